"""``llm-datadist-ray run`` and ``doctor`` as a user starts them: real actors, a real model, real bytes."""

from __future__ import annotations

import functools
import json
import re
import secrets
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from installed_command import COMMAND, CONFIGS, RunCommand
from process_marks import marked_processes, wait_until_ended
from ray_head import Head

from llm_datadist_ray.actors.cluster_config import ClusterConfig
from llm_datadist_ray.engines import Engine, create

TINY = CONFIGS / "local_1p1d_tiny.yaml"
SMOLLM2 = CONFIGS / "local_1p1d.yaml"
PROMPT = "Once upon a time there was a cache that two processes shared, block by block, until one of them died."
PATHS = ("shm", "cma", "unix", "tcp")


def phases_of(output: str) -> dict[str, list[str]]:
    """The rows of the table on standard output, by phase."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows if len(row) == 6}


@functools.cache
def tiny_engine() -> Engine:
    return create(ClusterConfig.load(TINY).engine_spec())


def whole_block_bytes(engine: Engine, prompt: str) -> int:
    """What must travel for a prompt: every block that it touches, whole, of every KV tensor."""
    layout = engine.layout
    num_blocks = layout.num_blocks_for(len(engine.encode(prompt, chat=True)))
    return num_blocks * layout.block_bytes * layout.num_tensors


def changed_config(folder: Path, **changes: object) -> Path:
    """The tiny configuration with some top-level keys replaced."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(TINY.read_text()) | changes))
    return path


def assert_checked(result: subprocess.CompletedProcess[str], num_tokens: int) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith(f"check: {num_tokens}/{num_tokens} tokens equal")


def test_table_and_check_of_a_cluster_that_starts_its_own_ray(run_command: RunCommand) -> None:
    sampling = ["--temperature", "0.9", "--top-p", "0.9", "--seed", "5"]
    result = run_command("run", TINY, "--prompt", PROMPT, "--max-tokens", "24", *sampling, "--check")
    assert_checked(result, 24)
    assert "starting Ray on this host" in result.stderr
    phases = phases_of(result.stdout)
    assert list(phases) == ["phase", "prefill", "handoff", "transfer", "first token", "decode"]
    _, num_bytes, used_path, gb_per_s, _ = phases["transfer"]
    assert used_path == "shm"
    assert int(num_bytes) == whole_block_bytes(tiny_engine(), PROMPT)
    assert float(gb_per_s) > 0
    milliseconds = {phase: float(cells[0]) for phase, cells in phases.items() if phase != "phase"}
    assert min(milliseconds.values()) > 0
    assert milliseconds["first token"] >= milliseconds["prefill"]


@pytest.mark.parametrize("path", PATHS)
def test_tokens_equal_and_whole_blocks_travel_over_the_path_asked_for(
    path: str, run_command: RunCommand, head: Head
) -> None:
    args = ["run", TINY, "--prompt", PROMPT, "--max-tokens", "24", "--json"]
    result = run_command(*args, env={"LDR_PATHS": path}, head=head)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"joining Ray at {head.address}" in result.stderr
    answer = json.loads(result.stdout)
    engine = tiny_engine()
    assert answer["token_ids"] == engine.generate_alone(engine.encode(PROMPT, chat=True), 24)
    assert answer["transfer_path"] == path
    assert answer["transfer_bytes"] == whole_block_bytes(engine, PROMPT)


def test_json_of_several_prompts_of_which_one_is_longer_than_the_cache(
    run_command: RunCommand, head: Head, tmp_path: Path
) -> None:
    config = changed_config(tmp_path, prompt={"num_blocks": 16}, decoder={"num_blocks": 16})
    file = tmp_path / "prompt.txt"
    file.write_text("h\u00e9llo\nw\u00f6rld\n", encoding="utf-8")
    prompts = ["--prompt", "x" * 400, "--prompt", PROMPT, "--prompt-file", file]
    result = run_command("run", config, *prompts, "--max-tokens", "8", "--no-chat", "--check", "--json", head=head)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    refused, *answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert refused["error"]["kind"] == "RequestRejected"
    assert "raise prompt.num_blocks" in refused["error"]["message"]
    assert [answer["prompt"] for answer in answers] == [PROMPT, "h\u00e9llo\nw\u00f6rld"]
    for answer in answers:
        assert answer["check"]["is_equal"]
        assert answer["check"]["num_compared"] == len(answer["token_ids"]) == 8
        assert answer["transfer_path"] in PATHS
        assert answer["error"] is None


def test_damaged_block_is_noticed(run_command: RunCommand, head: Head, tmp_path: Path) -> None:
    config = changed_config(tmp_path, testing={"overwrite_pulled_block": 0})
    result = run_command("run", config, "--prompt", PROMPT, "--max-tokens", "24", "--check", head=head)
    assert result.returncode == 1, result.stdout + result.stderr
    match = re.search(r"^check: (\d+)/24 tokens equal$", result.stdout, re.MULTILINE)
    assert match is not None, result.stdout
    # The first token is prefill's own and does not pass through the damaged block.
    assert 1 <= int(match[1]) < 24
    assert "check failed: at index" in result.stdout


BAD_INPUTS = {
    "unknown key": (["run", "unknown_key.yaml", "--prompt", "x"], "prompt.num_block: unknown key; did you mean"),
    "missing model": (["run", "missing_model.yaml", "--prompt", "x"], "unknown model 'tinny'; did you mean 'tiny'?"),
    "missing folder": (["run", "missing_folder.yaml", "--prompt", "x"], "model folder 'nowhere' does not exist"),
    "missing file": (["run", "no_such.yaml", "--prompt", "x"], "'no_such.yaml' does not exist"),
    "not UTF-8": (
        ["run", TINY, "--prompt-file", "latin1.txt"],
        "'latin1.txt' is not UTF-8 text: byte 0xe9 at offset 3",
    ),
    "max_tokens 0": (["run", TINY, "--prompt", "x", "--max-tokens", "0"], "0 is not in the range x>=1"),
    "empty prompt": (["run", TINY, "--prompt", ""], "--prompt is empty"),
    "no prompt": (["run", TINY], "give --prompt TEXT or --prompt-file FILE"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_exit_2_and_a_sentence(case: str, run_command: RunCommand, tmp_path: Path) -> None:
    text = TINY.read_text()
    (tmp_path / "unknown_key.yaml").write_text(text.replace("num_blocks:", "num_block:", 1))
    (tmp_path / "missing_model.yaml").write_text(text.replace("name: tiny", "name: tinny"))
    (tmp_path / "missing_folder.yaml").write_text(text.replace("name: tiny", "name: ./nowhere"))
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    args, sentence = BAD_INPUTS[case]
    result = run_command(*args)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ("tcpp", ["did you mean 'tcp'"]),
        ("hixl", ["libcann_hixl.so", "ASCEND_HOME_PATH, /opt/ascend", "LD_LIBRARY_PATH"]),
    ],
)
def test_a_data_path_that_is_not_there_is_exit_2_and_says_what_is(
    paths: str, words: list[str], run_command: RunCommand, tmp_path: Path
) -> None:
    env = {"LDR_PATHS": paths, "ASCEND_HOME_PATH": "/opt/ascend", "LLM_DATADIST_CACHE": str(tmp_path / "cache")}
    result = run_command("run", TINY, "--prompt", "x", env=env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert [word for word in [f"LDR_PATHS={paths}", *words] if word not in result.stderr] == []
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "cache").exists(), "the model must not be prepared for this"


def test_a_prompt_that_is_no_text_is_exit_2(run_command: RunCommand) -> None:
    result = run_command("run", TINY, "--prompt", b"caf\xe9")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "--prompt is no valid text" in result.stderr
    assert "Traceback" not in result.stderr


def test_interrupt_while_decoding_ends_every_process_and_exits_130(clean_env: dict[str, str], tmp_path: Path) -> None:
    args = [COMMAND, "run", TINY, "--prompt", PROMPT, "--max-tokens", "3000"]
    mark = f"MARK_OF_TEST={secrets.token_hex(16)}"
    env = clean_env | dict([mark.split("=")])
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=env, cwd=tmp_path
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == f"> {PROMPT[:100]}... ({len(PROMPT)} characters)\n"
        # The first character of the answer: decode runs.
        assert process.stdout.read(1) != ""
        with marked_processes(mark) as fds:
            assert len(fds) > 3  # the command, two actors and what makes up Ray
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert wait_until_ended(fds) == []
    assert process.returncode == 130, errors
    assert "Interrupted." in errors
    assert "Traceback" not in errors


def test_doctor_pulls_over_every_path(run_command: RunCommand) -> None:
    result = run_command("doctor")
    lines = {line[6:26].strip(): line for line in result.stdout.splitlines()}
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    for path in ("shm", "unix", "tcp"):
        assert "every byte compared" in lines[f"path {path}"]
    assert {"Python", "package", "compiled module", "path cma", "Ray", "CANN", "cores", "memory", "/dev/shm"} <= set(
        lines
    )


def test_doctor_says_why_cma_is_refused(run_command: RunCommand) -> None:
    result = run_command("doctor", env={"LDR_TEST_REFUSE_CMA": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if "path cma" in line)
    assert line.startswith("note")
    assert "not usable:" in line


@pytest.mark.smollm2
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [None, "tcp"])
def test_smollm2_answers_and_its_tokens_are_equal(path: str | None, run_command: RunCommand) -> None:
    prompt = "What is the capital of France?"
    env = {"LDR_PATHS": path} if path else {}
    args = ["run", SMOLLM2, "--prompt", prompt, "--max-tokens", "24", "--check"]
    # On a machine that never ran it the model is converted first.
    result = run_command(*args, env=env, deadline_s=500)
    assert result.returncode == 0, result.stdout + result.stderr
    match = re.search(r"^check: (\d+)/(\d+) tokens equal$", result.stdout, re.MULTILINE)
    assert match is not None, result.stdout
    assert match[1] == match[2]
    assert int(match[1]) > 1
    assert "The capital of France is Paris." in result.stdout
    _, num_bytes, used_path, _, _ = phases_of(result.stdout)["transfer"]
    assert used_path == (path or "shm")
    assert int(num_bytes) == whole_block_bytes(create(ClusterConfig.load(SMOLLM2).engine_spec()), prompt)
