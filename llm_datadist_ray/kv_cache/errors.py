"""What v1 calls a failure of the native core (spec api-kvcachemanager §8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llm_datadist_ray._native import NativeError, NativeStatus
from llm_datadist_ray.errors import LLMException, LLMStatusCode

# Where v1 and v2 differ.
_V1_CODES: dict[int, LLMStatusCode] = {
    NativeStatus.TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    NativeStatus.POOL_FULL: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
    NativeStatus.KEY_BOUND: LLMStatusCode.LLM_FAILED,
}


def v1_code_of(error: NativeError) -> LLMStatusCode:
    return _V1_CODES.get(error.native_status, error.status_code)


@contextmanager
def v1_codes() -> Iterator[None]:
    """Inside, a NativeError becomes an LLMException of the same text with v1's code."""
    try:
        yield
    except NativeError as error:
        raise LLMException(str(error.args[0]), status_code=v1_code_of(error)) from error
