"""Print the tables of docs/benchmarks/gate.md from its raw results: `python -m benchmarks.gate.page`.

Each table belongs between two comments of the page that have its name. tests/unit/test_gate_matrix.py fails if page and
results differ.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.gate.modes import HEALTHY, MODES, Mode

RAW = Path("docs/benchmarks/gate.json")
FOUND = {"Failed": "yes", "Error": "yes", "Inconclusive": "not promoted", "Passed": "**no**"}
"""Result of a mode in the table, by the verdict of the mode's last stage."""


def summary(rows: dict[str, Any]) -> str:
    """Return the sentence that says how many failure modes the gate found."""
    ends = [rows[mode.name]["stages"][-1]["verdict"] for mode in MODES if mode.name in rows]
    count = {found: sum(FOUND[end] == found for end in ends) for found in FOUND.values()}
    found, held, missed = count.values()
    return f"{len(ends)} of {len(MODES)} modes have run: {found} found, {held} inconclusive, {missed} missed."


def modes(rows: dict[str, Any]) -> str:
    """Return the table of failure modes. A mode without a row has not run."""
    lines = ["| mode | report | found | by | verdict | prompts | seconds |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_mode(mode, rows.get(mode.name)) for mode in MODES)])


def _mode(mode: Mode, row: dict[str, Any] | None) -> str:
    repository, number = mode.source.split("#")
    link = f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})"
    if row is None:
        return f"| `{mode.name}` | {link} | not run | | | | |"
    last = row["stages"][-1]
    cells = (FOUND[last["verdict"]], last["stage"], _verdict(last), *_cost(row["stages"]))
    return f"| `{mode.name}` | {link} | {' | '.join(cells)} |"


def healthy(rows: dict[str, Any]) -> str:
    """Return a table of the canaries without damage. Several runs of a canary repeat its stages."""
    lines = [
        "| canary | stages | runs | failed | mean KL, millinats | prompts | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in HEALTHY:
        if (row := rows.get(name)) is not None:
            stages = row["stages"]
            names = dict.fromkeys(f"`{one['stage']}`" for one in stages)
            means = [one["mean_kl_millinats"] for one in stages]
            cells = (
                ", ".join(names),
                str(len(stages) // len(names)),
                str(sum(one["verdict"] != "Passed" for one in stages)),
                " to ".join(dict.fromkeys(f"{mean:.1f}" for mean in (min(means), max(means)))),
                *_cost(stages),
            )
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def damages() -> str:
    """Return a table of failure modes: what the public report says, and the damage in this benchmark."""
    lines = ["| mode | what the report says | damage in this benchmark |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{mode.name}` | {mode.reported} | {mode.damage} |" for mode in MODES)])


def _verdict(stage: dict[str, Any]) -> str:
    return f"{stage['verdict']}, `{stage['reason']}`"


def _cost(stages: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the number of prompts and the seconds of all stages together, as texts."""
    return str(sum(one["prompts"] for one in stages)), str(sum(one["seconds"] for one in stages))


if __name__ == "__main__":
    found = json.loads(RAW.read_text())["rows"]
    print(summary(found), modes(found), healthy(found), damages(), sep="\n\n")
