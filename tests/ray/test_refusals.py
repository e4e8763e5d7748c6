"""What a cluster refuses, with which words; and that nothing stays reserved after it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    AuthenticationError,
    RayError,
    RuntimeEnvSetupError,
)

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import (
    ClusterCoordinator,
    DecoderActor,
    LaunchError,
    PromptActor,
    RequestRejected,
    launcher,
)
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
from llm_datadist_ray.actors.ray_session import RaySession
from llm_datadist_ray.actors.state_store import StateStore
from llm_datadist_ray.actors.status import OwnerRecord
from tests.ray.helpers import BLOCK_TOKENS, NUM_BLOCKS, is_at_rest, member, tiny_config, wait_until


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ("", 5, "the prompt is empty"),
        ("hello", 0, "max_tokens is 0; at least 1"),
        ("hello", -1, "max_tokens is -1; at least 1"),
        ("x" * 2000, 5, f"needs 125 KV blocks, prompt [0-9]+ has {NUM_BLOCKS}: shorten it or raise prompt.num_blocks"),
        ("x" * 5000, 5, "the context holds 4096"),
        ("hello", 2000, f"decoder [0-9]+ has {NUM_BLOCKS}: lower max_tokens or raise decoder.num_blocks"),
    ],
)
def test_bad_requests_are_rejected(cluster: DisaggCluster, prompt: str, max_tokens: int, sentence: str) -> None:
    with pytest.raises(RequestRejected, match=sentence):
        cluster.generate(prompt, max_tokens=max_tokens)
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_a_full_decoder_rejects_before_prefill(cluster: DisaggCluster) -> None:
    cluster.generate("link", max_tokens=1)
    decoder = ray.get_actor(member(cluster, "decoder").actor_name, namespace=namespace_of(cluster.config.name))
    granted_before = _granted(cluster)
    ray.get(decoder.reserve.remote("blocker", (NUM_BLOCKS - 2) * BLOCK_TOKENS, 1))
    try:
        with pytest.raises(RequestRejected, match=r"decoder [0-9]+ is full: 3 blocks are wanted, 2 of 80 are free"):
            cluster.generate("x" * 40, max_tokens=5)
        assert _granted(cluster) == granted_before
    finally:
        ray.get(decoder.cancel.remote("blocker"))
    assert cluster.generate("x" * 40, max_tokens=5).token_ids
    wait_until(lambda: is_at_rest(cluster), 1.0)


def _granted(cluster: DisaggCluster) -> int:
    worker = member(cluster, "prompt").worker
    assert worker is not None
    assert worker.grants is not None
    return worker.grants["granted"]


def test_a_rejected_request_can_come_again_with_its_id(cluster: DisaggCluster) -> None:
    with pytest.raises(RequestRejected, match="request mine: "):
        list(cluster.stream("hello", max_tokens=2000, request_id="mine"))
    assert list(cluster.stream("hello", max_tokens=2, request_id="mine"))
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_links_are_between_a_decoder_and_a_prompt(cluster: DisaggCluster) -> None:
    coordinator = ray.get_actor(COORDINATOR_NAME, namespace=namespace_of(cluster.config.name))
    prompt, decoder = member(cluster, "prompt"), member(cluster, "decoder")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"prompt-0\) is LLMRole.PROMPT and cannot be the"):
        ray.get(coordinator.ensure_link.remote(prompt.cluster_id, decoder.cluster_id))
    with pytest.raises(ray.exceptions.RayTaskError, match="cluster 99 is no member: the id was never given out"):
        ray.get(coordinator.ensure_link.remote(decoder.cluster_id, 99))


def test_input_of_a_wrong_type_is_rejected_before_anything_is_sent(cluster: DisaggCluster) -> None:
    with pytest.raises(RequestRejected, match="half of a surrogate pair"):
        cluster.stream("\ud800")
    with pytest.raises(RequestRejected, match="max_tokens is '5' of type str"):
        cluster.generate("hello", max_tokens="5")  # type: ignore[arg-type]


def test_a_second_launch_under_the_same_name_is_refused(cluster: DisaggCluster) -> None:
    with pytest.raises(LaunchError, match=f"cluster tests is running, launched by pid {os.getpid()} on .* 2 members"):
        DisaggCluster.launch(cluster.config)
    assert cluster.generate("still here", max_tokens=2).token_ids, "the refused launch must not harm the first one"


def test_resources_that_ray_does_not_have_are_named(cluster: DisaggCluster) -> None:
    config = tiny_config("no-npu", decoder={"resources": {"NPU": 3}})
    with pytest.raises(LaunchError, match=r"wants 3 NPU in all, this Ray has 0: see .*decoder\.resources"):
        DisaggCluster.launch(config)


def test_a_port_in_use_is_named(cluster: DisaggCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = tiny_config("no-port", listen={"host": "127.0.0.1", "port": port})
        with pytest.raises(LaunchError) as caught:
            DisaggCluster.launch(config)
    assert re.match(r"(prompt|decoder)-0 of cluster no-port did not start after [0-9.]+ s: ", str(caught.value))
    for part in ("listen.port", f"127.0.0.1:{port}", "in use"):
        assert part in str(caught.value)


def test_a_launch_has_a_limit_and_says_what_is_pending(cluster: DisaggCluster) -> None:
    with pytest.raises(LaunchError) as caught:
        DisaggCluster.launch(tiny_config("late", launch_timeout_s=1))
    for part in ("cluster late", "launch_timeout_s (1) is over", "still pending: ", " (its "):
        assert part in str(caught.value)


def test_an_interrupted_launch_leaves_no_coordinator(cluster: DisaggCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst moment: Ray has made the detached actor, and its handle never arrives."""
    namespace = namespace_of("interrupted")

    class Interrupting:
        def options(self, **options: Any) -> Interrupting:
            self._options = options
            return self

        def remote(self, *args: Any, **kwargs: Any) -> None:
            ClusterCoordinator.options(**self._options).remote(*args, **kwargs)
            assert ray.get_actor(COORDINATOR_NAME, namespace=namespace)
            raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "_COORDINATOR", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        DisaggCluster.launch(tiny_config("interrupted"))
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(COORDINATOR_NAME, namespace=namespace)
    assert StateStore(namespace).load() is None


@pytest.mark.parametrize(
    "error",
    [RayError("refused"), ConnectionError("refused"), AuthenticationError("refused"), PermissionError("refused")],
)
def test_a_ray_that_cannot_be_joined_is_a_launch_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(**arguments: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LaunchError, match=r"could not join Ray at 10\.0\.0\.1:6379 .*refused.*RAY_ADDRESS"):
        DisaggCluster.launch(tiny_config("nowhere", ray={"address": "10.0.0.1:6379"}))


@pytest.mark.parametrize(
    "error",
    [ActorUnschedulableError("no node"), RuntimeEnvSetupError("no node"), ActorDiedError(), RayError("no node")],
)
def test_whatever_ray_says_of_a_member_is_a_launch_error(error: RayError) -> None:
    launching = launcher.Launcher(tiny_config("x"), print, RaySession(False, ("", "")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", _raiser(error))
        with pytest.raises(LaunchError, match=r"(?s)prompt-0 of cluster x did not start after .*(no node|has died)"):
            launching._check_started("prompt-0", object())


def _raiser(error: Exception) -> Callable[..., None]:
    def get(ref: object, **arguments: Any) -> None:
        raise error

    return get


def test_members_of_different_layouts_do_not_link(cluster: DisaggCluster) -> None:
    name = "two-layouts"
    namespace = namespace_of(name)
    owner = OwnerRecord("here", os.getpid(), "test")
    coordinator = ClusterCoordinator.options(name=COORDINATOR_NAME, namespace=namespace).remote(name, namespace, owner)
    actors = [coordinator]
    try:
        ray.get(coordinator.status.remote())
        records = []
        for actor_class, actor_name, block_tokens in ((PromptActor, "p", 16), (DecoderActor, "d", 8)):
            config = tiny_config(name, model={"block_tokens": block_tokens})
            actor = actor_class.options(name=actor_name, namespace=namespace).remote(
                actor_name, namespace, config, b"a secret of 16 b", "127.0.0.1"
            )
            actors.append(actor)
            records.append(actor.start.remote())
        prompt, decoder = ray.get(records)
        report = ray.get(coordinator.ensure_link.remote(decoder.cluster_id, prompt.cluster_id))
        assert report.error
        assert report.paths == ()
        for layout_text in (prompt.layout_text, decoder.layout_text):
            assert re.search(re.escape(layout_text), report.error), report.error
        assert ray.get(coordinator.topology.remote()).links == frozenset()
    finally:
        for actor in actors:
            ray.kill(actor)
