"""EngineOptions: the option dictionary of ``init``, parsed once into types (spec api-config §2 - §5).

Below this edge nobody sees option strings.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray.checks import check_dict, check_isinstance, check_uint16, check_uint64
from llm_datadist_ray.errors import param_invalid, raise_if_false, raise_if_true
from llm_datadist_ray.log import log
from llm_datadist_ray.pool_config import BufferClass, PoolConfig, parse_buffer_classes, parse_json_object
from llm_datadist_ray.types.cluster_info import int_to_ip
from llm_datadist_ray.types.enums import LLMRole

ListenAddress = tuple[str, int]

DEFAULT_SYNC_KV_TIMEOUT_MS = 1000
DEFAULT_MEM_UTILIZATION = 0.95
DEFAULT_LINK_TOTAL_TIME_S = 120
_DEFAULT_DEVICE_IDS = (0,)
_HIXL = "hixl"
_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What ``LLMDataDist.init`` was asked for. Immutable and picklable.

    ``cache_manager`` True is v2, False is v1. Fields of the other interface keep their defaults: its keys are not
    looked at.
    """

    role: LLMRole
    cluster_id: int
    cache_manager: bool
    device_ids: tuple[int, ...] = _DEFAULT_DEVICE_IDS
    """Exactly one in v2."""
    listen_addresses: tuple[ListenAddress, ...] = ()
    """(IPv4 text, port) to listen on: at most one in v2; in v1 one per device for PROMPT, else none."""
    sync_kv_timeout_ms: int = DEFAULT_SYNC_KV_TIMEOUT_MS

    # v2.
    remote_accessible: bool = False
    local_comm_res: str | None = None
    transfer_backend: str | None = None
    """None is the comm backend, ``"hixl"`` the other one."""
    global_resource_config: str | None = None
    """Stored and not interpreted; with hixl a JSON object, or ``""`` for nothing."""
    mem_pool: PoolConfig | None = None
    host_mem_pool: PoolConfig | None = None
    link_total_time_s: int = 0
    """For ``link()`` only; 0 leaves it to the environment, see :func:`link_total_time_s`."""
    link_retry_count: int = 1
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None

    # v1.
    kv_pool_bytes: int | None = None
    """``ge.flowGraphMemMaxSize``; None when absent."""
    mem_utilization: float = DEFAULT_MEM_UTILIZATION
    buffer_classes: tuple[BufferClass, ...] = ()
    enable_switch_role: bool = False

    @property
    def listen_ip(self) -> str | None:
        return self.listen_addresses[0][0] if self.listen_addresses else None

    @property
    def listen_port(self) -> int | None:
        return self.listen_addresses[0][1] if self.listen_addresses else None

    @property
    def is_hixl(self) -> bool:
        return self.transfer_backend == _HIXL

    @property
    def needs_local_ip(self) -> bool:
        """Every ``LLMClusterInfo`` to link with must carry a local address (spec api-datadist §4.1)."""
        return not self.local_comm_res

    @classmethod
    def parse(cls, options: dict[str, str], *, role: LLMRole, cluster_id: int) -> EngineOptions:
        """Checks and converts ``options``, which is not modified; unknown keys are ignored (spec api-config §2 - §5).

        Raises, in this order: TypeError (no dict; AttributeError for None; a key or value that is no str),
        LLMException(LLM_PARAM_INVALID) for ``ge.flowGraphMemMaxSize``, for the interplay rules and for bad values;
        ValueError for a port that is no number of 16 bits (v2).
        """
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_uint64("cluster_id", cluster_id)
        check_dict("options", options, str, str)
        kv_pool_bytes = _parse_kv_pool_bytes(options)
        effective = _with_implied_flags(options)
        is_v2 = effective.get(keys.ENABLE_CACHE_MANAGER) == "1"
        fields = _parse_v2(effective) if is_v2 else _parse_v1(effective, role, kv_pool_bytes)
        return cls(role=role, cluster_id=cluster_id, cache_manager=is_v2, **fields)


def link_total_time_s(options: EngineOptions) -> int:
    """How long ``link()`` tries to reach all members: ``link_total_time``, else what the environment says in
    ``HCCL_CONNECT_TIMEOUT``, else 120 s (spec api-config §2, ``llm.LinkTotalTime``)."""
    if options.link_total_time_s:
        return options.link_total_time_s
    text = os.environ.get(keys.CONNECT_TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_LINK_TOTAL_TIME_S
    if text.isascii() and text.isdigit() and 0 < len(text) <= 9 and int(text):
        return int(text)
    log.warning("%s=%r is no number of seconds and is not used", keys.CONNECT_TIMEOUT_VARIABLE, text)
    return DEFAULT_LINK_TOTAL_TIME_S


def parse_listen_info(text: str) -> ListenAddress:
    """``"ip:port"`` as (IPv4 text, port), for ``init`` and ``switch_role`` (spec api-config §2, ``llm.listenIpInfo``).

    LLMException(LLM_PARAM_INVALID) unless there are exactly two parts and the first is an IPv4 address; ValueError for
    a port that is no number of 16 bits. IPv6 cannot be expressed.
    """
    parts = text.split(":")
    raise_if_false(len(parts) == 2, f"{keys.LISTEN_IP_INFO} should be 'ip:port' with an IPv4 address, but got {text!r}")
    ip, port_text = parts
    # int() takes more for a number than this means: spaces, signs, underscores, digits of other scripts.
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 20):
        raise ValueError(f"the port in {keys.LISTEN_IP_INFO} {text!r} should be a number")
    port = int(port_text)
    check_uint16(f"the port in {keys.LISTEN_IP_INFO} {text!r}", port)
    try:
        ipaddress.IPv4Address(ip)
    except ValueError as error:
        raise param_invalid(f"{ip!r} in {keys.LISTEN_IP_INFO} {text!r} is not an IPv4 address") from error
    return ip, port


def _parse_kv_pool_bytes(options: Mapping[str, str]) -> int | None:
    """``ge.flowGraphMemMaxSize``, which is checked in v2 as well although only v1 uses it."""
    text = options.get(keys.FLOW_GRAPH_MEM_MAX_SIZE)
    if text is None:
        return None
    raise_if_true("," in text, f"{keys.FLOW_GRAPH_MEM_MAX_SIZE} should be one number without ',', but got {text!r}")
    return _parse_number(keys.FLOW_GRAPH_MEM_MAX_SIZE, text)


def _with_implied_flags(options: Mapping[str, str]) -> dict[str, str]:
    """A copy in which what ``llm.LocalCommRes`` and ``llm.TransferBackend`` imply is spelled out (§4, rules 1 to 7)."""
    effective = dict(options)
    if keys.LOCAL_COMM_RES in effective:
        effective.setdefault(keys.ENABLE_CACHE_MANAGER, "1")
        effective.setdefault(keys.ENABLE_REMOTE_CACHE_ACCESSIBLE, "1")
        _check_needs(effective, keys.LOCAL_COMM_RES, keys.ENABLE_CACHE_MANAGER)
    if keys.TRANSFER_BACKEND in effective:
        _check_needs(effective, keys.TRANSFER_BACKEND, keys.ENABLE_CACHE_MANAGER)
        effective.setdefault(keys.ENABLE_REMOTE_CACHE_ACCESSIBLE, "1")
        _check_needs(effective, keys.TRANSFER_BACKEND, keys.ENABLE_REMOTE_CACHE_ACCESSIBLE)
        raise_if_false(
            keys.LISTEN_IP_INFO in effective, f"{keys.TRANSFER_BACKEND} needs {keys.LISTEN_IP_INFO}, which is not set"
        )
    return effective


def _check_needs(options: Mapping[str, str], key: str, needed: str) -> None:
    found = options.get(needed)
    raise_if_false(found == "1", f"{key} needs {needed} to be '1', but it is {found!r}")


def _parse_v2(options: Mapping[str, str]) -> dict[str, Any]:
    """The v2 fields; checks in the order of spec api-config §4, rules 8 and 9."""
    listen_info = options.get(keys.LISTEN_IP_INFO)
    listen_addresses = () if listen_info is None else (parse_listen_info(listen_info),)
    remote = options.get(keys.ENABLE_REMOTE_CACHE_ACCESSIBLE, "0")
    raise_if_false(
        remote in ("0", "1"), f"{keys.ENABLE_REMOTE_CACHE_ACCESSIBLE} should be '0' or '1', but got {remote!r}"
    )
    backend = options.get(keys.TRANSFER_BACKEND)
    raise_if_false(backend in (None, _HIXL), f"{keys.TRANSFER_BACKEND} should be {_HIXL!r}, but got {backend!r}")
    fields: dict[str, Any] = {
        "listen_addresses": listen_addresses,
        "remote_accessible": remote == "1",
        "transfer_backend": backend,
        "local_comm_res": options.get(keys.LOCAL_COMM_RES),
        "global_resource_config": options.get(keys.GLOBAL_RESOURCE_CONFIG),
        "device_ids": (_number(options, keys.DEVICE_ID, 0, high=_MAX_INT32),),
        "sync_kv_timeout_ms": _sync_kv_timeout_ms(options),
        "link_total_time_s": _number(options, keys.LINK_TOTAL_TIME, 0, high=_MAX_UINT32),
        "link_retry_count": _number(options, keys.LINK_RETRY_COUNT, 1, low=1, high=100),
        "rdma_traffic_class": _optional_number(options, keys.RDMA_TRAFFIC_CLASS),
        "rdma_service_level": _optional_number(options, keys.RDMA_SERVICE_LEVEL),
        "mem_pool": _pool(options, keys.MEM_POOL_CONFIG),
        "host_mem_pool": _pool(options, keys.HOST_MEM_POOL_CONFIG),
    }
    if backend == _HIXL and fields["global_resource_config"]:
        parse_json_object(fields["global_resource_config"], keys.GLOBAL_RESOURCE_CONFIG)
    return fields


def _parse_v1(options: Mapping[str, str], role: LLMRole, kv_pool_bytes: int | None) -> dict[str, Any]:
    """The v1 fields (spec api-config §2, §5)."""
    device_ids = _device_ids(options)
    buffer_text = options.get(keys.BUF_POOL_CFG)
    return {
        "device_ids": device_ids,
        "listen_addresses": _v1_listen_addresses(options, len(device_ids)) if role == LLMRole.PROMPT else (),
        "sync_kv_timeout_ms": _sync_kv_timeout_ms(options),
        "kv_pool_bytes": kv_pool_bytes,
        "mem_utilization": _mem_utilization(options),
        "buffer_classes": parse_buffer_classes(buffer_text, keys.BUF_POOL_CFG) if buffer_text else (),
        "enable_switch_role": options.get(keys.ENABLE_SWITCH_ROLE) == "1",
    }


def _device_ids(options: Mapping[str, str]) -> tuple[int, ...]:
    """One or more devices; only a complete ``llm.ClusterInfo`` makes the key optional."""
    text = options.get(keys.DEVICE_ID)
    if text is None:
        raise_if_false(keys.CLUSTER_INFO in options, f"{keys.DEVICE_ID} is required in v1, e.g. '0' or '0;1'")
        return _DEFAULT_DEVICE_IDS
    return tuple(_parse_number(keys.DEVICE_ID, part, high=_MAX_INT32) for part in text.split(";"))


def _v1_listen_addresses(options: Mapping[str, str], num_devices: int) -> tuple[ListenAddress, ...]:
    """Where a PROMPT listens, one address per device: from ``llm.ClusterInfo``, else from ``llm.listenIpInfo``."""
    if keys.CLUSTER_INFO in options:
        addresses = _cluster_info_addresses(options[keys.CLUSTER_INFO])
        source = keys.CLUSTER_INFO
    else:
        text = options.get(keys.LISTEN_IP_INFO)
        if text is None:
            raise param_invalid(
                f"{keys.LISTEN_IP_INFO} is required for {LLMRole.PROMPT} in v1, 'ip:port' for each device"
            )
        addresses = tuple(_v1_listen_info(part) for part in text.split(";"))
        source = keys.LISTEN_IP_INFO
    raise_if_false(
        len(addresses) == num_devices, f"{source} has {len(addresses)} addresses to listen on for {num_devices} devices"
    )
    return addresses


def _v1_listen_info(text: str) -> ListenAddress:
    try:
        return parse_listen_info(text)
    except ValueError as error:
        raise param_invalid(str(error)) from error


def _cluster_info_addresses(text: str) -> tuple[ListenAddress, ...]:
    """``listen_ip_info`` of the JSON that ``LLMConfig.cluster_info`` emits: ``[{"ip": int, "port": int}, ...]``."""
    listeners = parse_json_object(text, keys.CLUSTER_INFO).get("listen_ip_info", [])
    try:
        return tuple(parse_listen_info(f"{_ip_text(info['ip'])}:{info['port']}") for info in listeners)
    except (KeyError, TypeError, ValueError) as error:
        raise param_invalid(
            f"listen_ip_info in {keys.CLUSTER_INFO} should be a list of ip and port, but got {listeners!r}"
        ) from error


def _ip_text(ip: str | int) -> str:
    return ip if isinstance(ip, str) else int_to_ip(ip)


def _mem_utilization(options: Mapping[str, str]) -> float:
    text = options.get(keys.MEMORY_UTILIZATION)
    if text is None:
        return DEFAULT_MEM_UTILIZATION
    try:
        value = float(text)
    except ValueError as error:
        raise param_invalid(f"{keys.MEMORY_UTILIZATION} should be a number, but got {text!r}") from error
    raise_if_false(0.0 <= value <= 1.0, f"{keys.MEMORY_UTILIZATION} should be in range [0.0, 1.0], but got {text!r}")
    return value


def _pool(options: Mapping[str, str], key: str) -> PoolConfig | None:
    """A pool is configured when its option is there and not empty (spec api-config §3.1)."""
    text = options.get(key)
    return PoolConfig.parse(text, key) if text else None


def _sync_kv_timeout_ms(options: Mapping[str, str]) -> int:
    return _number(options, keys.SYNC_KV_TIMEOUT, DEFAULT_SYNC_KV_TIMEOUT_MS, high=_MAX_INT32)


def _optional_number(options: Mapping[str, str], key: str) -> int | None:
    return _number(options, key, 0, high=_MAX_UINT32) if key in options else None


def _number(options: Mapping[str, str], key: str, default: int, *, low: int = 0, high: int) -> int:
    text = options.get(key)
    return default if text is None else _parse_number(key, text, low=low, high=high)


def _parse_number(key: str, text: str, *, low: int = 0, high: int = 2**64 - 1) -> int:
    # Twenty digits are a uint64; more is refused before int() works on it.
    raise_if_false(
        text.isascii() and text.isdigit() and len(text) <= 20, f"{key} should be a number in digits, but got {text!r}"
    )
    value = int(text)
    raise_if_false(low <= value <= high, f"{key} should be in range [{low}, {high}], but got {text}")
    return value
