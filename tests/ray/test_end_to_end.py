"""Prefill in one actor, decode in another: the tokens of one process, and blocks that come back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.engines.base import Engine, Sampling
from tests.ray.helpers import BLOCK_TOKENS, alone, is_at_rest, member, wait_until, worker

PATHS = ("shm", "cma", "unix", "tcp")


@pytest.mark.parametrize("num_characters", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 500])
def test_tokens_equal_those_of_one_process(cluster: DisaggCluster, reference: Engine, num_characters: int) -> None:
    prompt = ("The quick brown fox jumps over the lazy dog. " * 12)[:num_characters]
    expected = alone(reference, prompt, 40)
    stream = cluster.stream(prompt, max_tokens=40)
    pieces = list(stream)
    report = stream.report
    assert report is not None
    assert report.token_ids == tuple(piece.token_id for piece in pieces) == expected
    assert [piece.index for piece in pieces] == list(range(len(expected)))
    assert report.text == "".join(piece.text for piece in pieces)
    assert report.finish_reason == ("stop" if expected[-1] in reference.eos_token_ids else "length")
    assert report.num_prompt_tokens == len(reference.encode(prompt, chat=False))
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_report_names_path_and_counts_whole_blocks(cluster: DisaggCluster, reference: Engine) -> None:
    served_before = worker(cluster, "decoder").links
    report = cluster.generate("x" * 100, max_tokens=3)
    layout = reference.layout
    num_blocks = layout.num_blocks_for(report.num_prompt_tokens)
    assert report.transfer_bytes == num_blocks * layout.num_tensors * layout.block_bytes
    assert report.transfer_path in PATHS
    (link,) = worker(cluster, "decoder").links
    pulled_before = served_before[0].bytes_pulled[report.transfer_path] if served_before else 0
    assert link.bytes_pulled[report.transfer_path] - pulled_before == report.transfer_bytes
    times = report.times
    assert min(times.prefill_s, times.handoff_s, times.transfer_s, times.decode_s) > 0
    assert times.first_token_s > times.prefill_s + times.transfer_s


def test_every_grant_is_closed_once(cluster: DisaggCluster) -> None:
    before = worker(cluster, "prompt").grants
    cluster.generate("one", max_tokens=2)
    cluster.generate("two", max_tokens=2)
    wait_until(lambda: is_at_rest(cluster), 1.0)
    after = worker(cluster, "prompt").grants
    assert before is not None
    assert after is not None
    assert (after["granted"] - before["granted"], after["closed"] - before["closed"]) == (2, 2)
    assert after["granted"] == after["closed"] + after["live"] + after["reclaimed"]


def test_requests_side_by_side_keep_their_tokens(cluster: DisaggCluster, reference: Engine) -> None:
    prompts = ["first of three", "the second one of them", "third"]
    streams = [cluster.stream(prompt, max_tokens=24) for prompt in prompts]
    waiting = list(streams)
    while waiting:
        waiting = [stream for stream in waiting if next(stream, None) is not None]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.report is not None
        assert stream.report.token_ids == alone(reference, prompt, 24)


def test_status_knows_both_members(cluster: DisaggCluster, reference: Engine) -> None:
    cluster.generate("hello", max_tokens=1)
    status = cluster.status()
    prompt, decoder = member(cluster, "prompt"), member(cluster, "decoder")
    assert status.owner.pid == os.getpid()
    assert status.links == ((decoder.cluster_id, prompt.cluster_id),)
    assert len({prompt.cluster_id, decoder.cluster_id}) == len({prompt.incarnation, decoder.incarnation}) == 2
    assert len({prompt.pid, decoder.pid, status.coordinator_pid, os.getpid()}) == 4
    assert all(found.port > 0 and found.layout == str(reference.layout) for found in (prompt, decoder))
    assert decoder.worker is not None
    assert [(link.cluster_id, link.state) for link in decoder.worker.links] == [(prompt.cluster_id, "ready")]
    assert json.loads(json.dumps(status.to_dict()))["members"][0]["worker"]["blocks"]["total"] > 0


@pytest.mark.parametrize(("mode", "path"), [("two-sided", "tcp"), ("two-sided", "cma")])
def test_mode_and_path_are_obeyed(
    launch: Callable[..., DisaggCluster], reference: Engine, mode: str, path: str
) -> None:
    cluster = launch(f"{mode}-{path}", transfer={"mode": mode, "paths": [path]})
    report = cluster.generate("x" * 300, max_tokens=20)
    assert report.transfer_path == path
    assert report.token_ids == alone(reference, "x" * 300, 20)


def test_sampled_tokens_equal_those_of_one_process(cluster: DisaggCluster, reference: Engine) -> None:
    prompt, sampling = "The quick brown fox", Sampling(temperature=1.2, top_p=0.95, seed=11)
    expected = tuple(reference.generate_alone(reference.encode(prompt, chat=False), 40, sampling=sampling))
    report = cluster.generate(prompt, max_tokens=40, temperature=1.2, top_p=0.95, seed=11)
    assert report.token_ids == expected
    assert report.token_ids != alone(reference, prompt, 40), "or this shows nothing"
    assert cluster.generate(prompt, max_tokens=40, temperature=1.2, top_p=0.95, seed=12).token_ids != expected


def test_an_id_can_be_used_again_at_once(cluster: DisaggCluster) -> None:
    """The grant of the first request may not have ended yet."""
    for _ in range(5):
        stream = cluster.stream("again", max_tokens=1, request_id="the same id")
        list(stream)
        assert stream.report is not None
        assert stream.report.request_id == "the same id"
