"""Links of the hixl backend: of use to the side that made them (spec api-datadist §4.4, §5, §6.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.linking.arguments import check_clusters
from llm_datadist_ray.linking.clusters import LinkResult, cluster_id_of, for_each_cluster, remote_address
from llm_datadist_ray.log import log
from llm_datadist_ray.options import EngineOptions, ListenAddress
from llm_datadist_ray.types import LLMClusterInfo

_OWN_CODES = {
    LLMStatusCode.LLM_PARAM_INVALID,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_ALREADY_LINK,
    LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
}


class HixlLinks:
    """What :class:`LLMDataDist` says about links goes for this too, with the differences of spec §4.4; any thread."""

    not_ready: Collection[int] = ()

    def __init__(self, engine: NativeEngine, options: EngineOptions) -> None:
        self._engine = engine
        self._needs_local_ip = options.needs_local_ip
        self._listen_address = options.listen_addresses[0]

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> LinkResult:
        """Each link is filed under the ``remote_cluster_id`` that was asked for."""

        def link(cluster: LLMClusterInfo) -> None:
            ip, port = remote_address(cluster)
            file_under = cluster_id_of(cluster)
            self._engine.link(ip=ip, port=port, timeout_s=timeout_ms / 1000, file_under=file_under)

        check_clusters(clusters, timeout_ms, needs_local_ip=self._needs_local_ip)
        return for_each_cluster("link", clusters, link, code_of_hixl_error)

    def unlink_clusters(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool) -> LinkResult:
        """Closes the own link only; ``force`` and addresses mean nothing."""

        def unlink(cluster: LLMClusterInfo) -> None:
            if cluster.remote_cluster_id not in linked:
                log.warning("unlink: cluster %s is not linked", cluster.remote_cluster_id)
            self._engine.unlink(cluster_id_of(cluster), force=True, timeout_s=timeout_ms / 1000)

        check_clusters(clusters, timeout_ms, needs_local_ip=False)
        linked = {link.cluster_id for link in self._engine.links() if not link.is_inbound}
        return for_each_cluster("unlink", clusters, unlink, code_of_hixl_error)

    def switch_listener(self, address: ListenAddress | None) -> None:
        """The listener stays as it is. LLMException(LLM_FEATURE_NOT_ENABLED) for another address than that of ``init``;
        the port that the kernel chose for 0 is the same address."""
        ip, port = self._listen_address
        raise_if_false(
            address in (None, self._listen_address, (ip, self._engine.info().listen_port)),
            f"switch_role: with {keys.TRANSFER_BACKEND} 'hixl' {keys.LISTEN_IP_INFO} stays what it was at init, "
            f"{ip}:{port}, but got {address}",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> NoReturn:
        raise _no_collective_links("link")

    def unlink(self, comm_id: int) -> NoReturn:
        raise _no_collective_links("unlink")

    def query_register_mem_status(self, comm_id: int) -> NoReturn:
        raise _no_collective_links("query_register_mem_status")

    def stop(self) -> None:
        """Nothing runs here."""

    def join(self) -> None:
        """Nothing runs here."""


def code_of_hixl_error(error: LLMException) -> LLMStatusCode:
    """The backend has few codes; what has none is ``LLM_FAILED``, a refused connection too (spec §4.4)."""
    return error.status_code if error.status_code in _OWN_CODES else LLMStatusCode.LLM_FAILED


def _no_collective_links(method: str) -> LLMException:
    return LLMException(
        f"{method}: collective links are of the comm backend, {keys.TRANSFER_BACKEND} is 'hixl': use link_clusters",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )
