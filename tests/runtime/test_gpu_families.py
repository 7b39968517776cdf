"""The benchmarks of families and of options, as they run on a GPU, with few prompts and without graphs on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


def run(script: str, out: Path, *arguments: str) -> dict[str, dict[str, object]]:
    """The rows that a program finds."""
    command = [sys.executable, str(ROOT / "runtime" / "benchmarks" / script), "--out", str(out), "--at-once=1",
               "--limit=600", "--within=3000", "--engine-args", '{"enforce_eager": true}', *arguments]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT / "demo"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    subprocess.run(command, check=False, timeout=3300, env=env)
    (written,) = (path for path in out.glob("*.json") if path.suffix == ".json")
    rows: dict[str, dict[str, object]] = json.loads(written.read_text())["rows"]
    return rows


def test_a_family_is_found_right_with_preemption_and_prefix_hits(tmp_path):
    row = run("gpu_families.py", tmp_path, "--families=qwen3", "--prompts=8", "--tokens=8")["qwen3"]
    assert row["verdict"] == "served and right"
    counters = row["engines"]["k4v4/codec"]["counters"]
    assert counters["vllm:num_preemptions"]
    assert counters["vllm:prefix_cache_hits"]


def test_what_a_request_may_ask_for_is_found_right(tmp_path):
    rows = run("gpu_options.py", tmp_path, "--what=details", "--prompts=4", "--tokens=6")
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(
        ("prompt logprobs", "parallel samples", "structured output"), "served and right"
    )
