"""What a caller may ask for: every refusal names the argument, and happens before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llm_datadist_ray.actors.attempt import new_attempt, request_id_of
from llm_datadist_ray.actors.errors import RequestRejected
from llm_datadist_ray.actors.request_input import check_request, make_request
from llm_datadist_ray.engines.base import Sampling

GOOD: dict[str, Any] = {
    "request_id": "r1",
    "prompt": "Hello",
    "max_tokens": 5,
    "chat": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 3,
}


def test_a_good_request() -> None:
    request = make_request(**GOOD)
    assert (request.request_id, request.prompt, request.max_tokens, request.chat) == ("r1", "Hello", 5, True)
    assert request.sampling == Sampling(0.7, 0.9, 3)
    assert make_request(**(GOOD | {"temperature": 1, "top_p": 1})).sampling == Sampling(1.0, 1.0, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": b"bytes"}, "request r1: the prompt is of type bytes; text (str) is needed"),
        ({"prompt": None}, "request r1: the prompt is of type NoneType"),
        ({"prompt": ""}, "request r1: the prompt is empty"),
        ({"prompt": "ab\udcff"}, "half of a surrogate pair, U+DCFF at character 2"),
        ({"max_tokens": 0}, "request r1: max_tokens is 0; at least 1"),
        ({"max_tokens": "5"}, "max_tokens is '5' of type str; a whole number is needed"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0 of type float; a whole number is needed"),
        ({"max_tokens": True}, "max_tokens is True of type bool"),
        ({"chat": "yes"}, "request r1: chat is 'yes'; True or False is needed"),
        ({"temperature": "hot"}, "temperature is 'hot' of type str; a number is needed"),
        ({"temperature": -0.1}, "request r1: temperature is -0.1; 0 (greedy) to 100 is allowed"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0.0; more than 0"),
        ({"seed": 1.5}, "seed is 1.5 of type float; a whole number is needed"),
        ({"seed": -1}, "seed is -1;"),
        ({"request_id": 7}, "request_id is of type int"),
        ({"request_id": ""}, "request_id is empty"),
        ({"request_id": "\ud800"}, "request_id is no valid Unicode text"),
    ],
)
def test_refusals_name_the_argument(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        make_request(**(GOOD | change))
    assert sentence in str(caught.value)


def test_a_member_checks_again_and_names_the_request_not_the_attempt() -> None:
    request = replace(make_request(**GOOD), request_id=new_attempt("r1"), prompt="\ud800")
    with pytest.raises(RequestRejected, match=r"^request r1: the prompt is no valid"):
        check_request(request)


def test_attempts_of_one_request_differ_and_know_their_request() -> None:
    attempts = {new_attempt("a~b") for _ in range(50)}
    assert len(attempts) == 50
    assert {request_id_of(attempt) for attempt in attempts} == {"a~b"}
    assert request_id_of("plain") == "plain"
