"""switch_role in v2 (spec api-datadist §6.1)."""

from __future__ import annotations

import socket

import pytest

from llm_datadist_ray import LLMConfig, LLMRole
from tests.conformance.pair import HOST_IP, SUCCESS, Pair
from tests.conformance.status import EXIST_LINK, FAILED, LINK_FAILED, PARAM_INVALID, raises


def listen_options(port: int) -> dict[str, str]:
    config = LLMConfig()
    config.listen_ip_info = f"{HOST_IP}:{port}"
    return config.generate_options()  # with llm.MemoryUtilization, which nobody looks at


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST_IP, 0))
        return probe.getsockname()[1]


def test_roles_change_sides(linked_pair: Pair) -> None:
    """Upstream's sample: listener and client change sides; caches survive (client-patterns §1)."""
    a, b = linked_pair.a, linked_pair.b
    on_a, on_b = a.cache("on_a"), b.cache("on_b")
    a.process.pull_cache(on_b.key(0), "on_a", 0)
    assert a.process.unlink_clusters([b.info()], 5000)[0] == SUCCESS

    old_port = b.port
    b.process.switch_role(LLMRole.DECODER)
    assert b.process.port() == 0
    assert a.process.link_clusters([b.info()], 2000) == (LINK_FAILED, [LINK_FAILED])
    a.process.switch_role(LLMRole.PROMPT, listen_options(0))
    a.port = a.process.port()
    assert a.port not in (0, old_port)
    assert b.process.link_clusters([a.info()], 5000) == (SUCCESS, [SUCCESS])
    b.process.pull_cache(on_a.key(1), "on_b", 2)
    for tensor in range(4):
        on_a.tensor(tensor)[0] = on_b.tensor(tensor)[0]
        on_b.tensor(tensor)[2] = on_a.tensor(tensor)[1]


def test_refused_while_linked(linked_pair: Pair) -> None:
    for end in (linked_pair.a, linked_pair.b):
        with raises(EXIST_LINK):
            end.process.switch_role(LLMRole.MIX)
    assert linked_pair.b.process.port() == linked_pair.b.port


def test_a_dead_peer_does_not_count(linked_pair: Pair) -> None:
    linked_pair.a.process.restart()
    linked_pair.a.forget()
    assert linked_pair.b.process.wait_for_link_down(1, 5.0)
    linked_pair.b.process.switch_role(LLMRole.DECODER)


def test_same_port_changes_nothing(pair: Pair) -> None:
    pair.b.process.switch_role(LLMRole.PROMPT, listen_options(pair.b.port))
    assert pair.b.process.port() == pair.b.port
    pair.link()


def test_same_port_changes_nothing_even_at_another_address(pair: Pair) -> None:
    options = {"llm.listenIpInfo": f"127.0.0.2:{pair.b.port}"}
    pair.b.process.switch_role(LLMRole.PROMPT, options)
    pair.link()


def test_another_port_replaces_the_listener(pair: Pair) -> None:
    old_info, port = pair.b.info(), free_port()
    pair.b.process.switch_role(LLMRole.PROMPT, listen_options(port))
    assert pair.b.process.port() == port
    assert pair.a.process.link_clusters([old_info], 2000)[0] == LINK_FAILED
    pair.b.port = port
    pair.link()


def test_a_port_in_use(pair: Pair) -> None:
    """The old listener is gone all the same."""
    with socket.create_server((HOST_IP, 0)) as other, raises(FAILED):
        pair.b.process.switch_role(LLMRole.PROMPT, listen_options(other.getsockname()[1]))
    assert pair.b.process.port() == 0


def test_arguments(pair: Pair) -> None:
    for role, options in ((1, None), (None, None), (LLMRole.MIX, [])):
        with pytest.raises(TypeError):
            pair.b.process.switch_role(role, options)
    with raises(PARAM_INVALID):
        pair.b.process.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "127.0.0.1"})
    with raises(PARAM_INVALID):
        pair.b.process.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "::1:80"})
    with pytest.raises(ValueError):
        pair.b.process.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "127.0.0.1:http"})
    assert pair.b.process.port() == pair.b.port
