"""vllm-ascend, second generation: v1, one cache for each request, given back at once; its key keeps the data until the
decoder has pulled it. The pool holds fewer requests than there are, so the prompt has to wait for the decoder."""

import json
import time

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require, tensors_at
from llm_datadist import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

PROMPT_ID, DECODER_ID = 0, 1
MODEL_ID = 1
NUM_TENSORS = 4
SHAPE = (1, 256, 16, 64)  # 512 KiB in float16
POOL_BYTES = 8 << 20
REQUESTS = [hash_ * 0x9E3779B97F4A7C15 % 2**64 for hash_ in range(1, 8)]


def init(role: LLMRole, cluster_id: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.ge_options = {
        "llm.SyncKvCacheWaitTime": "20000",
        "ge.flowGraphMemMaxSize": str(POOL_BYTES),
        "ge.exec.deviceId": str(client.rank),
    }
    config.buf_pool_cfg = json.dumps({"buf_cfg": [{"total_size": 2 << 20, "blk_size": 256, "max_buf_size": 8192}]})
    if role == LLMRole.PROMPT:
        config.listen_ip_info = f"{HOST_IP}:{client.ports[0]}"
    datadist.init(config.generate_options())
    return datadist


def describe() -> CacheDesc:
    return CacheDesc(NUM_TENSORS, SHAPE, DataType.DT_FLOAT16, seq_len_dim_index=1)


def source(request: int, tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float16, seed=10 * REQUESTS.index(request) + tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    manager = datadist.kv_cache_manager
    num_refused = 0
    for request in REQUESTS:
        while True:
            try:
                cache = manager.allocate_cache(describe(), [CacheKey(PROMPT_ID, request, MODEL_ID)])
                break
            except LLMException as error:
                require(error.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, f"allocate_cache: {error}")
                client.tell("the pool is full")
                num_refused += 1
                time.sleep(0.01)
        for i, tensor in enumerate(tensors_at(cache.per_device_tensor_addrs[0], SHAPE, torch.float16)):
            tensor.copy_(source(request, i))
        manager.deallocate_cache(cache)
        client.tell(f"{request} is computed")
    require(num_refused, f"the pool of {POOL_BYTES} bytes took all requests at once")
    client.barrier()  # unlinked
    datadist.finalize()


def link(datadist: LLMDataDist, client: Client) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_ID
    cluster.append_local_ip_info(HOST_IP, 0)
    cluster.append_remote_ip_info(HOST_IP, client.ports[0])
    deadline = time.monotonic() + 60
    while True:
        ret, rets = datadist.link_clusters([cluster], timeout=30_000)
        if ret == LLMStatusCode.LLM_SUCCESS and rets[0] == LLMStatusCode.LLM_SUCCESS:
            return cluster
        require(time.monotonic() < deadline, f"link_clusters: {ret}, {rets}")
        time.sleep(0.05)


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    manager = datadist.kv_cache_manager
    cluster = link(datadist, client)
    client.wait_for("the pool is full")
    for request in REQUESTS:
        client.wait_for(f"{request} is computed")
        cache = manager.allocate_cache(describe())
        manager.pull_cache(CacheKey(PROMPT_ID, request, MODEL_ID), cache, 0)
        pulled = [tensor.clone() for tensor in tensors_at(cache.per_device_tensor_addrs[0], SHAPE, torch.float16)]
        manager.deallocate_cache(cache)
        for i, tensor in enumerate(pulled):
            check_bytes(f"request {REQUESTS.index(request)}, tensor {i}", tensor, source(request, i))
    ret, rets = datadist.unlink_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}, {rets}")
    client.barrier()  # unlinked
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
