"""What an engine says about itself and about its links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from llm_datadist_ray._native._ldr import ffi
from llm_datadist_ray._native.clock import seconds
from llm_datadist_ray._native.paths import Path, PathSet, bytes_by_path, paths_of_mask

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


class LinkState(IntEnum):
    READY = 1
    BROKEN = 2
    """The peer was seen dead; linking again replaces it."""


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One link, seen from here. ``cluster_id`` is the peer's own word for itself (spec api-datadist §4.3)."""

    cluster_id: int
    incarnation: int
    epoch: int
    """Grows with every link that this engine makes."""
    state: LinkState
    paths: PathSet
    """What both ends agreed on, best first."""
    peer_pid: int
    """0 when the peer is not on this host."""
    is_same_host: bool
    last_heard_s: float
    """Age of the last sign of life."""
    peer_address: str
    bytes_pulled: dict[Path, int]
    bytes_pushed: dict[Path, int]
    is_inbound: bool = False
    """One-way engines: opened by the peer, of no use for transfers from here."""

    @property
    def is_ready(self) -> bool:
        return self.state == LinkState.READY


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """``bytes_pulled`` and ``bytes_pushed`` count successful transfers begun here, ``bytes_served`` what this engine
    moved for its peers (unix and tcp only: the other paths do not involve it)."""

    incarnation: int
    cluster_id: int
    listen_port: int
    """0 when there is no TCP listener."""
    paths: PathSet
    num_copy_threads: int
    num_links: int
    num_caches: int
    num_ops_in_flight: int
    bytes_pulled: dict[Path, int]
    bytes_pushed: dict[Path, int]
    bytes_served: dict[Path, int]


def link_info_from_c(info: CData) -> LinkInfo:
    return LinkInfo(
        cluster_id=info.cluster_id,
        incarnation=info.incarnation,
        epoch=info.epoch,
        state=LinkState(info.state),
        paths=paths_of_mask(info.path_set),
        peer_pid=info.peer_pid,
        is_same_host=bool(info.is_same_host),
        last_heard_s=seconds(info.last_heard_ns),
        peer_address=ffi.string(info.peer_address).decode(errors="replace"),
        bytes_pulled=bytes_by_path(info.bytes_pulled),
        bytes_pushed=bytes_by_path(info.bytes_pushed),
        is_inbound=bool(info.is_inbound),
    )


def engine_info_from_c(info: CData) -> EngineInfo:
    return EngineInfo(
        incarnation=info.incarnation,
        cluster_id=info.cluster_id,
        listen_port=info.listen_port,
        paths=paths_of_mask(info.path_set),
        num_copy_threads=info.num_copy_threads,
        num_links=info.num_links,
        num_caches=info.num_caches,
        num_ops_in_flight=info.num_ops_in_flight,
        bytes_pulled=bytes_by_path(info.bytes_pulled),
        bytes_pushed=bytes_by_path(info.bytes_pushed),
        bytes_served=bytes_by_path(info.bytes_served),
    )
