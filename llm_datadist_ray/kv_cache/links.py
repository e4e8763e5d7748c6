"""The links of a v1 process: linking, unlinking, roll-back, probing (spec api-datadist §8, §9)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from llm_datadist_ray._native import LinkInfo, NativeEngine, NativeError, NativeStatus
from llm_datadist_ray.errors import LLMException, LLMStatusCode, param_invalid, raise_if_false, raise_if_true
from llm_datadist_ray.kv_cache.busy_links import BusyLinks
from llm_datadist_ray.kv_cache.devices import Devices
from llm_datadist_ray.kv_cache.errors import v1_code_of, v1_codes
from llm_datadist_ray.kv_cache.link_call import MAX_LINKS, Rejected, check_whole_call, for_each
from llm_datadist_ray.kv_cache.visitors import find_visitors
from llm_datadist_ray.linking.arguments import check_clusters
from llm_datadist_ray.linking.clusters import LinkResult, cluster_id_of, remote_addresses
from llm_datadist_ray.log import log
from llm_datadist_ray.options import ListenAddress
from llm_datadist_ray.types import LLMClusterInfo, LLMRole

LinksById = dict[int, LinkInfo]

_SUCCESS = LLMStatusCode.LLM_SUCCESS
# What linking a cluster can end with besides success; everything else is LLM_LINK_FAILED.
_LINK_CODES = (
    LLMStatusCode.LLM_ALREADY_LINK,
    LLMStatusCode.LLM_PARAM_INVALID,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
)
_OVERALL_LINK_FAILURES = (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
# What unlinking can; everything else is LLM_UNLINK_FAILED.
_UNLINK_CODES = (
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED,
    LLMStatusCode.LLM_PARAM_INVALID,
    LLMStatusCode.LLM_LINK_BUSY,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
)


class Links:
    """Device ``i`` is linked with ``remote_ip_info_list[i]`` of each cluster. Any thread, but only one call links or
    unlinks at a time: another one is rejected."""

    def __init__(self, devices: Devices, busy_links: BusyLinks) -> None:
        self._devices = devices
        self._busy_links = busy_links
        self._call_lock = threading.Lock()
        # Where the clusters that were linked from here listen, as LLMClusterInfo had it.
        self._linked_at: dict[int, list[tuple[int, int]]] = {}

    @property
    def linked_ids(self) -> set[int]:
        """Clusters with a usable link on some device."""
        return {link.cluster_id for engine in self._devices.engines for link in engine.links() if link.is_ready}

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Inside, nobody else links or unlinks; waits for who does."""
        with self._call_lock:
            yield

    def link(self, role: LLMRole, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> LinkResult:
        """See :meth:`V1Runtime.link_clusters`."""
        check_clusters(clusters, timeout_ms, needs_local_ip=False)
        try:
            check_whole_call(role, (LLMRole.DECODER,), clusters, len(self._devices))
            with self._only_call():
                self._check_room(clusters)
                return self._link_all(clusters, timeout_ms / 1000)
        except Rejected as rejection:
            log.error("link_clusters: %s", rejection)
            return rejection.code, []

    def unlink(self, role: LLMRole, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool) -> LinkResult:
        """See :meth:`V1Runtime.unlink_clusters`."""
        check_clusters(clusters, timeout_ms, needs_local_ip=False)
        timeout_s = timeout_ms / 1000

        def unlink(cluster: LLMClusterInfo) -> LLMStatusCode:
            try:
                with v1_codes():
                    if role == LLMRole.PROMPT:
                        return self._unlink_visitor(cluster, links, visitors, timeout_s)
                    return self._unlink_one(cluster, links, timeout_s, force)
            except LLMException as error:
                log.error("unlink of cluster %s failed: %s", cluster.remote_cluster_id, error)
                return error.status_code if error.status_code in _UNLINK_CODES else LLMStatusCode.LLM_UNLINK_FAILED

        try:
            check_whole_call(role, (LLMRole.DECODER, LLMRole.PROMPT), clusters, len(self._devices))
            with self._only_call():
                # All clusters of the call are looked for among the links that there were before it.
                links = [_links_by_id(engine) for engine in self._devices.engines]
                visitors = _find_visitors(clusters, links) if role == LLMRole.PROMPT else []
                codes = for_each("unlink", clusters, unlink)
        except Rejected as rejection:
            log.error("unlink_clusters: %s", rejection)
            return rejection.code, []
        is_fine = all(code in (_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK) for code in codes)
        return _SUCCESS if is_fine else LLMStatusCode.LLM_UNLINK_FAILED, codes

    def check(self, remote_cluster_id: int, timeout_s: float) -> None:
        """See :meth:`V1Runtime.check_link_status`."""
        with self._busy_links.use(remote_cluster_id, "check_link_status"):
            self._devices.at_once(lambda engine: engine.probe_link(remote_cluster_id, timeout_s))

    @contextmanager
    def _only_call(self) -> Iterator[None]:
        if not self._call_lock.acquire(blocking=False):
            raise Rejected(LLMStatusCode.LLM_PROCESSING_LINK, "another call links or unlinks at this moment")
        try:
            yield
        finally:
            self._call_lock.release()

    def _check_room(self, clusters: Sequence[LLMClusterInfo]) -> None:
        linked = self.linked_ids
        num_links = len(linked.union(map(cluster_id_of, clusters)))
        if num_links > MAX_LINKS:
            why = f"{len(linked)} clusters are linked, with these it would be {num_links}, more than {MAX_LINKS}"
            raise Rejected(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, why)

    def _link_all(self, clusters: Sequence[LLMClusterInfo], timeout_s: float) -> LinkResult:
        roll_back_failures: list[LLMStatusCode] = []

        def link(cluster: LLMClusterInfo) -> LLMStatusCode:
            made: list[NativeEngine] = []
            try:
                with v1_codes():
                    self._link_one(cluster, timeout_s, made)
            except LLMException as error:
                log.error("link with cluster %s failed: %s", cluster.remote_cluster_id, error)
                roll_back_failures.extend(_roll_back(cluster_id_of(cluster), made, timeout_s))
                return error.status_code if error.status_code in _LINK_CODES else LLMStatusCode.LLM_LINK_FAILED
            return _SUCCESS

        codes = for_each("link", clusters, link)
        if roll_back_failures:
            return roll_back_failures[0], codes
        return LLMStatusCode.LLM_LINK_FAILED if any(
            code in _OVERALL_LINK_FAILURES for code in codes
        ) else _SUCCESS, codes

    def _link_one(self, cluster: LLMClusterInfo, timeout_s: float, made: list[NativeEngine]) -> None:
        """Adds each engine that has a new link to ``made``."""
        deadline_s = time.monotonic() + timeout_s
        already: NativeError | None = None
        for engine, (ip, port) in zip(self._devices.engines, remote_addresses(cluster), strict=True):
            try:
                info = engine.link(ip=ip, port=port, timeout_s=_left_s(deadline_s))
            except NativeError as error:
                if error.native_status != NativeStatus.ALREADY_LINKED:
                    raise
                already = error
                continue
            if info.cluster_id != cluster_id_of(cluster):
                engine.unlink(info.cluster_id, timeout_s=_left_s(deadline_s))
                raise param_invalid(f"the cluster at {ip}:{port} is {info.cluster_id}, not {cluster_id_of(cluster)}")
            made.append(engine)
        # Some devices may still have had theirs, when those of others had broken.
        if already is not None and not made:
            raise already
        self._linked_at[cluster_id_of(cluster)] = list(cluster.remote_ip_info_list)

    def _unlink_one(
        self, cluster: LLMClusterInfo, links: Sequence[LinksById], timeout_s: float, force: bool
    ) -> LLMStatusCode:
        cluster_id, addresses = cluster_id_of(cluster), remote_addresses(cluster)
        linked_at = self._linked_at.get(cluster_id, cluster.remote_ip_info_list)
        if not any(cluster_id in links_of_device for links_of_device in links):
            self._linked_at.pop(cluster_id, None)
            return LLMStatusCode.LLM_NOT_YET_LINK
        raise_if_false(
            force or linked_at == cluster.remote_ip_info_list,
            f"cluster {cluster_id} was linked at other addresses than those of {cluster}",
        )
        deadline_s = time.monotonic() + timeout_s
        with self._busy_links.use(cluster_id, "unlink_clusters"):
            is_reachable = force or all(_is_reachable(address, deadline_s) for address in addresses)
            for engine in self._devices.engines:
                engine.unlink(cluster_id, force=force or not is_reachable, timeout_s=_left_s(deadline_s))
        self._linked_at.pop(cluster_id, None)
        if is_reachable:
            return _SUCCESS
        log.error("unlink of cluster %d: it cannot be reached at %s; this side is cleaned up", cluster_id, addresses)
        return LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED

    def _unlink_visitor(
        self, cluster: LLMClusterInfo, links: Sequence[LinksById], visitors: Sequence[LinksById], timeout_s: float
    ) -> LLMStatusCode:
        """Of a PROMPT; ``visitors`` are the links that clusters of this call mean, by device."""
        deadline_s = time.monotonic() + timeout_s
        cluster_id, addresses = cluster_id_of(cluster), remote_addresses(cluster)
        found = [visitors_of_device.get(cluster_id) for visitors_of_device in visitors]
        for link, links_of_device, (ip, _) in zip(found, links, addresses, strict=True):
            raise_if_true(
                link is None and cluster_id in links_of_device, f"cluster {cluster_id} is linked, but not from {ip}"
            )
        for engine, link in zip(self._devices.engines, found, strict=True):
            if link is not None:
                with self._busy_links.use(link.cluster_id, "unlink_clusters"):
                    engine.unlink(link.cluster_id, force=True, timeout_s=_left_s(deadline_s))
        return _SUCCESS if any(found) else LLMStatusCode.LLM_NOT_YET_LINK


def _roll_back(cluster_id: int, made: Sequence[NativeEngine], timeout_s: float) -> list[LLMStatusCode]:
    """Drops what the first devices have linked; the codes of failures."""
    failures = []
    for engine in made:
        try:
            engine.unlink(cluster_id, timeout_s=timeout_s)
        except NativeError as error:
            log.error("roll-back of the link with cluster %d failed: %s", cluster_id, error)
            failures.append(v1_code_of(error))
    return failures


def _links_by_id(engine: NativeEngine) -> LinksById:
    return {link.cluster_id: link for link in engine.links()}


def _find_visitors(clusters: Sequence[LLMClusterInfo], links: Sequence[LinksById]) -> list[LinksById]:
    """Whom the clusters mean on each device. One with a wrong address means nobody, and fails later."""
    wanted: dict[int, list[ListenAddress]] = {}
    for cluster in clusters:
        with suppress(LLMException):
            wanted.setdefault(cluster_id_of(cluster), remote_addresses(cluster))
    return [
        find_visitors(links_of_device, [(cluster_id, addresses[index][0]) for cluster_id, addresses in wanted.items()])
        for index, links_of_device in enumerate(links)
    ]


def _is_reachable(address: ListenAddress, deadline_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=max(0.001, _left_s(deadline_s))).close()
    except OSError:
        return False
    return True


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
