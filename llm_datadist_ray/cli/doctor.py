"""``llm-datadist-ray doctor``: what this machine can do, one line per fact, with the remedy where something lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click

from llm_datadist_ray.cli import facts, path_probe
from llm_datadist_ray.cli.exits import EXIT_FAILED
from llm_datadist_ray.cli.facts import Fact, Verdict

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "red"}
_NAME_WIDTH = 20


@click.command("doctor", short_help="Say what this machine can do, and what to do about the rest.")
def doctor() -> None:
    """Checks Python, the compiled module, every data path (by linking two processes and comparing what one pulls from
    the other), Ray, CANN and the limits of this machine. Starts no Ray.

    A line says ok, note (nothing that is needed here is missing) or BAD. Exit codes: 0 no line is BAD; 1 some are.
    """
    is_healthy = True
    for fact in all_facts():
        is_healthy &= fact.verdict is not Verdict.BAD
        click.echo(line_of(fact))
    if not is_healthy:
        raise click.exceptions.Exit(EXIT_FAILED)


def line_of(fact: Fact) -> str:
    verdict = click.style(f"{fact.verdict.value:4}", fg=_STYLES[fact.verdict])
    text = " ".join(fact.text.split())
    return f"{verdict}  {fact.name:{_NAME_WIDTH}}  {text}" + (f" -> {fact.remedy}" if fact.remedy else "")


def all_facts() -> Iterator[Fact]:
    """Each as soon as it is known; probing the paths takes seconds."""
    yield facts.python_fact()
    own = list(facts.package_facts())
    yield from own
    if any(fact.verdict is Verdict.BAD for fact in own):
        yield Fact("data paths", Verdict.NOTE, "not probed: that needs the compiled module")
    else:
        yield from path_facts()
    yield from chain(facts.ray_facts(), facts.engine_facts(), [facts.cann_fact()], facts.machine_facts())


def path_facts() -> Iterator[Fact]:
    try:
        probes = []
        for probe in path_probe.probe_paths():
            probes.append(probe)
            yield _path_fact(probe)
    except path_probe.ProbeFailed as error:
        yield Fact("data paths", Verdict.BAD, str(error), "without a data path no KV cache can travel: report this")
        return
    if all(probe.error for probe in probes):
        yield Fact("data paths", Verdict.BAD, "none works", "see the reasons above; tcp needs only the loopback device")
    if restriction := os.environ.get("LDR_PATHS"):
        yield Fact("LDR_PATHS", Verdict.NOTE, f"only {restriction} may carry KV caches", "unset it to allow every path")


def _path_fact(probe: path_probe.PathProbe) -> Fact:
    name = f"path {probe.name}"
    if not probe.error:
        return Fact(name, Verdict.OK, f"{probe.gb_per_s:.1f} GB/s, every byte compared")
    return Fact(name, Verdict.NOTE, f"not usable: {probe.error}", _remedy(probe.name))


def _remedy(path: str) -> str:
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if path == "cma" and yama.is_file():
        return f"{yama} is {yama.read_text().strip()}; 0 or 1 lets one process read another"
    return "the other paths carry the KV cache"
