"""What a cluster refuses, with which words; and that nothing stays reserved after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import ray

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import (
    ClusterCoordinator,
    DecoderActor,
    LaunchError,
    PromptActor,
    RequestFailed,
    RequestRejected,
)
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
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


def test_a_request_id_is_used_once_at_a_time(cluster: DisaggCluster) -> None:
    decoder = ray.get_actor(member(cluster, "decoder").actor_name, namespace=namespace_of(cluster.config.name))
    ray.get(decoder.reserve.remote("twice", 4, 4))
    with pytest.raises(ray.exceptions.RayTaskError, match="twice already holds blocks"):
        ray.get(decoder.reserve.remote("twice", 4, 4))
    ray.get(decoder.cancel.remote("twice"))
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_links_are_between_a_decoder_and_a_prompt(cluster: DisaggCluster) -> None:
    coordinator = ray.get_actor(COORDINATOR_NAME, namespace=namespace_of(cluster.config.name))
    prompt, decoder = member(cluster, "prompt"), member(cluster, "decoder")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"prompt-0\) is LLMRole.PROMPT and cannot be the"):
        ray.get(coordinator.ensure_link.remote(prompt.cluster_id, decoder.cluster_id))
    with pytest.raises(ray.exceptions.RayTaskError, match="cluster 99 is no member: the id was never given out"):
        ray.get(coordinator.ensure_link.remote(decoder.cluster_id, 99))


def test_a_second_launch_under_the_same_name_is_refused(cluster: DisaggCluster) -> None:
    with pytest.raises(LaunchError, match=f"cluster tests is running, launched by pid {os.getpid()} on .* 2 members"):
        DisaggCluster.launch(cluster.config)
    assert cluster.generate("still here", max_tokens=2).token_ids, "the refused launch must not harm the first one"


def test_resources_that_ray_does_not_have_are_named(cluster: DisaggCluster) -> None:
    config = tiny_config("no-npu", decoder={"resources": {"NPU": 3}})
    with pytest.raises(LaunchError, match=r"wants 3 NPU in all, this Ray has 0: see .*decoder\.resources"):
        DisaggCluster.launch(config)


def test_a_member_that_cannot_start_is_named(cluster: DisaggCluster) -> None:
    config = tiny_config("no-model", model={"name": "./no/such/folder"})
    with pytest.raises(LaunchError, match=r"(prompt|decoder)-0 of cluster no-model did not start .* does not exist"):
        DisaggCluster.launch(config)


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


def test_a_cluster_that_was_shut_down_says_so(launch: Callable[..., DisaggCluster]) -> None:
    cluster = launch("gone")
    cluster.shutdown()
    cluster.shutdown()
    with pytest.raises(RequestFailed, match="cluster gone is shut down"):
        cluster.generate("hello")
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(COORDINATOR_NAME, namespace=namespace_of("gone"))
