"""``with raises(PARAM_INVALID):`` — an LLMException with exactly this code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist_ray import LLMException, LLMStatusCode

SUCCESS = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
KV_CACHE_NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
ALREADY_LINK = LLMStatusCode.LLM_ALREADY_LINK
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
UNLINK_FAILED = LLMStatusCode.LLM_UNLINK_FAILED
EXIST_LINK = LLMStatusCode.LLM_EXIST_LINK
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
FEATURE_NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY


@contextmanager
def raises(code: LLMStatusCode, match: str | None = None) -> Iterator[None]:
    with pytest.raises(LLMException, match=match) as caught:
        yield
    assert caught.value.status_code == code, caught.value
