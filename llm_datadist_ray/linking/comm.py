"""Links of the comm backend: both ends use them, whoever made them (spec api-datadist §4, §5, §6.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.errors import LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.arguments import check_clusters
from llm_datadist_ray.linking.clusters import LinkResult, cluster_id_of, for_each_cluster, remote_address
from llm_datadist_ray.linking.collective import Communicators
from llm_datadist_ray.log import log
from llm_datadist_ray.options import EngineOptions, ListenAddress
from llm_datadist_ray.types import LLMClusterInfo, RegisterMemStatus


class CommLinks:
    """What :class:`LLMDataDist` says about links goes for this too; any thread."""

    def __init__(self, engine: NativeEngine, options: EngineOptions, events: EventDispatcher) -> None:
        self._engine = engine
        self._needs_local_ip = options.needs_local_ip
        self._derives_local_resources = _derives_local_resources(options)
        self._communicators = Communicators(engine, options, events)

    @property
    def not_ready(self) -> Collection[int]:
        """Live: the clusters that a collective link has not reached (yet), where transfers are LLM_NOT_YET_LINK."""
        return self._communicators.not_ready

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> LinkResult:
        def link(cluster: LLMClusterInfo) -> None:
            if self._derives_local_resources:
                num_local = len(cluster.local_ip_info_list)
                raise_if_false(num_local == 1, f"exactly one local IP entry is needed, but there are {num_local}")
            ip, port = remote_address(cluster)
            info = self._engine.link(ip=ip, port=port, timeout_s=timeout_ms / 1000)
            if info.cluster_id != cluster.remote_cluster_id:
                log.warning(
                    "cluster %s at %s:%d calls itself %d, and is to be addressed so",
                    cluster.remote_cluster_id, ip, port, info.cluster_id,
                )  # fmt: skip

        check_clusters(clusters, timeout_ms, needs_local_ip=self._needs_local_ip)
        return for_each_cluster("link", clusters, link)

    def unlink_clusters(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool) -> LinkResult:
        """Both halves, which takes the peer's address, or with ``force`` the local one."""

        def unlink(cluster: LLMClusterInfo) -> None:
            ip, port = (None, 0) if force else remote_address(cluster)
            if cluster.remote_cluster_id not in linked:
                log.warning("unlink: cluster %s is not linked", cluster.remote_cluster_id)
            self._engine.unlink(cluster_id_of(cluster), force=force, ip=ip, port=port, timeout_s=timeout_ms / 1000)

        check_clusters(clusters, timeout_ms, needs_local_ip=False)
        linked = {link.cluster_id for link in self._engine.links()}
        return for_each_cluster("unlink", clusters, unlink)

    def switch_listener(self, address: ListenAddress | None) -> None:
        """Starts, moves or stops the listener; LLMException: LLM_EXIST_LINK, LLM_FAILED (the old one is gone then)."""
        linked = [link.cluster_id for link in self._engine.links() if link.is_ready]
        raise_if_true(
            linked, f"switch_role: clusters {linked} are linked, unlink them first", LLMStatusCode.LLM_EXIST_LINK
        )
        self._engine.listen(*(address or (None, 0)))

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        return self._communicators.link(comm_name, cluster_rank_info, rank_table)

    def unlink(self, comm_id: int) -> None:
        self._communicators.unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        return self._communicators.status(comm_id)

    def stop(self) -> None:
        """Tells the threads of collective links to end; :meth:`join` them when the engine is closed."""
        self._communicators.stop()

    def join(self) -> None:
        self._communicators.join()


def _derives_local_resources(options: EngineOptions) -> bool:
    """Whether upstream would derive its link resources from the one local IP entry, which must be there then: not with
    resources given, and not when ``""`` was given and the listen address has served for it (spec api-config §3.4)."""
    if options.local_comm_res:
        return False
    return options.local_comm_res is None or not options.listen_addresses
