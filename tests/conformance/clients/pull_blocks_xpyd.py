"""Upstream's pull_blocks_xpyd sample: one decoder links several prompts that listen; remote access is implied."""

import ipaddress

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

SHAPE = [10, 128]
ROLES = ["prompt-0", "prompt-1", "decoder"]


def cluster_id(ip: str, port: int) -> int:
    return (int(ipaddress.ip_address(ip)) << 16) + port


def init(role: LLMRole, client: Client) -> LLMDataDist:
    port = client.ports[client.rank]
    datadist = LLMDataDist(role, cluster_id(HOST_IP, port))
    config = LLMConfig()
    config.device_id = client.rank
    config.local_comm_res = ""
    config.sync_kv_timeout = 20000
    if role == LLMRole.PROMPT:
        config.listen_ip_info = f"{HOST_IP}:{port}"
    datadist.init(config.generate_options())
    return datadist


def device_desc() -> CacheDesc:
    return CacheDesc(num_tensors=1, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)


def source(prompt: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=prompt)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, client)
    tensor = source(client.rank)
    key = BlocksCacheKey(datadist.cluster_id, 0)
    cache = datadist.cache_manager.register_blocks_cache(device_desc(), [tensor.data_ptr()], key)
    client.barrier()  # registered
    client.barrier()  # unlinked
    check_bytes("source", tensor, source(client.rank))
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, client)
    manager = datadist.cache_manager
    tensor = torch.full(SHAPE, -1, dtype=torch.float32)
    cache = manager.register_blocks_cache(device_desc(), [tensor.data_ptr()], BlocksCacheKey(datadist.cluster_id, 0))
    client.barrier()  # registered

    clusters = []
    for port in client.ports[:2]:
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = cluster_id(HOST_IP, port)
        cluster.append_local_ip_info(HOST_IP, 0)
        cluster.append_remote_ip_info(HOST_IP, port)
        clusters.append(cluster)
    ret, _ = datadist.link_clusters(clusters, 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")

    expected = tensor.clone()
    for prompt, port in enumerate(client.ports[:2]):
        key = BlocksCacheKey(cluster_id(HOST_IP, port), 0)
        manager.pull_blocks(key, cache, src_blocks=[0, 1], dst_blocks=[0, 2])
        expected[[0, 2]] = source(prompt)[[0, 1]]
        check_bytes(f"pulled from prompt {prompt}", tensor, expected)

    ret, _ = datadist.unlink_clusters(clusters, 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")
    client.barrier()  # unlinked
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()


client = Client(ROLES)
(run_decoder if client.role == "decoder" else run_prompt)(client)
client.end()
