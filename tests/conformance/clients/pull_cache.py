"""Upstream's pull_cache sample: contiguous caches from a pool, one request key for each batch entry, two-sided."""

import json

import torch
from common import Client, check_bytes, poll, random_tensor, rank_table, tensors_at
from llm_datadist import CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole, Placement, RegisterMemStatus

PROMPT_ID, DECODER_ID = 1, 2
NUM_TENSORS = 4
SHAPE = [2, 128, 320]


def init(role: LLMRole, cluster_id: int, device_id: int) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.device_id = device_id
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": 16 << 20})
    config.sync_kv_timeout = 20000
    datadist.init(config.generate_options())
    return datadist


def link(datadist: LLMDataDist, ports: list[int]) -> int:
    comm_id = datadist.link("link", {PROMPT_ID: 0, DECODER_ID: 1}, rank_table(ports))
    poll(lambda: datadist.query_register_mem_status(comm_id), [RegisterMemStatus.OK])
    return comm_id


def source(tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, device_id=0)
    manager = datadist.cache_manager
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    keys = [CacheKey(prompt_cluster_id=PROMPT_ID, req_id=i, model_id=0) for i in range(SHAPE[0])]
    cache = manager.allocate_cache(desc, keys)
    tensors = tensors_at(cache.tensor_addrs, SHAPE, torch.float32)
    for i, tensor in enumerate(tensors):
        tensor.copy_(source(i))
    comm_id = link(datadist, client.ports)
    client.barrier()  # filled
    client.barrier()  # pulled
    for i, tensor in enumerate(tensors):
        check_bytes(f"source tensor {i}", tensor, source(i))
    datadist.unlink(comm_id)
    for key in keys:
        manager.remove_cache_key(key)  # both have gone with the pulls
    manager.deallocate_cache(cache)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, device_id=1)
    manager = datadist.cache_manager
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    cache = manager.allocate_cache(desc)
    tensors = tensors_at(cache.tensor_addrs, SHAPE, torch.float32)
    for tensor in tensors:
        tensor.fill_(-1)
    comm_id = link(datadist, client.ports)
    client.barrier()  # filled
    for i in range(SHAPE[0]):
        manager.pull_cache(CacheKey(prompt_cluster_id=PROMPT_ID, req_id=i, model_id=0), cache, batch_index=i)
        for j, tensor in enumerate(tensors):
            check_bytes(f"pulled tensor {j}, entries to {i}", tensor[: i + 1], source(j)[: i + 1])
            check_bytes(f"tensor {j}, behind entry {i}", tensor[i + 1 :], torch.full_like(tensor[i + 1 :], -1))
    client.barrier()  # pulled
    datadist.unlink(comm_id)
    manager.deallocate_cache(cache)
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
