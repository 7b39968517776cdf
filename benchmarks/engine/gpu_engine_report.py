"""Make the tables of the engine benchmark: results, their ratios to those of `auto` and `fp8`, and targets.

`load` reads the JSON files of gpu_engine.py. If a shape and dtype have several runs, the newest one counts.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]
Runs = dict[str, Run]
"""Runs of one shape, by dtype."""


def load(paths: Iterable[Path]) -> dict[str, Runs]:
    """Return the runs in these files by shape and dtype. A shape's name includes the number of GPUs, if several."""
    found: dict[str, Runs] = {}
    for run in sorted((run for path in paths for run in _documents(path)), key=lambda run: run["date"]):
        gpus = f", {run['tp']} GPUs" if run["tp"] > 1 else ""
        found.setdefault(run["shape"] + gpus, {})[run["dtype"]] = run
    return found


def _documents(path: Path) -> list[Run]:
    read = json.loads(path.read_text())
    return read if isinstance(read, list) else [read]


def step(run: Run | None, batch: int, context: int) -> float | None:
    """Return the milliseconds of a decode step; None if it was not measured."""
    case = (run or {}).get("cases", {}).get(f"{batch}x{context}", {})
    found: float | None = case.get("step_ms")
    return found


def prefill(run: Run | None, context: int) -> float | None:
    """Return the prefill rate of prompts of `context` tokens, in tokens per second, from the largest batch."""
    cases = [case for case in (run or {}).get("cases", {}).values() if case.get("context") == context]
    rates = [(case["batch"], case["prefill"]["tokens_per_s"]) for case in cases if case["prefill"]["tokens_per_s"]]
    return max(rates)[1] if rates else None


def attention(run: Run | None, batch: int, context: int) -> float | None:
    """Return the milliseconds of a decode step that are spent on the context; None if not measured.

    The result is the step's time minus the time of a step with 16 tokens of context per sequence.
    """
    whole, empty = step(run, batch, context), step(run, batch, 16)
    return whole - empty if whole and empty else None


def chunked(run: Run | None) -> float | None:
    """Return the seconds to the first token of a long prompt whose first half is cached."""
    found: float | None = (run or {}).get("chunked", {}).get("ttft_s")
    return found


def capacity(run: Run | None) -> float | None:
    """Return the number of tokens that the KV cache holds."""
    return (run or {}).get("kv_tokens")


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient, or None if a value is missing or 0."""
    return numerator / denominator if numerator and denominator else None


@dataclass(frozen=True)
class Bar:
    """Target for a figure of the runs: the figure must be at least `bound`, or with `at_most` at most `bound`."""

    what: str
    measure: Callable[[Runs], float | None]
    bound: float
    at_most: bool = False
    unit: str = "x"

    def row(self, runs: Runs) -> str:
        """Return this target as a row of the Markdown table: target, measured figure, verdict."""
        value = self.measure(runs)
        sign = "at most" if self.at_most else "at least"
        bound = f"{self.bound:,g}" if self.bound < 1e6 else f"{self.bound:,.0f}"
        if value is None:
            return f"| {self.what} | {sign} {bound}{self.unit} | - | not measured |"
        held = value <= self.bound if self.at_most else value >= self.bound
        shown = f"{value:,.0f}" if value >= 1e4 else f"{value:.2f}"
        return f"| {self.what} | {sign} {bound}{self.unit} | {shown}{self.unit} | {'pass' if held else '**fail**'} |"


def faster(dtype: str, than: str, batch: int, context: int) -> Callable[[Runs], float | None]:
    """Return a function that computes the speed of a decode step relative to that of dtype `than`."""
    return lambda runs: ratio(step(runs.get(than), batch, context), step(runs.get(dtype), batch, context))


def milliseconds(dtype: str, batch: int, context: int) -> Callable[[Runs], float | None]:
    """Return a function that returns the milliseconds of a decode step."""
    return lambda runs: step(runs.get(dtype), batch, context)


def tokens(dtype: str) -> Callable[[Runs], float | None]:
    """Return a function that computes a dtype's KV-cache tokens relative to those of `auto`."""
    return lambda runs: ratio(capacity(runs.get(dtype)), capacity(runs.get("auto")))


MAIN_SHAPE = "llama3-8b"
MAIN_BARS = (
    Bar("k4v4 step, 32 x 16K", milliseconds("k4v4", 32, 16384), 11.5, True, " ms"),
    Bar("k4v4 step, 32 x 16K, over bf16", faster("k4v4", "auto", 32, 16384), 1.75),
    Bar("k4v4 step, 32 x 16K, over fp8", faster("k4v4", "fp8", 32, 16384), 1.4),
    Bar("k4v4 step, 32 x 2K", milliseconds("k4v4", 32, 2048), 7.0, True, " ms"),
    Bar("k4v4 step, 32 x 2K, over bf16", faster("k4v4", "auto", 32, 2048), 1.0),
    Bar("k4v4 step, 8 x 1K, over bf16", faster("k4v4", "auto", 8, 1024), 1.0),
    Bar("k4v4 step, 1 x 64K", milliseconds("k4v4", 1, 65536), 5.9, True, " ms"),
    Bar("k4v2 step, 32 x 16K", milliseconds("k4v2", 32, 16384), 10.5, True, " ms"),
    Bar("k4v4 prefill, 16K prompts, over bf16",
        lambda runs: ratio(prefill(runs.get("k4v4"), 16384), prefill(runs.get("auto"), 16384)), 0.95),
    Bar("k4v4 second half of a 64K prompt, over bf16",
        lambda runs: ratio(chunked(runs.get("auto")), chunked(runs.get("k4v4"))), 0.85),
    Bar("k4v4 KV tokens, over bf16", tokens("k4v4"), 3.7),
    Bar("k4v2 KV tokens, over bf16", tokens("k4v2"), 4.8),
    Bar("k4v4 KV tokens", lambda runs: capacity(runs.get("k4v4")), 3.3e6, unit=""),
)  # fmt: skip
OTHER_BARS = (Bar("k4v4 step, 32 x 16K, over bf16", faster("k4v4", "auto", 32, 16384), 1.0),)


def bars_table(shape: str, runs: Runs) -> str:
    """Return the table of a shape's targets: target, figure and verdict."""
    bars = MAIN_BARS if shape == MAIN_SHAPE else OTHER_BARS
    rows = "\n".join(bar.row(runs) for bar in bars)
    return f"| figure | target | measured | |\n|---|---|---|---|\n{rows}\n"


def results_table(runs: Runs) -> str:
    """Return the table of results by dtype: capacity, step times in ms, and prefill, each with ratios (`over`)."""
    sizes = {(c["batch"], c["context"]) for run in runs.values() for c in run["cases"].values() if "batch" in c}
    cases = sorted(sizes, key=lambda case: (-case[0], -case[1]))
    largest, longest = cases[0] if cases else (0, 0)
    heads = [f"{batch} x {short(context)}, ms" for batch, context in cases]
    heads = [
        "dtype",
        "KV tokens",
        *heads,
        f"attention of {largest} x {short(longest)}, ms",
        f"prefill, {short(longest)} prompts, tokens/s",
        "second half, s",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    base, fp8 = runs.get("auto"), runs.get("fp8")
    for dtype, run in sorted(runs.items(), key=lambda item: capacity(item[1]) or 0):
        cells = [over(capacity(run), capacity(run), capacity(base), digits=0)]
        for case in cases:
            value = step(run, *case)
            cells.append(over(value, step(base, *case), value, other=ratio(step(fp8, *case), value)))
        rate, half, share = prefill(run, longest), chunked(run), attention(run, largest, longest)
        cells.append(over(share, attention(base, largest, longest), share))
        cells += [over(rate, rate, prefill(base, longest), digits=0), over(half, chunked(base), half)]
        lines.append(f"| `{dtype}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def over(value: float | None, up: float | None, down: float | None, digits: int = 2, other: float | None = None) -> str:
    """Return a table cell: the value, and ratios by which it is better than with `auto` and with `fp8` (`other`).

    The ratio to `auto` is `up` / `down`.
    """
    if value is None:
        return "-"
    ratios = [f"{times:.2f}x" for times in (ratio(up, down), other) if times]
    return f"{value:,.{digits}f}" + (f" ({', '.join(ratios)})" if ratios else "")


def short(tokens: int) -> str:
    """Return a number of tokens in short form, such as `16K` for 16,384."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def failures(runs: Runs) -> list[str]:
    """Return one line for each measurement that failed, with the reason."""
    found = [f"`{dtype}`: {run['error']}" for dtype, run in runs.items() if run.get("error")]
    for dtype, run in runs.items():
        cases = {**run["cases"], "second half": run.get("chunked", {})}
        found += [f"`{dtype}`, {name}: {case['error']}" for name, case in cases.items() if case.get("error")]
    return found


def described(runs: Runs) -> str:
    """Return device, versions and dates of the runs, and vLLM's log lines about its attention backends, as text."""
    versions = sorted({versions_of(run["versions"]) for run in runs.values() if "versions" in run})
    dates = sorted({run["date"] for run in runs.values()})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    chosen = [f"`{dtype}`: {'; '.join(run['attention'])}" for dtype, run in runs.items() if run.get("attention")]
    return f"{' / '.join(versions)}; {span} UTC.\n" + (
        f"Attention, as vLLM logs it: {', '.join(chosen)}.\n" if chosen else ""
    )


def versions_of(facts: dict[str, str]) -> str:
    """Return the device and the versions of a run as text."""
    return f"{facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}, Python {facts['python']}"


HEAD = """\
# Speed and capacity of vLLM from which the planner computes

This page has the runs on an H200 from which `kvpilot plan` and `kvpilot backtest` take their constants: time of a
decode step, prefill and capacity. They are from 2026-11-21. [Today's kernels](h200-engine-window.md) are faster.
"""

INTRODUCTION = """\
Each dtype has its own engine, with random weights, default compilation and CUDA graphs, and prefix caching. Ratios in
brackets say how many times better a figure is than that of `auto`. Steps have a second ratio, over `fp8`. The columns:

* *32 x 16K, ms* and the like: time of a decode step with 32 sequences of 16K tokens. A step gives each sequence one
  token. Each timing is the mean of consecutive steps, and the table shows the median of the timings.
* *attention*: the time of that step, less the time of a step with 16 tokens of context a sequence.
* *prefill*: tokens per second of prompts that are not in the prefix cache.
* *second half*: time to the first token of a long prompt, whose first half is in the prefix cache.

Raw: [h200-engine.json](h200-engine.json).
"""


def page(found: dict[str, Runs], plots: dict[str, list[str]]) -> str:
    """Return the page as Markdown. `plots` has the names of the image files of each shape."""
    commands = sorted({run["command"] for runs in found.values() for run in runs.values()})
    text = [HEAD, "```sh", *commands, "```\n"]
    text.append(INTRODUCTION)
    for shape, runs in sorted(found.items(), key=lambda item: item[0] != MAIN_SHAPE):
        text += [f"## {shape}\n", described(runs), results_table(runs), bars_table(shape, runs)]
        text += [f"![{name}]({name})\n" for name in plots.get(shape, [])]
        text += [f"- {line}" for line in failures(runs)]
    return "\n".join(text)
