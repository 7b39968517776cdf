"""Fit the built-in profile to the H200 benchmark: `python planning/benchmarks/backtest_profile.py`.

Reads docs/benchmarks/h200-engine.json (real vLLM) and, for the time that k8v4 takes to read the cache, h200-decode.json
(kernels alone). Writes the profile into the package and prints the error of every measured point.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvpilot_kernels import formats
from kvpilot_planning.backtest.costs import Costs, Profile, dump_profile

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
PACKAGE = Path(__file__).parents[1] / "kvpilot_planning" / "backtest" / "h200-llama3-8b.json"
MODEL = {"head_dim": 128, "kv_heads": 8, "layers": 32, "window_layers": 0}
DERIVED, SOURCE = "k8v4", "k4v4"


def points(run: dict[str, Any]) -> list[tuple[str, tuple[float, ...], float]]:
    """Every measured time of one dtype: its name, the features that Costs multiplies, and seconds."""
    found: list[tuple[str, tuple[float, ...], float]] = []
    for name, case in run["cases"].items():
        batch, context = case["batch"], case["context"]
        # 128 tokens are decoded after the prompt: on average half of them are there.
        cached = batch * (context + 64)
        found.append((f"step {name}", (1, batch, cached, 0, 0), case["step_ms"] / 1000))
        for group in case["prefill"]["groups"][:1]:
            if group["cached"] == 0 and group["tokens"] > 1000:
                size, steps = group["tokens"], -(-group["tokens"] // run["max_num_batched_tokens"])
                seconds = float(np.mean([g["seconds"] for g in case["prefill"]["groups"]]))
                found.append((f"prefill {name}", (steps, 0, 0, size, size * context / 2), seconds))
    half = run["chunked"]["tokens"] / 2
    steps = -(-half // run["max_num_batched_tokens"])
    found.append(("second half of 64K", (steps, 0, 0, half, half * (half + half / 2)), run["chunked"]["ttft_s"]))
    return found


def fit(run: dict[str, Any]) -> tuple[Costs, dict[str, float]]:
    """Least squares of relative errors over all points of one dtype; and the error of each, in percent."""
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


def derived(costs: dict[str, Costs], decode: Any) -> Costs:
    """k8v4: the engine's costs of k4v4, its cache read slower as the kernels alone were, its capacity by bits."""
    ratio = layer_time(decode, DERIVED) / layer_time(decode, SOURCE)
    base, bits = costs[SOURCE], [formats.parse(d).bits_per_element() for d in (SOURCE, DERIVED)]
    return Costs(
        base.base, base.per_sequence, float(f"{base.per_kv_token * ratio:.4g}"), base.per_prefill_token,
        base.per_prefill_pair, int(base.kv_tokens * bits[0] / bits[1]), base.block_size,
    )  # fmt: skip


def layer_time(decode: Any, dtype: str) -> float:
    """Time of one layer's decode at Llama-3-8B's 32 x 16,384."""
    case = decode["rows"][0]["case"]
    return float(next(row["layer"] for row in decode["rows"] if row["case"] == case and row["name"] == dtype))


def main() -> None:
    """Fit, write, print."""
    runs = [
        r
        for r in json.loads((BENCHMARKS / "h200-engine.json").read_text())
        if r["shape"] == "llama3-8b" and r["tp"] == 1
    ]
    decode = json.loads((BENCHMARKS / "h200-decode.json").read_text())
    costs: dict[str, Costs] = {}
    for run in runs:
        costs[run["dtype"]], errors = fit(run)
        print(run["dtype"], costs[run["dtype"]], f"largest error {max(map(abs, errors.values()))}%", errors)
    costs[DERIVED] = derived(costs, decode)
    print(DERIVED, costs[DERIVED], "(derived)")
    profile = Profile("llama3-8b", "NVIDIA-H200", MODEL, 1, costs)
    PACKAGE.write_text(json.dumps(dump_profile(profile), indent=1) + "\n")


if __name__ == "__main__":
    main()
