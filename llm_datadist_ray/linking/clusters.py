"""What ``link_clusters`` and ``unlink_clusters`` share: result and addresses (spec api-datadist §4.2, §5, §9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_datadist_ray.errors import LLMException, LLMStatusCode, param_invalid, raise_if_false
from llm_datadist_ray.log import log
from llm_datadist_ray.options import ListenAddress
from llm_datadist_ray.parallel import in_parallel
from llm_datadist_ray.types import LLMClusterInfo, int_to_ip

LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]


def for_each_cluster(
    step: str,
    clusters: Sequence[LLMClusterInfo],
    action: Callable[[LLMClusterInfo], None],
    code_of_error: Callable[[LLMException], LLMStatusCode] = lambda error: error.status_code,
) -> LinkResult:
    """Runs the action for up to 16 clusters at once. The overall code is that of the last failure in list order.

    A failure is a code in the result, and logged with its reason.
    """

    def code_of(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            action(cluster)
        except LLMException as error:
            log.error("%s with cluster %s failed: %s", step, cluster.remote_cluster_id, error)
            return code_of_error(error)
        return LLMStatusCode.LLM_SUCCESS

    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    codes = in_parallel(f"ldr-{step}", code_of, clusters)
    failures = [code for code in codes if code != LLMStatusCode.LLM_SUCCESS]
    return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), codes


def cluster_id_of(cluster: LLMClusterInfo) -> int:
    """Of a cluster that ``check_clusters`` has let pass."""
    assert cluster.remote_cluster_id is not None
    return cluster.remote_cluster_id


def remote_address(cluster: LLMClusterInfo) -> ListenAddress:
    """LLMException(LLM_PARAM_INVALID) unless there is exactly one, and a usable one."""
    num_remote = len(cluster.remote_ip_info_list)
    raise_if_false(num_remote == 1, f"exactly one remote IP entry is needed, but there are {num_remote}")
    return remote_addresses(cluster)[0]


def remote_addresses(cluster: LLMClusterInfo) -> list[ListenAddress]:
    """LLMException(LLM_PARAM_INVALID): spec api-types §8 lets wrong addresses pass until they are used."""
    try:
        return [(int_to_ip(ip), port) for ip, port in cluster.remote_ip_info_list]
    except (TypeError, ValueError) as error:
        raise param_invalid(f"remote IP entry of cluster {cluster.remote_cluster_id}: {error}") from error
