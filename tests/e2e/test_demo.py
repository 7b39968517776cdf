"""The README's demo without a terminal: every step of the story is checked against its record."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from support.processors import serves_quantized_by_vllm

pytestmark = pytest.mark.timeout(2700)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    path = folder / "record.json"
    command = [sys.executable, "-m", "kvpilot_demo", "--plain", f"--record={path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2600, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return json.loads(path.read_text())


def test_a_real_chat_request_is_answered_through_the_service(record):
    assert "Paris" in record["answer"]


def test_memory_pressure_is_reported_with_its_numbers(record):
    assert "KV use" in record["pressure"]
    assert "waiting" in record["pressure"]


def test_the_operator_says_why_it_chose_k4v4(record):
    assert record["decision"].startswith("auto -> k4v4")
    assert "would hold" in record["decision"]


def test_capacity_grows_by_at_least_3_6(record):
    # 22 blocks of 128 tokens become 85. Of the 17 blocks of a sequence of 2,048 tokens, one is the ring of its recent
    # window.
    assert record["capacity_ratio"] >= 3.6


def test_no_request_fails_during_the_change(record):
    assert record["requests"] > 0
    assert record["failed_requests"] == 0, record["failures"]


def test_the_good_canary_passes_its_probe(record):
    assert record["good_probe"]["verdict"] == "Passed"
    assert record["good_probe"]["top1AgreementPermille"] > 0


@serves_quantized_by_vllm
def test_the_preflight_warns_of_the_bad_dtype(record):
    assert "int4_per_token_head" in record["preflight_warning"]


@serves_quantized_by_vllm
def test_the_bad_canary_fails_before_it_gets_traffic(record):
    assert record["bad_probe"]["verdict"] == "Failed"
    assert record["bad_canary"]["reason"] == "AccuracyRegressed"
    assert not record["canary_had_traffic"]


@serves_quantized_by_vllm
def test_the_bad_dtype_is_denied_and_the_last_good_one_serves(record):
    assert [d["dtype"] for d in record["denied"]] == ["int4_per_token_head"]
    assert record["final_dtype"] == "k4v4"


@serves_quantized_by_vllm
def test_both_answers_are_shown_side_by_side(record):
    found = re.fullmatch(r"asked: .+ \| 16-bit: (.+) \| int4_per_token_head: (.+)", record["bad_answers"], re.DOTALL)
    assert found
    assert found[1] != found[2]
