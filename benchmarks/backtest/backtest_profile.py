"""Fit the backtest's built-in cost profile to the H200 benchmark: `python -m benchmarks.backtest.backtest_profile`.

The program reads docs/benchmarks/h200-engine.json (real vLLM). If h200-engine-window.json has a complete run of a
dtype, with newer kernels and the default recent window, the program uses that run instead. It writes the profile into
the package, and prints the error of every measured point.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from kvpilot_cli.backtest.costs import Costs, Profile
from kvpilot_operator.state.snapshot import ModelFacts

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
PACKAGE = Path(__file__).parents[2] / "cli" / "kvpilot_cli" / "backtest" / "h200-llama3-8b.json"
MODEL = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)


def points(run: dict[str, Any]) -> list[tuple[str, tuple[float, ...], float]]:
    """Return every measured time of one dtype as (name, factors, seconds).

    The time is the sum of the five constants in `Costs`, each multiplied by its factor.
    """
    found: list[tuple[str, tuple[float, ...], float]] = []
    for name, case in run["cases"].items():
        batch, context = case["batch"], case["context"]
        # The context grows by 128 tokens during the measurement, so add half of them.
        cached = batch * (context + 64)
        found.append((f"step {name}", (1, batch, cached, 0, 0), case["step_ms"] / 1000))
        for group in case["prefill"]["groups"][:1]:
            if group["cached"] == 0 and group["tokens"] > 1000:
                size, steps = group["tokens"], -(-group["tokens"] // run["max_num_batched_tokens"])
                seconds = float(np.mean([g["seconds"] for g in case["prefill"]["groups"]]))
                found.append((f"prefill {name}", (steps, 0, 0, size, size * context / 2), seconds))
    if run.get("chunked"):
        half = run["chunked"]["tokens"] / 2
        steps = -(-half // run["max_num_batched_tokens"])
        found.append(("second half of 64K", (steps, 0, 0, half, half * (half + half / 2)), run["chunked"]["ttft_s"]))
    return found


def newest() -> list[dict[str, Any]]:
    """Return every dtype's newest complete run.

    A run counts as complete if it has a prompt of 64K tokens, because the cost of context is fitted to this prompt.
    """
    first = json.loads((BENCHMARKS / "h200-engine.json").read_text())
    later = json.loads((BENCHMARKS / "h200-engine-window.json").read_text())
    found = {run["dtype"]: run for run in first if run["shape"] == "llama3-8b" and run["tp"] == 1}
    whole = {dtype: later[dtype] for dtype in found if "1x65536" in later.get(dtype, {}).get("cases", ())}
    return list((found | whole).values())


def fit(run: dict[str, Any]) -> tuple[Costs, dict[str, float]]:
    """Fit one dtype's costs by least squares of relative errors. Return the costs and each point's error in percent."""
    measured = points(run)
    features = np.array([row for _, row, _ in measured])
    seconds = np.array([s for _, _, s in measured])
    found = np.linalg.lstsq(features / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    if (found < 0).any():
        raise RuntimeError(f"{run['dtype']}: a cost below zero: {found}")
    errors = (features @ found / seconds - 1) * 100
    base, sequence, cached, token, pair = (float(f"{value:.4g}") for value in found)
    costs = Costs(base, sequence, cached, token, pair, run["kv_tokens"], run["block_size"])
    return costs, {name: round(float(e), 1) for (name, _, _), e in zip(measured, errors, strict=True)}


def main() -> None:
    """Fit the costs of every dtype, write the profile into the package, and print the errors."""
    costs: dict[str, Costs] = {}
    for run in newest():
        costs[run["dtype"]], errors = fit(run)
        print(run["dtype"], costs[run["dtype"]], f"largest error {max(map(abs, errors.values()))}%", errors)
    profile = Profile("llama3-8b", "NVIDIA-H200", MODEL, 1, costs)
    PACKAGE.write_text(json.dumps(to_builtins(profile), indent=1) + "\n")


if __name__ == "__main__":
    main()
