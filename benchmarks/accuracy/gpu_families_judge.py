"""Judge a family's answers by comparisons with plain transformers, and between engines.

All divergences are means over tokens, in nats. An *oracle* is plain transformers on the same tokens, without the codec
(`auto`) or with it (`k4v4`); see kvpilot_smallmodels.oracle. A divergence *from an oracle* compares an engine's
predictions with those of the oracle, for every token of every answer.

With the default window and factors, answers of `k4v4` depend on a request's history: the tokens in the window, and the
part of a prompt that was read back from pages. The oracle does not know this history. So the verdict compares the
*damage* of `k4v4` (its divergence from the oracle without the codec) with that of the bare codec. It also compares the
*crowded* run with the *alone* run (see gpu_families.py).
"""

import math
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.accuracy.gpu_equality_compare import Answer, agreement, divergence
from kvpilot_smallmodels.oracle import Oracle

NEAR = 0.25
"""Largest allowed ratio of an engine's divergence from its own dtype's oracle to that from the other dtype's oracle."""
ROUNDED = 3.0
"""Largest allowed divergence of the bare codec from its oracle, relative to the sum of two other divergences.

One is the divergence that rounding of codes causes. The other is the divergence of `auto` from its own oracle.

A value near the edge between two codes may round to either code. If a group's scale changes by one step, all its codes
may change.
"""
SERVED = 1.25
"""Largest allowed damage of `k4v4` with its window and factors, relative to that of the bare codec.

The expected ratio is below 1.
"""
FAULT = 0.5
"""Largest allowed divergence of an engine from its oracle, relative to that from an oracle that misreads a block."""
CROWD = 3.0
"""Factor in the largest allowed divergence of a dtype's *crowded* run from its *alone* run.

The limit is the dtype's own damage, plus this factor times the divergence between the two runs of `auto`.
"""
BLOCK = 16
"""Number of tokens that the faulty oracle misreads."""
RIGHT = "served and right"
COMPUTED = "transformers in bfloat16 from float32"
"""Name of the figure for the divergence that bfloat16 arithmetic alone causes. `auto` may diverge as much."""

Figures = dict[str, Any]
PAIRS = (("auto/crowded", "auto/alone"), ("k4v4/alone", "auto/alone"), ("k4v4/crowded", "k4v4/alone"))
TOLD = ("counters", "kv_tokens", "groups", "free_blocks", "said", "attention", "graphs")


def from_oracle(oracle: Oracle, prompts: list[list[int]], answers: list[Answer], *, misread: bool = False) -> float:
    """Return the mean KL divergence of an engine's predictions from the oracle's, in nats.

    Args:
        prompts: token IDs of each prompt.
        answers: the engine's answer to each prompt.
        misread: True lets the oracle misread one block of the prompt.
    """
    found: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        at = max(BLOCK, (len(prompt) - BLOCK) // BLOCK * BLOCK)
        wanted = oracle.predictions(prompt, answer["tokens"], misread=at if misread else None)
        for right, got in zip(wanted, answer["logprobs"], strict=True):
            sound = not any(map(math.isnan, got.values()))
            found.append(divergence({t: float(right[int(t)]) for t in got}, got) if sound else math.nan)
    return statistics.fmean(found)


def of_rounding(oracle: Oracle, prompts: list[list[int]], answers: list[Answer], dtype: str) -> float:
    """Return the mean KL divergence, in nats, of an oracle from itself with rounding errors in keys and values.

    The errors have the size of errors from rounding to `dtype`.
    """
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        exact = oracle.predictions(prompt, answer["tokens"])
        moved = oracle.predictions(prompt, answer["tokens"], jitter=torch.finfo(getattr(torch, dtype)).eps / 2)
        found.append(float((exact.exp() * (exact - moved)).sum(-1).mean()))
    return statistics.fmean(found)


def of_computing(model: Path, oracle: Oracle, prompts: list[list[int]], answers: list[Answer]) -> float:
    """Return the mean divergence of transformers in bfloat16 from `oracle`, which uses float32 and no codec."""
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        exact, count = oracle.predictions(prompt, answer["tokens"]), len(answer["tokens"])
        with torch.inference_mode():
            tokens = torch.tensor([prompt + answer["tokens"][:-1]])
            other = rounded(tokens, logits_to_keep=count).logits[0].double().log_softmax(-1)
        found.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    return statistics.fmean(found)


def judge(model: Path, dtype: str, runs: dict[str, dict[str, Any]]) -> Figures:
    """Return the figures and the verdict for a family. `runs` has the answers of its engines by run."""
    prompts = next(iter(runs.values()))["prompts"]
    errors = {name: run["error"] for name, run in runs.items() if "error" in run}
    figures: Figures = {
        "dtype": dtype, "errors": errors,
        "engines": {name: {key: run.get(key) for key in TOLD} for name, run in runs.items() if name not in errors},
    }  # fmt: skip
    good = {name: run["answers"] for name, run in runs.items() if name not in errors}
    for name, against in PAIRS:
        if name in good and against in good:
            figures[f"{name} from {against}"] = agreement(good[against], good[name])
    oracle = Oracle(model, "auto")
    for name in good.keys() & {"auto/crowded", "k4v4/codec", "k4v4/crowded"}:
        figures[f"{name} from oracle auto"] = from_oracle(oracle, prompts, good[name])
    if dtype == "bfloat16" and "auto/crowded" in good:
        figures[COMPUTED] = of_computing(model, oracle, prompts, good["auto/crowded"])
    oracle = Oracle(model, "k4v4")
    if "auto/crowded" in good:
        figures["auto/crowded from oracle k4v4"] = from_oracle(oracle, prompts, good["auto/crowded"])
    if "k4v4/codec" in good:
        answers = good["k4v4/codec"]
        figures["k4v4/codec from oracle k4v4"] = from_oracle(oracle, prompts, answers)
        figures["k4v4/codec from a misread block"] = from_oracle(oracle, prompts, answers, misread=True)
        figures["oracle k4v4 rounded"] = of_rounding(oracle, prompts, answers, dtype)
    return {"verdict": verdict(figures), **figures}


def far(figures: Figures, name: str) -> float:
    """Return the figure called `name`, a KL divergence in nats; NaN if it is missing."""
    found = figures.get(name, math.nan)
    return float(found["mean_kl"] if isinstance(found, dict) else found)


def verdict(figures: Figures) -> str:
    """Return `served and right`, or the faults. Compare the *crowded* run only if the *alone* run has answers."""
    errors = {name: error for name, error in figures["errors"].items() if not name.endswith("/alone")}
    if errors:
        return "not served: " + "; ".join(f"{name}: {error}" for name, error in errors.items())
    served = "k4v4/crowded from oracle auto"
    own, other = (far(figures, f"k4v4/codec from oracle {codec}") for codec in ("k4v4", "auto"))
    control, changed = (far(figures, f"auto/crowded from oracle {codec}") for codec in ("auto", "k4v4"))
    rounded = far(figures, "oracle k4v4 rounded")
    near = max(NEAR * changed, far(figures, COMPUTED)) if COMPUTED in figures else NEAR * changed
    holds = {
        "auto differs from transformers": control <= near,
        "the codec differs from transformers": own <= max(NEAR * other, ROUNDED * (rounded + control)),
        "a misread block would not be noticed": own <= FAULT * far(figures, "k4v4/codec from a misread block"),
        "no run has the served settings": served in figures,
        "window and factors do harm": served not in figures or far(figures, served) <= SERVED * other,
        "logits are not numbers": not any(x.get("not_a_number") for x in figures.values() if isinstance(x, dict)),
    }
    if "k4v4/crowded from k4v4/alone" in figures:
        damage, noise = far(figures, "k4v4/alone from auto/alone"), far(figures, "auto/crowded from auto/alone")
        holds["a crowd changes answers"] = far(figures, "k4v4/crowded from k4v4/alone") <= damage + CROWD * noise
    missing = [what for what, held in holds.items() if not held]
    return "served, not shown right: " + "; ".join(missing) if missing else RIGHT
