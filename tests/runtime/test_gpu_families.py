"""The GPU benchmarks for model families and options, run on a CPU with few prompts and without CUDA graphs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


def rows(script: str, out: Path, *arguments: str):
    """Return the verdicts on a program's answers, by row."""
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    asking = [script, f"--out={out}", "--at-once=1", "--limit=600", "--within=3000", *arguments]
    name = "families" if "families" in script else "options"
    judging = ["gpu_families_page", str(out / f"{name}-answers.json.gz"), str(out / "page.md")]
    for program, *options in (asking, judging):
        command = [sys.executable, "-m", f"benchmarks.accuracy.{program}", *options]
        subprocess.run(command, cwd=ROOT, check=True, timeout=3300, env=env)
    (found,) = json.loads((out / "page.json").read_text())
    return found["rows"]


def test_the_program_for_families_finds_right_answers_with_preemption_and_prefix_hits(tmp_path):
    row = rows("gpu_families", tmp_path, "--families=qwen3", "--prompts=8", "--tokens=8")["qwen3"]
    assert row["verdict"] == "served and right"
    counters = row["engines"]["k4v4/codec"]["counters"]
    assert counters["vllm:num_preemptions"]
    assert counters["vllm:prefix_cache_hits"]


def test_the_program_for_families_checks_the_features_of_requests(tmp_path):
    found = rows("gpu_options", tmp_path, "--what=details", "--prompts=4", "--tokens=6")
    wanted = ("prompt logprobs", "parallel samples", "structured output")
    assert {name: row["verdict"] for name, row in found.items()} == dict.fromkeys(wanted, "served and right")
