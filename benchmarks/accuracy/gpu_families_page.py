"""Judge the answers of gpu_families.py and gpu_options.py, and write a page: `gpu_families_page.py ANSWERS ... OUT.md`.

ANSWERS are result files of these programs. This program creates the models again. Their weights must equal those of the
models that answered. A JSON file beside OUT gets all figures.
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
# Families of models, and what people switch on, in real vLLM on a GPU

Small random models, `k4v4` beside `auto`, greedy answers; no speed was measured. All figures are mean Kullback-Leibler
divergences (nats x 1000) of the 20 most likely tokens. Those from plain transformers cover all tokens of all answers,
those between engines an answer up to its first difference.

* The *codec*'s column is the engine without window and factors, whose chunks read themselves back, in a crowd (CUDA
  graphs, prefix caching, chunks, little cache). It shows how far its predictions are from plain transformers in float32
  with the same codec, without one, and with one block of 16 tokens of the prompt misread.
* *As served* is `k4v4` with its default window and its own factors. It shows how far its answers in a crowd are from
  its own alone (one at a time, eager, no prefix caching), beside the same of `auto`, and how far alone it is from
  `auto`.

*Served and right* means all of this:

* `auto` and the codec are each nearer to their own oracle in transformers than to the other's, by a factor of at least
  {near:.0f}. Or `auto` is no further off than plain transformers in bfloat16, and the codec no further than
  {rounded:.0f} times the effect of rounding alone, which moves codes.
* The codec is nearer to its oracle than with a block misread, by a factor of at least {fault:.0f}.
* `k4v4` as served does at most {served:.2f} times the damage of the bare codec.
* In a crowd `k4v4` is at most as far from itself alone as alone from `auto`, and at most {crowd:.0f} times as far as
  `auto` in a crowd is from `auto` alone.
"""


TITLES = {"families": "Families", "options": "What people switch on", "options-2": "On two GPUs"}


def number(value: float) -> str:
    """Return a divergence in nats as text, times 1000."""
    if math.isnan(value):
        return "-"
    return f"{1e3 * value:,.1f}" if value < 1 else f"{1e3 * value:,.0f}"


def pressure(row: dict[str, Any], run: str) -> str:
    """Return a run's preemptions and cached tokens as text."""
    counters = row.get("engines", {}).get(run, {}).get("counters") or {}
    if not counters:
        return "-"
    return f"{counters['vllm:num_preemptions']} / {counters['vllm:prefix_cache_hits']:,}"


def family(name: str, row: Figures) -> str:
    """Return a family's row of the table as Markdown."""

    def numbers(*names: str) -> str:
        return " / ".join(number(far(row, one)) for one in names)

    cells = [
        name, row["dtype"], numbers("auto/crowded from oracle auto", "auto/crowded from oracle k4v4"),
        numbers("k4v4/codec from oracle k4v4", "oracle k4v4 rounded", "k4v4/codec from oracle auto",
                "k4v4/codec from a misread block"),
        numbers("k4v4/crowded from oracle auto"),
        numbers("k4v4/crowded from k4v4/alone", "auto/crowded from auto/alone", "k4v4/alone from auto/alone"),
        pressure(row, "k4v4/codec"), pressure(row, "k4v4/crowded"), row["verdict"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(rows: Rows) -> list[str]:
    """Return a table with one row per family, or per model on several GPUs."""
    heads = [
        "", "computed in", "`auto` from transformers: `auto` / codec",
        "codec from transformers: codec / rounding alone / `auto` / misread", "as served from transformers: `auto`",
        "crowd from alone: as served / `auto` / alone from `auto`",
        "preemptions / cached tokens: codec", "as served", "verdict",
    ]  # fmt: skip
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(family(*item) for item in rows.items()), ""]


def other(name: str, row: dict[str, Any]) -> str:
    """Return the row of a result that is neither a family nor a model on several GPUs."""
    figures = [
        f"{key}: {number(far(row, key))}" if isinstance(value, dict) and "mean_kl" in value else f"{key}: {value}"
        if not isinstance(value, float) else f"{key}: {number(value)}"
        for key, value in row.items() if key not in ("verdict", "said", "counters") and not key.endswith(" said")
    ]  # fmt: skip
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
        lines += ["| what | figures, divergences in millinats | verdict |", "|---|---|---|"]
        lines += [*(other(*item) for item in others.items()), ""]
    return [*lines, *([facts["note"], ""] if "note" in facts else [])]


def judged(facts: dict[str, Any]) -> Rows:
    """Return the judged results of one run of a program.

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
