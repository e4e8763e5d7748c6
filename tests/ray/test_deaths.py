"""Members and the coordinator are killed while they are needed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import ClusterCoordinator, LaunchError, RequestError, RequestFailed
from llm_datadist_ray.actors.messages import JoinRequest
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
from llm_datadist_ray.actors.status import MemberStatus, OwnerRecord
from llm_datadist_ray.engines.base import Engine
from llm_datadist_ray.types import LLMRole
from tests.ray.helpers import alone, is_at_rest, member, tiny_config, wait_until

pytestmark = pytest.mark.faults
LEASE_S = 3.0


class Request(threading.Thread):
    """One request in its own thread; ``error`` and ``ended_at`` tell how it went."""

    def __init__(self, cluster: DisaggCluster, prompt: str, max_tokens: int) -> None:
        super().__init__()
        self.first_token = threading.Event()
        self.error: RequestError | None = None
        self.ended_at = 0.0
        self._stream = cluster.stream(prompt, max_tokens=max_tokens)
        self.start()

    def run(self) -> None:
        try:
            for _ in self._stream:
                self.first_token.set()
        except RequestError as error:
            self.error = error
        self.ended_at = time.monotonic()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def check_failed_within_a_second(request: Request, killed_at: float, name: str, pid: int, step: str) -> None:
    request.join(timeout=10)
    assert isinstance(request.error, RequestFailed), request.error
    assert request.ended_at - killed_at < 1.0
    assert name in request.error.member
    assert (request.error.step, request.error.elapsed_s > 0) == (step, True)
    for part in (name, f"pid {pid}", step, "ms", "has died", "try again"):
        assert part in str(request.error)


class KilledAfterPrefill:
    """A prompt's handle; the process is killed when its prefill has returned, before anybody pulls."""

    def __init__(self, handle: Any, pid: int) -> None:
        self.admit, self.cancel = handle.admit, handle.cancel
        self.prefill = self
        self.killed_at = 0.0
        self._handle, self._pid = handle, pid

    def remote(self, attempt_id: str) -> Any:
        ref = self._handle.prefill.remote(attempt_id)
        ray.get(ref)
        os.kill(self._pid, signal.SIGKILL)
        self.killed_at = time.monotonic()
        return ref


def test_prompts_killed_during_prefill_and_before_the_pull(launch: Callable[..., DisaggCluster]) -> None:
    cluster = launch("kill-p", prompt={"num_blocks": 260, "replicas": 2}, decoder={"num_blocks": 260})
    cluster.generate("link first", max_tokens=1)
    pids = [status.pid for status in cluster.status().members]
    first, second = (status for status in cluster.status().members if status.role == "prompt")

    request = Request(cluster, "x" * 4000, 5)
    wait_until(lambda: any(_working(status) for status in cluster.status().members if status.role == "prompt"), 10.0)
    victim = next(status for status in cluster.status().members if status.role == "prompt" and _working(status))
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    check_failed_within_a_second(request, killed_at, victim.actor_name, victim.pid, "prefill")
    wait_until(lambda: sorted(status.role for status in cluster.status().members) == ["decoder", "prompt"], 1.0)
    wait_until(lambda: is_at_rest(cluster), 1.0)

    assert cluster.generate("the other one serves", max_tokens=2).token_ids
    survivor = next(status for status in (first, second) if status.pid != victim.pid)
    handles = cluster._router._handles
    killer = handles[survivor.cluster_id] = KilledAfterPrefill(handles[survivor.cluster_id], survivor.pid)
    request = Request(cluster, "x" * 500, 5)
    request.join(timeout=10)
    assert isinstance(request.error, RequestFailed), request.error
    assert request.ended_at - killer.killed_at < 1.0
    assert request.error.step == "open"
    for part in (f"{survivor.actor_name} (cluster {survivor.cluster_id}, pid {survivor.pid}", "step open", "try again"):
        assert part in str(request.error)
    wait_until(lambda: [status.role for status in cluster.status().members] == ["decoder"], 1.0)
    wait_until(lambda: is_at_rest(cluster), 1.0)
    with pytest.raises(RequestFailed, match="no prompt actor is alive"):
        cluster.generate("anybody there?")
    cluster.shutdown()
    wait_until(lambda: all(is_gone(pid) for pid in pids), 5.0)


def _working(status: MemberStatus) -> bool:
    return status.worker is not None and status.worker.blocks.working > 0


def test_decoder_killed_while_it_decodes(launch: Callable[..., DisaggCluster], long_story: str) -> None:
    cluster = launch("kill-d")
    victim = member(cluster, "decoder")
    request = Request(cluster, long_story, 600)
    assert request.first_token.wait(20.0)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    check_failed_within_a_second(request, killed_at, "decoder-0", victim.pid, "decode")
    wait_until(lambda: [status.role for status in cluster.status().members] == ["prompt"], 1.0)
    wait_until(lambda: is_at_rest(cluster), 1.0)
    with pytest.raises(RequestFailed, match="no decoder actor is alive"):
        cluster.generate("anybody there?")


def test_requests_go_on_without_the_coordinator_and_ids_are_not_used_again(
    launch: Callable[..., DisaggCluster], reference: Engine
) -> None:
    cluster = launch("kill-c")
    cluster.generate("link first", max_tokens=1)
    before = cluster.status()
    os.kill(before.coordinator_pid, signal.SIGKILL)
    assert cluster.generate("go on", max_tokens=8).token_ids == alone(reference, "go on", 8)
    after = cluster.status()  # waits for Ray to start the coordinator again
    assert after.coordinator_pid != before.coordinator_pid
    assert [status.incarnation for status in after.members] == [status.incarnation for status in before.members]
    coordinator = ray.get_actor(COORDINATOR_NAME, namespace=namespace_of("kill-c"))
    request = JoinRequest("late", LLMRole.PROMPT, "127.0.0.1", os.getpid())
    new_id = ray.get(coordinator.join.remote(request)).cluster_id
    assert new_id not in {status.cluster_id for status in before.members}
    os.kill(member(cluster, "decoder").pid, signal.SIGKILL)
    wait_until(lambda: [status.role for status in cluster.status().members] == ["prompt"], 2.0)


def test_an_abandoned_name_is_free_after_its_owners_lease_and_its_ids_are_spent(cluster: DisaggCluster) -> None:
    """The owner was killed: its members died with it, the detached coordinator did not."""
    namespace = namespace_of("abandoned")
    owner = OwnerRecord("elsewhere", 4711, "test")
    coordinator = ClusterCoordinator.options(name=COORDINATOR_NAME, namespace=namespace, lifetime="detached").remote(
        "abandoned", namespace, owner, epoch=40, lease_s=LEASE_S
    )
    joins = [JoinRequest(f"early {number}", LLMRole.PROMPT, "127.0.0.1", os.getpid()) for number in range(3)]
    spent = {reply.cluster_id for reply in ray.get([coordinator.join.remote(join) for join in joins])}
    ray.get(coordinator.renew_lease.remote())
    with pytest.raises(LaunchError, match="abandoned is running, launched by pid 4711 on elsewhere, with 0 members"):
        DisaggCluster.launch(tiny_config("abandoned"))
    wait_until(lambda: ray.get(coordinator.status.remote()).lease_left_s == 0, LEASE_S + 1)
    sentences: list[str] = []
    with DisaggCluster.launch(tiny_config("abandoned"), on_progress=sentences.append) as successor:
        assert successor.generate("hello", max_tokens=2).token_ids
        status = successor.status()
    assert "replacing what is left of cluster abandoned, launched by pid 4711 on elsewhere" in sentences
    assert min(found.cluster_id for found in status.members) > max(spent)
    assert status.epoch > 40
