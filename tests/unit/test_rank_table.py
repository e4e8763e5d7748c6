"""The rank table of ``link()`` (spec api-datadist §7.1, design section 4)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.linking.rank_table import Candidate, RankAddress, parse_rank_table


def table(*devices: dict[str, Any], version: str = "1.0", **fields: Any) -> str:
    """One server entry for each device, as the clients write it."""
    servers = [{"server_id": f"node-{index}", "device": [device]} for index, device in enumerate(devices)]
    return json.dumps({"version": version, "status": "completed", "server_list": servers, **fields})


def refused(text: str) -> str:
    with pytest.raises(LLMException) as caught:
        parse_rank_table(text)
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED
    assert "rank_table" in str(caught.value)
    return str(caught.value)


def test_the_samples_table_of_version_1_0() -> None:
    """Numbers as text, the address with the device, one server for both (client-patterns §1)."""
    text = json.dumps(
        {
            "server_count": "1",
            "status": "completed",
            "version": "1.0",
            "server_list": [
                {
                    "server_id": "10.0.0.9",
                    "device": [
                        {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"},
                        {"device_id": "1", "device_ip": "192.168.1.2", "rank_id": "1"},
                    ],
                }
            ],
        }
    )
    server = Candidate("server_id", "10.0.0.9")
    assert parse_rank_table(text) == {
        0: RankAddress(0, (Candidate("device_ip", "192.168.1.1"), server), 16666, "16666 + device_id 0"),
        1: RankAddress(1, (Candidate("device_ip", "192.168.1.2"), server), 16667, "16666 + device_id 1"),
    }


def test_version_1_2_with_what_only_the_hardware_needs() -> None:
    """The table of the third vllm-ascend generation (client-patterns §2.3)."""
    text = table(
        {"device_id": "4", "device_ip": "10.1.1.4", "super_device_id": "99", "rank_id": "0", "device_port": "16999"},
        {"device_id": 5, "device_ip": "10.1.1.5", "super_device_id": 98, "rank_id": 1},
        version="1.2",
        super_pod_list=[{"super_pod_id": "0", "server_list": [{"server_id": "node-0"}]}],
    )
    ranks = parse_rank_table(text)
    assert (ranks[0].port, ranks[0].port_source) == (16999, "device_port")
    assert ranks[1].port == 16671
    assert ranks[0].candidates == (Candidate("device_ip", "10.1.1.4"),)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device_ip": "1.1.1.1", "host_ip": "2.2.2.2", "server_id": "3.3.3.3"}, ["1.1.1.1", "2.2.2.2", "3.3.3.3"]),
        ({"server_id": "3.3.3.3", "host_ip": "2.2.2.2"}, ["2.2.2.2", "3.3.3.3"]),
        ({"device_ip": "1.1.1.1", "host_ip": "1.1.1.1"}, ["1.1.1.1"]),
        ({"device_ip": "", "host_ip": "fd00::1"}, ["fd00::1"]),
        ({"device_ip": "0.0.0.0", "host_ip": "224.0.0.1", "server_id": "localhost"}, []),
        ({"device_ip": "fe80::1%eth0", "host_ip": "1.2.3", "server_id": "256.1.1.1"}, []),
        ({}, []),
    ],
    ids=str,
)
def test_candidates_in_order(fields: dict[str, str], expected: list[str]) -> None:
    (address,) = parse_rank_table(table({"device_id": "0", "rank_id": "7", **fields})).values()
    assert (address.rank, [ip for _, ip in address.candidates]) == (7, expected)


def test_a_host_ip_of_the_server_entry_counts_for_its_devices() -> None:
    server = {"host_ip": "2.2.2.2", "device": [{"rank_id": 0, "device_id": 0}, {"rank_id": 1, "device_id": 1}]}
    ranks = parse_rank_table(json.dumps({"version": "1.0", "server_list": [server]}))
    assert [ranks[rank].candidates for rank in (0, 1)] == [(Candidate("host_ip", "2.2.2.2"),)] * 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("...", "valid JSON"),
        ("", "valid JSON"),
        ("[" * 100_000, "valid JSON"),
        ("[]", "JSON object"),
        ("{}", "version"),
        (table({"rank_id": "0", "device_id": "0"}, version="1.3"), "version should be '1.0' or '1.2', but is '1.3'"),
        (table({"rank_id": "0", "device_id": "0"}, status="initializing"), "status"),
        ('{"version": "1.0"}', "server_list should be a list"),
        ('{"version": "1.0", "server_list": []}', "server_list should be a list"),
        ('{"version": "1.0", "server_list": {}}', "server_list should be a list"),
        ('{"version": "1.0", "server_list": [1]}', "server_list[0] should be an object"),
        ('{"version": "1.0", "server_list": [{}]}', "server_list[0].device should be a list"),
        ('{"version": "1.0", "server_list": [{"device": ["x"]}]}', "server_list[0].device[0] should be an object"),
        (table({"device_id": "0"}), "rank_id"),
        (table({"rank_id": "first", "device_id": "0"}), "rank_id should be a number"),
        (table({"rank_id": -1, "device_id": "0"}), "rank_id"),
        (table({"rank_id": 2**32, "device_id": "0"}), "rank_id"),
        (table({"rank_id": True, "device_id": "0"}), "rank_id"),
        (table({"rank_id": 1.5, "device_id": "0"}), "rank_id"),
        (table({"rank_id": "0"}), "server_list[0].device[0]: device_id"),
        (table({"rank_id": "0", "device_id": 65535}), "device_id"),
        (table({"rank_id": "0", "device_port": "0"}), "device_port should be a number in [1, 65535]"),
        (table({"rank_id": "0", "device_port": 65536}), "device_port"),
        (table({"rank_id": "0", "device_id": "0", "device_ip": 5}), "device_ip should be text"),
        (table({"rank_id": "0", "device_id": "0"}, {"rank_id": 0, "device_id": "1"}), "rank_id 0 is there twice"),
    ],
    ids=lambda value: value[:60],
)
def test_malformed(text: str, what: str) -> None:
    assert what in refused(text)


def test_an_address_as_text() -> None:
    ranks = parse_rank_table(
        table({"rank_id": 0, "device_id": 3, "device_ip": "1.1.1.1"}, {"rank_id": 1, "device_port": 7})
    )
    assert str(ranks[0]) == "rank 0 (device_ip 1.1.1.1; port 16669 from 16666 + device_id 3)"
    assert "none of device_ip, host_ip, server_id" in str(ranks[1])
