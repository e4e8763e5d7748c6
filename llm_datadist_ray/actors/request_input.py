"""What a caller may ask for, checked before anything is computed or sent."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from llm_datadist_ray.actors.attempt import request_id_of
from llm_datadist_ray.actors.errors import RequestRejected
from llm_datadist_ray.actors.messages import GenerateRequest
from llm_datadist_ray.engines.base import Sampling


def make_request(
    *, request_id: Any, prompt: Any, max_tokens: Any, chat: Any, temperature: Any, top_p: Any, seed: Any
) -> GenerateRequest:
    """RequestRejected that names the argument and what it may be."""
    _check_text("request_id", request_id)
    if not request_id:
        raise RequestRejected("request_id is empty: give an id, or None for a random one")
    try:
        sampling = Sampling(
            temperature=float(_number("temperature", temperature, Real)),
            top_p=float(_number("top_p", top_p, Real)),
            seed=int(_number("seed", seed, Integral)),
        )
        request = GenerateRequest(request_id, prompt, _number("max_tokens", max_tokens, Integral), chat, sampling)
        check_request(request)
    except (RequestRejected, ValueError) as error:
        raise RequestRejected(_naming(request_id, str(error))) from None
    return request


def check_request(request: GenerateRequest) -> None:
    """The part that every member repeats: whoever calls it may be a router of another process. RequestRejected."""
    try:
        _check_text("the prompt", request.prompt)
        if not request.prompt:
            raise RequestRejected("the prompt is empty")
        if not isinstance(request.chat, bool):
            raise RequestRejected(f"chat is {request.chat!r}; True or False is needed")
        if _number("max_tokens", request.max_tokens, Integral) < 1:
            raise RequestRejected(f"max_tokens is {request.max_tokens}; at least 1 token is generated")
    except RequestRejected as error:
        raise RequestRejected(_naming(request_id_of(request.request_id), str(error))) from None


def surrogate_in(text: str) -> str:
    """Where the first half of a surrogate pair stands, in words; empty for text that UTF-8 can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at character {error.start}"
    return ""


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RequestRejected(f"{name} is of type {type(value).__name__}; text (str) is needed")
    if where := surrogate_in(value):
        raise RequestRejected(f"{name} is no valid Unicode text: half of a surrogate pair, {where}; decode it first")


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        needed = "a whole number" if kind is Integral else "a number"
        raise RequestRejected(f"{name} is {value!r} of type {type(value).__name__}; {needed} is needed")
    return value


def _naming(request_id: str, sentence: str) -> str:
    prefix = f"request {request_id}: "
    return sentence if sentence.startswith(prefix) else prefix + sentence
