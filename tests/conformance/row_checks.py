"""What the tests of the rows share: refusals, signatures and an initialised object in this process."""

from __future__ import annotations

import ctypes
import inspect
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Status
from llm_datadist_ray.compat.modules import resolve
from llm_datadist_ray.errors import code_2_status, handle_llm_status

v1_name = partial(resolve, "llm_datadist_v1")
"""What a v1 program gets for a name of its package."""

v2_name = partial(resolve, "llm_datadist")

MIB = 1 << 20
POOL = '{"memory_size": 1048576, "page_shift": 12}'
V1_POOL_BYTES = 4 * MIB
STATUS_BASE = 0x5010B000


Refusal = type[Exception] | tuple[type[Exception], ...] | LLMStatusCode

FOR_NONE = (TypeError, AttributeError)
"""None for what is needed: either will do (spec api-types §2)."""


def refused(error: Refusal, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The call raises exactly this class, or one of these, or an LLMException with exactly this code; its text."""
    with pytest.raises(LLMException if isinstance(error, LLMStatusCode) else error) as caught:
        call(*args, **kwargs)
    if isinstance(error, LLMStatusCode):
        assert isinstance(caught.value, LLMException)
        assert caught.value.status_code is error, repr(caught.value)
    else:
        assert type(caught.value) in (error if isinstance(error, tuple) else (error,)), repr(caught.value)
    return str(caught.value)


def is_read_only(owner: object, *names: str) -> bool:
    for name in names:
        with pytest.raises(AttributeError):
            setattr(owner, name, None)
    return True


def parameters(function: Callable[..., Any]) -> list[Any]:
    """``name`` or ``(name, default)`` of each parameter that can be given by position, then ``*args`` and ``**kwargs``;
    keyword-only ones are ours."""
    found: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self" or parameter.kind is parameter.KEYWORD_ONLY:
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        has_default = parameter.default is not parameter.empty
        found.append((parameter.name, parameter.default) if has_default else stars + parameter.name)
    return found


def options_of(**config: Any) -> dict[str, str]:
    """What an LLMConfig with these properties generates."""
    llm_config = LLMConfig()
    for name, value in config.items():
        setattr(llm_config, name, value)
    return llm_config.generate_options()


@contextmanager
def initialised(options: dict[str, str], role: LLMRole = LLMRole.PROMPT, cluster_id: int = 1) -> Iterator[LLMDataDist]:
    dist = LLMDataDist(role, cluster_id)
    dist.init(options)
    try:
        yield dist
    finally:
        dist.finalize()


@contextmanager
def v2(role: LLMRole = LLMRole.PROMPT, *, cluster_id: int = 1, **config: Any) -> Iterator[LLMDataDist]:
    """An initialised v2 object; ``config`` are further properties of LLMConfig."""
    with initialised(options_of(enable_cache_manager=True, **config), role, cluster_id) as dist:
        yield dist


def v1_options(role: LLMRole, **config: Any) -> dict[str, str]:
    config.setdefault("device_id", 0)
    ge_options = {"ge.flowGraphMemMaxSize": str(V1_POOL_BYTES), **config.pop("ge_options", {})}
    if role == LLMRole.PROMPT:
        config.setdefault("listen_ip_info", "127.0.0.1:0")
    return options_of(ge_options=ge_options, **config)


@contextmanager
def v1(role: LLMRole = LLMRole.PROMPT, *, cluster_id: int = 1, **config: Any) -> Iterator[LLMDataDist]:
    """An initialised v1 object with a pool of 4 MiB."""
    with initialised(v1_options(role, **config), role, cluster_id) as dist:
        yield dist


def init_refused(error: Refusal, options: Any, role: LLMRole = LLMRole.PROMPT) -> str:
    """``init`` raises it, and nothing is left initialised."""
    dist = LLMDataDist(role, 1)
    text = refused(error, dist.init, options)
    assert LLMDataDist.llm_engine_instance is None
    refused(RuntimeError, lambda: dist.cache_manager)
    return text


def bytes_at(address: int, size: int) -> np.ndarray:
    """A view of this process's memory."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5.0).close()
    except ConnectionRefusedError:
        return False
    return True


def check_code(name: str, value: int) -> LLMStatusCode:
    """Value, text, comparison with integers, and that an exception and a Status carry it."""
    code = LLMStatusCode[f"LLM_{name}"]
    assert code == value
    assert int(code) == value
    assert value == code
    assert code != value + 1
    assert LLMStatusCode(value) is code is code_2_status(value)
    assert str(code) == f"{code}" == f"LLMStatusCode.LLM_{name}"
    assert getattr(v1_name("LLMStatusCode"), code.name) is getattr(v2_name("LLMStatusCode"), code.name) is code
    if value:
        assert f"LLM_{name}" in refused(code, handle_llm_status, value, "step")
    error = pickle.loads(pickle.dumps(LLMException("text", status_code=code)))
    assert (error.status_code, error.args) == (code, ("text",))
    assert Status(code).is_ok() is (value == 0)
    return code
