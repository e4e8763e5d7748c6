"""What the parts of the cache manager share: the engine, and one way into it for every transfer."""

from __future__ import annotations

from collections.abc import Collection

from llm_datadist_ray._native import NativeEngine, NativeError, NativeStatus, Transfer
from llm_datadist_ray.cache.selection import explained
from llm_datadist_ray.cache.task import TransferTask
from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.options import EngineOptions

Operation = tuple[Transfer, str | None]
"""A transfer that is ready to go, and what is known to be wrong with it, if anything: the native core refuses it when
its turn among the checks has come, and the error then says this, too."""


class ManagerPart:
    """Base of the parts of :class:`CacheManager`."""

    def __init__(
        self, engine: NativeEngine, options: EngineOptions, events: EventDispatcher, not_ready: Collection[int]
    ) -> None:
        self._engine = engine
        self._options = options
        self._events = events
        self._not_ready = not_ready
        self._is_remote_access = options.remote_accessible
        self._timeout_s = options.sync_kv_timeout_ms / 1000
        self._is_call_linked = False

    def _run(self, operation: Operation) -> None:
        """Blocks until it is done; the caller's thread takes part in it."""
        transfer, flaw = operation
        if self._not_ready:
            self._check_ready(transfer)
        try:
            self._engine.run(transfer)
        except NativeError as error:
            raise explained(error, flaw) from None

    def _start(self, operation: Operation) -> TransferTask:
        """Raises what is wrong at once as :meth:`_run` would; the rest comes out of the task."""
        transfer, flaw = operation
        if self._not_ready:
            self._check_ready(transfer)
        task = TransferTask(self._engine, transfer.params.cluster_id, flaw)
        tag = self._events.expect_op(task.complete)
        try:
            task.op_id = self._engine.submit(transfer, user_tag=tag)
        except NativeError as error:
            self._events.forget_op(tag)
            raise explained(error, flaw) from None
        return task

    def _check_open(self) -> None:
        """For methods that may have nothing to ask the engine, which would do this by itself (spec §1)."""
        if not self._engine.is_open:
            raise NativeError("the engine is closed: make a new one", NativeStatus.CLOSED)

    def _check_ready(self, transfer: Transfer) -> None:
        self._check_open()
        cluster_id = transfer.params.cluster_id
        if cluster_id in self._not_ready:
            raise LLMException(
                f"cluster {cluster_id} cannot be reached yet: its link() exchange is not OK yet, wait until "
                "query_register_mem_status says so",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
