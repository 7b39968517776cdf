"""Judges answers of gpu_families.py and gpu_options.py and makes their page: `gpu_families_page.py ANSWERS ... OUT.md`.

ANSWERS are what these programs wrote. The models are made anew, and have to be those that answered. Beside OUT lie all
figures in one file.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_options
from gpu_engine_report import versions_of
from gpu_equality import prompts_of
from gpu_families import CASES, RUNS, digest, made
from gpu_families_judge import CROWD, NEAR, SERVED, judge

Rows = dict[str, dict[str, Any]]

INTRODUCTION = """\
# Families of models, and what people switch on, in real vLLM on a GPU

Small random models, `k4v4` beside `auto`, greedy answers; no speed was measured. The *codec*'s column is the engine
without window and factors, whose chunks read themselves back, in a crowd (CUDA graphs, prefix caching, chunks, little
cache): how far its predictions are from those of plain transformers in float32 with the same codec, without one, and
with one block of 16 tokens of the prompt misread. *As served* is `k4v4` with its default window and its own factors:
how far its answers in a crowd are from its own alone (one at a time, eager, no prefix caching), beside the same of
`auto`, and how far alone it is from `auto`. All are mean Kullback-Leibler divergences in millinats, of the 20 most
likely tokens; those from plain transformers over all tokens of all answers, those between engines up to an answer's
first difference.

*Served and right*: `auto` and the codec are each nearer to what transformers say of them than to what they say of the
other, by a factor of {near:.0f} at least (or the codec as near as rounding allows, which moves codes), and the codec
so, too, than to a misread block; `k4v4` as served does at most {served:.2f} times the damage of the bare codec; in a
crowd it is from itself alone at most as far as alone from `auto`, and {crowd:.0f} times what a crowd changes `auto`.
"""


TITLES = {"families": "Families", "options": "What people switch on", "options-2": "On two GPUs"}


def number(value: float | None) -> str:
    """Nats as millinats."""
    if value is None or math.isnan(value):
        return "-"
    return f"{1e3 * value:,.1f}" if value < 1 else f"{1e3 * value:,.0f}"


def mean_kl(row: dict[str, Any], name: str) -> str:
    """Of two runs."""
    return number(row.get(name, {}).get("mean_kl"))


def pressure(row: dict[str, Any], run: str) -> str:
    """Preemptions and cached tokens of a run."""
    counters = row.get("engines", {}).get(run, {}).get("counters") or {}
    if not counters:
        return "-"
    return f"{counters['vllm:num_preemptions']} / {counters['vllm:prefix_cache_hits']:,}"


def family(name: str, row: dict[str, Any]) -> str:
    """A line of the table."""
    codec = " / ".join(
        number(row.get(f"k4v4/codec from {what}")) for what in ("oracle k4v4", "oracle auto", "a misread block")
    )
    auto = " / ".join(number(row.get(f"auto/crowded from oracle {what}")) for what in ("auto", "k4v4"))
    cells = [
        name, row.get("dtype", ""), auto, codec, mean_kl(row, "k4v4/crowded from k4v4/alone"),
        mean_kl(row, "auto/crowded from auto/alone"), mean_kl(row, "k4v4/alone from auto/alone"),
        pressure(row, "k4v4/crowded"), row["verdict"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(rows: dict[str, dict[str, Any]], first: str) -> list[str]:
    """Families, or what is spread over GPUs."""
    heads = [
        first, "weights", "`auto` from transformers: `auto` / codec",
        "codec from transformers: codec / `auto` / misread", "as served, crowd", "`auto`, crowd",
        "as served from `auto`", "preemptions / cached tokens", "verdict",
    ]  # fmt: skip
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(family(*item) for item in rows.items()), ""]


def other(name: str, row: dict[str, Any]) -> str:
    """A line of what is neither."""
    figures = [
        f"{key}: {mean_kl(row, key)}" if isinstance(value, dict) and "mean_kl" in value else f"{key}: {value}"
        if not isinstance(value, float) else f"{key}: {number(value)}"
        for key, value in row.items() if key not in ("verdict", "said", "counters") and not key.endswith(" said")
    ]  # fmt: skip
    return f"| {name} | {'; '.join(figures)} | {row['verdict']} |"


def section(facts: dict[str, Any]) -> list[str]:
    """One run of a program."""
    rows: Rows = facts["rows"]
    compared = {name: row for name, row in rows.items() if "engines" in row}
    others = {name: row for name, row in rows.items() if "engines" not in row}
    lines = [f"## {TITLES[facts['name']]}", "", f"{versions_of(facts['versions'])}; {facts['date']} UTC; "
             f"{facts['prompts']} prompts, {facts['tokens']} tokens each.", ""]  # fmt: skip
    lines += table(compared, "what") if compared else []
    if others:
        lines += ["| what | figures, divergences in millinats | verdict |", "|---|---|---|"]
        lines += [*(other(*item) for item in others.items()), ""]
    return lines


def judged(facts: dict[str, Any]) -> Rows:
    """Rows of one run of a program, of its answers.

    Raises:
        ValueError: the models that are made here are not those that answered.
    """
    told: dict[str, Any] = facts["answers"]
    with tempfile.TemporaryDirectory(prefix="kvpilot-judged-") as folder:
        one = facts["name"] == "families"
        models = made(list(facts["weights"]), Path(folder))[0] if one else gpu_options.made(Path(folder))
        for name, wanted in facts["weights"].items():
            if name not in models or digest(models[name]) != wanted:
                raise ValueError(f"{name} as it is made here has other weights than the model that answered ({wanted})")
        prompts = prompts_of(next(iter(models.values())), facts["prompts"])
        if one:
            return {name: judge(models[name], CASES[name].dtype, prompts,
                                {run: told[f"{name} {run}"] for run in RUNS if f"{name} {run}" in told})
                    for name in models}  # fmt: skip
        on_one = facts["name"] == "options"
        what = [x for x in (gpu_options.ON_ONE if on_one else gpu_options.SPREAD) if any(x in name for name in told)]
        judging = gpu_options.rows_of_one if on_one else gpu_options.rows_of_two
        return {name: row for x in what for name, row in judging(told, models, x, prompts).items()}


def main() -> int:
    """Write the page and the joined figures."""
    *raw, out = map(Path, sys.argv[1:])
    found = []
    for path in raw:
        with gzip.open(path, "rt") as file:
            facts = json.load(file)
        found.append({**{key: value for key, value in facts.items() if key != "answers"}, "rows": judged(facts)})
        for name, row in found[-1]["rows"].items():
            print(f"{name}: {row['verdict']}", flush=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    introduction = INTRODUCTION.format(near=1 / NEAR, crowd=CROWD, served=SERVED)
    out.write_text("\n".join([introduction, *(line for facts in found for line in section(facts))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
