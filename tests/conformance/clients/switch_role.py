"""Upstream's switch_role sample: the two processes exchange their roles, and the server of the new link pushes."""

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
    LLMRole,
    LLMStatusCode,
    Placement,
)

# By their roles at the start.
PROMPT_ID, DECODER_ID = 1, 2
NUM_TENSORS = 2
SHAPE = [10, 128]


def init(role: LLMRole, id_: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, id_)
    config = LLMConfig()
    config.device_id = client.rank
    config.local_comm_res = ""
    config.sync_kv_timeout = 20000
    if role == LLMRole.PROMPT:
        config.listen_ip_info = f"{HOST_IP}:{client.ports[0]}"
    datadist.init(config.generate_options())
    return datadist


def register(datadist: LLMDataDist, tensors: list[torch.Tensor]) -> Cache:
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    addrs = [tensor.data_ptr() for tensor in tensors]
    return datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(datadist.cluster_id, 0))


def cluster_info(remote_cluster_id: int, port: int | None) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = remote_cluster_id
    if port is not None:
        cluster.append_local_ip_info(HOST_IP, 0)
        cluster.append_remote_ip_info(HOST_IP, port)
    return cluster


def require_success(call: str, result: tuple[LLMStatusCode, list[LLMStatusCode]]) -> None:
    ret, rets = result
    require(ret == LLMStatusCode.LLM_SUCCESS, f"{call}: {ret}, {rets}")


def source(cluster_id: int, tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=10 * cluster_id + tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    tensors = [source(PROMPT_ID, i) for i in range(NUM_TENSORS)]
    register(datadist, tensors)
    client.barrier()  # registered
    client.barrier()  # pulled and unlinked

    datadist.switch_role(LLMRole.DECODER)
    client.barrier()  # switched
    cluster = cluster_info(DECODER_ID, client.ports[1])
    require_success("link_clusters", datadist.link_clusters([cluster], 5000))
    client.barrier()  # linked again
    client.barrier()  # pushed
    for i, tensor in enumerate(tensors):
        expected = source(PROMPT_ID, i)
        expected[[5, 6]] = source(DECODER_ID, i)[[8, 9]]
        check_bytes(f"pushed tensor {i}", tensor, expected)
    cluster = cluster_info(DECODER_ID, None)
    require_success("unlink_clusters", datadist.unlink_clusters([cluster], 5000, force=True))
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    manager = datadist.cache_manager
    tensors = [source(DECODER_ID, i) for i in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered

    cluster = cluster_info(PROMPT_ID, client.ports[0])
    require_success("link_clusters", datadist.link_clusters([cluster], 5000))
    manager.pull_blocks(BlocksCacheKey(PROMPT_ID, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    for i, tensor in enumerate(tensors):
        expected = source(DECODER_ID, i)
        expected[[0, 2]] = source(PROMPT_ID, i)[[0, 1]]
        check_bytes(f"pulled tensor {i}", tensor, expected)
    require_success("unlink_clusters", datadist.unlink_clusters([cluster], 5000))
    client.barrier()  # pulled and unlinked

    config = LLMConfig()
    config.listen_ip_info = f"{HOST_IP}:{client.ports[1]}"
    datadist.switch_role(LLMRole.PROMPT, config.generate_options())
    client.barrier()  # switched
    client.barrier()  # linked again
    manager.push_blocks(
        BlocksCacheKey(PROMPT_ID, 0),
        cache,
        src_blocks=[8, 9],
        dst_blocks=[5, 6],
        src_layer_range=range(2),
        dst_layer_range=range(2),
        tensor_num_per_layer=1,
    )
    client.barrier()  # pushed
    cluster = cluster_info(PROMPT_ID, None)
    require_success("unlink_clusters", datadist.unlink_clusters([cluster], 5000, force=True))
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
