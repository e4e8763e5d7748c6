"""vllm-ascend, first generation: v1, raw option dictionary, caches pulled by the ids of their allocation order."""

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require, tensors_at
from llm_datadist import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

PROMPT_ID, DECODER_ID = 0, 1
NUM_LAYERS = 2

# One cache each, by the model id that tells them apart: tensors, shape, types, dimension of the sequence.
KEYS = 1
VALUES = 2
HIDDEN = 3
LENGTHS = 4
BUFFERS = {
    KEYS: (NUM_LAYERS, (4, 64, 2, 16), DataType.DT_FLOAT16, torch.float16, 1),
    VALUES: (NUM_LAYERS, (4, 64, 2, 16), DataType.DT_FLOAT16, torch.float16, 1),
    HIDDEN: (1, (4, 64, 96), DataType.DT_BF16, torch.bfloat16, 1),
    LENGTHS: (1, (4, 8), DataType.DT_INT64, torch.int64, -1),
}


def init(role: LLMRole, cluster_id: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    options = {"llm.SyncKvCacheWaitTime": "20000", "ge.exec.deviceId": str(client.rank)}
    if role == LLMRole.PROMPT:
        options["llm.listenIpInfo"] = f"{HOST_IP}:{client.ports[0]}"
    datadist.init(options)
    return datadist


def describe(model_id: int) -> CacheDesc:
    num_tensors, shape, data_type, _, seq_len_dim_index = BUFFERS[model_id]
    return CacheDesc(num_tensors, shape, data_type, seq_len_dim_index=seq_len_dim_index)


def tensors_of(cache: KvCache, model_id: int) -> list[torch.Tensor]:
    _, shape, _, dtype, _ = BUFFERS[model_id]
    return tensors_at(cache.per_device_tensor_addrs[0], shape, dtype)


def source(model_id: int, tensor: int) -> torch.Tensor:
    _, shape, _, dtype, _ = BUFFERS[model_id]
    return random_tensor(shape, dtype, seed=10 * model_id + tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    manager = datadist.kv_cache_manager
    caches = {}
    for model_id, (_, shape, *_) in BUFFERS.items():
        keys = [CacheKey(PROMPT_ID, batch, model_id) for batch in range(shape[0])]
        caches[model_id] = manager.allocate_cache(describe(model_id), keys)
        for i, tensor in enumerate(tensors_of(caches[model_id], model_id)):
            tensor.copy_(source(model_id, i))
    client.barrier()  # filled
    client.barrier()  # pulled
    for model_id, cache in caches.items():
        for i, tensor in enumerate(tensors_of(cache, model_id)):
            check_bytes(f"source of cache {cache.cache_id}, tensor {i}", tensor, source(model_id, i))
    client.barrier()  # unlinked
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    manager = datadist.kv_cache_manager
    caches = {model_id: manager.allocate_cache(describe(model_id)) for model_id in BUFFERS}
    tensors = {model_id: tensors_of(cache, model_id) for model_id, cache in caches.items()}
    for tensor in (tensor for several in tensors.values() for tensor in several):
        tensor.zero_()
    client.barrier()  # filled

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_ID
    cluster.append_local_ip_info(HOST_IP, client.ports[1])
    cluster.append_remote_ip_info(HOST_IP, client.ports[0])
    _, ret = datadist.link_clusters([cluster], 20000)
    require(ret[0] == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")

    for id_, model_id in zip((1, 2, 3, 4), BUFFERS, strict=True):
        try:
            manager.pull_cache(CacheKeyByIdAndIndex(PROMPT_ID, id_, 0), caches[model_id], 0)
        except LLMException as error:
            require(False, f"pull of cache {id_}: {error.status_code}: {error}")
        for i, tensor in enumerate(tensors[model_id]):
            expected = torch.zeros_like(tensor)
            expected[0] = source(model_id, i)[0]
            check_bytes(f"cache {id_}, tensor {i}", tensor, expected)
    client.barrier()  # pulled

    _, ret = datadist.unlink_clusters([cluster], 5000)
    require(ret[0] == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")
    client.barrier()  # unlinked
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
