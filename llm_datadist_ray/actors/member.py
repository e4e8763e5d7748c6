"""The part of a Ray actor that prefill and decode share: start, join, link, end."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, TypeVar

import ray

from llm_datadist_ray.actors.cluster_config import ClusterConfig
from llm_datadist_ray.actors.end_watch import EndWatch
from llm_datadist_ray.actors.messages import JoinRequest, LinkOrder, LinkReport, MemberRecord
from llm_datadist_ray.actors.names import COORDINATOR_NAME
from llm_datadist_ray.actors.progress import ProgressLog
from llm_datadist_ray.actors.remote import method
from llm_datadist_ray.actors.status import WorkerStatus
from llm_datadist_ray.actors.worker import WorkerCore, load_engine
from llm_datadist_ray.types import LLMRole

CONCURRENCY_GROUPS = {"control": 8, "data": 16, "lifetime": 4}
"""Threads by kind of call: short ones, computing ones, and those that only end with the actor or its start."""


class Service(Protocol):
    """What a role does once it has a worker core."""

    def cancel(self, attempt_id: str) -> None: ...

    def status(self) -> WorkerStatus: ...


S = TypeVar("S", bound=Service)


class MemberActor(ABC, Generic[S]):
    """Base of :class:`PromptActor` and :class:`DecoderActor`; threaded, no method is async.

    The constructor is cheap. :meth:`start` loads the model; before that only ``progress``, ``until_end`` and ``stop``
    work.
    """

    role: ClassVar[LLMRole]

    def __init__(self, name: str, namespace: str, config: ClusterConfig, secret: bytes, host: str | None) -> None:
        """``name`` is the actor's own name in ``namespace``; ``host`` None: this node's address."""
        self._name = name
        self._namespace = namespace
        self._config = config
        self._secret = secret
        self._host = host or config.listen.host or ray.util.get_node_ip_address()
        self._core: WorkerCore | None = None
        self._service: S | None = None
        self._progress = ProgressLog()
        self._watch = EndWatch()

    @method(concurrency_group="data")
    def start(self) -> MemberRecord:
        """Loads the model, takes a cluster id, allocates KV memory, listens and registers. Blocks for seconds."""
        try:
            self._progress.say(f"{self._name}: loading model {self._config.model.name}")
            engine = load_engine(
                self._config, lambda step, fraction: self._progress.say(f"{self._name}: {step} ({fraction:.0%})")
            )
            coordinator = ray.get_actor(COORDINATOR_NAME, namespace=self._namespace)
            request = JoinRequest(uuid.uuid4().hex, self.role, self._host, os.getpid())
            cluster_id = ray.get(coordinator.join.remote(request)).cluster_id
            core = WorkerCore(self.role, cluster_id, self._config, engine, secret=self._secret, host=self._host)
            self._core = core
            self._service = self._serve(core)
            record = core.record(self._name)
            ray.get(coordinator.register.remote(record))
            self._progress.say(
                f"{self._name}: ready as cluster {cluster_id} at {core.address} (pid {record.pid}, "
                f"{record.num_blocks} blocks)"
            )
            return record
        finally:
            self._progress.close()

    @method(concurrency_group="lifetime")
    def progress(self, num_read: int) -> tuple[str, ...]:
        """Sentences behind the first ``num_read`` about :meth:`start`; blocks for the next one. Empty: it has ended."""
        return self._progress.wait(num_read)

    @method(concurrency_group="lifetime")
    def until_end(self) -> bool:
        """As :meth:`EndWatch.wait`; the caller gets ActorDiedError when this process dies."""
        return self._watch.wait()

    @method(concurrency_group="control")
    def link_to(self, order: LinkOrder) -> LinkReport:
        """As :meth:`WorkerCore.link_to`."""
        self._serving()
        assert self._core is not None  # it is there before the service
        return self._core.link_to(order)

    @method(concurrency_group="control")
    def cancel(self, attempt_id: str) -> None:
        """Frees what this side holds for a request, in any phase. Idempotent."""
        self._serving().cancel(attempt_id)

    @method(concurrency_group="control")
    def status(self) -> WorkerStatus:
        return self._serving().status()

    @method(concurrency_group="control")
    def stop(self) -> None:
        """Closes the native engine. Idempotent; the process ends when its owner kills it."""
        self._watch.end()
        if self._core is not None:
            self._core.close()

    @abstractmethod
    def _serve(self, core: WorkerCore) -> S:
        """The role's own part of the start."""

    def _serving(self) -> S:
        if self._service is None:
            raise RuntimeError(f"{self._name} has not started yet: wait for start()")
        return self._service
