"""What prefill and decode actors have in common: an engine, KV blocks, and a native engine that links. No Ray."""

from __future__ import annotations

import os

from llm_datadist_ray import engines, option_keys
from llm_datadist_ray._native import EventKind, LinkInfo, NativeError, NativeStatus
from llm_datadist_ray.actors.cluster_config import ClusterConfig
from llm_datadist_ray.actors.compute_turn import ComputeTurn
from llm_datadist_ray.actors.kv_memory import KvMemory
from llm_datadist_ray.actors.messages import LinkOrder, LinkReport, MemberRecord
from llm_datadist_ray.actors.status import LinkStatus, WorkerStatus
from llm_datadist_ray.datadist import LLMDataDist
from llm_datadist_ray.engines.base import Engine
from llm_datadist_ray.errors import LLMException
from llm_datadist_ray.events import EventHandler
from llm_datadist_ray.handoff.blocks import BlockAllocator
from llm_datadist_ray.membership import Membership
from llm_datadist_ray.types import LLMRole


class WorkerCore:
    """One member of a cluster, in its own process (:class:`LLMDataDist` allows one). Any thread may call.

    The constructor takes over a loaded engine, allocates and registers the KV memory, and starts to listen.
    ``compute_turn`` must be held for every call of the engine that computes.
    """

    def __init__(
        self, role: LLMRole, cluster_id: int, config: ClusterConfig, engine: Engine, *, secret: bytes, host: str
    ) -> None:
        self.role = role
        self.cluster_id = cluster_id
        self.engine = engine
        self.layout = engine.layout
        self.compute_turn = ComputeTurn()
        self.timeout_s = config.transfer.sync_kv_timeout_ms / 1000
        self.max_context_tokens = min(
            engine.max_context_tokens, config.model.max_context_tokens or engine.max_context_tokens
        )
        num_blocks = (config.prompt if role == LLMRole.PROMPT else config.decoder).num_blocks
        self.allocator = BlockAllocator(num_blocks)
        self.memory = KvMemory(self.layout, num_blocks)
        engine.attach(self.memory.blocks)
        self._host = host
        self._datadist = LLMDataDist(role, cluster_id)
        membership = Membership(
            secret,
            layout_digest=self.layout.digest,
            layout_text=str(self.layout),
            paths=",".join(config.transfer.paths) if config.transfer.paths else None,
            heartbeat_ms=config.liveness.heartbeat_ms,
            budget_ms=config.liveness.budget_ms,
            allow_ptracer=config.transfer.cma_ptracer == "any",
        )
        self._init(config, membership)
        self.native = self._datadist.native_engine
        info = self.native.info()
        self.incarnation = info.incarnation
        self._port = info.listen_port
        self.cache_id = self.memory.register(self._datadist.cache_manager, cluster_id).cache_id

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def listen_to_events(self, handlers: dict[EventKind, EventHandler]) -> None:
        """From now on until :meth:`close`, in the thread of :attr:`LLMDataDist.events`."""
        for kind, handler in handlers.items():
            self._datadist.events.subscribe(kind, handler)

    def record(self, actor_name: str) -> MemberRecord:
        return MemberRecord(
            cluster_id=self.cluster_id,
            incarnation=self.incarnation,
            role=self.role,
            host=self._host,
            port=self._port,
            pid=os.getpid(),
            layout_digest=self.layout.digest,
            layout_text=str(self.layout),
            num_blocks=self.allocator.num_blocks,
            actor_name=actor_name,
        )

    def link_to(self, order: LinkOrder) -> LinkReport:
        """Links to that very incarnation; blocks up to ``order.timeout_ms``. A failure is in the report, not raised.
        Repeatable: a link that is up already is reported as it is."""
        try:
            link = self._link(order)
        except NativeError as error:
            return LinkReport(order.cluster_id, order.incarnation, error=str(error))
        if (link.cluster_id, link.incarnation) != (order.cluster_id, order.incarnation):
            self.native.unlink(link.cluster_id, force=True, timeout_s=order.timeout_ms / 1000)
            return LinkReport(
                order.cluster_id,
                order.incarnation,
                error=f"at {order.host}:{order.port} answers cluster {link.cluster_id} incarnation "
                f"{link.incarnation:x}, expected was cluster {order.cluster_id} incarnation {order.incarnation:x}",
            )
        return LinkReport(order.cluster_id, order.incarnation, tuple(str(path) for path in link.paths))

    def status(self, *, num_requests: int, grants: dict[str, int] | None) -> WorkerStatus:
        links = tuple(_link_status(link) for link in self.native.links())
        return WorkerStatus(self.allocator.counts(), num_requests, links, grants)

    def close(self) -> None:
        """Closes the native engine: peers see the links go at once. Handlers have ended. Repeatable."""
        self._datadist.finalize()

    def _init(self, config: ClusterConfig, membership: Membership) -> None:
        try:
            self._datadist.init(_options(config, self._host), membership=membership)
        except LLMException as error:
            if config.listen.port == 0:
                raise
            advice = "another process, or another member of this host, may have it; 0 takes a free one"
            raise RuntimeError(f"{error} (listen.port is {config.listen.port}: {advice})") from error

    def _link(self, order: LinkOrder) -> LinkInfo:
        try:
            return self.native.link(ip=order.host, port=order.port, timeout_s=order.timeout_ms / 1000)
        except NativeError as error:
            if error.native_status != NativeStatus.ALREADY_LINKED:
                raise
            return self.native.link_info(order.cluster_id)


def load_engine(config: ClusterConfig, progress: engines.Progress | None = None) -> Engine:
    """Blocks for seconds. Errors as :func:`llm_datadist_ray.engines.create`."""
    return engines.create(config.engine_spec(), progress=progress)


def _options(config: ClusterConfig, host: str) -> dict[str, str]:
    return {
        option_keys.ENABLE_CACHE_MANAGER: "1",
        option_keys.ENABLE_REMOTE_CACHE_ACCESSIBLE: "1" if config.transfer.mode == "remote-access" else "0",
        option_keys.LISTEN_IP_INFO: f"{host}:{config.listen.port}",
        option_keys.SYNC_KV_TIMEOUT: str(config.transfer.sync_kv_timeout_ms),
    }


def _link_status(link: LinkInfo) -> LinkStatus:
    return LinkStatus(
        link.cluster_id,
        link.incarnation,
        link.state.name.lower(),
        tuple(str(path) for path in link.paths),
        link.peer_address,
        {str(path): num_bytes for path, num_bytes in link.bytes_pulled.items()},
    )
