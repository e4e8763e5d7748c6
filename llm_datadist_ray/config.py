"""LLMConfig: typed settings that become the option dictionary of ``LLMDataDist.init`` (spec api-config §1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray.checked_field import Check, CheckedField
from llm_datadist_ray.checks import check_dict, check_int32, check_isinstance, check_list_int32, check_uint32
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types.cluster_info import ip_to_int

T = TypeVar("T")
Encode = Callable[[Any], str]


class Setting(CheckedField[T]):
    """A checked property of :class:`LLMConfig` and the option keys that it becomes.

    None inside means "not set": the getter then gives ``default`` and no key is emitted. ``emit_empty=False`` also
    keeps falsy values (``""``, False) out of the dictionary.
    """

    def __init__(
        self, check: Check, encoders: Mapping[str, Encode], *, default: T | None = None, emit_empty: bool = False
    ) -> None:
        super().__init__(check)
        self._encoders = encoders
        self._default = default
        self._emit_empty = emit_empty

    def load(self, instance: object) -> Any:
        value = self._stored(instance)
        return self._default if value is None else value

    def options_of(self, instance: object) -> dict[str, str]:
        """The keys that the instance's value emits, possibly none."""
        value = self._stored(instance)
        if value is None or not (value or self._emit_empty):
            return {}
        return {key: encode(value) for key, encode in self._encoders.items()}

    def _stored(self, instance: object) -> Any:
        return getattr(instance, f"_{self.name}", None)


class _ClusterInfoSetting(Setting[str]):
    """Keeps the JSON text with every address string replaced by its integer."""

    def store(self, instance: object, value: Any) -> None:
        super().store(instance, _with_integer_ips(value))


def _is_a(classes: type | tuple[type, ...], *, allow_none: bool = False) -> Check:
    return lambda name, value: check_isinstance(name, value, classes, allow_none=allow_none)


def _is_within(low: float, high: float, classes: type) -> Check:
    def check(name: str, value: Any) -> None:
        check_isinstance(name, value, classes, allow_none=False)
        raise_if_false(low <= value <= high, f"{name} should be in range [{low}, {high}], but got {value}")

    return check


def _check_device_id(name: str, value: Any) -> None:
    check_isinstance(name, value, (int, list, tuple), allow_none=False)
    ids = [value] if isinstance(value, int) else value
    check_isinstance(name, ids, (list, tuple), int)
    raise_if_false(ids, f"{name} should name at least one device")
    raise_if_false(min(ids) >= 0, f"{name} should not be negative, but got {value}")
    check_list_int32(name, ids)


def _check_sync_kv_timeout(name: str, value: Any) -> None:
    check_isinstance(name, value, (int, str), allow_none=False)
    if isinstance(value, str):
        raise_if_false(value.isascii() and value.isdigit(), f"{name} should be a number of ms, but got {value!r}")
    timeout_ms = int(value)
    raise_if_false(timeout_ms > 0, f"{name} should be greater than zero ms, but got {value}")
    check_int32(name, timeout_ms)


def _check_str_dict(name: str, value: Any) -> None:
    check_dict(name, value, str, str)


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _number(value: int | str) -> str:
    return str(int(value))


def _device_ids(value: int | Sequence[int]) -> list[str]:
    return [_number(device_id) for device_id in ([value] if isinstance(value, int) else value)]


def _all_device_ids(value: int | Sequence[int]) -> str:
    return ";".join(_device_ids(value))


def _first_device_id(value: int | Sequence[int]) -> str:
    return _device_ids(value)[0]


def _with_integer_ips(text: str) -> str:
    """The JSON text of v1's ``cluster_info`` with ``listen_ip_info[].ip`` strings as integers (spec api-config §1.2).

    Raises json.JSONDecodeError, RuntimeError (an address that is no IPv4), LLMException(LLM_PARAM_INVALID) (no object).
    """
    info = json.loads(text)
    raise_if_false(isinstance(info, dict), f"cluster_info should be a JSON object, but got {text}")
    listeners = info.get("listen_ip_info", [])
    check_isinstance("listen_ip_info of cluster_info", listeners, list, dict, allow_none=False)
    for listener in listeners:
        if isinstance(listener.get("ip"), str):
            listener["ip"] = ip_to_int(listener["ip"])
    return json.dumps(info)


_check_text = _is_a(str, allow_none=True)
_check_flag = _is_a(bool, allow_none=True)


class LLMConfig:
    """Settings for ``LLMDataDist.init``; every one is checked where it is assigned (spec api-config §1).

    Wrong types are TypeError, numbers outside their width ValueError, other violations
    LLMException(LLM_PARAM_INVALID). None unsets a setting where its type names None.
    """

    device_id: Setting[int | Sequence[int] | None] = Setting(
        _check_device_id,
        {keys.DEVICE_ID: _all_device_ids, keys.SESSION_DEVICE_ID: _first_device_id},
        emit_empty=True,
    )
    """Device number, or several (v1); int32, not negative."""

    sync_kv_timeout: Setting[int | str | None] = Setting(
        _check_sync_kv_timeout, {keys.SYNC_KV_TIMEOUT: _number}, emit_empty=True
    )
    """Time-out of pulls, pushes and each layer of a transfer, in ms; int32 > 0 or its digits. Engine default: 1000."""

    listen_ip_info: Setting[str | None] = Setting(_check_text, {keys.LISTEN_IP_INFO: str}, default="")
    """``"ip:port"`` to listen on (v1 with several devices: joined by ``;``); parsed by ``init`` only."""

    deploy_res_path: Setting[str | None] = Setting(_check_text, {keys.DEPLOY_RES_PATH: str}, default="")
    """Legacy, ignored."""

    enable_switch_role: Setting[bool | None] = Setting(_check_flag, {keys.ENABLE_SWITCH_ROLE: _flag}, default=False)
    """v1: allows ``switch_role``."""

    mem_utilization: Setting[float] = Setting(
        _is_within(0.0, 1.0, float), {keys.MEMORY_UTILIZATION: str}, emit_empty=True
    )
    """v1: usable fraction of the KV pool, 0.0 to 1.0; a float, not an int."""

    buf_pool_cfg: Setting[str | None] = Setting(_check_text, {keys.BUF_POOL_CFG: str}, default="")
    """v1: JSON of the allocator's size classes (spec api-config §3.3)."""

    cluster_info: Setting[str] = _ClusterInfoSetting(_is_a(str), {keys.CLUSTER_INFO: str}, default="")
    """v1, legacy: JSON; parsed at once, addresses become integers (json.JSONDecodeError, RuntimeError)."""

    output_max_size: Setting[int | None] = Setting(
        _is_a(int, allow_none=True), {keys.OUTPUT_MAX_SIZE: _number}, emit_empty=True
    )
    """Legacy, ignored."""

    enable_cache_manager: Setting[bool | None] = Setting(
        _check_flag, {keys.ENABLE_CACHE_MANAGER: _flag}, default=False, emit_empty=True
    )
    """True selects v2."""

    enable_remote_cache_accessible: Setting[bool | None] = Setting(
        _check_flag, {keys.ENABLE_REMOTE_CACHE_ACCESSIBLE: _flag}, default=False, emit_empty=True
    )
    """v2: True selects remote-access mode, where the caller reads and writes peer memory itself."""

    mem_pool_cfg: Setting[str | None] = Setting(_check_text, {keys.MEM_POOL_CONFIG: str}, default="")
    """v2: JSON of the device pool, ``{"memory_size": bytes, "page_shift": 16}`` (spec api-config §3.1)."""

    host_mem_pool_cfg: Setting[str | None] = Setting(_check_text, {keys.HOST_MEM_POOL_CONFIG: str}, default="")
    """v2: JSON of the host pool, as ``mem_pool_cfg``."""

    rdma_traffic_class: Setting[int | None] = Setting(check_uint32, {keys.RDMA_TRAFFIC_CLASS: _number}, emit_empty=True)
    """v2: uint32, handed to the NIC."""

    rdma_service_level: Setting[int | None] = Setting(check_uint32, {keys.RDMA_SERVICE_LEVEL: _number}, emit_empty=True)
    """v2: uint32, handed to the NIC."""

    local_comm_res: Setting[str | None] = Setting(_check_text, {keys.LOCAL_COMM_RES: str}, default="", emit_empty=True)
    """v2: communication-resource JSON or ``""``; setting it implies cache manager and remote access (spec §4)."""

    link_total_time: Setting[int] = Setting(
        _is_within(0, 2**32 - 1, int), {keys.LINK_TOTAL_TIME: _number}, default=0, emit_empty=True
    )
    """v2: limit of ``link()`` in seconds; 0 means the engine's default."""

    link_retry_count: Setting[int] = Setting(
        _is_within(1, 100, int), {keys.LINK_RETRY_COUNT: _number}, default=1, emit_empty=True
    )
    """v2: tries of ``link()`` inside that limit, 1 to 100."""

    transfer_backend: Setting[str | None] = Setting(
        _check_text, {keys.TRANSFER_BACKEND: str}, default="", emit_empty=True
    )
    """v2: ``"hixl"``; other values, ``""`` included, are refused by ``init``."""

    global_resource_config: Setting[str | None] = Setting(
        _check_text, {keys.GLOBAL_RESOURCE_CONFIG: str}, default="", emit_empty=True
    )
    """v2: text for the hixl engine."""

    ge_options: CheckedField[dict[str, str]] = CheckedField(_check_str_dict)
    """Further keys, verbatim; a property wins over the same key in here. None is AttributeError."""

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self._ge_options: dict[str, str] = {}
        self.mem_utilization = 0.95  # assigned: it is emitted always, even in v2, which ignores it

    @property
    def options(self) -> dict[str, str]:
        """The dictionary that :meth:`generate_options` fills; empty before its first call."""
        return self._options

    def generate_options(self) -> dict[str, str]:
        """Brings :attr:`options` up to date and returns it: always the same object. Keys are overwritten and never
        removed, so callers may add their own (spec api-config §1.1)."""
        self._options.update(self.ge_options)
        for setting in vars(LLMConfig).values():
            if isinstance(setting, Setting):
                self._options.update(setting.options_of(self))
        return self._options

    def gen_options(self) -> dict[str, str]:
        """The same as :meth:`generate_options`."""
        return self.generate_options()


LlmConfig = LLMConfig
