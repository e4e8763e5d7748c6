"""Status codes, the exception that carries one, and the helpers that raise it (spec api-types §2, §3.2, §4)."""

from __future__ import annotations

from llm_datadist_ray._named_enum import NamedIntEnum

_BASE = 0x5010B000


class LLMStatusCode(NamedIntEnum):
    """Every status the transfer API can report, with upstream's values (spec api-types §3.2).

    ``LLM_FAILED``, ``LLM_SUSPECT_REMOTE_ERROR`` and ``LLM_UNKNOWN_ERROR`` are not recoverable, everything else is.
    ``LLM_TIMEOUT`` from a transfer means that its link must be torn down and built again.
    """

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1


class LLMException(RuntimeError):
    """Failure of a transfer-API call; ``status_code`` says which kind (spec api-types §4).

    A RuntimeError, so handlers of that catch it too. ``str()`` ends with the code's name unless it is the default.
    Pickles with its code: it crosses Ray actor boundaries.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        # In __dict__, which BaseException.__reduce__ carries as state; no pickling code of our own is needed.
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status_code

    def __str__(self) -> str:
        text = super().__str__()
        if self._status_code == LLMStatusCode.LLM_SUCCESS:
            return text
        return f"{text} [{code_2_status(self._status_code).name}]"


class Status:
    """A status code with a question attached (spec api-types §4). No documented method returns one."""

    def __init__(self, status: LLMStatusCode) -> None:
        self._status_code = status

    def is_ok(self) -> bool:
        return self._status_code == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status_code

    def __repr__(self) -> str:
        return f"Status({self._status_code})"


def code_2_status(code: int) -> LLMStatusCode:
    """The status of an engine's number; a number without a Python name is ``LLM_FAILED`` (spec api-types §2, §3.2)."""
    try:
        return LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def handle_llm_status(code: int, step: str, detail: str = "") -> None:
    """Raises :class:`LLMException` with the mapped code unless ``code`` is success (spec api-types §2).

    ``step`` says what was tried and with whom ("pull_cache from cluster 1"), ``detail`` what the engine said about it.
    Both are finished text. A code without a Python name is shown as a number as well.
    """
    if code == LLMStatusCode.LLM_SUCCESS:
        return
    status = code_2_status(code)
    number = "" if status == code else f" (engine code {int(code)})"
    raise LLMException(f"{step} failed{number}" + (f": {detail}" if detail else ""), status_code=status)


def param_invalid(message: str) -> LLMException:
    """What :func:`raise_if_false` raises by default, for who raises it from another exception."""
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def raise_if_false(
    condition: object, message: str, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID
) -> None:
    """Raises :class:`LLMException` when the condition does not hold (spec api-types §2, "predicate check").

    ``message`` is finished text and used as it is: braces of a dict or JSON in it are just braces.
    """
    if not condition:
        raise LLMException(message, status_code=status_code)


def raise_if_true(
    condition: object, message: str, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID
) -> None:
    """The opposite of :func:`raise_if_false` (spec api-types §2)."""
    raise_if_false(not condition, message, status_code)
