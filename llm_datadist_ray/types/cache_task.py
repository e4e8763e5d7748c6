"""The caller's handle on a background transfer (spec api-types §10.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_datadist_ray.checks import check_uint32
from llm_datadist_ray.errors import LLMStatusCode


class TransferJob(Protocol):
    """What :class:`CacheTask` needs of the thing that runs the transfer. Any thread may call it, repeatedly."""

    @property
    def num_configs(self) -> int:
        """How many transfer configs the job was given."""

    def wait(self, timeout_ms: int | None) -> bool:
        """Blocks until the job has ended (True) or the time is up (False); None waits for ever. Cancels nothing."""

    def results(self) -> Sequence[LLMStatusCode | None]:
        """After the end: one status per config in the order given, None for one that never completed. Configs of the
        same destination cluster share their last status (spec api-types §10.5)."""


class CacheTask:
    """Returned by ``transfer_cache_async``; users do not construct it (spec api-types §10.5).

    ``timeout_code`` is ``LLM_TIMEOUT`` in v2 and ``LLM_WAIT_PROCESS_TIMEOUT`` in v1. Both methods may be called
    repeatedly and from any thread; a time-out does not cancel the job.
    """

    def __init__(self, job: TransferJob, *, timeout_code: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT) -> None:
        self._job = job
        self._timeout_code = timeout_code

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Waits (None: for ever; else uint32 ms, TypeError / ValueError) for the job and returns its outcome.

        The time-out code while it still runs; else the first failure in config order; else success, also when configs
        never started.
        """
        if not self._wait(timeout_in_millis):
            return self._timeout_code
        failures = (status for status in self._job.results() if status not in (None, LLMStatusCode.LLM_SUCCESS))
        return next(failures, None) or LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Waits as :meth:`synchronize` and returns one entry per config in the order given: success, an error, None
        for one that never completed, or the time-out code everywhere while the job still runs."""
        if not self._wait(timeout_in_millis):
            return [self._timeout_code] * self._job.num_configs
        return list(self._job.results())

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
        return self._job.wait(timeout_in_millis)
