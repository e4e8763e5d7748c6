"""One Ray on this host for the whole folder, one cluster for most of it, and the model in this process as reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist_ray import DisaggCluster, engines
from llm_datadist_ray.actors import ClusterConfig
from llm_datadist_ray.engines.base import Engine
from tests.ray.actor_logs import ActorLogs
from tests.ray.helpers import tiny_config

# Set here, so that nobody's token file or absence of one decides how Ray behaves.
os.environ["RAY_AUTH_MODE"] = "disabled"
for variable in ("RAY_ADDRESS", "LDR_PATHS", "LLM_DATADIST_SECRET"):
    os.environ.pop(variable, None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[DisaggCluster]:
    """1 P and 1 D of 80 blocks each. It is launched first and starts Ray; later launches of this process join that."""
    with DisaggCluster.launch(tiny_config("tests")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def actor_logs() -> ActorLogs:
    return ActorLogs()


@pytest.fixture(scope="module", autouse=True)
def no_unexpected_actor_logs(request: pytest.FixtureRequest, actor_logs: ActorLogs) -> Iterator[None]:
    """Fails a module whose actors wrote to standard error, except what its ``EXPECTED_LOGS`` (expressions) allow."""
    yield
    assert actor_logs.unexpected(getattr(request.module, "EXPECTED_LOGS", ())) == []


@pytest.fixture
def launch(cluster: DisaggCluster) -> Iterator[Callable[..., DisaggCluster]]:
    """Launches further clusters in the same Ray; they are shut down after the test."""
    launched: list[DisaggCluster] = []

    def launch_one(name: str, **sections: Any) -> DisaggCluster:
        launched.append(DisaggCluster.launch(tiny_config(name, **sections)))
        return launched[-1]

    yield launch_one
    for other in launched:
        other.shutdown()


@pytest.fixture(scope="session")
def reference() -> Engine:
    config: ClusterConfig = tiny_config("reference")
    return engines.create(config.engine_spec())


@pytest.fixture(scope="session")
def long_story(reference: Engine) -> str:
    """A prompt that the model answers with many tokens; the model is deterministic, so it is always the same one."""
    for number in range(200):
        prompt = f"Tell me story number {number}."
        if len(reference.generate_alone(reference.encode(prompt, chat=False), 600)) == 600:
            return prompt
    pytest.fail("the tiny model answers every prompt with few tokens; the tests need one that keeps it busy")
