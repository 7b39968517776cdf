"""The README's demo without a terminal: every step of the story is checked against its record."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_localcluster import build
from kvpilot_smallmodels.models import smollm2_135m

pytestmark = pytest.mark.timeout(5400)
ROOT = Path(__file__).parents[2]
# Nothing listens on the discard port: a request through this proxy would fail.
PROXY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    build.build(newer=False)
    smollm2_135m()
    path = tmp_path_factory.mktemp("demo") / "record.json"
    command = [sys.executable, "-m", "kvpilot_demo.prepare", "--plain", f"--record={path}"]
    env = {**os.environ, "PYTHONPATH": "demo:localcluster", "HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=5300, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return ended.stdout, json.loads(path.read_text())


@pytest.fixture
def record(demo):
    return demo[1]


def test_a_real_chat_request_is_answered_through_the_service(record):
    assert "Paris" in record["answer"]


def test_memory_pressure_is_reported_with_its_numbers(record):
    assert "KV use" in record["pressure"]
    assert "waiting" in record["pressure"]


def test_the_operator_says_why_it_chose_k4v4(record):
    assert record["decision"].startswith("auto -> k4v4")
    assert "would hold" in record["decision"]


def test_the_canarys_dtype_holds_at_least_3_6_times_the_tokens(record):
    # 22 blocks of 128 tokens become 85. vLLM's capacity does not count residual pages.
    assert record["capacity_ratio"] >= 3.6


def test_no_request_fails_during_the_change(record):
    assert record["requests"] > 0
    assert record["failed_requests"] == 0, record["failures"]


def test_the_good_canary_passes_its_probe(record):
    assert record["good_probe"]["verdict"] == "Passed"
    assert record["good_probe"]["top1AgreementPermille"] > 0


def test_the_bad_canary_fails_before_it_gets_traffic(record):
    assert record["bad_probe"]["verdict"] == "Failed"
    assert record["bad_canary"]["reason"] == "AccuracyRegressed"
    assert not record["canary_had_traffic"]


def test_the_bad_dtype_is_denied_and_the_last_good_one_serves(record):
    assert [(one["dtype"], one["recentTokens"]) for one in record["denied"]] == [("k2v2", 0)]
    assert record["final_dtype"] == "k4v4"
    assert record["final_answer"]


def test_both_answers_are_shown_side_by_side(record):
    found = re.fullmatch(r"asked: .+ \| 16-bit: (.+) \| k2v2: (.+)", record["bad_answers"], re.DOTALL)
    assert found
    assert found[1] != found[2]


def test_the_screen_has_steps_events_and_a_summary_but_no_raw_log_line(demo):
    printed, record = demo
    for title in record["seconds"]:
        assert f"== {title}" in printed
    for event in ("CanaryStarted: ", "CanaryPassed: ", "AnswersDiffer: "):
        assert event in printed
    for line in ("Problem  ", "Change  ", "Gain  ", "Mistake  ", "Caught  "):
        assert line in printed
    assert "INFO" not in printed
    assert "Traceback" not in printed
