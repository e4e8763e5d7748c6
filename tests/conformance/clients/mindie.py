"""MindIE-LLM: all members are MIX, K and V are caches of their own, several collective links are pending at a time and
polled in turn; one that fails is unlinked."""

import torch
from common import Client, check_bytes, poll, random_tensor, rank_table, require
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
)

ROLES = ["prefill-0", "prefill-1", "misconfigured", "decode"]
MISCONFIGURED = 2
DECODE = 3
NUM_LAYERS = 2
SHAPE = (12, 16, 2, 8)
K_MODEL, V_MODEL = 0, 1


def cluster_id(rank: int) -> int:
    return 100 + rank


def link_name(rank: int) -> str:
    return f"{cluster_id(rank)}_{cluster_id(DECODE)}"


class Engine:
    """One member: its engine, its K and V memory."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.memory = memory_of(client.rank)
        self.datadist = LLMDataDist(LLMRole.MIX, cluster_id(client.rank))
        config = LLMConfig()
        config.device_id = client.rank
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = client.rank != MISCONFIGURED
        config.link_total_time = 1080
        config.link_retry_count = 80
        config.sync_kv_timeout = 5000
        options = config.generate_options()
        options["llm.RdmaServiceLevel"] = "4"
        options["llm.RdmaTrafficClass"] = "132"
        self.datadist.init(options)
        self.manager = self.datadist.cache_manager
        self.caches = [self.register(model_id) for model_id in (K_MODEL, V_MODEL)]

    def register(self, model_id: int) -> Cache:
        tensors = self.memory[model_id]
        desc = CacheDesc(
            num_tensors=len(tensors), shape=SHAPE, data_type=DataType.DT_FLOAT16, placement=Placement.DEVICE
        )
        key = BlocksCacheKey(self.datadist.cluster_id, model_id)
        return self.manager.register_blocks_cache(desc, [tensor.data_ptr() for tensor in tensors], key)

    def link(self, rank: int) -> int:
        """With the member of that rank, or this one with the decoder."""
        members = {cluster_id(rank): 0, cluster_id(DECODE): 1}
        table = rank_table([self.client.ports[rank], self.client.ports[DECODE]])
        comm_id = self.datadist.link(link_name(rank), members, table)
        require(comm_id != LLMStatusCode.LLM_ALREADY_LINK, f"link {link_name(rank)} exists already")
        return comm_id

    def status(self, comm_id: int) -> RegisterMemStatus:
        return self.datadist.query_register_mem_status(comm_id)

    def check(self, expected: list[list[torch.Tensor]]) -> None:
        for model_id, tensors in enumerate(self.memory):
            for i, tensor in enumerate(tensors):
                check_bytes(f"{'KV'[model_id]} of layer {i}", tensor, expected[model_id][i])


def memory_of(rank: int) -> list[list[torch.Tensor]]:
    return [
        [random_tensor(SHAPE, torch.float16, seed=100 * rank + 10 * model_id + i) for i in range(NUM_LAYERS)]
        for model_id in (K_MODEL, V_MODEL)
    ]


def run_prefill(client: Client) -> None:
    engine = Engine(client)
    client.barrier()  # registered
    comm_id = engine.link(client.rank)
    if client.rank == MISCONFIGURED:
        client.wait_for("a link has failed")
        status = engine.status(comm_id)
        require(status != RegisterMemStatus.OK, f"link {link_name(client.rank)}: {status}")
    else:
        poll(lambda: engine.status(comm_id), [RegisterMemStatus.OK])
    client.barrier()  # pulled
    engine.check(memory_of(client.rank))
    engine.datadist.unlink(comm_id)
    engine.datadist.finalize()


def run_decode(client: Client) -> None:
    engine = Engine(client)
    client.barrier()  # registered
    pending = {rank: engine.link(rank) for rank in range(DECODE)}
    require(list(pending.values()) == [1, 2, 3], f"communicators {pending}")
    linked: dict[int, int] = {}

    def poll_pending() -> bool:
        for rank, comm_id in list(pending.items()):
            status = engine.status(comm_id)
            if status == RegisterMemStatus.OK:
                linked[rank] = pending.pop(rank)
            elif status == RegisterMemStatus.FAILED:
                engine.datadist.unlink(pending.pop(rank))
                client.tell("a link has failed")
        return not pending

    poll(poll_pending, [True])
    require(sorted(linked) == [0, 1], f"linked with {sorted(linked)}")

    expected = memory_of(DECODE)
    for rank, (src, dst) in {0: ([11, 0, 1, 5], [2, 3, 4, 0]), 1: ([6, 7], [8, 10])}.items():
        for model_id, cache in enumerate(engine.caches):
            key = BlocksCacheKey(cluster_id=cluster_id(rank), model_id=model_id)
            try:
                engine.manager.pull_blocks(key, cache, src, dst)
            except LLMException as error:
                require(False, f"pull_blocks: {error.status_code}: {error}")
            for i, tensor in enumerate(memory_of(rank)[model_id]):
                expected[model_id][i][dst] = tensor[src]
        engine.check(expected)

    try:
        engine.manager.pull_blocks(BlocksCacheKey(cluster_id=cluster_id(MISCONFIGURED)), engine.caches[0], [0], [0])
    except LLMException as error:
        require(error.status_code == LLMStatusCode.LLM_NOT_YET_LINK, f"pull without a link: {error.status_code}")
    else:
        require(False, "a pull without a link has succeeded")
    engine.check(expected)
    client.barrier()  # pulled
    for comm_id in linked.values():
        engine.datadist.unlink(comm_id)
    engine.datadist.finalize()


client = Client(ROLES)
(run_decode if client.role == "decode" else run_prefill)(client)
client.end()
