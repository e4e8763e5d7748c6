"""SGLang's demonstration connector: two blocks caches under one key; peers find the one that was registered later."""

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

PREFILL_ID, DECODE_ID = 11, 22
NUM_LAYERS = 3
SHAPE = [20, 4, 32]
K, V = 0, 1


def init(role: LLMRole, cluster_id: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.device_id = client.rank
    config.local_comm_res = ""
    config.sync_kv_timeout = 20000
    if role == LLMRole.PROMPT:
        config.listen_ip_info = f"{HOST_IP}:{client.ports[0]}"
    datadist.init(config.generate_options())
    return datadist


def memory_of(cluster_id: int, which: int) -> list[torch.Tensor]:
    return [random_tensor(SHAPE, torch.bfloat16, seed=100 * cluster_id + 10 * which + i) for i in range(NUM_LAYERS)]


def register(datadist: LLMDataDist, memory: list[list[torch.Tensor]]) -> list[Cache]:
    """K first, then V, both under the same key."""
    key = BlocksCacheKey(datadist.cluster_id, 0)
    return [
        datadist.cache_manager.register_blocks_cache(
            CacheDesc(num_tensors=NUM_LAYERS, shape=SHAPE, data_type=DataType.DT_BF16),
            [tensor.data_ptr() for tensor in tensors],
            key,
        )
        for tensors in memory
    ]


def check(memory: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for which, tensors in enumerate(memory):
        for i, tensor in enumerate(tensors):
            check_bytes(f"{'KV'[which]} of layer {i}", tensor, expected[which][i])


def run_prefill(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PREFILL_ID, client)
    memory = [memory_of(PREFILL_ID, which) for which in (K, V)]
    register(datadist, memory)
    client.barrier()  # registered
    client.barrier()  # pulled
    check(memory, [memory_of(PREFILL_ID, which) for which in (K, V)])
    datadist.finalize()


def run_decode(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODE_ID, client)
    memory = [memory_of(DECODE_ID, which) for which in (K, V)]
    caches = register(datadist, memory)
    client.barrier()  # registered

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL_ID
    cluster.append_local_ip_info(HOST_IP, 0)
    cluster.append_remote_ip_info(HOST_IP, client.ports[0])
    ret, _ = datadist.link_clusters([cluster], 20000)
    require(ret == 0, f"link_clusters: {ret}")

    key = BlocksCacheKey(PREFILL_ID, 0)
    expected = [memory_of(DECODE_ID, which) for which in (K, V)]
    for cache, tensors, (src, dst) in zip(caches, expected, (([1, 2, 9], [4, 5, 0]), ([19], [7])), strict=True):
        datadist.cache_manager.pull_blocks(key, cache, src_blocks=src, dst_blocks=dst)
        for tensor, source in zip(tensors, memory_of(PREFILL_ID, V), strict=True):
            tensor[dst] = source[src]
        check(memory, expected)

    ret, _ = datadist.unlink_clusters([cluster], 5000)
    require(ret == 0, f"unlink_clusters: {ret}")
    client.barrier()  # pulled
    datadist.finalize()


client = Client(["prefill", "decode"])
(run_prefill if client.role == "prefill" else run_decode)(client)
client.end()
