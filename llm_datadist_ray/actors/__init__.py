"""Prefill and decode in Ray actors. Names are resolved at their first use: importing this package imports no Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llm_datadist_ray.actors.errors import (
    ConfigError,
    LaunchError,
    MembershipError,
    RequestCancelled,
    RequestError,
    RequestFailed,
    RequestRejected,
)

if TYPE_CHECKING:
    from llm_datadist_ray.actors.cluster import DisaggCluster
    from llm_datadist_ray.actors.cluster_config import ClusterConfig
    from llm_datadist_ray.actors.coordinator import ClusterCoordinator
    from llm_datadist_ray.actors.decoder import DecoderActor
    from llm_datadist_ray.actors.prompt import PromptActor
    from llm_datadist_ray.actors.request import RequestStream

_HOMES = {
    "ClusterConfig": "cluster_config",
    "ClusterCoordinator": "coordinator",
    "DecoderActor": "decoder",
    "DisaggCluster": "cluster",
    "PromptActor": "prompt",
    "RequestStream": "request",
}

__all__ = [
    "ClusterConfig",
    "ClusterCoordinator",
    "ConfigError",
    "DecoderActor",
    "DisaggCluster",
    "LaunchError",
    "MembershipError",
    "PromptActor",
    "RequestCancelled",
    "RequestError",
    "RequestFailed",
    "RequestRejected",
    "RequestStream",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
