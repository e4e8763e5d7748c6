"""Where a cluster to link with can be reached (spec api-types §8)."""

from __future__ import annotations

import socket

from llm_datadist_ray.checked_field import CheckedField
from llm_datadist_ray.checks import check_isinstance, check_uint16, check_uint64
from llm_datadist_ray.types.enums import LLMRole


def _check_role_type(name: str, value: object) -> None:
    check_isinstance(name, value, (LLMRole, int))


class LLMClusterInfo:
    """One peer of ``link_clusters`` / ``unlink_clusters``, filled in by the caller (spec api-types §8).

    Addresses are IPv4 only and kept as integers whose least significant byte is the first octet.
    """

    remote_cluster_id: CheckedField[int | None] = CheckedField(check_uint64)
    """uint64 (TypeError / ValueError); None until assigned, which linking refuses."""

    remote_role_type: CheckedField[LLMRole | int | None] = CheckedField(_check_role_type)
    """Carried and never used."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[tuple[int, int]] = []
        self._remote_ip_info_list: list[tuple[int, int]] = []

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Adds an own address. ``ip`` is text or an integer in the byte order above, ``port`` a uint16.

        TypeError, ValueError (port), RuntimeError (text that is no IPv4 address). The port is not used in v2.
        """
        self._local_ip_info_list.append(_ip_info(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Adds an address where the peer listens; arguments as :meth:`append_local_ip_info`."""
        self._remote_ip_info_list.append(_ip_info(ip, port))

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        """(ip as integer, port) per :meth:`append_local_ip_info`, in order."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        """(ip as integer, port) per :meth:`append_remote_ip_info`, in order."""
        return self._remote_ip_info_list

    def __repr__(self) -> str:
        return (
            f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, "
            f"local={[_text(*info) for info in self._local_ip_info_list]}, "
            f"remote={[_text(*info) for info in self._remote_ip_info_list]})"
        )


def ip_to_int(ip: str) -> int:
    """``"1.2.3.4"`` → ``0x04030201``; RuntimeError for text that ``inet_aton`` refuses, IPv6 included (spec §8)."""
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except (OSError, UnicodeError) as error:
        raise RuntimeError(f"{ip!r} is not an IPv4 address (IPv6 cannot be used for cluster links)") from error


def int_to_ip(value: int) -> str:
    """The inverse of :func:`ip_to_int`. TypeError for None, ValueError for what is no uint32."""
    check_isinstance("ip", value, int, allow_none=False)
    if not 0 <= value < 2**32:
        raise ValueError(f"ip should be an IPv4 address as uint32, but got {value}")
    return socket.inet_ntoa(value.to_bytes(4, "little"))


def _ip_info(ip: str | int, port: int) -> tuple[int, int]:
    # None passes, as upstream lets it: it has no address and fails when somebody links with it.
    check_isinstance("ip", ip, (str, int))
    check_uint16("port", port)
    return (ip_to_int(ip) if isinstance(ip, str) else ip), port


def _text(ip: int, port: int) -> str:
    return f"{int_to_ip(ip) if isinstance(ip, int) and 0 <= ip < 2**32 else ip}:{port}"
