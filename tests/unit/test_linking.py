"""What linking checks and how it runs over several clusters, without an engine (spec api-datadist §4, §7.1)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.linking.arguments import check_clusters, check_link_arguments
from llm_datadist_ray.linking.clusters import for_each_cluster, remote_address, remote_addresses
from llm_datadist_ray.types import LLMClusterInfo

SUCCESS = LLMStatusCode.LLM_SUCCESS
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED


def cluster(
    cluster_id: int | None = 2, *, local: tuple[Any, ...] = ("127.0.0.1",), remote: tuple[Any, ...] = ()
) -> Any:
    info = LLMClusterInfo()
    if cluster_id is not None:
        info.remote_cluster_id = cluster_id
    for ip in local:
        info.append_local_ip_info(ip, 0)
    for ip in remote:
        info.append_remote_ip_info(ip, 1)
    return info


CLUSTER_ARGUMENTS = [
    ([cluster()], 1, True, None),
    ((cluster(), cluster()), 2**31 - 1, True, None),
    ([], 1, True, None),
    ([cluster(local=())], 1, False, None),
    ([cluster(), cluster(local=())], 1, True, PARAM_INVALID),
    ([cluster()], 0, True, PARAM_INVALID),
    ([cluster()], -1, True, PARAM_INVALID),
    ([cluster()], 2**31, True, ValueError),
    ([cluster()], None, True, TypeError),
    ([cluster()], "1", True, TypeError),
    ([cluster(None)], 1, True, TypeError),
    (cluster(), 1, True, TypeError),
    (None, 1, True, TypeError),
    ([1], 1, True, TypeError),
    ([None], 1, True, TypeError),
]


@pytest.mark.parametrize(("clusters", "timeout_ms", "needs_local_ip", "error"), CLUSTER_ARGUMENTS)
def test_4_1_cluster_arguments(clusters: Any, timeout_ms: Any, needs_local_ip: bool, error: Any) -> None:
    check_error(error, lambda: check_clusters(clusters, timeout_ms, needs_local_ip=needs_local_ip))


def check_error(error: Any, call: Any) -> None:
    if error is None:
        call()
        return
    is_code = isinstance(error, LLMStatusCode)
    with pytest.raises(LLMException if is_code else error) as caught:
        call()
    if is_code:
        assert caught.value.status_code is error
    else:
        assert type(caught.value) is error


NAME, RANKS, TABLE = "name", {1: 0, 2: 1}, "{}"

LINK_ARGUMENTS = [
    ((NAME, RANKS, TABLE), None),
    (("x" * 127, {2**64 - 1: 0, 0: 2**32 - 1}, ""), None),
    ((NAME, {1: 0, 2: 0, 3: 5, 4: 5}, TABLE), None),
    ((None, RANKS, TABLE), TypeError),
    ((1, RANKS, TABLE), TypeError),
    (("", RANKS, TABLE), PARAM_INVALID),
    (("x" * 128, RANKS, TABLE), PARAM_INVALID),
    ((NAME, None, TABLE), TypeError),
    ((NAME, [(1, 0), (2, 1)], TABLE), TypeError),
    ((NAME, {"1": 0, 2: 1}, TABLE), TypeError),
    ((NAME, {1: 0, 2: "1"}, TABLE), TypeError),
    ((NAME, {1: 0, 2: None}, TABLE), TypeError),
    ((NAME, {}, TABLE), PARAM_INVALID),
    ((NAME, {1: 0}, TABLE), PARAM_INVALID),
    ((NAME, dict.fromkeys(range(5), 0), TABLE), PARAM_INVALID),
    ((NAME, {1: 1, 2: 0}, TABLE), PARAM_INVALID),
    ((NAME, {1: 0, 2: 2, 3: 1}, TABLE), PARAM_INVALID),
    ((NAME, {-1: 0, 2: 1}, TABLE), ValueError),
    ((NAME, {2**64: 0, 2: 1}, TABLE), ValueError),
    ((NAME, {1: -1, 2: 1}, TABLE), ValueError),
    ((NAME, {1: 0, 2: 2**32}, TABLE), ValueError),
    ((NAME, RANKS, None), TypeError),
    ((NAME, RANKS, {}), TypeError),
]


@pytest.mark.parametrize(("arguments", "error"), LINK_ARGUMENTS, ids=lambda value: str(value)[:60])
def test_7_1_link_arguments(arguments: tuple[Any, Any, Any], error: Any) -> None:
    check_error(error, lambda: check_link_arguments(*arguments))


@pytest.mark.parametrize(
    ("remote", "expected"),
    [(("1.2.3.4",), ("1.2.3.4", 1)), ((), None), (("1.2.3.4", "1.2.3.5"), None), ((None,), None), ((2**32,), None)],
    ids=str,
)
def test_4_2_remote_address(remote: tuple[Any, ...], expected: tuple[str, int] | None) -> None:
    info = cluster(remote=remote)
    if expected is None:
        check_error(PARAM_INVALID, lambda: remote_address(info))
    else:
        assert remote_address(info) == expected
        assert remote_addresses(info) == [expected]


@pytest.mark.logs("step with cluster 3 failed: no answer")
def test_4_2_codes_in_order_and_the_last_failure_overall() -> None:
    codes = {1: SUCCESS, 2: LINK_FAILED, 3: TIMEOUT, 4: SUCCESS}

    def action(info: LLMClusterInfo) -> None:
        code = codes[info.remote_cluster_id or 0]
        if code:
            raise LLMException("no answer", status_code=code)

    assert for_each_cluster("step", [cluster(number) for number in codes], action) == (TIMEOUT, list(codes.values()))
    assert for_each_cluster("step", [cluster(4)], action) == (SUCCESS, [SUCCESS])
    assert for_each_cluster("step", [cluster(2)], action) == (LINK_FAILED, [LINK_FAILED])
    assert for_each_cluster("step", [], action) == (PARAM_INVALID, [])
    as_timeout = for_each_cluster("step", [cluster(2)], action, lambda error: TIMEOUT)
    assert as_timeout == (TIMEOUT, [TIMEOUT])


def test_4_2_sixteen_at_once_and_the_rest_queued() -> None:
    running, most = 0, 0
    lock = threading.Lock()
    sixteen = threading.Barrier(16, timeout=30)  # breaks unless sixteen are inside together

    def action(info: LLMClusterInfo) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        sixteen.wait()
        with lock:
            running -= 1

    assert for_each_cluster("step", [cluster(number) for number in range(32)], action)[0] == SUCCESS
    assert most == 16
