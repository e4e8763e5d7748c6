"""The command line without Ray, a model or the compiled module: a fake cluster answers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from llm_datadist_ray.actors.errors import LaunchError, RequestError, RequestFailed
from llm_datadist_ray.actors.messages import PhaseTimes, RequestReport, TokenPiece
from llm_datadist_ray.cli import doctor, facts, path_probe
from llm_datadist_ray.cli import main as main_module
from llm_datadist_ray.cli import run as run_module
from llm_datadist_ray.cli.answers import TextAnswers
from llm_datadist_ray.cli.check import compare
from llm_datadist_ray.cli.facts import Fact, Verdict
from llm_datadist_ray.cli.phase_table import phase_rows, phase_table
from llm_datadist_ray.cli.steps import Steps
from llm_datadist_ray.engines.base import GREEDY, Sampling

TINY = Path(__file__).parents[2] / "cluster_configs" / "local_1p1d_tiny.yaml"
TOKENS = (11, 12, 13, 14)
PIECES = ("The ", "", "r\u00e9s", "um\u00e9.")
REPORT = RequestReport(
    request_id="r1",
    prompt_cluster_id=1,
    decoder_cluster_id=2,
    num_prompt_tokens=40,
    token_ids=TOKENS,
    text="".join(PIECES),
    finish_reason="length",
    transfer_bytes=3_000_000,
    transfer_path="shm",
    times=PhaseTimes(prefill_s=0.2, handoff_s=0.001, transfer_s=0.002, first_token_s=0.25, decode_s=1.5),
)


class FakeStream:
    def __init__(self, error: BaseException | None, fail_after: int) -> None:
        self.report: RequestReport | None = None
        self.is_cancelled = False
        self._error = error
        self._fail_after = fail_after

    def __iter__(self) -> Iterator[TokenPiece]:
        for index, (token, text) in enumerate(zip(TOKENS, PIECES, strict=True)):
            if self._error is not None and index == self._fail_after:
                raise self._error
            yield TokenPiece("r1", index, token, text)
        self.report = REPORT

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class FakeCluster:
    """``errors`` says which prompt ends how, after two tokens."""

    errors: dict[str, BaseException] = field(default_factory=dict)
    asked: list[tuple[str, int | None, bool]] = field(default_factory=list)
    sampling: list[dict[str, float]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    is_shut_down: bool = False

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_shut_down = True

    def stream(self, prompt: str, *, max_tokens: int | None = None, chat: bool = True, **sampling: float) -> FakeStream:
        self.asked.append((prompt, max_tokens, chat))
        self.sampling.append(sampling)
        self.streams.append(FakeStream(self.errors.get(prompt), fail_after=2))
        return self.streams[-1]


class FakeReference:
    tokens: tuple[int, ...] = TOKENS
    sampling: Sampling | None = None

    def __init__(self, config: object) -> None:
        pass

    def check(
        self, token_ids: tuple[int, ...], prompt: str, *, chat: bool, max_tokens: int, sampling: Sampling
    ) -> object:
        type(self).sampling = sampling
        return compare(token_ids, self.tokens)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """What the next ``run`` launches, whatever the configuration says."""
    fake = FakeCluster()

    def launch(config: object, say: Callable[[str], None]) -> FakeCluster:
        say("linked")
        return fake

    monkeypatch.setattr(run_module, "launch", launch)
    monkeypatch.setattr(run_module, "prepare_model", lambda config, steps: None)
    monkeypatch.setattr(run_module, "Reference", FakeReference)
    monkeypatch.setattr(FakeReference, "tokens", TOKENS)
    monkeypatch.setattr(FakeReference, "sampling", None)
    monkeypatch.delenv("LDR_PATHS", raising=False)
    return fake


def run(*args: str) -> int:
    return main_module.main(["run", str(TINY), *args])


# ---- usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "nothing to ask: give --prompt TEXT or --prompt-file FILE"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "x", "--max-tokens", "0"], "0 is not in the range x>=1"),
        (["--prompt", "x", "--max-tokens", "many"], "'many' is not a valid integer range"),
        (["--prompt-file", "/nonexistent/file"], "prompt file '/nonexistent/file' cannot be read: No such file"),
        (["--promt", "x"], "No such option"),
        (["--prompt", "caf\udce9"], "--prompt is no valid text: half of a surrogate pair, U+DCE9 at character 3"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; 0 (greedy) to 100 is allowed"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "x", "--top-p", "0"], "top_p is 0.0; more than 0 and at most 1 is allowed"),
        (["--prompt", "x", "--seed", "-3"], "seed is -3"),
        (["--prompt", "x", "--seed", "1.5"], "'1.5' is not a valid integer"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(
    args: list[str], sentence: str, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""
    assert cluster.asked == []


def test_missing_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["run", "no_such.yaml", "--prompt", "x"]) == 2
    assert "'no_such.yaml' does not exist" in capsys.readouterr().err


def test_unknown_config_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(TINY.read_text().replace("num_blocks:", "num_block:", 1))
    assert main_module.main(["run", str(config), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert ".num_block" in error
    assert "num_blocks" in error.replace(".num_block", "", 1)
    assert "Traceback" not in error


def test_unknown_model_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(TINY.read_text().replace("name: tiny", "name: tinny"))
    assert "tinny" in config.read_text()
    assert main_module.main(["run", str(config), "--prompt", "x"]) == 2
    assert "unknown model 'tinny'; did you mean 'tiny'?" in capsys.readouterr().err


def test_prompt_file_that_is_not_utf8(tmp_path: Path, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("caf\u00e9".encode("latin-1"))
    assert run("--prompt-file", str(file)) == 2
    assert "is not UTF-8 text: byte 0xe9 at offset 3" in capsys.readouterr().err
    assert cluster.asked == []


def test_prompts_from_options_files_and_standard_input(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"two\nlines\r\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("d\u00e9j\u00e0\n".encode())))
    assert run("--prompt", "one", "--prompt-file", str(file), "--prompt-file", "-", "--max-tokens", "7") == 0
    assert [asked[:2] for asked in cluster.asked] == [("one", 7), ("two\nlines", 7), ("d\u00e9j\u00e0", 7)]


def test_no_chat_and_the_default_of_max_tokens(cluster: FakeCluster) -> None:
    from llm_datadist_ray.actors.cluster_config import ClusterConfig

    generation = ClusterConfig.load(TINY).generation
    assert run("--prompt", "one") == 0
    assert run("--prompt", "one", "--no-chat") == 0
    assert cluster.asked == [
        ("one", generation.max_tokens, generation.chat),
        ("one", generation.max_tokens, False),
    ]


def test_sampling_reaches_the_requests_and_the_check(cluster: FakeCluster) -> None:
    assert run("--prompt", "one", "--check") == 0
    assert FakeReference.sampling == GREEDY
    assert run("--prompt", "one", "--check", "--temperature", "0.8", "--top-p", "0.5", "--seed", "7") == 0
    assert FakeReference.sampling == Sampling(0.8, 0.5, 7)
    assert cluster.sampling == [
        {"temperature": 0.0, "top_p": 1.0, "seed": 0},
        {"temperature": 0.8, "top_p": 0.5, "seed": 7},
    ]


@pytest.mark.parametrize("paths", ["tcpp", "hixl", "tcp,hixl"])
def test_bad_ldr_paths_are_found_before_the_model_is_prepared(
    paths: str, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(run_module, "prepare_model", lambda config, steps: prepared.append(config))
    monkeypatch.setenv("LDR_PATHS", paths)
    assert run("--prompt", "x") == 2
    assert f"LDR_PATHS={paths}: " in capsys.readouterr().err
    assert (prepared, cluster.asked) == ([], [])


def test_a_model_that_cannot_be_written_down_is_a_sentence_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLM_DATADIST_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv("LDR_PATHS", raising=False)
    assert run("--prompt", "x") == 1
    error = capsys.readouterr().err
    assert f"model tiny could not be prepared in '{tmp_path}/file'" in error
    assert "LLM_DATADIST_CACHE" in error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--help"], ["run", "doctor", "Answer prompts"]),
        (
            ["run", "--help"],
            [
                *("CONFIG", "--prompt ", "--prompt-file", "--max-tokens", "--no-chat", "--check", "--json"),
                *("--temperature", "--top-p", "--seed", "LDR_PATHS"),
            ],
        ),
        (["doctor", "--help"], ["data path", "Starts no Ray"]),
    ],
)
def test_help(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(command) == 0
    text = capsys.readouterr().out
    assert [word for word in words if word not in text] == []


def test_importing_the_command_line_imports_neither_ray_nor_torch() -> None:
    code = "import sys, llm_datadist_ray.cli.main; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- run -----------------------------------------------------------------------------------------------------------


def test_answer_table_and_check(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "What?", "--check") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("> What?\nThe r\u00e9sum\u00e9.\n")
    assert "40 prompt tokens, 4 new tokens (length); prefill by member 1, decode by member 2" in captured.out
    assert captured.out.rstrip().endswith("check: 4/4 tokens equal")
    assert "linked" in captured.err
    assert cluster.is_shut_down
    assert not cluster.streams[0].is_cancelled


def test_failed_check_says_where_and_exits_1(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeReference, "tokens", (11, 99, 13, 14, 15))
    assert run("--prompt", "What?", "--check") == 1
    out = capsys.readouterr().out
    assert "check: 3/5 tokens equal\n" in out
    assert "check failed: at index 1 the cluster gave token id 12, one process gives token id 99" in out
    assert cluster.is_shut_down


def test_failed_request_does_not_stop_the_next(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.errors["bad"] = RequestFailed("decoder 2 died")
    assert run("--prompt", "bad", "--prompt", "good", "--check") == 1
    captured = capsys.readouterr()
    assert "Error: decoder 2 died" in captured.err
    assert "check: 4/4 tokens equal" in captured.out
    assert [stream.is_cancelled for stream in cluster.streams] == [True, False]


def test_failed_launch_is_exit_1(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(config: object, say: object) -> FakeCluster:
        raise LaunchError("prompt member 1 did not start within 60 s")

    monkeypatch.setattr(run_module, "launch", launch)
    assert run("--prompt", "x") == 1
    assert "Error: prompt member 1 did not start within 60 s" in capsys.readouterr().err


def test_interrupt_cancels_cleans_up_and_exits_130(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.errors["slow"] = KeyboardInterrupt()
    assert run("--prompt", "slow", "--prompt", "never") == 130
    assert [asked[0] for asked in cluster.asked] == ["slow"]
    assert cluster.streams[0].is_cancelled
    assert cluster.is_shut_down
    assert "Interrupted." in capsys.readouterr().err


def test_json_is_one_object_per_prompt(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.errors["bad"] = RequestError("no")
    assert run("--prompt", "bad", "--prompt", "good", "--check", "--json") == 1
    bad, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert bad == {"prompt": "bad", "error": {"kind": "RequestError", "message": "no"}}
    assert good["token_ids"] == list(TOKENS)
    assert (good["transfer_bytes"], good["transfer_path"]) == (3_000_000, "shm")
    assert good["times"]["decode_s"] == 1.5
    assert good["check"] == {"num_equal": 4, "num_compared": 4, "first_difference": "", "is_equal": True}
    assert good["error"] is None


# ---- rendering -----------------------------------------------------------------------------------------------------


def test_phase_rows() -> None:
    assert phase_rows(REPORT) == [
        ("prefill", "200.00", "", "", "", "200.0"),
        ("handoff", "1.00", "", "", "", ""),
        ("transfer", "2.00", "3000000", "shm", "1.500", ""),
        ("first token", "250.00", "", "", "", ""),
        ("decode", "1500.00", "", "", "", "2.0"),
    ]


def test_plain_table_is_ascii_and_keeps_every_row_on_a_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(phase_table(REPORT, plain=True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.isascii()
    lines = [line for line in text.splitlines() if not set(line) <= set("+-|")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert rows == [("phase", "ms", "bytes", "path", "GB/s", "tokens/s"), *phase_rows(REPORT)]


def test_rates_of_nothing_are_a_dash() -> None:
    report = RequestReport("r", 1, 2, 0, (5,), "", "stop", 0, "none")
    rows = {row[0]: row for row in phase_rows(report)}
    assert rows["decode"][5] == "-"
    assert rows["transfer"][4] == "-"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a[2Jb\n\t"), (False, "a\x1b[2Jb\n\t")])
def test_control_characters_do_not_reach_a_terminal(is_terminal: bool, shown: str) -> None:
    file = io.StringIO()
    TextAnswers(Console(file=file, force_terminal=is_terminal)).piece(TokenPiece("r", 0, 1, "a\x1b[2Jb\n\t"))
    assert file.getvalue() == shown


def test_long_and_multi_line_prompts_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    TextAnswers().ask("first\nsecond")
    TextAnswers().ask("x" * 300)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "> first... (12 characters)"
    assert second == f"> {'x' * 100}... (300 characters)"


def test_steps_on_a_pipe_are_plain_lines_and_a_bar_says_each_step_once() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    steps = Steps(console)
    with steps.doing("launching [a cluster] with a long name") as say:
        say("linked")
    with steps.bar("model m") as progress:
        for fraction in (0.1, 0.2, 0.3):
            progress("reading", fraction)
        progress("writing", 0.9)
    assert isinstance(console.file, io.StringIO)
    lines = [line.partition("] ")[2] for line in console.file.getvalue().splitlines()]
    assert lines == [
        "launching [a cluster] with a long name",
        "linked",
        "model m: reading",
        "model m: writing",
    ]


def test_steps_on_a_terminal_show_a_spinner_and_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)
    steps = Steps(console)
    with steps.doing("launching"):
        pass
    with steps.bar("model m") as progress:
        progress("reading", 0.5)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "launching" in text
    assert "model m: reading" in text


@pytest.mark.parametrize(
    ("ours", "reference", "num_equal", "num_compared"),
    [((1, 2, 3), (1, 2, 3), 3, 3), ((1, 2), (1, 2, 3), 2, 3), ((1, 2, 3), (1, 9), 1, 3), ((), (), 0, 0)],
)
def test_compare(ours: tuple[int, ...], reference: tuple[int, ...], num_equal: int, num_compared: int) -> None:
    result = compare(ours, reference)
    assert (result.num_equal, result.num_compared) == (num_equal, num_compared)
    assert result.is_equal == (ours == reference) == (result.first_difference == "")


# ---- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_line_has_verdict_name_text_and_remedy_on_one_line() -> None:
    line = doctor.line_of(Fact("path cma", Verdict.NOTE, "not\nusable", "do this"))
    assert "note" in line
    assert line.endswith("path cma              not usable -> do this")


@pytest.mark.parametrize(("verdict", "exit_code"), [(Verdict.OK, 0), (Verdict.NOTE, 0), (Verdict.BAD, 1)])
def test_doctor_exit_code(
    verdict: Verdict, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "all_facts", lambda: iter([Fact("a", Verdict.OK, "x"), Fact("b", verdict, "y")]))
    assert main_module.main(["doctor"]) == exit_code
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_doctor_says_why_a_path_fails_and_is_bad_only_when_none_works(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = path_probe.PathProbe("cma", error="the kernel refused")
    works = path_probe.PathProbe("tcp", gb_per_s=2.5)
    monkeypatch.delenv("LDR_PATHS", raising=False)
    monkeypatch.setattr(path_probe, "probe_paths", lambda: iter([refused, works]))
    some = list(doctor.path_facts())
    assert [fact.verdict for fact in some] == [Verdict.NOTE, Verdict.OK]
    assert "the kernel refused" in some[0].text
    assert "2.5 GB/s" in some[1].text
    monkeypatch.setattr(path_probe, "probe_paths", lambda: iter([refused]))
    assert [fact.verdict for fact in doctor.path_facts()] == [Verdict.NOTE, Verdict.BAD]


def test_cann_is_looked_for_in_named_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    absent = facts.cann_fact()
    assert "no libacl_rt.so" in absent.text
    assert str(tmp_path / "lib64") in absent.text
    assert absent.verdict is Verdict.NOTE
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libacl_rt.so").touch()
    assert f"found {tmp_path / 'lib64' / 'libacl_rt.so'}" in facts.cann_fact().text


def test_machine_facts_are_numbers_of_this_machine() -> None:
    found = {fact.name: fact for fact in facts.machine_facts()}
    assert set(found) == {"cores", "memory", "/dev/shm"}
    assert int(found["cores"].text.split()[0]) >= 1
    assert float(found["memory"].text.split()[0]) > 0
