"""DisaggCluster: a cluster of prefill and decode actors, launched and used from one process."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llm_datadist_ray.actors.cluster_config import ClusterConfig
from llm_datadist_ray.actors.errors import LaunchError, RequestFailed
from llm_datadist_ray.actors.messages import MemberRecord, RequestReport
from llm_datadist_ray.actors.ray_session import RaySession, connect
from llm_datadist_ray.actors.request_input import make_request
from llm_datadist_ray.actors.secret import cluster_secret
from llm_datadist_ray.actors.status import ClusterStatus, CoordinatorStatus, MemberStatus, WorkerStatus

if TYPE_CHECKING:
    from llm_datadist_ray.actors.launcher import Launcher
    from llm_datadist_ray.actors.request import RequestStream
    from llm_datadist_ray.actors.router import Router

_LEASE_RENEWAL_S = 3.0
_STATUS_TIMEOUT_S = 5.0
_log = logging.getLogger("llm_datadist_ray.actors")


class DisaggCluster:
    """Use :meth:`launch`. A context manager that ends what it started; any thread may send requests.

    >>> with DisaggCluster.launch("cluster_configs/local_1p1d.yaml") as cluster:
    ...     for piece in cluster.stream("Once upon a time", max_tokens=32):
    ...         print(piece.text, end="", flush=True)
    """

    def __init__(self, config: ClusterConfig, session: RaySession, launcher: Launcher) -> None:
        """As :meth:`launch` makes it. RouteError when the coordinator has gone meanwhile."""
        from llm_datadist_ray.actors.router import Router

        self.config = config
        self._session = session
        self._launcher = launcher
        self._router = Router(launcher.coordinator, config.name, launcher.namespace, session)
        self._is_shut_down = threading.Event()
        self._lease = threading.Thread(target=self._renew_lease, name="ldr-owner-lease", daemon=True)
        self._lease.start()

    @classmethod
    def launch(
        cls, config: str | Path | ClusterConfig, *, on_progress: Callable[[str], None] | None = None
    ) -> DisaggCluster:
        """Starts the actors, and Ray on this host when there is none to join; blocks until every model is loaded.

        ``on_progress`` hears sentences meanwhile. ``LDR_PATHS`` and ``LLM_DATADIST_SECRET`` of this process's
        environment win over the configuration. ConfigError; LaunchError, after which nothing is left running.
        """
        say = on_progress or _silent
        if not isinstance(config, ClusterConfig):
            config = ClusterConfig.load(config)
        config = config.with_paths(os.environ.get("LDR_PATHS"))
        secret = cluster_secret(config.secret_file)
        with ExitStack() as undo:
            session = connect(config.ray, say)
            undo.callback(session.close)
            from llm_datadist_ray.actors.launcher import Launcher
            from llm_datadist_ray.actors.router import RouteError

            launcher = Launcher(config, say, session)
            undo.callback(launcher.stop)
            # A Ray that we start is on this host only: nothing else can want to link.
            launcher.start(secret, config.listen.host or ("127.0.0.1" if session.is_owned else None))
            try:
                cluster = cls(config, session, launcher)
            except RouteError as error:
                raise LaunchError(f"cluster {config.name} was launched and is lost again: {error}") from error
            undo.pop_all()
            return cluster

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        chat: bool | None = None,
        request_id: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> RequestStream:
        """An iterator over :class:`TokenPiece`; see :class:`RequestStream`. None takes the configuration's value
        (``generation``), or a random id. An id that is given may be used again when its request has ended.

        RequestRejected for an argument of a wrong type or range; RequestFailed after :meth:`shutdown`.
        """
        from llm_datadist_ray.actors.request import RequestStream

        generation = self.config.generation
        request = make_request(
            request_id=uuid.uuid4().hex if request_id is None else request_id,
            prompt=prompt,
            max_tokens=generation.max_tokens if max_tokens is None else max_tokens,
            chat=generation.chat if chat is None else chat,
            temperature=generation.temperature if temperature is None else temperature,
            top_p=generation.top_p if top_p is None else top_p,
            seed=generation.seed if seed is None else seed,
        )
        if self._is_shut_down.is_set():
            raise self._shut_down_error()
        return RequestStream(self._router, request)

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        chat: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> RequestReport:
        """The whole answer at once, as :meth:`stream`. RequestRejected, RequestFailed."""
        stream = self.stream(prompt, max_tokens=max_tokens, chat=chat, temperature=temperature, top_p=top_p, seed=seed)
        for _ in stream:
            pass
        assert stream.report is not None  # the iteration has ended normally
        return stream.report

    def status(self) -> ClusterStatus:
        """Asks the coordinator and every member; blocks for seconds, or until Ray has started the coordinator again. A
        member that does not answer has the reason in its ``error``. RequestFailed when the coordinator is gone, and
        after :meth:`shutdown`."""
        coordinator = self._ask_coordinator()
        topology = coordinator.topology
        # All are asked before the first answer is waited for.
        waiting = [_MemberQuestion(member, self._router) for member in topology.members]
        return ClusterStatus(
            name=self.config.name,
            epoch=topology.epoch,
            owner=coordinator.owner,
            coordinator_pid=coordinator.pid,
            members=tuple(question.answer() for question in waiting),
            links=tuple(sorted(topology.links)),
        )

    def shutdown(self) -> None:
        """Ends the requests that are on their way, the actors that :meth:`launch` started, and Ray if it started that.
        Idempotent."""
        if self._is_shut_down.is_set():
            return
        self._is_shut_down.set()
        try:
            self._router.close(self._shut_down_error())
            self._lease.join()
            self._launcher.stop()
        finally:
            self._session.close()

    def __enter__(self) -> DisaggCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _ask_coordinator(self) -> CoordinatorStatus:
        from llm_datadist_ray.actors.router import RouteError

        try:
            return self._router.coordinator_status()
        except RouteError as error:
            raise RequestFailed(str(error), member=error.who, step=error.step) from error

    def _shut_down_error(self) -> RequestFailed:
        return RequestFailed(f"cluster {self.config.name} is shut down: launch it again", step="shutdown")

    def _renew_lease(self) -> None:
        """While this thread runs nobody else may take the cluster's name."""
        from ray.exceptions import RayError

        while not self._is_shut_down.wait(_LEASE_RENEWAL_S):
            if not self._session.is_alive:
                reason = f"cluster {self.config.name}: its Ray was shut down in this process: launch it again"
                self._router.close(RequestFailed(reason, step="shutdown"))
                return
            try:
                self._launcher.coordinator.renew_lease.remote()
            except RayError as error:  # the coordinator restarts; the lease outlives three renewals
                _log.warning("cluster %s: its lease was not renewed this time: %s", self.config.name, error)


class _MemberQuestion:
    """Asks one member for its status when made; :meth:`answer` waits for it."""

    def __init__(self, member: MemberRecord, router: Router) -> None:
        self._member = member
        self._ref: Any = None
        self._error = ""
        try:
            self._ref = router.handle_of(member).status.remote()
        except ValueError as error:
            self._error = str(error)

    def answer(self) -> MemberStatus:
        worker = None if self._error else self._wait()
        member = self._member
        return MemberStatus(
            role=member.role.name.lower(),
            cluster_id=member.cluster_id,
            incarnation=member.incarnation,
            actor_name=member.actor_name,
            host=member.host,
            port=member.port,
            pid=member.pid,
            layout=member.layout_text,
            worker=worker,
            error=self._error,
        )

    def _wait(self) -> WorkerStatus | None:
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(self._ref, timeout=_STATUS_TIMEOUT_S)
        except RayError as error:
            self._error = f"{type(error).__name__}: {error}"
            return None


def _silent(sentence: str) -> None:
    """The progress of a caller that does not want to hear any."""
