"""What layer-wise transfers of v1 and v2 share: their thread, destinations and checks (spec api-cachemanager §8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray._native import Direction, RemoteBy, TensorSpan, Transfer
from llm_datadist_ray.checks import num_layers
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.log import log
from llm_datadist_ray.types import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig

TENSORS_PER_LAYER = 2
"""Always, in layer-wise transfers (spec §8.1)."""

SendLayer = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerTarget:
    """Where layers go. ``send(layer, q)`` moves one and blocks; ``q`` counts from 0 in ``src_layers``. It raises
    LLMException when it fails."""

    dst_cluster_id: int
    src_layers: range
    send: SendLayer


def check_layers(
    name: str, config: TransferConfig | TransferWithCacheKeyConfig, num_layers_of_cache: int, *, has_src_blocks: bool
) -> None:
    """The rows "per config" of spec §8.1; a range left out is put into the caller's object, as they say."""
    raise_if_false(
        not has_src_blocks or config.src_batch_index == 0,
        f"{name}: src_batch_index should be 0 with src_block_indices, but got {config.src_batch_index}",
    )
    if config.src_layer_range is None:
        config.src_layer_range = range(num_layers_of_cache)
    layers = config.src_layer_range
    raise_if_false(
        layers.stop <= num_layers_of_cache,
        f"{name}: src_layer_range {layers} should be inside the {num_layers_of_cache} layers",
    )
    if isinstance(config, TransferConfig):
        count, found = num_layers(layers), len(config.dst_addrs)
        raise_if_false(
            found == TENSORS_PER_LAYER * count,
            f"{name}: {count} layers need {TENSORS_PER_LAYER} dst_addrs each, but got {found}",
        )
    else:
        # Setters do not compare them (spec api-types §10.4), and a layer without a destination could not be sent.
        if config.dst_layer_range is None:
            raise TypeError(f"{name}: dst_layer_range only support range, but got None")
        raise_if_false(
            num_layers(config.dst_layer_range) == num_layers(layers),
            f"{name}: src_layer_range {layers} and dst_layer_range {config.dst_layer_range} should be equally long",
        )


def pushes_to_addresses(
    addresses: Sequence[int], layer: int, q: int, timeout_s: float, fields: Mapping[str, Any]
) -> Iterator[Transfer]:
    """One transfer for each tensor of the layer, to the ``q``-th of the layers' addresses: they may lie in two caches.
    They share the time limit. ``fields`` is the rest of each."""
    deadline_s = time.monotonic() + timeout_s
    for j in range(TENSORS_PER_LAYER):
        yield Transfer(
            direction=Direction.PUSH,
            remote_by=RemoteBy.ADDRESS,
            remote_key_id=addresses[q * TENSORS_PER_LAYER + j],
            local_tensors=TensorSpan(layer * TENSORS_PER_LAYER + j, 1),
            timeout_s=max(0.0, deadline_s - time.monotonic()),
            **fields,
        )


class LayerwiseJob:
    """Sends each layer to every target that wants it, in order, as soon as the synchronizer says that it is ready.

    :meth:`start` begins it, in a thread of its own that keeps the process alive: a synchronizer may block for as long
    as it likes. Of the rest (:class:`~llm_datadist_ray.types.cache_task.TransferJob`) any thread may call anything.
    """

    def __init__(
        self, synchronizer: LayerSynchronizer, targets: Sequence[LayerTarget], num_layers: int, name: str
    ) -> None:
        self._synchronizer = synchronizer
        self._targets = list(targets)
        self._num_layers = num_layers
        self._name = name
        self._dst_cluster_ids = [target.dst_cluster_id for target in targets]
        self._unfinished = list(targets)
        # By destination cluster, as upstream has it: configs aimed at the same one share the last status.
        self._statuses: dict[int, LLMStatusCode] = {}
        self._ended = threading.Event()

    def start(self) -> None:
        if self._targets:
            threading.Thread(target=self._run, name=self._name, daemon=False).start()
        else:
            self._ended.set()

    @property
    def num_configs(self) -> int:
        return len(self._dst_cluster_ids)

    def wait(self, timeout_ms: int | None) -> bool:
        return self._ended.wait(None if timeout_ms is None else timeout_ms / 1000)

    def results(self) -> list[LLMStatusCode | None]:
        return [self._statuses.get(cluster_id) for cluster_id in self._dst_cluster_ids]

    def _run(self) -> None:
        try:
            self._send_layers()
        except BaseException:
            # The user's synchronizer, usually; SystemExit too, by which a thread only ends itself. There is nobody to
            # raise it to but who asks for the results.
            log.exception("%s: ended by an exception", self._name)
            failed = (target.dst_cluster_id for target in self._unfinished)
            self._statuses.update(dict.fromkeys(failed, LLMStatusCode.LLM_FAILED))
        finally:
            # They hold what they send from, and who waits may hold this for long.
            self._targets.clear()
            self._unfinished.clear()
            self._ended.set()

    def _send_layers(self) -> None:
        for layer in range(self._num_layers):
            targets = [target for target in self._targets if layer in target.src_layers]
            if not targets:
                continue
            if not self._synchronizer.synchronize_layer(layer, None):
                log.info("%s: the synchronizer gave up at layer %d", self._name, layer)
                for target in targets:
                    self._statuses[target.dst_cluster_id] = LLMStatusCode.LLM_PARAM_INVALID
                return
            for target in targets:
                if not self._send(target, layer):
                    return

    def _send(self, target: LayerTarget, layer: int) -> bool:
        layers = target.src_layers
        try:
            target.send(layer, layer - layers.start)
        except LLMException as error:
            log.error("%s: layer %d to cluster %d: %s", self._name, layer, target.dst_cluster_id, error)
            self._statuses[target.dst_cluster_id] = error.status_code
            return False
        if layer == layers.stop - 1:
            self._statuses[target.dst_cluster_id] = LLMStatusCode.LLM_SUCCESS
            self._unfinished.remove(target)
        return True
