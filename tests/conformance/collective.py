"""What tests of collective links and of link events need: rank tables, and functions that run in a side's process."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

from llm_datadist_ray import RegisterMemStatus
from llm_datadist_ray._native import LinkInfo
from llm_datadist_ray.linking.changes import LinkChange
from tests.conformance.pair import HOST_IP, End
from tests.conformance.side import Side

WAIT_S = 20.0


def free_port(ip: str = HOST_IP) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return probe.getsockname()[1]


def rank_table(*devices: dict[str, Any], version: str = "1.2") -> str:
    """``devices[r]`` is what is known of rank ``r``."""
    servers = [
        {"server_id": f"node-{rank}", "device": [{"rank_id": str(rank), "device_id": str(rank), **device}]}
        for rank, device in enumerate(devices)
    ]
    return json.dumps({"version": version, "status": "completed", "server_list": servers})


def local_table(num_ranks: int) -> str:
    """Every rank on this host, with a port of its own."""
    return rank_table(*({"host_ip": HOST_IP, "device_port": str(free_port())} for _ in range(num_ranks)))


def ranks_of(*ends: End) -> dict[int, int]:
    return {end.cluster_id: rank for rank, end in enumerate(ends)}


# In the side's process


def call(side: Side, method: str, *args: Any, **kwargs: Any) -> Any:
    """A method of its LLMDataDist."""
    return getattr(side.dist, method)(*args, **kwargs)


def links_when_peers_have_gone(side: Side, timeout_s: float = WAIT_S) -> list[LinkInfo]:
    """No link at all, once the inbound ones have followed their openers, or what there is when the time is up."""
    deadline = time.monotonic() + timeout_s
    while (links := side.dist.link_states()) and time.monotonic() < deadline:
        time.sleep(0.005)  # inbound links raise no event
    return links


def final_status(side: Side, comm_id: int, timeout_s: float = WAIT_S) -> RegisterMemStatus:
    """Once it is no longer PREPARING, or what it is when the time is up. Clients ask again and again, too."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = side.dist.query_register_mem_status(comm_id=comm_id)
        if status != RegisterMemStatus.PREPARING or time.monotonic() > deadline:
            return status
        time.sleep(0.005)  # there is no event


_watches: list[tuple[queue.SimpleQueue[LinkChange], Callable[[], None]]] = []


def watch(side: Side) -> None:
    changes: queue.SimpleQueue[LinkChange] = queue.SimpleQueue()
    _watches.append((changes, side.dist.on_link_change(changes.put)))


def next_change(side: Side, timeout_s: float = WAIT_S) -> LinkChange | None:
    """Of the latest watch; None when the time is up."""
    try:
        return _watches[-1][0].get(timeout=timeout_s)
    except queue.Empty:
        return None


def end_watch(side: Side) -> None:
    """Of the latest watch; what it has seen and nobody has asked for is still there to ask for."""
    _watches[-1][1]()
