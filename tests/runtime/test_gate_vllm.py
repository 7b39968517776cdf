"""`kvpilot probe` against real vLLM and real weights: noise passes, and a dtype that answers garbage does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpilot_demo.models import smollm2_135m
from kvpilot_localcluster.engines.real import engine
from kvpilot_operator.gate import command

# vLLM's CPU backend accepts this one and computes something else.
BROKEN = "int4_per_token_head"
KV_MEMORY = "--kv-cache-memory-bytes=128M"

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine(smollm2_135m(), "auto", tmp_path_factory.mktemp("auto"), KV_MEMORY) as running:
        yield running.url


def probed(capsys: pytest.CaptureFixture[str], baseline: str, candidate: str) -> tuple[int, dict[str, Any]]:
    arguments = ("--probe-set", "builtin/general", "--deadline-seconds", "900", "--json")
    code = command.main(["--baseline", baseline, "--candidate", candidate, *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_a_sixteen_bit_engine_passes_against_itself_by_the_default_limits(
    baseline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = probed(capsys, baseline, baseline)
    assert code == 0, found["message"]
    assert found["baseline"]["model"] == "m"
    assert found["measured"]["positions"] > 200


def test_a_dtype_that_answers_garbage_has_regressed(
    baseline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(smollm2_135m(), BROKEN, tmp_path, KV_MEMORY) as running:
        code, found = probed(capsys, baseline, running.url)
    assert code == 1, found["message"]
    assert found["excess_kl_micronats"] > 500_000
    assert found["measured"]["sample"]["stable"] != found["measured"]["sample"]["canary"]
