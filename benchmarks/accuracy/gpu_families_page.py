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
# Families of models, and what people switch on, in real vLLM on a GPU

This page shows if `k4v4` gives right answers with many model families and vLLM features. The models are small and
have random weights. Answers are greedy, and speed was not measured. All figures are mean KL divergences in nats x 1000,
over the 20 most likely tokens. Divergences from plain transformers cover all tokens of all answers. Divergences between
two engines cover each answer up to its first difference.

Engines run in one of two ways:

* *crowd*: many prompts at once, with CUDA graphs, prefix caching, chunked prompts and a small KV cache;
* *alone*: one prompt at a time, eager, without prefix caching.

`k4v4` runs in two variants:

* *codec*: in a crowd, without window and factors, and a chunk reads its own tokens back from pages. Its predictions are
  compared with plain transformers in float32: with the codec, without it (`auto`), and with the codec and one misread
  block of 16 prompt tokens (*misread*). *rounding alone* is the effect of rounding errors on transformers with the
  codec.
* *as served*: with its default window and its own factors. Its answers in a crowd are compared with its answers alone.
  The table also compares `auto` in a crowd with `auto` alone, and `k4v4` alone with `auto` alone.

The verdict *served and right* means that all of these hold:

* `auto` is at least {near:.0f} times nearer to transformers without the codec than to transformers with it. A
  model in bfloat16 also passes if `auto` is no further off than plain transformers in bfloat16.
* The codec is at least {near:.0f} times nearer to transformers with the codec than to transformers without it. Or it is
  at most {rounded:.0f} times as far off as *rounding alone* and `auto` together.
* The codec is at least {fault:.0f} times nearer to transformers with the codec than to those with a misread block.
* `k4v4` as served has at most {served:.2f} times the divergence of the bare codec from transformers without a codec.
* `k4v4` in a crowd differs from `k4v4` alone at most by a sum: the divergence of `k4v4` alone from `auto` alone, and
  {crowd:.0f} times the divergence of `auto` in a crowd from `auto` alone.
* No logit is NaN.
"""


TITLES = {"families": "Families", "options": "What people switch on", "options-2": "On two GPUs"}


def number(value: float) -> str:
    """Return a KL divergence, given in nats, as text in nats x 1000."""
    if math.isnan(value):
        return "-"
    return f"{1e3 * value:,.1f}" if value < 1 else f"{1e3 * value:,.0f}"


def pressure(row: dict[str, Any], run: str) -> str:
    """Return the numbers of preemptions and of cached tokens in a run as text."""
    counters = row.get("engines", {}).get(run, {}).get("counters") or {}
    if not counters:
        return "-"
    return f"{counters['vllm:num_preemptions']} / {counters['vllm:prefix_cache_hits']:,}"


def family(name: str, row: Figures) -> str:
    """Return the figures of a model family as one row of the Markdown table."""

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
    """Return the Markdown row of a result about an option of vLLM, such as LoRA or sleep mode."""
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
