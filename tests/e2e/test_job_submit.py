"""``ray job submit -- llm-datadist-ray run ...`` on a Ray that somebody has started."""

from __future__ import annotations

import subprocess

from installed_command import CONFIGS
from ray_head import RAY, Head

JOB_DEADLINE_S = 200.0


def test_submitted_job_runs_prefill_and_decode_and_checks_every_token(head: Head) -> None:
    submit = [RAY, "job", "submit", "--address", head.job_address, "--"]
    run = ["llm-datadist-ray", "run", CONFIGS / "local_1p1d_tiny.yaml", "--prompt", "Hello there", "--max-tokens", "12"]
    result = subprocess.run(
        [*submit, *run, "--check"], capture_output=True, encoding="utf-8", timeout=JOB_DEADLINE_S, env=head.env
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "check: 12/12 tokens equal" in output
    assert "succeeded" in output.lower()
    list_jobs = [RAY, "job", "list", "--address", head.job_address]
    jobs = subprocess.run(list_jobs, capture_output=True, encoding="utf-8", timeout=60, env=head.env)
    assert "SUCCEEDED" in jobs.stdout + jobs.stderr
