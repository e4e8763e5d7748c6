"""Argument checks of the linking methods (spec api-datadist §4.1, §7.1)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from llm_datadist_ray.checks import check_dict, check_int32, check_isinstance, check_uint32, check_uint64
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import LLMClusterInfo

MAX_NAME_CHARACTERS = 127
MIN_MEMBERS, MAX_MEMBERS = 2, 4


def check_clusters(clusters: Any, timeout_ms: Any, *, needs_local_ip: bool) -> None:
    """TypeError, ValueError or LLMException(LLM_PARAM_INVALID), before anything is attempted (spec §4.1)."""
    check_isinstance("clusters", clusters, (list, tuple), LLMClusterInfo, allow_none=False)
    check_int32("timeout", timeout_ms)
    raise_if_false(timeout_ms > 0, f"timeout should be greater than zero (ms), but got {timeout_ms}")
    for cluster in clusters:
        if needs_local_ip:
            raise_if_false(cluster.local_ip_info_list, f"local_ip_info_list is empty in {cluster}")
        check_uint64("remote_cluster_id", cluster.remote_cluster_id)


def check_link_arguments(comm_name: Any, cluster_rank_info: Any, rank_table: Any) -> None:
    """TypeError, ValueError or LLMException(LLM_PARAM_INVALID), spec §7.1."""
    check_isinstance("comm_name", comm_name, str, allow_none=False)
    raise_if_false(
        0 < len(comm_name) <= MAX_NAME_CHARACTERS,
        f"comm_name should have 1 to {MAX_NAME_CHARACTERS} characters, but has {len(comm_name)}",
    )
    check_isinstance("cluster_rank_info", cluster_rank_info, dict, allow_none=False)
    check_dict("cluster_rank_info", cluster_rank_info, int, int)
    raise_if_false(
        MIN_MEMBERS <= len(cluster_rank_info) <= MAX_MEMBERS,
        f"cluster_rank_info should have {MIN_MEMBERS} to {MAX_MEMBERS} clusters, but has {len(cluster_rank_info)}",
    )
    for cluster_id, rank in cluster_rank_info.items():
        check_uint64("cluster_rank_info key", cluster_id)
        check_uint32("cluster_rank_info value", rank)
    raise_if_false(
        all(before <= after for before, after in pairwise(cluster_rank_info.values())),
        f"the ranks in cluster_rank_info should ascend, but are {list(cluster_rank_info.values())}",
    )
    check_isinstance("rank_table", rank_table, str, allow_none=False)
