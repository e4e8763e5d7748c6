"""V1Runtime: what LLMDataDist delegates to when it was initialised in v1 (spec api-kvcachemanager §1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.checks import check_uint64
from llm_datadist_ray.errors import LLMStatusCode, param_invalid, raise_if_false, raise_if_true
from llm_datadist_ray.kv_cache.busy_links import BusyLinks
from llm_datadist_ray.kv_cache.devices import Devices
from llm_datadist_ray.kv_cache.links import Links
from llm_datadist_ray.kv_cache.manager import KvCacheManager
from llm_datadist_ray.linking.clusters import LinkResult
from llm_datadist_ray.log import log
from llm_datadist_ray.options import EngineOptions, ListenAddress, parse_listen_info
from llm_datadist_ray.types import LLMClusterInfo, LLMRole


class V1Runtime:
    """The engines of one process, one per device, and what v1 does with them. Any thread, until :meth:`close`.

    ``make_engine`` gets a device index and returns a new two-sided engine of this cluster, which does not listen: once
    it has its pool it is made to. Raises what that raises, and LLMException: LLM_OUT_OF_MEMORY (the pool), LLM_FAILED
    (cannot listen), LLM_PARAM_INVALID; nothing is left then. Types of arguments are checked by who delegates here.
    """

    def __init__(self, options: EngineOptions, make_engine: Callable[[int], NativeEngine]) -> None:
        self._options = options
        self._devices = Devices.start(options, make_engine)
        busy_links = BusyLinks()
        self._links = Links(self._devices, busy_links)
        self._timeout_s = options.sync_kv_timeout_ms / 1000
        self.kv_cache_manager = KvCacheManager(self._devices, busy_links, options.role, options.sync_kv_timeout_ms)

    @property
    def role(self) -> LLMRole:
        return self.kv_cache_manager.role

    def close(self) -> None:
        """Ends the manager, all links and all caches. Repeatable; calls in progress fail with LLM_FAILED."""
        self.kv_cache_manager.set_finalized()
        self._devices.close()

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> LinkResult:
        """Links device ``i`` with ``remote_ip_info_list[i]`` of each cluster, ``timeout`` ms for each of them. DECODER.

        Returns LLM_LINK_FAILED when a cluster could not be linked, or why it could not be rolled back; else success,
        **also when an entry is LLM_ALREADY_LINK, LLM_REPEAT_REQUEST or LLM_PARAM_INVALID**; and the code of each
        cluster. Those that were linked stay. ``(code, [])`` rejects the whole call (spec api-datadist §9).
        Raises TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for arguments.
        """
        return self._links.link(self.role, clusters, timeout)

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> LinkResult:
        """Result as :meth:`link_clusters`, but the overall code is success when every entry is success or
        LLM_NOT_YET_LINK, else LLM_UNLINK_FAILED.

        A DECODER drops both sides, or with ``force`` its own. When the peer cannot be reached, the own side goes all
        the same and the entry is LLM_NOTIFY_PROMPT_UNLINK_FAILED. A PROMPT drops its own side of the link that comes
        from the remote address.
        """
        return self._links.unlink(self.role, clusters, timeout, force)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """A round trip to a linked PROMPT. DECODER. LLMException: LLM_PARAM_INVALID (role), LLM_NOT_YET_LINK,
        LLM_LINK_BUSY, LLM_WAIT_PROCESS_TIMEOUT after ``sync_kv_timeout`` (spec api-datadist §8)."""
        role = self.role
        raise_if_false(role == LLMRole.DECODER, f"check_link_status is for DECODER, and this is a {role.name}")
        check_uint64("remote_cluster_id", remote_cluster_id)
        self._links.check(remote_cluster_id, self._timeout_s)

    def switch_role(self, role: LLMRole, listen_info: str | None = None) -> None:
        """Takes another role; a new PROMPT listens at ``listen_info``, its ``llm.listenIpInfo``, others do not listen.

        LLMException: LLM_PARAM_INVALID (the same role, a PROMPT without address),
        LLM_FEATURE_NOT_ENABLED (without ``enable_switch_role``, or on several devices), LLM_EXIST_LINK, LLM_FAILED (it
        cannot listen; the role stays, an old listener is gone) (spec api-datadist §6.2).
        """
        raise_if_true(role == self.role, f"switch_role: the role is {role.name} already")
        address = _listen_address(listen_info) if role == LLMRole.PROMPT else None
        not_enabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        raise_if_false(
            self._options.enable_switch_role,
            f"switch_role needs enable_switch_role=True ({keys.ENABLE_SWITCH_ROLE}) at init",
            not_enabled,
        )
        raise_if_false(
            len(self._devices) == 1,
            f"switch_role is for one device, this process has {len(self._devices)}",
            not_enabled,
        )
        with self._links.unchanging():
            linked = sorted(self._links.linked_ids)
            raise_if_true(
                linked, f"switch_role: clusters {linked} are linked, unlink them first", LLMStatusCode.LLM_EXIST_LINK
            )
            self._devices.first.listen(*(address or (None, 0)))
            self.kv_cache_manager.set_role(role)
        log.info("cluster %d is %s now, listening: %s", self._options.cluster_id, role, address)


def _listen_address(listen_info: str | None) -> ListenAddress:
    if listen_info is None:
        raise param_invalid(f"switch_role: a {LLMRole.PROMPT.name} needs {keys.LISTEN_IP_INFO}, 'ip:port'")
    try:
        return parse_listen_info(listen_info)
    except ValueError as error:
        raise param_invalid(str(error)) from error
