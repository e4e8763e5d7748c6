"""What actors claim of Ray's resources, and whether it can ever be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from llm_datadist_ray.actors.cluster_config import ClusterConfig, RoleConfig
from llm_datadist_ray.actors.errors import LaunchError


def claims(role: RoleConfig) -> dict[str, Any]:
    """Ray's options for a claim; without one an actor is placed anywhere, so that two cores suffice for everything."""
    resources = dict(role.resources)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources.pop("memory")
    return options | {"resources": resources}


def check_resources(config: ClusterConfig) -> None:
    """LaunchError for what can never be placed: it would be waited for until the launch's time is over."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    problem = placement_problem({"prompt": config.prompt, "decoder": config.decoder}, nodes)
    if problem:
        raise LaunchError(f"cluster {config.name} {problem}: see prompt.resources and decoder.resources")


def placement_problem(roles: Mapping[str, RoleConfig], nodes: list[dict[str, float]]) -> str:
    """What is wanted and cannot be had of these nodes, in all or on any one of them; empty when nothing is."""
    wanted: dict[str, float] = {}
    for role in roles.values():
        for name, amount in role.resources.items():
            wanted[name] = wanted.get(name, 0.0) + amount * role.replicas
    for name, amount in wanted.items():
        available = sum(node.get(name, 0.0) for node in nodes)
        if amount > available:
            return f"wants {amount:g} {name} in all, this Ray has {available:g}"
    for prefix, role in roles.items():
        if not any(_fits(role, node) for node in nodes):
            claim = ", ".join(f"{amount:g} {name}" for name, amount in role.resources.items())
            return f"wants {claim} for one {prefix} actor, and no single node of this Ray has that"
    return ""


def _fits(role: RoleConfig, node: dict[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in role.resources.items())
