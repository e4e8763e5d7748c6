"""Upstream's push_blocks sample: the decoder pushes blocks to the prompt, and both unlink by force."""

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
    config.local_comm_res = client.args.comm_res or ""
    config.sync_kv_timeout = 20000
    if client.args.backend:
        config.transfer_backend = client.args.backend
    config.listen_ip_info = f"{HOST_IP}:{client.ports[client.rank]}"
    datadist.init(config.generate_options())
    return datadist


def register(datadist: LLMDataDist, tensors: list[torch.Tensor]) -> Cache:
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    addrs = [tensor.data_ptr() for tensor in tensors]
    return datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(datadist.cluster_id, 0))


def unlink_by_force(datadist: LLMDataDist, remote_cluster_id: int) -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = remote_cluster_id
    ret, rets = datadist.unlink_clusters([cluster], 5000, force=True)
    require(ret == LLMStatusCode.LLM_SUCCESS and rets == [LLMStatusCode.LLM_SUCCESS], f"unlink_clusters: {ret}, {rets}")


def source(tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    tensors = [torch.full(SHAPE, -1, dtype=torch.float32) for _ in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered
    client.barrier()  # pushed
    for i, tensor in enumerate(tensors):
        expected = torch.full(SHAPE, -1, dtype=torch.float32)
        expected[[0, 2]] = source(i)[[0, 1]]
        check_bytes(f"pushed tensor {i}", tensor, expected)
    unlink_by_force(datadist, DECODER_ID)
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    tensors = [source(i) for i in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_ID
    cluster.append_local_ip_info(HOST_IP, client.ports[1])
    cluster.append_remote_ip_info(HOST_IP, client.ports[0])
    ret, _ = datadist.link_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")

    datadist.cache_manager.push_blocks(BlocksCacheKey(PROMPT_ID, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    client.barrier()  # pushed
    for i, tensor in enumerate(tensors):
        check_bytes(f"source tensor {i}", tensor, source(i))
    unlink_by_force(datadist, PROMPT_ID)
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


client = Client(["prompt", "decoder"], "backend", "comm-res")
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
