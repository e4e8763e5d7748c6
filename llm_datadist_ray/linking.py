"""``link_clusters`` and ``unlink_clusters``: arguments, parallelism and result tuples (spec api-datadist §4, §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.checks import check_int32, check_isinstance, check_uint64
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.log import log
from llm_datadist_ray.types import LLMClusterInfo, int_to_ip

LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]

_MAX_PARALLEL = 16


def check_clusters(clusters: Any, timeout_ms: Any, *, needs_local_ip: bool) -> None:
    """TypeError, ValueError or LLMException(LLM_PARAM_INVALID), before anything is attempted (spec §4.1)."""
    check_isinstance("clusters", clusters, (list, tuple), LLMClusterInfo, allow_none=False)
    check_int32("timeout", timeout_ms)
    raise_if_false(timeout_ms > 0, f"timeout should be greater than zero (ms), but got {timeout_ms}")
    for cluster in clusters:
        if needs_local_ip:
            raise_if_false(cluster.local_ip_info_list, f"local_ip_info_list is empty in {cluster}")
        check_uint64("remote_cluster_id", cluster.remote_cluster_id)


def link_all(
    engine: NativeEngine, clusters: Sequence[LLMClusterInfo], timeout_ms: int, *, derives_local_resources: bool
) -> LinkResult:
    """Links with each cluster; ``timeout_ms`` is for each of them. Failures are codes, and logged with their reason."""

    def link(cluster: LLMClusterInfo) -> None:
        if derives_local_resources:
            num_local = len(cluster.local_ip_info_list)
            raise_if_false(num_local == 1, f"exactly one local IP entry is needed, but there are {num_local}")
        ip, port = _remote_address(cluster)
        info = engine.link(ip=ip, port=port, timeout_s=timeout_ms / 1000)
        if info.cluster_id != cluster.remote_cluster_id:
            log.warning(
                "cluster %s at %s:%d calls itself %d, and is to be addressed so",
                cluster.remote_cluster_id, ip, port, info.cluster_id,
            )  # fmt: skip

    return _for_each("link", link, clusters)


def unlink_all(engine: NativeEngine, clusters: Sequence[LLMClusterInfo], timeout_ms: int, *, force: bool) -> LinkResult:
    """Unlinks each cluster: both halves, which takes the peer's address, or with ``force`` the local one."""
    linked = {link.cluster_id for link in engine.links()}

    def unlink(cluster: LLMClusterInfo) -> None:
        assert cluster.remote_cluster_id is not None  # see check_clusters
        ip, port = (None, 0) if force else _remote_address(cluster)
        if cluster.remote_cluster_id not in linked:
            log.warning("unlink: cluster %d is not linked", cluster.remote_cluster_id)
        engine.unlink(cluster.remote_cluster_id, force=force, ip=ip, port=port, timeout_s=timeout_ms / 1000)

    return _for_each("unlink", unlink, clusters)


def _for_each(step: str, action: Callable[[LLMClusterInfo], None], clusters: Sequence[LLMClusterInfo]) -> LinkResult:
    """Runs the action for up to 16 clusters at once. The overall code is that of the last failure in list order."""

    def code_of(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            action(cluster)
        except LLMException as error:
            log.error("%s with cluster %s failed: %s", step, cluster.remote_cluster_id, error)
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    if len(clusters) == 1:
        codes = [code_of(clusters[0])]
    else:
        with ThreadPoolExecutor(min(len(clusters), _MAX_PARALLEL), thread_name_prefix=f"ldr-{step}") as pool:
            codes = list(pool.map(code_of, clusters))
    failures = [code for code in codes if code != LLMStatusCode.LLM_SUCCESS]
    return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), codes


def _remote_address(cluster: LLMClusterInfo) -> tuple[str, int]:
    num_remote = len(cluster.remote_ip_info_list)
    raise_if_false(num_remote == 1, f"exactly one remote IP entry is needed, but there are {num_remote}")
    ip, port = cluster.remote_ip_info_list[0]
    try:
        return int_to_ip(ip), port
    except (TypeError, ValueError) as error:
        # Spec api-types §8: such an address passes append_remote_ip_info and fails when it is used.
        raise LLMException(f"remote IP entry: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID) from error
