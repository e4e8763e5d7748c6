"""Upstream's transfer_cache_async sample: the prompt sends a layer when its synchronizer says that it is ready."""

import torch
from common import HOST_IP, Client, check_bytes, random_tensor, require
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)

PROMPT_ID, DECODER_ID = 1, 2
NUM_TENSORS = 2  # one layer
SHAPE = [10, 128]


class ComputedLayers(LayerSynchronizer):
    """Computes a layer when it is asked for it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.layers: list[int] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.layers.append(layer_index)
        for i in (2 * layer_index, 2 * layer_index + 1):
            self.tensors[i].copy_(source(i))
        return True


def init(role: LLMRole, id_: int, client: Client) -> LLMDataDist:
    datadist = LLMDataDist(role, id_)
    config = LLMConfig()
    config.device_id = client.rank
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 20000
    config.listen_ip_info = f"{HOST_IP}:{client.ports[client.rank]}"
    if client.args.backend:
        config.transfer_backend = client.args.backend
    if client.args.comm_res is not None:
        config.local_comm_res = client.args.comm_res
    datadist.init(config.generate_options())
    return datadist


def register(datadist: LLMDataDist, tensors: list[torch.Tensor]) -> Cache:
    desc = CacheDesc(num_tensors=NUM_TENSORS, shape=SHAPE, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
    addrs = [tensor.data_ptr() for tensor in tensors]
    return datadist.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(datadist.cluster_id, 0))


def unlink_by_force(datadist: LLMDataDist, remote_cluster_id: int) -> None:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = remote_cluster_id
    ret, _ = datadist.unlink_clusters([cluster], 5000, force=True)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"unlink_clusters: {ret}")


def source(tensor: int) -> torch.Tensor:
    return random_tensor(SHAPE, torch.float32, seed=tensor)


def run_prompt(client: Client) -> None:
    datadist = init(LLMRole.PROMPT, PROMPT_ID, client)
    tensors = [torch.zeros(SHAPE) for _ in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = DECODER_ID
    cluster.append_local_ip_info(HOST_IP, client.ports[0])
    cluster.append_remote_ip_info(HOST_IP, client.ports[1])
    ret, _ = datadist.link_clusters([cluster], 5000)
    require(ret == LLMStatusCode.LLM_SUCCESS, f"link_clusters: {ret}")

    layers = ComputedLayers(tensors)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(DECODER_ID, 0), range(1), range(1))
    task = datadist.cache_manager.transfer_cache_async(cache, layers, [config])
    results = task.get_results()
    require(results == [LLMStatusCode.LLM_SUCCESS], f"get_results: {results}")
    require(layers.layers == [0], f"layers {layers.layers} were asked for")
    require(task.synchronize() == LLMStatusCode.LLM_SUCCESS, f"synchronize: {task.synchronize()}")
    client.barrier()  # sent
    unlink_by_force(datadist, DECODER_ID)
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def run_decoder(client: Client) -> None:
    datadist = init(LLMRole.DECODER, DECODER_ID, client)
    tensors = [torch.full(SHAPE, -1, dtype=torch.float32) for _ in range(NUM_TENSORS)]
    cache = register(datadist, tensors)
    client.barrier()  # registered
    client.barrier()  # sent
    for i, tensor in enumerate(tensors):
        expected = torch.full(SHAPE, -1, dtype=torch.float32)
        expected[0] = source(i)[0]  # without block lists only the first block is sent
        check_bytes(f"tensor {i}", tensor, expected)
    unlink_by_force(datadist, PROMPT_ID)
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


client = Client(["prompt", "decoder"], "backend", "comm-res")
(run_prompt if client.role == "prompt" else run_decoder)(client)
client.end()
