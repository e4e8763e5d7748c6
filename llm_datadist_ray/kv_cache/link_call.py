"""What v1 checks before it links or unlinks, and how one call treats many clusters (spec api-datadist §9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_datadist_ray.errors import LLMStatusCode
from llm_datadist_ray.linking.clusters import cluster_id_of
from llm_datadist_ray.parallel import in_parallel
from llm_datadist_ray.types import LLMClusterInfo, LLMRole

MAX_CLUSTERS = 16
MAX_LINKS = 512


class Rejected(Exception):
    """The whole call: an overall code, and no codes of clusters."""

    def __init__(self, code: LLMStatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


def check_whole_call(
    role: LLMRole, roles: Sequence[LLMRole], clusters: Sequence[LLMClusterInfo], num_devices: int
) -> None:
    """Rejects a call for its role, for no or too many clusters, and for the addresses."""
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    if role not in roles:
        raise Rejected(invalid, f"this is a {role.name}, only {' and '.join(role.name for role in roles)} can do that")
    if not clusters:
        raise Rejected(invalid, "no cluster is given")
    for cluster in clusters:
        local, remote = cluster.local_ip_info_list, cluster.remote_ip_info_list
        if not len(local) == len(remote) == num_devices:
            raise Rejected(
                invalid, f"{cluster} should have one local and one remote address per device ({num_devices})"
            )
        if local != clusters[0].local_ip_info_list:
            raise Rejected(invalid, f"the local addresses of {cluster} are not those of {clusters[0]}")
    if len(clusters) > MAX_CLUSTERS:
        code = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        raise Rejected(code, f"{len(clusters)} clusters are more than the {MAX_CLUSTERS} that one call takes")


def for_each(
    step: str, clusters: Sequence[LLMClusterInfo], action: Callable[[LLMClusterInfo], LLMStatusCode]
) -> list[LLMStatusCode]:
    """Runs the action, which does not raise, for all clusters at once. A cluster that is named again in the same call
    is only told so."""
    first_of_id: dict[int, LLMClusterInfo] = {}
    for cluster in clusters:
        first_of_id.setdefault(cluster_id_of(cluster), cluster)
    codes = dict(zip(first_of_id, in_parallel(f"ldr-{step}", action, list(first_of_id.values())), strict=True))
    # Popped: what comes second finds nothing.
    return [codes.pop(cluster_id_of(cluster), LLMStatusCode.LLM_REPEAT_REQUEST) for cluster in clusters]
