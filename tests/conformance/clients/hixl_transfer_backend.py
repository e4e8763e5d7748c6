"""Upstream's hixl_transfer_backend sample: each side links, then one pulls while the other pushes between the two."""

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

PROMPT_ID, DECODER_ID = 1, 2
NUM_TENSORS = 2
SHAPE = [10, 128]


def init(role: LLMRole, id_: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, id_)
    config = LLMConfig()
    config.device_id = client.rank
    config.local_comm_res = ""
    config.transfer_backend = "hixl"
    config.sync_kv_timeout = 20000
    config.listen_ip_info = f"{HOST_IP}:{client.ports[client.rank]}"
    datadist.init(config.generate_options())
    return datadist


def register(datadist: LLMDataDist, tensors: list[torch.Tensor]) -> Cache:
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    addrs = [tensor.data_ptr() for tensor in tensors]
    return datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(datadist.cluster_id, 0))


def link(datadist: LLMDataDist, remote_cluster_id: int, local_port: int, remote_port: int) -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = remote_cluster_id
    cluster.append_local_ip_info(HOST_IP, local_port)
    cluster.append_remote_ip_info(HOST_IP, remote_port)
    ret, _ = datadist.link_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")


def unlink(datadist: LLMDataDist, remote_cluster_id: int) -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = remote_cluster_id
    ret, _ = datadist.unlink_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")


def source(cluster_id: int, tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=10 * cluster_id + tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    tensors = [source(PROMPT_ID, i) for i in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered
    link(datadist, DECODER_ID, client.ports[0], client.ports[1])
    client.barrier()  # linked
    datadist.cache_manager.pull_blocks(BlocksCacheKey(DECODER_ID, 0), cache, src_blocks=[2], dst_blocks=[2])
    client.barrier()  # pulled and pushed
    for i, tensor in enumerate(tensors):
        expected = source(PROMPT_ID, i)
        expected[[0, 1, 2]] = source(DECODER_ID, i)[[0, 1, 2]]
        check_bytes(f"tensor {i}", tensor, expected)
    unlink(datadist, DECODER_ID)
    client.barrier()  # unlinked
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    tensors = [source(DECODER_ID, i) for i in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered
    link(datadist, PROMPT_ID, client.ports[1], client.ports[0])
    client.barrier()  # linked
    datadist.cache_manager.push_blocks(BlocksCacheKey(PROMPT_ID, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 1])
    client.barrier()  # pulled and pushed
    for i, tensor in enumerate(tensors):
        check_bytes(f"source tensor {i}", tensor, source(DECODER_ID, i))
    unlink(datadist, PROMPT_ID)
    client.barrier()  # unlinked
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
