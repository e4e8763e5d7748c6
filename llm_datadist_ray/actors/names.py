"""Names inside Ray. Each cluster has a namespace of its own, so two clusters never see each other's actors."""

from __future__ import annotations

COORDINATOR_NAME = "coordinator"


def namespace_of(cluster_name: str) -> str:
    return f"llm_datadist_ray.{cluster_name}"
