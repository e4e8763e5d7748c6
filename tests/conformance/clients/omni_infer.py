"""Omni-infer: a decoder links several prompts at once, relinks by force when a pull fails, registers destinations while
links are up, and initialises the same object again."""

import ipaddress
import struct

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.status import LLMStatusCode as Codes

RETRYABLE = [
    Codes.LLM_REPEAT_REQUEST,
    Codes.LLM_CLUSTER_NUM_EXCEED_LIMIT,
    Codes.LLM_PROCESSING_LINK,
    Codes.LLM_DEVICE_OUT_OF_MEMORY,
    Codes.LLM_TIMEOUT,
    Codes.LLM_WAIT_PROCESS_TIMEOUT,
    Codes.LLM_LINK_BUSY,
]
ROLES = ["prompt-0", "prompt-1", "decoder"]
NUM_BLOCKS = 16
NUM_TENSORS = 3  # one for each layer
SHAPES = [(NUM_BLOCKS, 8, 24), (NUM_BLOCKS, 8, 5)]  # by model id


def pack_cluster_id(ip: str, port: int, tp_size: int, pp_size: int) -> int:
    """64 bits: the address, the port and the two sizes."""
    address = int(ipaddress.ip_address(ip))
    return struct.unpack(">Q", struct.pack(">IHBB", address, port, tp_size, pp_size))[0]


def cluster_id_of(client: Client, rank: int) -> int:
    return pack_cluster_id(HOST_IP, client.ports[rank], tp_size=1, pp_size=1)


def seed_of(rank: int, model_id: int, tensor: int, life: int = 0) -> int:
    return 1000 * life + 100 * rank + 10 * model_id + tensor


def memory_of(rank: int, life: int = 0) -> list[list[torch.Tensor]]:
    return [
        [random_tensor(shape, torch.bfloat16, seed_of(rank, model_id, i, life)) for i in range(NUM_TENSORS)]
        for model_id, shape in enumerate(SHAPES)
    ]


def check(what: str, memory: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for model_id, tensors in enumerate(memory):
        for i, tensor in enumerate(tensors):
            check_bytes(f"{what}: cache {model_id}, tensor {i}", tensor, expected[model_id][i])


class Endpoint:
    """One engine and its caches."""

    def __init__(self, role: LLMRole, client: Client) -> None:
        self.role = role
        self.client = client
        self.engine = LLMDataDist(role, cluster_id_of(client, client.rank))
        config = LLMConfig()
        config.device_id = client.rank
        config.local_comm_res = ""
        config.sync_kv_timeout = 5000
        config.enable_remote_cache_accessible = True
        if role == LLMRole.PROMPT:
            config.listen_ip_info = f"{HOST_IP}:{client.ports[client.rank]}"
        self.options = config.generate_options()
        self.caches: list[Cache] = []
        self.engine.init(self.options)

    def register(self, memory: list[list[torch.Tensor]]) -> None:
        self.caches = []
        for model_id, tensors in enumerate(memory):
            desc = CacheDesc(num_tensors=NUM_TENSORS, shape=tuple(tensors[0].shape), data_type=DataType.DT_BF16)
            key = None
            if self.role == LLMRole.PROMPT:
                key = BlocksCacheKey(self.engine.cluster_id, model_id=model_id)
            addrs = [tensor.data_ptr() for tensor in tensors]
            cache = self.engine.cache_manager.register_blocks_cache(desc, addrs, key)
            self.caches.append(cache)
            require(str(cache.cache_id) in f"{cache=}", f"{cache=}")

    def reinit(self) -> None:
        """The same object, the same options."""
        self.engine.finalize()
        self.engine.init(self.options)


class Decoder(Endpoint):
    def __init__(self, client: Client) -> None:
        super().__init__(LLMRole.DECODER, client)
        self.num_retries = 0

    def clusters(self, *ranks: int) -> list[LLMClusterInfo]:
        clusters = []
        for rank in ranks:
            cluster = LLMClusterInfo()
            cluster.remote_cluster_id = cluster_id_of(self.client, rank)
            cluster.append_local_ip_info(HOST_IP, 0)
            cluster.append_remote_ip_info(HOST_IP, self.client.ports[rank])
            clusters.append(cluster)
        return clusters

    def link(self, clusters: list[LLMClusterInfo]) -> None:
        ret, _ = self.engine.link_clusters(clusters, timeout=5000)
        require(ret == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")

    def unlink_by_force(self, clusters: list[LLMClusterInfo]) -> None:
        ret, _ = self.engine.unlink_clusters(clusters, timeout=5000, force=True)
        require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")

    def pull(self, rank: int, src_blocks: list[int], dst_blocks: list[int]) -> None:
        for model_id, cache in enumerate(self.caches):
            key = BlocksCacheKey(prompt_cluster_id=cluster_id_of(self.client, rank), model_id=model_id)
            try:
                self.engine.cache_manager.pull_blocks(key, cache, src_blocks, dst_blocks)
            except LLMException as error:
                require(error.status_code not in RETRYABLE[:4], f"pull_blocks: {error}")
                self.num_retries += 1
                clusters = self.clusters(rank)
                self.unlink_by_force(clusters)
                self.link(clusters)
                self.engine.cache_manager.pull_blocks(key, cache, src_blocks, dst_blocks)


def run_prompt(client: Client) -> None:
    endpoint = Endpoint(LLMRole.PROMPT, client)
    memory = memory_of(client.rank)
    endpoint.register(memory)
    client.barrier()  # registered
    client.barrier()  # pulled
    check("source", memory, memory_of(client.rank))

    if client.rank == 1:  # this one starts anew, and its decoder does not know
        endpoint.reinit()
        memory = memory_of(client.rank, life=1)
        endpoint.register(memory)
    client.barrier()  # started anew
    client.barrier()  # done
    check("source", memory, memory_of(client.rank, life=int(client.rank == 1)))
    endpoint.engine.finalize()


def run_decoder(client: Client) -> None:
    decoder = Decoder(client)
    memory = memory_of(client.rank)
    expected = memory_of(client.rank)
    decoder.register(memory)
    client.barrier()  # registered

    def pull(what: str, rank: int, src_blocks: list[int], dst_blocks: list[int], life: int = 0) -> None:
        decoder.pull(rank, src_blocks, dst_blocks)
        for model_id, tensors in enumerate(memory_of(rank, life)):
            for i, tensor in enumerate(tensors):
                expected[model_id][i][dst_blocks] = tensor[src_blocks]
        check(what, memory, expected)

    decoder.link(decoder.clusters(0, 1))
    pull("first pull from prompt 0", 0, [0, 3, 4], [9, 2, 3])
    pull("first pull from prompt 1", 1, [15, 1], [0, 1])
    require(not decoder.num_retries, "pulls over new links failed")

    # Destinations change while links are up; the new ones overlap with what is registered.
    manager = decoder.engine.cache_manager
    old_caches = list(decoder.caches)
    manager.unregister_cache(old_caches[0].cache_id)
    decoder.register(memory)
    pull("pull into caches that were registered late", 0, [7, 8], [14, 5])
    manager.unregister_cache(old_caches[1].cache_id)
    pull("pull after the old ones have gone", 0, [10], [15])
    client.barrier()  # pulled

    client.barrier()  # prompt 1 has started anew
    pull("pull from a prompt that has started anew", 1, [2, 6, 12], [4, 6, 7], life=1)
    require(decoder.num_retries == 1, f"{decoder.num_retries} pulls were tried again, expected one")
    pull("pull from the prompt that was not concerned", 0, [11], [8])
    require(decoder.num_retries == 1, "the link to prompt 0 has broken")

    # Only the id is set.
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = cluster_id_of(client, 0)
    decoder.unlink_by_force([cluster])
    decoder.unlink_by_force([cluster])

    decoder.reinit()
    decoder.register(memory)
    decoder.link(decoder.clusters(0, 1))
    pull("pull after this side has started anew", 0, [1, 2], [10, 11])
    pull("pull after this side has started anew", 1, [3, 4], [12, 13], life=1)
    require(decoder.num_retries == 1, "pulls over new links failed")
    client.barrier()  # done
    decoder.engine.finalize()


client = Client(ROLES)
(run_decoder if client.role == "decoder" else run_prompt)(client)
client.end()
