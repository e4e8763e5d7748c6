"""vllm-ascend, third generation: v2 with paged caches and collective links. ``--model`` dense: one cache, with K and V
of every layer; mla: two caches of one tensor for each layer; sparse: three."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import llm_datadist
import torch
from common import HOST_IP, Client, check_bytes, poll, random_tensor, rank_table, require
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, LLMConfig, LLMDataDist, LLMException, LLMRole

PREFILL_ID, DECODE_ID = 0, 1
NUM_BLOCKS = 48
NUM_LAYERS = 3
NUM_REQUESTS = 12
BLOCKS_PER_REQUEST = 3
NUM_THREADS = 4

DATA_TYPES = {
    torch.float16: llm_datadist.DataType.DT_FLOAT16,
    torch.bfloat16: llm_datadist.DataType.DT_BF16,
    torch.float32: llm_datadist.DataType.DT_FLOAT,
    torch.int8: llm_datadist.DataType.DT_INT8,
    torch.int64: llm_datadist.DataType.DT_INT64,
    torch.int32: llm_datadist.DataType.DT_INT32,
}

# Of each cache: its number of tensors, the shape of a block, the type. Its index is its model id.
MODELS = {
    "dense": [(2 * NUM_LAYERS, (16, 2, 32), torch.float16)],
    "mla": [(NUM_LAYERS, (16, 1, 64), torch.bfloat16), (NUM_LAYERS, (16, 1, 8), torch.bfloat16)],
    "sparse": [
        (NUM_LAYERS, (16, 1, 64), torch.bfloat16),
        (NUM_LAYERS, (16, 1, 8), torch.bfloat16),
        (NUM_LAYERS, (16, 1, 17), torch.int8),
    ],
}


class Worker:
    """A worker of the engine: its paged memory, registered once and before any link."""

    def __init__(self, client: Client, role: LLMRole, cluster_id: int) -> None:
        self.caches_of_model = MODELS[client.args.model]
        self.memory = [
            [
                random_tensor((NUM_BLOCKS, *shape), dtype, seed=seed_of(cluster_id, model_id, i))
                for i in range(num_tensors)
            ]
            for model_id, (num_tensors, shape, dtype) in enumerate(self.caches_of_model)
        ]
        self.datadist = LLMDataDist(role, cluster_id)
        config = LLMConfig()
        config.device_id = client.rank
        config.sync_kv_timeout = 20000
        config.enable_switch_role = True
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        self.datadist.init(config.generate_options())
        self.manager = self.datadist.cache_manager
        self.caches = [self.register(cluster_id, model_id) for model_id in range(len(self.memory))]

    def register(self, cluster_id: int, model_id: int) -> Cache:
        tensors = self.memory[model_id]
        addrs = [tensor.data_ptr() for tensor in tensors]
        desc = CacheDesc(len(addrs), [*tensors[0].shape], DATA_TYPES[tensors[0].dtype])
        if len(self.memory) == 1:
            key = BlocksCacheKey(cluster_id=cluster_id)
        else:
            key = BlocksCacheKey(cluster_id=cluster_id, model_id=model_id)
        return self.manager.register_blocks_cache(desc, addrs, key)

    def link(self, ports: list[int]) -> int:
        comm_name = f"pd_comm_{HOST_IP}_{HOST_IP}"
        comm_id = self.datadist.link(comm_name, {PREFILL_ID: 0, DECODE_ID: 1}, rank_table(ports, "1.2"))
        status = poll(
            lambda: self.datadist.query_register_mem_status(comm_id=comm_id),
            [llm_datadist.RegisterMemStatus.OK, llm_datadist.RegisterMemStatus.FAILED],
        )
        require(status == llm_datadist.RegisterMemStatus.OK, f"query_register_mem_status: {status}")
        return comm_id

    def unlink(self, comm_id: int) -> None:
        try:
            self.datadist.unlink(comm_id)
        except LLMException as error:
            require(False, f"unlink: {error}")

    def check(self, expected: list[list[torch.Tensor]]) -> None:
        for model_id, tensors in enumerate(self.memory):
            for i, tensor in enumerate(tensors):
                check_bytes(f"cache {model_id}, tensor {i}", tensor, expected[model_id][i])


def seed_of(cluster_id: int, model_id: int, tensor: int) -> int:
    return 1000 * cluster_id + 100 * model_id + tensor


def in_thread(function: Callable[[list[int]], int], ports: list[int]) -> int:
    """Its result: links are made in threads of their own."""
    results: list[int] = []
    thread = Thread(target=lambda: results.append(function(ports)))
    thread.start()
    thread.join()
    require(results, f"{function.__name__} failed")
    return results[0]


def run_prefill(client: Client) -> None:
    worker = Worker(client, LLMRole.PROMPT, PREFILL_ID)
    before = [[tensor.clone() for tensor in tensors] for tensors in worker.memory]
    comm_id = in_thread(worker.link, client.ports)  # the listener
    client.barrier()  # linked
    client.barrier()  # pulled
    worker.check(before)
    worker.unlink(comm_id)
    worker.datadist.finalize()


def run_decode(client: Client) -> None:
    worker = Worker(client, LLMRole.DECODER, DECODE_ID)
    expected = [[tensor.clone() for tensor in tensors] for tensors in worker.memory]
    comm_id = in_thread(worker.link, client.ports)
    client.barrier()  # linked

    shuffled = random.Random(7)
    remote_blocks = shuffled.sample(range(NUM_BLOCKS), NUM_REQUESTS * BLOCKS_PER_REQUEST)
    local_blocks = shuffled.sample(range(NUM_BLOCKS), NUM_REQUESTS * BLOCKS_PER_REQUEST)
    requests = [
        (remote_blocks[start : start + BLOCKS_PER_REQUEST], local_blocks[start : start + BLOCKS_PER_REQUEST])
        for start in range(0, len(remote_blocks), BLOCKS_PER_REQUEST)
    ]

    def read_blocks(request: tuple[list[int], list[int]]) -> None:
        remote_ids, local_ids = request
        for model_id, cache in enumerate(worker.caches):
            if len(worker.caches) == 1:
                key = BlocksCacheKey(cluster_id=PREFILL_ID)
            else:
                key = BlocksCacheKey(cluster_id=PREFILL_ID, model_id=model_id)
            try:
                worker.manager.pull_blocks(key, cache, remote_ids, local_ids)
            except (TypeError, ValueError) as error:
                raise RuntimeError(f"wrong arguments for pull_blocks: {error}") from error
            except LLMException as error:
                raise RuntimeError(f"pull_blocks timed out: {error}") from error

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read_blocks, requests))
    for model_id, (num_tensors, shape, dtype) in enumerate(worker.caches_of_model):
        for i in range(num_tensors):
            source = random_tensor((NUM_BLOCKS, *shape), dtype, seed=seed_of(PREFILL_ID, model_id, i))
            expected[model_id][i][local_blocks] = source[remote_blocks]
    worker.check(expected)
    client.barrier()  # pulled
    worker.unlink(comm_id)
    worker.datadist.finalize()


client = Client(["prefill", "decode"], "model")
(run_prefill if client.role == "prefill" else run_decode)(client)
client.end()
