"""What can never be placed is refused; no Ray runs here."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist_ray.actors.placement import claims, placement_problem
from tests.ray.helpers import tiny_config

NODES = [{"CPU": 2.0, "NPU": 2.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("prompt", "decoder", "sentence"),
    [
        ({}, {}, ""),
        ({"CPU": 2}, {"CPU": 2, "NPU": 1}, ""),
        ({"NPU": 2}, {"NPU": 1}, "wants 3 NPU in all, this Ray has 2"),
        ({"GPU": 1}, {}, "wants 1 GPU in all, this Ray has 0"),
        ({"CPU": 3}, {}, "wants 3 CPU for one prompt actor, and no single node of this Ray has that"),
        ({}, {"CPU": 2, "NPU": 2}, ""),
        ({}, {"CPU": 2.5, "NPU": 1}, "wants 2.5 CPU, 1 NPU for one decoder actor, and no single node"),
    ],
)
def test_never_placeable(prompt: dict[str, Any], decoder: dict[str, Any], sentence: str) -> None:
    config = tiny_config("placed", prompt={"resources": prompt}, decoder={"resources": decoder})
    problem = placement_problem({"prompt": config.prompt, "decoder": config.decoder}, NODES)
    assert problem.startswith(sentence)
    assert bool(problem) == bool(sentence)


def test_claims_are_rays_options() -> None:
    config = tiny_config("claims", prompt={"resources": {"CPU": 1, "GPU": 0.5, "memory": 100, "NPU": 2}})
    assert claims(config.prompt) == {"num_cpus": 1.0, "num_gpus": 0.5, "memory": 100.0, "resources": {"NPU": 2.0}}
    assert claims(config.decoder) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}
