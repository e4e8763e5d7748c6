"""The one place where a native status becomes an exception."""

from __future__ import annotations

from enum import IntEnum

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray.errors import LLMException, LLMStatusCode


class NativeStatus(IntEnum):
    """``ldr_status_t`` (native/include/ldr.h), grouped by what is hurt: the operation, the link, the engine."""

    OK = 0
    INVALID = -1
    NOT_FOUND = -2
    NO_CACHE = -3
    TIMEOUT = -4
    CANCELLED = -5
    NO_PATH = -6
    UNSUPPORTED = -7
    BUSY = -8
    KEY_BOUND = -9
    STALE = -20
    CONSUMED = -21
    EXPIRED = -22
    UNKNOWN_GRANT = -23
    REVOKED = -24
    NOT_LINKED = -40
    ALREADY_LINKED = -41
    LINK_FAILED = -42
    LINK_BROKEN = -43
    MODE_MISMATCH = -44
    AUTH = -45
    VERSION = -46
    LAYOUT = -47
    UNLINK_FAILED = -48
    HANDSHAKE = -49
    POOL_FULL = -60
    INTERNAL = -80
    NO_MEMORY = -81
    FORKED = -82
    CLOSED = -83
    BIND = -84
    SYSTEM = -85


STATUS_CODES: dict[NativeStatus, LLMStatusCode] = {
    NativeStatus.OK: LLMStatusCode.LLM_SUCCESS,
    NativeStatus.INVALID: LLMStatusCode.LLM_PARAM_INVALID,
    NativeStatus.KEY_BOUND: LLMStatusCode.LLM_PARAM_INVALID,
    NativeStatus.POOL_FULL: LLMStatusCode.LLM_OUT_OF_MEMORY,
    NativeStatus.MODE_MISMATCH: LLMStatusCode.LLM_PARAM_INVALID,
    NativeStatus.NO_CACHE: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    NativeStatus.TIMEOUT: LLMStatusCode.LLM_TIMEOUT,
    NativeStatus.NO_PATH: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    NativeStatus.UNSUPPORTED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    NativeStatus.NOT_LINKED: LLMStatusCode.LLM_NOT_YET_LINK,
    NativeStatus.ALREADY_LINKED: LLMStatusCode.LLM_ALREADY_LINK,
    NativeStatus.LINK_FAILED: LLMStatusCode.LLM_LINK_FAILED,
    NativeStatus.AUTH: LLMStatusCode.LLM_LINK_FAILED,
    NativeStatus.VERSION: LLMStatusCode.LLM_LINK_FAILED,
    NativeStatus.LAYOUT: LLMStatusCode.LLM_LINK_FAILED,
    NativeStatus.UNLINK_FAILED: LLMStatusCode.LLM_UNLINK_FAILED,
    NativeStatus.HANDSHAKE: LLMStatusCode.LLM_FAILED,
    NativeStatus.NO_MEMORY: LLMStatusCode.LLM_OUT_OF_MEMORY,
}
"""Codes of the transfer API; what is not here has no name of its own there and is ``LLM_FAILED``."""


class NativeError(LLMException):
    """A native call failed. ``native_status`` is the exact reason, ``status_code`` what the transfer API calls it.

    The text is the native core's own sentence: what, which peer, which step, how long. Pickles with both codes.
    """

    def __init__(self, text: str, native_status: int) -> None:
        super().__init__(text, status_code=status_code_of(native_status))
        self._native_status = native_status

    @property
    def native_status(self) -> int:
        """A :class:`NativeStatus`, or a number that this version does not know."""
        return self._native_status

    def __reduce__(self) -> tuple[type[NativeError], tuple[str, int]]:
        return type(self), (str(self.args[0]), int(self._native_status))


def status_code_of(native_status: int) -> LLMStatusCode:
    return STATUS_CODES.get(native_status, LLMStatusCode.LLM_FAILED)  # type: ignore[call-overload]


def native_status_of(status: int) -> int:
    try:
        return NativeStatus(status)
    except ValueError:
        return status


def check(status: int) -> None:
    """Raises :class:`NativeError` unless the call that this thread has just made succeeded."""
    if status:
        raise NativeError(last_error() or status_name(status), native_status_of(status))


def last_error() -> str:
    return ffi.string(lib.ldr_last_error()).decode(errors="replace")


def status_name(status: int) -> str:
    return ffi.string(lib.ldr_status_name(status)).decode()
