"""The gate's detection matrix: its modes, its raw results, and the page that shows them."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gate import damage, page
from benchmarks.gate.modes import HEALTHY, MODES, SHARED

ROOT = Path(__file__).parents[2]
RAW = json.loads((ROOT / "docs/benchmarks/gate.json").read_text())
PAGE = (ROOT / "docs/benchmarks/gate.md").read_text()


def test_the_matrix_has_sixteen_modes_or_more_that_each_name_a_public_report() -> None:
    names = [mode.name for mode in MODES]
    assert len(set(names)) == len(names) >= 16
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", mode.source) for mode in MODES)
    assert all(mode.reported and mode.damage for mode in MODES)


def test_each_injected_damage_has_a_failure_mode_and_vice_versa() -> None:
    damages = {*damage.TABLES, *damage.STORES, *damage.LOGITS, damage.CUT}
    names = {mode.name for mode in MODES}
    assert damages <= names
    assert {mode.name for mode in MODES if mode.engine == SHARED} <= damages


def test_the_raw_results_have_only_known_rows_and_end_each_row_with_a_verdict() -> None:
    assert set(RAW["rows"]) <= {*(mode.name for mode in MODES), *HEALTHY}
    verdicts = {stage["verdict"] for row in RAW["rows"].values() for stage in row["stages"]}
    assert verdicts <= {"Passed", "Failed", "Error", "Inconclusive"}


def test_the_page_of_the_detection_matrix_shows_the_raw_results() -> None:
    rows = RAW["rows"]
    for part in (page.summary(rows), page.modes(rows), page.healthy(rows), page.damages()):
        assert part in PAGE


def test_the_table_of_images_shows_the_raw_results() -> None:
    images = (ROOT / "docs/accuracy-images.md").read_text()
    for name, first in (("k4v4 with images", "`k4v4`"), ("pictures", "16 bits, but attention")):
        message = RAW["rows"][name]["stages"][-1]["message"].rpartition("all prompts: ")[2]
        kl, agreement, positions = re.findall(r"KL ([\d.]+) .*agreement ([\d.]+)% .* (\d+) positions", message)[0]
        (line,) = (line for line in images.splitlines() if line.startswith(f"| {first}"))
        assert f" | {float(kl):.{1 if float(kl) < 100 else 0}f} | {agreement}% | {positions} | " in line


def test_the_notes_on_canaries_with_host_memory_show_the_raw_results() -> None:
    auto, packed = (
        RAW["rows"][f"{dtype} with host memory"]["stages"][-1]["buckets"]["from-OffloadingConnector"]
        for dtype in ("auto", "k4v4")
    )
    means = f"{sum(auto) / len(auto):.1f} and {sum(packed) / len(packed):.1f}"
    told = (
        f"sound after {len(auto)} prompts with `auto` and after {len(packed)} with `k4v4`. Its mean damage is {means} "
    )
    assert told in " ".join(PAGE.split())
