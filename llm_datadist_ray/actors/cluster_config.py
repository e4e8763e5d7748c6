"""The YAML schema of a cluster: every key with its unit and default. Unknown keys are refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from llm_datadist_ray.actors.errors import ConfigError
from llm_datadist_ray.engines import EngineSpec, engine_kinds
from llm_datadist_ray.engines.base import Sampling
from llm_datadist_ray.engines.models import nearest
from llm_datadist_ray.errors import LLMException

DATA_PATH_NAMES = ("shm", "cma", "unix", "tcp")


class _Section(BaseModel):
    # strict: "8" is no number and 1 is no bool; what a file means must not depend on a guess.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(_Section):
    kind: str = Field(default="transformers", description="Engine that computes tokens.")
    name: str = Field(
        default="tiny", description="Bundled model (tiny, smollm2-135m), or ./FOLDER in Hugging Face format."
    )
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        default="float32", description="Element type of weights and KV; float64 makes token equality exact everywhere."
    )
    device: str = Field(
        default="cpu", pattern=r"^(cpu|npu:\d+)$", description="Where the model computes: cpu, or npu:N."
    )
    block_tokens: int = Field(default=16, ge=1, le=1024, description="Token positions of one KV block.")
    max_context_tokens: int | None = Field(
        default=None, ge=2, description="Prompt and generated tokens together, at most; null = what the model can."
    )
    num_threads: int = Field(
        default=1, ge=1, le=1024, description="Compute threads of one actor; 1 makes results repeatable."
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in engine_kinds():
            raise ValueError(f"unknown engine kind {kind!r}{nearest(kind, engine_kinds())}")
        return kind


class RoleConfig(_Section):
    replicas: int = Field(default=1, ge=1, le=1024, description="Number of actors of this role.")
    num_blocks: int = Field(default=256, ge=1, description="KV blocks of each actor (of model.block_tokens tokens).")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources of each actor, such as {CPU: 2, NPU: 1}; default no claim."
    )

    @field_validator("resources", mode="before")
    @classmethod
    def _amounts(cls, value: Any) -> Any:
        if isinstance(value, dict) and all(isinstance(amount, int | float) for amount in value.values()):
            if any(amount < 0 for amount in value.values()):
                raise ValueError("amounts are not negative")
            return {name: float(amount) for name, amount in value.items()}
        return value


class TransferConfig(_Section):
    paths: list[str] | None = Field(
        default=None,
        description="Data paths that may carry KV bytes, of shm, cma, unix, tcp; null = all. LDR_PATHS wins.",
    )
    mode: Literal["two-sided", "remote-access"] = Field(
        default="remote-access", description="Whether peers read caches one-sidedly or ask the owner."
    )
    sync_kv_timeout_ms: int = Field(default=5000, ge=1, le=2**31 - 1, description="Limit of one KV transfer, in ms.")
    cma_ptracer: Literal["any", "never"] = Field(
        default="any",
        description="Whether a member lets others read its memory under Yama scope 1 (PR_SET_PTRACER_ANY).",
    )

    @field_validator("paths")
    @classmethod
    def _known_paths(cls, paths: list[str] | None) -> list[str] | None:
        for path in paths or ():
            if path == "hixl":
                raise ValueError(_refusal_of(path))
            if path not in DATA_PATH_NAMES:
                raise ValueError(f"unknown data path {path!r}{nearest(path, DATA_PATH_NAMES)}")
        if paths == []:
            raise ValueError("an empty list allows no path at all; write null for all paths")
        return paths


class ListenConfig(_Section):
    host: str | None = Field(
        default=None,
        description="IPv4 address that members listen on; null = 127.0.0.1 for a cluster on this host only, "
        "else each node's own address.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="0: the kernel chooses and the real port is published; any other fits one member per host only.",
    )

    @field_validator("host")
    @classmethod
    def _is_ipv4(cls, host: str | None) -> str | None:
        if host is not None:
            try:
                address = ipaddress.IPv4Address(host)
            except ValueError as error:
                raise ValueError(f"{host!r} is no IPv4 address") from error
            if address.is_unspecified:
                raise ValueError(f"members advertise what they bind to, so it cannot be {host}")
        return host


class LivenessConfig(_Section):
    heartbeat_ms: int = Field(
        default=500, ge=10, le=60_000, description="Interval of native heartbeats on a link, in ms."
    )
    budget_ms: int = Field(default=3000, ge=20, le=600_000, description="Silence after which a link is broken, in ms.")

    @model_validator(mode="after")
    def _budget_holds_two_beats(self) -> LivenessConfig:
        if self.budget_ms < 2 * self.heartbeat_ms:
            raise ValueError(
                f"budget_ms {self.budget_ms} must be at least two heartbeats of {self.heartbeat_ms} ms: one may be late"
            )
        return self


class RayConfig(_Section):
    address: str | None = Field(
        default=None,
        description="Ray cluster to join, such as auto or HOST:PORT; null = RAY_ADDRESS, else a local one.",
    )
    num_cpus: int = Field(default=2, ge=1, description="CPUs of a local Ray.")
    object_store_mb: int = Field(
        default=100, ge=80, description="Object store of a local Ray, in MB; KV never goes there."
    )
    auth_mode: Literal["token", "disabled"] = Field(
        default="token", description="Ray's own access check (RAY_AUTH_MODE); a value in the environment wins."
    )


class GenerationConfig(_Section):
    max_tokens: int = Field(default=64, ge=1, description="Generated tokens of a request that does not say.")
    chat: bool = Field(default=True, description="Wrap a prompt as one user turn of the model's chat template.")
    temperature: float = Field(
        default=0.0, ge=0.0, le=100.0, description="0: the most probable token; higher: draws, more evenly the higher."
    )
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Draw only among the most probable tokens that together reach this."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of the draws: the same one draws the same tokens.")

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.seed)


class TestingConfig(_Section):
    overwrite_pulled_block: int | None = Field(
        default=None,
        ge=0,
        description="Damage the n-th pulled block (from 0) before decode: shows that a check can fail.",
    )


ClusterName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class ClusterConfig(_Section):
    """One cluster. Immutable and picklable; :meth:`load` reads it from a file."""

    name: ClusterName = Field(description="Names the cluster inside its Ray; lower case, digits and . _ -")
    model: ModelConfig = Field(default=ModelConfig(), description="What computes tokens.")
    prompt: RoleConfig = Field(default=RoleConfig(), description="Actors that prefill.")
    decoder: RoleConfig = Field(default=RoleConfig(), description="Actors that decode.")
    transfer: TransferConfig = Field(default=TransferConfig(), description="How KV travels.")
    listen: ListenConfig = Field(default=ListenConfig(), description="Where members accept links.")
    liveness: LivenessConfig = Field(default=LivenessConfig(), description="When silence is a death.")
    ray: RayConfig = Field(default=RayConfig(), description="The Ray that the actors run in.")
    launch_timeout_s: int = Field(
        default=600, ge=1, le=86_400, description="Limit of a launch, in s; preparing and loading a model included."
    )
    secret_file: str | None = Field(
        default=None,
        description="File with the cluster secret, at least 16 bytes; null = LLM_DATADIST_SECRET, else a new one.",
    )
    generation: GenerationConfig = Field(default=GenerationConfig(), description="Defaults of requests.")
    testing: TestingConfig = Field(default=TestingConfig(), description="Deliberate damage; all off.")

    @classmethod
    def load(cls, path: str | Path) -> ClusterConfig:
        """Reads a YAML file. ConfigError that names the file and, line by line, each key that is wrong; for an unknown
        key also the nearest known one."""
        try:
            with open(path, encoding="utf-8") as file:
                content = yaml.load(file, Loader=_UniqueKeyLoader)
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(path)!r} is not valid YAML: {error}") from error
        return cls.parse(content, source=str(path))

    @classmethod
    def parse(cls, content: Any, *, source: str = "configuration") -> ClusterConfig:
        """The same from what a YAML file contains."""
        if not isinstance(content, dict):
            raise ConfigError(f"{source}: expected keys and values, but got {type(content).__name__}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            lines = [_sentence(problem) for problem in error.errors(include_url=False)]
            raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from None

    def engine_spec(self) -> EngineSpec:
        """What every actor, and a reference in one process, builds its engine from."""
        model = self.model
        return EngineSpec(
            kind=model.kind,
            model=model.name,
            dtype=model.dtype,
            device=model.device,
            block_tokens=model.block_tokens,
            num_threads=model.num_threads,
        )

    def with_paths(self, paths: str | None) -> ClusterConfig:
        """This configuration with the data paths of ``LDR_PATHS`` when that is set (it wins). ConfigError for an
        unknown one."""
        if not paths:
            return self
        names = [path.strip() for path in paths.split(",")]
        if not set(names) <= set(DATA_PATH_NAMES):
            raise ConfigError(f"LDR_PATHS={paths}: {_refusal_of(paths)}")
        changed = self.model_dump()
        changed["transfer"]["paths"] = names
        return self.parse(changed, source=f"LDR_PATHS={paths}")


def _refusal_of(paths: str) -> str:
    """Why the native core does not take them, in the words that it has for every caller."""
    from llm_datadist_ray._native import parse_paths  # only for this: a good configuration needs no compiled module

    try:
        parse_paths(paths)
    except LLMException as error:
        return str(error)
    return f"known paths are {', '.join(DATA_PATH_NAMES)}"


def known_keys() -> tuple[str, ...]:
    """Every key of the schema, dotted."""
    return tuple(_dotted_keys(ClusterConfig, ""))


def _dotted_keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")


def _sentence(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(key, _candidates(key))}"
    if problem["type"] == "missing":
        return f"{key}: required and not there"
    reason = problem["msg"].removeprefix("Value error, ")
    # Our own validators name the value themselves.
    tells_value = problem["type"] == "value_error" or isinstance(problem["input"], dict)
    return f"{key}: {reason}" + ("" if tells_value else f", but got {problem['input']!r}")


def _candidates(key: str) -> list[str]:
    """Known keys that an unknown one may have meant: of its own section first, else that leaf of any section."""
    section, _, leaf = key.rpartition(".")
    siblings = [known for known in known_keys() if known.rpartition(".")[0] == section]
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == leaf]
    return elsewhere or siblings


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
