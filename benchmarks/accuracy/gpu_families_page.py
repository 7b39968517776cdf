"""Judge the answers of gpu_families.py and gpu_options.py, and write a page: `gpu_families_page.py ANSWERS ... OUT.md`.

ANSWERS are result files of these programs. This program creates the models again, and their weights must equal the
weights of the models that answered. It writes all figures to a JSON file beside OUT.
"""

import gzip
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accuracy import gpu_options
from benchmarks.accuracy.gpu_families import CASES, RUNS, digest, made
from benchmarks.accuracy.gpu_families_judge import CROWD, FAULT, NEAR, ROUNDED, SERVED, Figures, far, judge
from benchmarks.engine.gpu_engine_report import versions_of

Rows = dict[str, Figures]

INTRODUCTION = """\
# Does `k4v4` answer right with many model families and vLLM features?

This page shows which model families and features of vLLM gave right answers with `k4v4` on H100s. **All of them did.**
The models are small and have random weights, answers are greedy, and speed was not measured.

A figure is a *distance* between two sources of predictions: the mean KL divergence in millinats (thousandths of a nat)
over the 20 most likely tokens. Distances from plain transformers cover all tokens of all answers. Distances between two
engines cover each answer up to its first difference. Engines run in one of two ways:

* *crowd*: many prompts at once, with CUDA graphs, prefix caching, chunked prompts and a small KV cache;
* *alone*: one prompt at a time, eager, without prefix caching.

`k4v4` runs in two variants:

* *codec*: in a crowd, without window and factors, and every token is read back from pages. Its predictions are
  compared with plain transformers in float32 that use the same codec, that use no codec, and that use the codec but
  misread one block of 16 prompt tokens.
* *as served*: with its default window and its own calibration factors.

The verdict *served and right* means that all of these hold:

* `auto` is at least {near:.0f} times nearer to transformers without the codec than to transformers with it. A
  model in bfloat16 also passes if `auto` is no further off than plain transformers in bfloat16.
* The codec is at least {near:.0f} times nearer to transformers with the codec than to transformers without it. Or its
  distance from transformers with the codec is at most {rounded:.0f} times the sum of two distances: that of `auto` from
  transformers without the codec, and that by which rounding errors move transformers with the codec.
* The codec is at least {fault:.0f} times nearer to transformers with the codec than to those with a misread block.
* `k4v4` as served is at most {served:.2f} times as far from transformers without a codec as the bare codec is.
* `k4v4` in a crowd differs from `k4v4` alone at most by a sum: the distance of `k4v4` alone from `auto` alone, and
  {crowd:.0f} times the distance of `auto` in a crowd from `auto` alone.
* No logit is NaN.

All distances are in h100-families.json beside this page.
"""


TITLES = {"families": "Families", "options": "Features of vLLM", "options-2": "On two GPUs"}


def number(value: float) -> str:
    """Return a KL divergence, given in nats, as text in thousandths of a nat."""
    if math.isnan(value):
        return "-"
    return f"{1e3 * value:,.1f}" if value < 1 else f"{1e3 * value:,.0f}"


COLUMNS = {
    "`auto` from transformers": "auto/crowded from oracle auto",
    "codec from transformers with the codec": "k4v4/codec from oracle k4v4",
    "codec from transformers without it": "k4v4/codec from oracle auto",
    "codec from transformers with a misread block": "k4v4/codec from a misread block",
    "as served from transformers without the codec": "k4v4/crowded from oracle auto",
    "as served: crowd from alone": "k4v4/crowded from k4v4/alone",
}
"""Column titles of the families' table, and the name of the figure that each column shows."""


def table(rows: Rows) -> list[str]:
    """Return a table with one row per family, or per model on several GPUs."""
    lines = [f"| model | computed in | {' | '.join(COLUMNS)} | verdict |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name, row in rows.items():
        cells = [name, row["dtype"], *(number(far(row, one)) for one in COLUMNS.values()), row["verdict"]]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def shown(value: Any) -> str:
    """Return a figure of a feature as text. Numbers with a fraction are nats, and are shown in thousandths of a nat."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(one)}" for name, one in value.items())
    return number(value) if isinstance(value, float) else str(value)


def other(name: str, row: dict[str, Any]) -> str:
    """Return the Markdown row of a result about an option of vLLM, such as LoRA or sleep mode."""
    figures = [
        f"{key}: {number(far(row, key)) if isinstance(value, dict) and 'mean_kl' in value else shown(value)}"
        for key, value in row.items()
        if key not in ("verdict", "said", "counters") and not key.endswith(" said")
    ]
    return f"| {name} | {'; '.join(figures)} | {row['verdict']} |"


def section(facts: dict[str, Any]) -> list[str]:
    """Return the page's section about one run of a program."""
    rows: Rows = facts["rows"]
    compared = {name: row for name, row in rows.items() if "engines" in row}
    others = {name: row for name, row in rows.items() if "engines" not in row}
    lines = [f"## {TITLES[facts['name']]}", "", f"{versions_of(facts['versions'])}; {facts['date']} UTC; "
             f"{facts['prompts']} prompts, {facts['tokens']} tokens each.", ""]  # fmt: skip
    lines += table(compared) if compared else []
    if others:
        lines += ["| feature | distances, in millinats | verdict |", "|---|---|---|"]
        lines += [*(other(*item) for item in others.items()), ""]
    return [*lines, *([facts["note"], ""] if "note" in facts else [])]


def judged(facts: dict[str, Any]) -> Rows:
    """Judge the answers in one result file, and return the rows of figures.

    Raises:
        ValueError: a model that is created here differs from the one that answered.
    """
    told: dict[str, Any] = facts["answers"]
    with tempfile.TemporaryDirectory(prefix="kvpilot-judged-") as folder:
        one = facts["name"] == "families"
        models = made(list(facts["weights"]), Path(folder))[0] if one else gpu_options.made(Path(folder))
        for name, wanted in facts["weights"].items():
            if name not in models or digest(models[name]) != wanted:
                raise ValueError(f"{name} as it is made here has other weights than the model that answered ({wanted})")
        if one:
            return {name: judge(models[name], CASES[name].dtype,
                                {run: told[f"{name} {run}"] for run in RUNS if f"{name} {run}" in told})
                    for name in models}  # fmt: skip
        on_one = facts["name"] == "options"
        what = [x for x in (gpu_options.ON_ONE if on_one else gpu_options.SPREAD) if any(x in name for name in told)]
        judging = gpu_options.rows_of_one if on_one else gpu_options.rows_of_two
        return {name: row for x in what for name, row in judging(told, models, x).items()}


def main() -> int:
    """Write the page, and one file with all results."""
    *raw, out = map(Path, sys.argv[1:])
    found = []
    for path in raw:
        with gzip.open(path, "rt") as file:
            facts = json.load(file)
        found.append({**{key: value for key, value in facts.items() if key != "answers"}, "rows": judged(facts)})
        for name, row in found[-1]["rows"].items():
            print(f"{name}: {row['verdict']}", flush=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    introduction = INTRODUCTION.format(near=1 / NEAR, rounded=ROUNDED, fault=1 / FAULT, crowd=CROWD, served=SERVED)
    out.write_text("\n".join([introduction, *(line for facts in found for line in section(facts))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
