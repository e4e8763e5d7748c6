"""The background thread of a layer-wise transfer, for v1 and v2 (spec api-cachemanager §8.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.log import log
from llm_datadist_ray.types import LayerSynchronizer

SendLayer = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerTarget:
    """Where layers go. ``send(layer, q)`` moves one and blocks; ``q`` counts from 0 in ``src_layers``. It raises
    LLMException when it fails."""

    dst_cluster_id: int
    src_layers: range
    send: SendLayer


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
