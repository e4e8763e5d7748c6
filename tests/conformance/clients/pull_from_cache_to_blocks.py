"""Upstream's pull_from_cache_to_blocks sample: a contiguous cache with one key, pulled into a blocks cache."""

import json

import torch
from common import Client, check_bytes, poll, random_tensor, rank_table, tensors_at
from llm_datadist import CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole, RegisterMemStatus

PROMPT_ID, DECODER_ID = 1, 2
ENTRY_SHAPE = [1, 128]
BLOCKS_SHAPE = [10, 128]


def init(role: LLMRole, cluster_id: int, device_id: int) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.device_id = device_id
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": 4 << 20})
    config.sync_kv_timeout = 20000
    datadist.init(config.generate_options())
    return datadist


def link(datadist: LLMDataDist, ports: list[int]) -> int:
    comm_id = datadist.link("link", {PROMPT_ID: 0, DECODER_ID: 1}, rank_table(ports))
    poll(lambda: datadist.query_register_mem_status(comm_id), [RegisterMemStatus.OK])
    return comm_id


def source() -> torch.Tensor:
    return random_tensor(ENTRY_SHAPE, torch.float16, seed=1)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, device_id=0)
    manager = datadist.cache_manager
    desc = CacheDesc(num_tensors=1, shape=ENTRY_SHAPE, data_type=DataType.DT_FLOAT16)
    key = CacheKey(prompt_cluster_id=PROMPT_ID, req_id=0, model_id=0)
    cache = manager.allocate_cache(desc, [key])
    (tensor,) = tensors_at(cache.tensor_addrs, ENTRY_SHAPE, torch.float16)
    tensor.copy_(source())
    comm_id = link(datadist, client.ports)
    client.barrier()  # filled
    client.barrier()  # pulled
    check_bytes("source", tensor, source())
    datadist.unlink(comm_id)
    manager.remove_cache_key(key)
    manager.deallocate_cache(cache)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, device_id=1)
    manager = datadist.cache_manager
    desc = CacheDesc(num_tensors=1, shape=BLOCKS_SHAPE, data_type=DataType.DT_FLOAT16)
    tensor = torch.full(BLOCKS_SHAPE, -1, dtype=torch.float16)
    cache = manager.register_blocks_cache(desc, [tensor.data_ptr()])
    comm_id = link(datadist, client.ports)
    client.barrier()  # filled
    key = CacheKey(prompt_cluster_id=PROMPT_ID, req_id=0, model_id=0)
    manager.pull_blocks(key, cache, src_blocks=[], dst_blocks=[0])
    expected = torch.full(BLOCKS_SHAPE, -1, dtype=torch.float16)
    expected[0] = source()[0]
    check_bytes("pulled", tensor, expected)
    client.barrier()  # pulled
    datadist.unlink(comm_id)
    datadist.finalize()


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
