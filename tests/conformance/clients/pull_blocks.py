"""Upstream's pull_blocks sample: registered blocks caches of one tensor, two-sided, then swapped to host memory."""

import torch
from common import Client, check_bytes, poll, random_tensor, rank_table
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
    RegisterMemStatus,
)
from llm_datadist.v2.cache_manager import CacheManager

PROMPT_ID, DECODER_ID = 1, 2
SHAPE = [10, 128]
PULLED = [0, 1]


def init(role: LLMRole, cluster_id: int, device_id: int) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.device_id = device_id
    config.enable_cache_manager = True
    config.sync_kv_timeout = 20000
    datadist.init(config.generate_options())
    return datadist


def link(datadist: LLMDataDist, ports: list[int]) -> int:
    comm_id = datadist.link("link", {PROMPT_ID: 0, DECODER_ID: 1}, rank_table(ports))
    poll(lambda: datadist.query_register_mem_status(comm_id), [RegisterMemStatus.OK])
    return comm_id


def device_desc() -> CacheDesc:
    return CacheDesc(num_tensors=1, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)


def source() -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=1)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, device_id=0)
    tensor = source()
    datadist.cache_manager.register_blocks_cache(device_desc(), [tensor.data_ptr()], BlocksCacheKey(PROMPT_ID, 0))
    comm_id = link(datadist, client.ports)
    client.barrier()  # linked
    client.barrier()  # pulled
    check_bytes("source", tensor, source())
    datadist.unlink(comm_id)
    datadist.finalize()  # the cache is still registered


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, device_id=1)
    manager = datadist.cache_manager
    tensor = torch.full(SHAPE, -1, dtype=torch.float32)
    cache = manager.register_blocks_cache(device_desc(), [tensor.data_ptr()])
    comm_id = link(datadist, client.ports)
    client.barrier()  # linked

    manager.pull_blocks(BlocksCacheKey(PROMPT_ID, 0), cache, src_blocks=PULLED, dst_blocks=PULLED)
    expected = torch.full(SHAPE, -1, dtype=torch.float32)
    expected[PULLED] = source()[PULLED]
    check_bytes("pulled", tensor, expected)

    swap(manager, cache, tensor, expected)
    client.barrier()  # pulled
    datadist.unlink(comm_id)
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def swap(manager: CacheManager, cache: Cache, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Out to host memory, and back after the blocks were overwritten."""
    host_desc = CacheDesc(num_tensors=1, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.HOST)
    host = torch.zeros(SHAPE)
    host_cache = Cache.create_cpu_cache(host_desc, [host.data_ptr()])
    manager.swap_blocks(cache, host_cache, {0: 0, 1: 1})
    swapped = torch.zeros(SHAPE)
    swapped[PULLED] = expected[PULLED]
    check_bytes("swapped out", host, swapped)
    check_bytes("after swapping out", tensor, expected)

    tensor[PULLED] = 7
    manager.swap_blocks(host_cache, cache, {0: 0, 1: 1})
    check_bytes("swapped in", tensor, expected)
    check_bytes("host memory after swapping in", host, swapped)


client = Client(["prompt", "decoder"])
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
