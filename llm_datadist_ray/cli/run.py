"""``llm-datadist-ray run``: launch a cluster, answer prompts with it, prove the answers, end it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llm_datadist_ray.cli.answers import Answers, JsonAnswers, TextAnswers
from llm_datadist_ray.cli.check import CheckResult, Reference
from llm_datadist_ray.cli.exits import EXIT_FAILED, BadInput, Failed
from llm_datadist_ray.cli.prompts import gather
from llm_datadist_ray.cli.steps import Steps

if TYPE_CHECKING:
    from llm_datadist_ray.actors.cluster import DisaggCluster
    from llm_datadist_ray.actors.cluster_config import ClusterConfig
    from llm_datadist_ray.actors.messages import RequestReport
    from llm_datadist_ray.engines.base import Sampling


@click.command("run", short_help="Answer prompts: prefill in one actor, decode in another.")
@click.argument("config_path", metavar="CONFIG", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="What to ask; may be repeated.")
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    metavar="FILE",
    help="A UTF-8 file that is one prompt as a whole; '-' is standard input; may be repeated.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most so many new tokens per prompt.  [default: generation.max_tokens of CONFIG]",
)
@click.option("--no-chat", is_flag=True, help="Take the prompt as it is, without the model's chat template.")
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help="0 takes the most probable token; up to 100 draws, more evenly the higher.  [default: generation.temperature]",
)
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    help="Draw only among the most probable tokens that together reach P.  [default: generation.top_p]",
)
@click.option(
    "--seed", type=int, metavar="N", help="Of the draws: the same one, the same tokens.  [default: generation.seed]"
)
@click.option("--check", is_flag=True, help="Also run the model in this process; exit 1 if any token differs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt and nothing else.")
def run(
    config_path: Path,
    texts: tuple[str, ...],
    files: tuple[str, ...],
    max_tokens: int | None,
    no_chat: bool,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    check: bool,
    as_json: bool,
) -> None:
    """Launches the cluster that CONFIG describes, answers the prompts one after the other, and ends it again.

    The answer is printed token by token, then a table: prefill, handoff (grant made, opened and closed), transfer of
    the KV cache with its bytes and data path, first token (from the start of the request), decode. What happens
    meanwhile is told on standard error.

    LDR_PATHS=tcp (or any of shm,cma,unix,tcp) in the environment restricts what carries the KV cache.

    Exit codes: 0 all well; 1 a request or a check failed; 2 wrong usage or configuration; 130 interrupted.

    \b
    Examples:
      llm-datadist-ray run cluster_configs/local_1p1d.yaml --prompt "What is the capital of France?" --check
      ray job submit -- llm-datadist-ray run /abs/path/local_1p1d.yaml --prompt "Hello" --check
    """
    prompts = gather(texts, files)
    config = load_config(config_path)
    sampling = choose_sampling(config.generation.sampling(), temperature=temperature, top_p=top_p, seed=seed)
    steps = Steps()
    prepare_model(config, steps)
    job = Job(
        config,
        prompts,
        max_tokens=max_tokens or config.generation.max_tokens,
        chat=config.generation.chat and not no_chat,
        sampling=sampling,
        is_checked=check,
        answers=JsonAnswers() if as_json else TextAnswers(),
        steps=steps,
    )
    if not job.run():
        raise click.exceptions.Exit(EXIT_FAILED)


def load_config(path: Path) -> ClusterConfig:
    """With the data paths of ``LDR_PATHS``, so that a wrong one is found before anything else is done. Raises BadInput
    with the schema's own sentence."""
    from llm_datadist_ray.actors.cluster_config import ClusterConfig
    from llm_datadist_ray.actors.errors import ConfigError

    try:
        return ClusterConfig.load(path).with_paths(os.environ.get("LDR_PATHS"))
    except ConfigError as error:
        raise BadInput(str(error)) from error


def choose_sampling(default: Sampling, **options: float | None) -> Sampling:
    """The configuration's sampling with what the command line says. Raises BadInput."""
    try:
        return replace(default, **{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]
    except ValueError as error:
        raise BadInput(str(error)) from error


def prepare_model(config: ClusterConfig, steps: Steps) -> None:
    """Here and not in the actors, so that a conversion shows its progress and a missing model is a sentence."""
    from llm_datadist_ray.engines import models

    name = config.model.name
    try:
        with steps.bar(f"model {name}") as progress:
            models.resolve(name, progress=progress)
    except (ValueError, models.ModelNotFound, ImportError) as error:
        raise BadInput(f"model.name: {error}") from error
    except OSError as error:
        raise Failed(
            f"model {name} could not be prepared in {str(models.cache_folder())!r}: {error}; make room there, or set "
            "LLM_DATADIST_CACHE to a folder that can be written to"
        ) from error


def launch(config: ClusterConfig, on_progress: Callable[[str], None]) -> DisaggCluster:
    from llm_datadist_ray.actors.cluster import DisaggCluster

    return DisaggCluster.launch(config, on_progress=on_progress)


@dataclass
class Job:
    """The prompts of one command and how they are to be answered."""

    config: ClusterConfig
    prompts: list[str]
    max_tokens: int
    chat: bool
    sampling: Sampling
    is_checked: bool
    answers: Answers
    steps: Steps
    _reference: Reference | None = field(default=None, init=False)

    def run(self) -> bool:
        """Whether every request and every check went well; one that fails does not stop the next."""
        from llm_datadist_ray.actors.errors import ConfigError, LaunchError

        try:
            with self.steps.doing(f"launching {self.config.name}") as say:
                cluster = launch(self.config, say)
        except ConfigError as error:
            raise BadInput(str(error)) from error
        except LaunchError as error:
            raise Failed(str(error)) from error
        with cluster:
            outcomes = [self._answer(cluster, prompt) for prompt in self.prompts]
        return all(outcomes)

    def _answer(self, cluster: DisaggCluster, prompt: str) -> bool:
        from llm_datadist_ray.actors.errors import RequestError

        self.answers.ask(prompt)
        try:
            report = self._stream(cluster, prompt)
        except RequestError as error:
            self.answers.fail(prompt, error)
            return False
        self.answers.answered(report)
        check = self._check(report, prompt) if self.is_checked else None
        self.answers.finish(prompt, report, check)
        return check is None or check.is_equal

    def _stream(self, cluster: DisaggCluster, prompt: str) -> RequestReport:
        stream = cluster.stream(prompt, max_tokens=self.max_tokens, chat=self.chat, **asdict(self.sampling))
        try:
            for piece in stream:
                self.answers.piece(piece)
        finally:
            if stream.report is None:  # it failed, was interrupted, or nobody reads our output any more
                stream.cancel()
        assert stream.report is not None  # the iteration has ended normally
        return stream.report

    def _check(self, report: RequestReport, prompt: str) -> CheckResult:
        with self.steps.doing("checking against the model in one process"):
            if self._reference is None:
                self._reference = Reference(self.config)
            return self._reference.check(
                report.token_ids, prompt, chat=self.chat, max_tokens=self.max_tokens, sampling=self.sampling
            )
