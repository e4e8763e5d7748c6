"""Configurations, and waiting for what a cluster says about itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import ClusterConfig
from llm_datadist_ray.actors.status import MemberStatus, WorkerStatus
from llm_datadist_ray.engines.base import Engine

NUM_BLOCKS = 80
BLOCK_TOKENS = 16


def tiny_config(name: str, **sections: Any) -> ClusterConfig:
    """The tiny model in float64, 80 blocks of 16 tokens on each side; ``sections``, or single keys, are merged over
    it."""
    content: dict[str, Any] = {
        "name": name,
        "model": {"name": "tiny", "dtype": "float64", "block_tokens": BLOCK_TOKENS},
        "prompt": {"num_blocks": NUM_BLOCKS},
        "decoder": {"num_blocks": NUM_BLOCKS},
        "ray": {"num_cpus": 2, "object_store_mb": 80, "auth_mode": "disabled"},
        "generation": {"chat": False},
    }
    for section, values in sections.items():
        content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
    return ClusterConfig.parse(content)


def member(cluster: DisaggCluster, role: str) -> MemberStatus:
    return next(member for member in cluster.status().members if member.role == role)


def worker(cluster: DisaggCluster, role: str) -> WorkerStatus:
    found = member(cluster, role)
    assert found.worker is not None, found.error
    return found.worker


def is_at_rest(cluster: DisaggCluster) -> bool:
    """No request, no grant, every block free, on every live member."""
    return all(
        status.worker is not None
        and status.worker.num_requests == 0
        and status.worker.blocks.free == status.worker.blocks.total
        and (status.worker.grants is None or status.worker.grants["live"] == 0)
        for status in cluster.status().members
    )


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Asks again and again, each time over Ray, and returns the seconds it took; fails when the time is up."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < timeout_s, f"not within {timeout_s} s"
    return time.monotonic() - started_at


def alone(reference: Engine, prompt: str, max_tokens: int) -> tuple[int, ...]:
    """What one process answers to a prompt without chat template."""
    return tuple(reference.generate_alone(reference.encode(prompt, chat=False), max_tokens))
