"""Upstream's push_cache sample: one batch entry goes to the peer's first cache, which is named by its id."""

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require
from llm_datadist import (
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
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
SHAPE = [3, 128]


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
    return datadist.cache_manager.register_cache(desc, [tensor.data_ptr() for tensor in tensors])


def source(tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    tensors = [torch.full(SHAPE, -1, dtype=torch.float32) for _ in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    require(cache.cache_id == 1, f"the first cache has the id {cache.cache_id}")
    client.barrier()  # registered
    client.barrier()  # pushed and unlinked
    for i, tensor in enumerate(tensors):
        expected = torch.full(SHAPE, -1, dtype=torch.float32)
        expected[0] = source(i)[0]
        check_bytes(f"pushed tensor {i}", tensor, expected)
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

    key = CacheKeyByIdAndIndex(cluster_id=PROMPT_ID, cache_id=1, batch_index=0)
    datadist.cache_manager.push_cache(key, cache, src_batch_index=0)

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_ID
    cluster.append_remote_ip_info(HOST_IP, client.ports[0])
    ret, _ = datadist.unlink_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")
    client.barrier()  # pushed and unlinked
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


client = Client(["prompt", "decoder"], "backend", "comm-res")
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
