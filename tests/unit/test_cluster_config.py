"""The YAML schema: every shipped file loads, and every refusal says what to change."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_datadist_ray.actors.cluster_config import ClusterConfig, known_keys
from llm_datadist_ray.actors.errors import ConfigError
from llm_datadist_ray.actors.secret import cluster_secret
from llm_datadist_ray.engines.base import GREEDY, Sampling

CONFIGS = sorted((Path(__file__).parents[2] / "cluster_configs").glob("*.yaml"))


def parse(**sections: Any) -> ClusterConfig:
    return ClusterConfig.parse({"name": "test", **sections})


def test_there_are_shipped_files() -> None:
    assert {"local_1p1d.yaml", "local_1p1d_tiny.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    config = ClusterConfig.load(path)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.name.replace("-", "_") == path.stem


def test_one_shipped_file_explains_every_key_with_its_default() -> None:
    """What is commented out there must be what a file without it means."""
    text = next(path for path in CONFIGS if path.name == "local_1p1d.yaml").read_text()
    body = text[text.index("name: local-1p1d") :]  # what is above it is prose
    everything = yaml.safe_load(re.sub(r"^( *)# ", r"\1", body, flags=re.MULTILINE))
    assert ClusterConfig.parse(everything) == ClusterConfig.load(CONFIGS[0].with_name("local_1p1d.yaml"))
    written = {f"{section}.{key}" for section, keys in everything.items() if isinstance(keys, dict) for key in keys}
    assert written | set(everything) == set(known_keys())
    lines = [line for line in body.splitlines() if line.strip(" #")]
    assert [line for line in lines if line.count("#") < (2 if line.lstrip().startswith("#") else 1)] == UNEXPLAINED


# As in the section above it.
UNEXPLAINED = ["  replicas: 1", "  num_blocks: 256", "  # resources: {}"]


def test_engine_spec_carries_the_model_section() -> None:
    model = {"name": "tiny", "dtype": "float64", "device": "npu:1", "block_tokens": 8, "num_threads": 2}
    spec = parse(model=model).engine_spec()
    assert (spec.kind, spec.model, spec.dtype) == ("transformers", "tiny", "float64")
    assert (spec.device, spec.block_tokens, spec.num_threads) == ("npu:1", 8, 2)
    assert parse().engine_spec().device == "cpu"


def test_generation_carries_the_sampling() -> None:
    assert parse().generation.sampling() == GREEDY
    generation = {"temperature": 1, "top_p": 0.5, "seed": 7}
    assert parse(generation=generation).generation.sampling() == Sampling(1.0, 0.5, 7)


def test_every_key_is_described_with_a_default() -> None:
    def fields(section: Any, prefix: str = "") -> list[tuple[str, Any]]:
        found = []
        for name, field in section.model_fields.items():
            found.append((prefix + name, field))
            if hasattr(field.annotation, "model_fields"):
                found += fields(field.annotation, f"{prefix}{name}.")
        return found

    described = fields(ClusterConfig)
    assert [name for name, _ in described] == list(known_keys())
    assert [name for name, field in described if not field.description] == []
    assert [name for name, field in described if field.is_required()] == ["name"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"transfre": {}}, "transfre: unknown key; did you mean 'transfer'?"),
        ({"transfer": {"pathes": None}}, "transfer.pathes: unknown key; did you mean 'transfer.paths'?"),
        ({"num_cpus": 2}, "num_cpus: unknown key; did you mean 'ray.num_cpus'?"),
        ({"prompt": {"num_block": 2}}, "prompt.num_block: unknown key; did you mean 'prompt.num_blocks'?"),
        ({"transfer": {"mode": "push"}}, "transfer.mode: Input should be 'two-sided' or 'remote-access'"),
        ({"transfer": {"paths": ["shmm"]}}, "transfer.paths: unknown data path 'shmm'; did you mean 'shm'?"),
        ({"transfer": {"paths": []}}, "transfer.paths: an empty list allows no path at all"),
        ({"transfer": {"sync_kv_timeout_ms": 0}}, "transfer.sync_kv_timeout_ms: "),
        ({"model": {"kind": "transformer"}}, "model.kind: unknown engine kind 'transformer'; did you mean"),
        ({"model": {"dtype": "float8"}}, "model.dtype: "),
        ({"model": {"block_tokens": 0}}, "model.block_tokens: "),
        ({"prompt": {"num_blocks": "8"}}, "prompt.num_blocks: Input should be a valid integer, but got '8'"),
        ({"prompt": {"replicas": 0}}, "prompt.replicas: "),
        ({"decoder": {"replicas": True}}, "decoder.replicas: Input should be a valid integer, but got True"),
        ({"decoder": {"resources": {"NPU": -1}}}, "decoder.resources: amounts are not negative"),
        ({"listen": {"host": "0.0.0.0"}}, "listen.host: members advertise what they bind to"),
        ({"listen": {"host": "localhost"}}, "listen.host: 'localhost' is no IPv4 address"),
        ({"listen": {"port": 65536}}, "listen.port: "),
        ({"liveness": {"heartbeat_ms": 500, "budget_ms": 900}}, "liveness: budget_ms 900 must be at least two"),
        ({"ray": {"auth_mode": "off"}}, "ray.auth_mode: Input should be 'token' or 'disabled', but got 'off'"),
        ({"ray": {"object_store_mb": 8}}, "ray.object_store_mb: "),
        ({"generation": {"max_tokens": 0}}, "generation.max_tokens: "),
        ({"generation": {"chat": "yes"}}, "generation.chat: Input should be a valid boolean, but got 'yes'"),
        ({"generation": {"temperature": -1.0}}, "generation.temperature: "),
        ({"generation": {"temperature": 101}}, "generation.temperature: "),
        ({"generation": {"top_p": 0}}, "generation.top_p: "),
        ({"generation": {"seed": -1}}, "generation.seed: "),
        ({"generation": {"seed": 2**63}}, "generation.seed: "),
        ({"model": {"device": "npu"}}, "model.device: String should match pattern"),
        ({"launch_timeout_s": 0}, "launch_timeout_s: "),
        ({"testing": {"overwrite_pulled_block": -1}}, "testing.overwrite_pulled_block: "),
        ({"name": "Bad Name"}, "name: String should match pattern"),
    ],
)
def test_refusals_name_the_key(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.parse({"name": "test", **content}, source="some.yaml")
    first_line, *problems = str(caught.value).splitlines()
    assert first_line == "some.yaml:"
    assert len(problems) == 1
    assert problems[0].startswith("  " + sentence)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.parse({"prompt": {"replicas": 0}, "decoder": {"replica": 2}})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "name",
        "prompt.replicas",
        "decoder.replica",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: a\nname: b\n", "key 'name' is there twice"),
        ("name: a\nmodel:\n  name: tiny\n  name: tiny\n", "key 'name' is there twice"),
        ("name: [a\n", "is not valid YAML"),
        ("? [a]\n: b\n", "is not valid YAML"),
        ("- name\n", "expected keys and values, but got list"),
        ("", "expected keys and values, but got NoneType"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        ClusterConfig.load(path)
    assert sentence in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*No such file"):
        ClusterConfig.load(tmp_path / "none.yaml")


def test_configuration_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().name = "other"


def test_ldr_paths_win() -> None:
    config = parse(transfer={"paths": ["shm"], "mode": "two-sided"})
    changed = config.with_paths("tcp, cma")
    assert changed.transfer.paths == ["tcp", "cma"]
    assert changed.transfer.mode == "two-sided"
    assert config.with_paths(None) is config
    with pytest.raises(ConfigError, match=r"^LDR_PATHS=tpc: .*tpc"):
        config.with_paths("tpc")


def test_hixl_is_refused_with_the_library_and_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/ascend-of-test")
    with pytest.raises(ConfigError) as from_environment:
        parse().with_paths("hixl")
    with pytest.raises(ConfigError) as from_file:
        parse(transfer={"paths": ["hixl"]})
    for caught in (from_environment, from_file):
        for part in ("libcann_hixl.so", "/opt/ascend-of-test"):
            assert part in str(caught.value)


def test_secret_comes_from_the_environment_then_the_file_then_chance(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  a secret of enough bytes\n")
    file.chmod(0o600)
    environ = {"LLM_DATADIST_SECRET": "another secret of enough bytes"}
    assert cluster_secret(str(file), environ) == b"another secret of enough bytes"
    assert cluster_secret(str(file), {}) == b"a secret of enough bytes"
    made = cluster_secret(None, {})
    assert len(made) == 32
    assert made != cluster_secret(None, {})


def test_bad_secrets_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot read"):
        cluster_secret(str(file), {})
    file.write_text("a secret of enough bytes")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users; run: chmod 600"):
        cluster_secret(str(file), {})
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="has 5 bytes, at least 16"):
        cluster_secret(str(file), {})
    with pytest.raises(ConfigError, match="LLM_DATADIST_SECRET: the secret has 1 bytes"):
        cluster_secret(None, {"LLM_DATADIST_SECRET": "x"})
