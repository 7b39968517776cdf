"""The accuracy table's model of the cache matches a real engine at every position that is decoded from pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_smallmodels.models import tiny_llama

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("after", [("--tokens=256",), ("--tokens=256", "--hit=192")], ids=["decoded", "after-a-hit"])
def test_the_accuracy_tables_kl_divergence_is_within_20_percent_of_a_real_engines(tmp_path, after):
    out = tmp_path / "kl.json"
    command = [sys.executable, "-m", "benchmarks.accuracy.engine_kl", f"--model={tiny_llama()}", f"--out={out}",
               "--rows=k4v4+self+w64", "--sequences=2", "--chunk=512", *after]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=3000)
    (section,) = json.loads(out.read_text()).values()
    row = section["rows"]["k4v4+self+w64"]
    # With random weights and a thousand tokens, even small damage is a large figure.
    assert row["engine"]["mean_kl"] > 100
    assert row["engine"]["mean_kl"] == pytest.approx(row["model"]["mean_kl"], rel=0.2)
    # The compared distributions are those that the engine answered from.
    assert row["unlike"] < 1e-3
    assert any("source self" in line for line in row["said"])
    assert any("64 tokens" in line for line in row["said"])
