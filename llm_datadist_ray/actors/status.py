"""What a cluster says about itself: records for people and for ``--json``."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from llm_datadist_ray.actors.messages import Topology
from llm_datadist_ray.handoff.blocks import BlockCounts


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One native link, as the member sees it. ``bytes_pulled`` is by data path and counts what this member began."""

    cluster_id: int
    incarnation: int
    state: str
    """``"ready"`` or ``"broken"``."""
    paths: tuple[str, ...]
    peer_address: str
    bytes_pulled: dict[str, int]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A member's own answer. ``grants`` are the counters of a prompt's native core, None for a decoder."""

    blocks: BlockCounts
    num_requests: int
    links: tuple[LinkStatus, ...]
    grants: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What the coordinator knows of a member, and the member's own answer, or why there is none."""

    role: str
    cluster_id: int
    incarnation: int
    actor_name: str
    host: str
    port: int
    pid: int
    layout: str
    worker: WorkerStatus | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """Who launched a cluster, and which of its launches it was."""

    host: str
    pid: int
    version: str
    launch_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """The coordinator's answer. ``lease_left_s`` is how long the owner may stay silent until its name is free."""

    name: str
    pid: int
    owner: OwnerRecord
    lease_left_s: float
    topology: Topology
    next_cluster_id: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    name: str
    epoch: int
    owner: OwnerRecord
    coordinator_pid: int
    members: tuple[MemberStatus, ...]
    links: tuple[tuple[int, int], ...]
    """(decoder cluster id, prompt cluster id) of every link that is up, as the coordinator has been told."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers: ready for JSON."""
        return asdict(self)
