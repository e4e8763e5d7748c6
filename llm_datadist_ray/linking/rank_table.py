"""The rank table of ``link()``: where each rank can be reached (spec api-datadist §7.1, design section 4)."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llm_datadist_ray.errors import LLMException, LLMStatusCode

BASE_PORT = 16666
"""HCCL's own; on a host several "devices" share an address, so the device id is added."""

_VERSIONS = ("1.0", "1.2")
_ADDRESS_FIELDS = ("device_ip", "host_ip", "server_id")
_MAX_UINT32 = 2**32 - 1


class Candidate(NamedTuple):
    field: str
    ip: str


@dataclass(frozen=True, slots=True)
class RankAddress:
    """``candidates`` are the IP addresses of a rank in the order in which they are tried; there may be none."""

    rank: int
    candidates: tuple[Candidate, ...]
    port: int
    port_source: str
    """The field that the port comes from, for error texts."""

    def __str__(self) -> str:
        ips = ", ".join(f"{field} {ip}" for field, ip in self.candidates) or f"none of {', '.join(_ADDRESS_FIELDS)}"
        return f"rank {self.rank} ({ips}; port {self.port} from {self.port_source})"


def parse_rank_table(text: str) -> dict[int, RankAddress]:
    """The address of every rank in an HCCL rank table of version 1.0 or 1.2, by rank.

    Looked at are ``version``, ``status`` and, for each device of each entry of ``server_list``, ``rank_id``,
    ``device_id``, ``device_ip``, ``device_port``, ``host_ip`` and the entry's ``server_id`` and ``host_ip``. Numbers
    may be text. LLMException(LLM_LINK_FAILED) says which field is wrong, and how.
    """
    table = _load(text)
    version = table.get("version")
    if version not in _VERSIONS:
        raise _malformed(f"version should be {' or '.join(map(repr, _VERSIONS))}, but is {version!r}")
    status = table.get("status", "completed")
    if status != "completed":
        raise _malformed(f"status should be 'completed', but is {status!r}")
    ranks: dict[int, RankAddress] = {}
    for server_index, server in enumerate(_objects(table, "server_list", "server_list")):
        where = f"server_list[{server_index}]"
        for device_index, device in enumerate(_objects(server, "device", f"{where}.device")):
            address = _rank_address({**server, **device}, f"{where}.device[{device_index}]")
            if address.rank in ranks:
                raise _malformed(f"rank_id {address.rank} is there twice")
            ranks[address.rank] = address
    return ranks


def _load(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"it is not valid JSON ({error}): {text[:200]!r}") from error
    if not isinstance(table, dict):
        raise _malformed(f"it should be a JSON object, but is {text[:200]!r}")
    return table


def _objects(owner: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    found = owner.get(name)
    if not isinstance(found, list) or not found:
        raise _malformed(f"{where} should be a list with something in it, but is {found!r}")
    for index, item in enumerate(found):
        if not isinstance(item, dict):
            raise _malformed(f"{where}[{index}] should be an object, but is {item!r}")
    return found


def _rank_address(device: Mapping[str, Any], where: str) -> RankAddress:
    rank = _number(device, "rank_id", where, high=_MAX_UINT32)
    if "device_port" in device:
        port, port_source = _number(device, "device_port", where, low=1, high=65535), "device_port"
    else:
        device_id = _number(device, "device_id", where, high=65535 - BASE_PORT)
        port, port_source = BASE_PORT + device_id, f"{BASE_PORT} + device_id {device_id}"
    candidates: list[Candidate] = []
    for field in _ADDRESS_FIELDS:
        value = device.get(field, "")
        if not isinstance(value, str):
            raise _malformed(f"{where}: {field} should be text, but is {value!r}")
        if _is_usable_ip(value) and value not in (ip for _, ip in candidates):
            candidates.append(Candidate(field, value))
    return RankAddress(rank, tuple(candidates), port, port_source)


def _is_usable_ip(text: str) -> bool:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return False  # a name, as server_id often is
    return not ip.is_unspecified and not ip.is_multicast and "%" not in text


def _number(fields: Mapping[str, Any], name: str, where: str, *, low: int = 0, high: int) -> int:
    value = fields.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    # JSON's true is a Python int, and a number it is not.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _malformed(f"{where}: {name} should be a number in [{low}, {high}], but is {value!r}")
    return value


def _malformed(what: str) -> LLMException:
    return LLMException(f"rank_table: {what}", status_code=LLMStatusCode.LLM_LINK_FAILED)
