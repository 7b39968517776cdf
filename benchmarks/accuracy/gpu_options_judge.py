"""Judge the answers of gpu_options.py. Each feature gets a row of figures and a verdict.

Divergences are in nats. The limits are those of gpu_families_judge.py.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.accuracy.gpu_equality_compare import agreement
from benchmarks.accuracy.gpu_families_ask import SCHEMA
from benchmarks.accuracy.gpu_families_judge import CROWD, NEAR, RIGHT, from_oracle
from kvpilot_smallmodels.oracle import Oracle

Runs = dict[str, dict[str, Any]]
"""Answers for one feature, by run."""

OFF = "median difference of logprobs"
"""Name of the median difference from transformers' log-probabilities, in nats."""


def failed(*of: Runs) -> str:
    """Return the errors of all these runs, or an empty string."""
    return "; ".join(f"{name}: {run['error']}" for runs in of for name, run in runs.items() if "error" in run)


def row(figures: dict[str, Any], holds: dict[str, bool]) -> dict[str, Any]:
    """Return a row with these figures and a verdict. The verdict names each key of `holds` whose value is False."""
    missing = [what for what, held in holds.items() if not held]
    return {"verdict": "served, not shown right: " + "; ".join(missing) if missing else RIGHT, **figures}


def pair(runs: Runs, name: str, against: Runs, reference: str) -> dict[str, Any]:
    """Compare the answers of two runs, `runs[name]` and `against[reference]`, and return the figures of `agreement`."""
    return agreement(against[reference]["answers"], runs[name]["answers"])


def fp8_row(fp8: Runs, plain: Runs) -> dict[str, Any]:
    """Judge `k4v4` with fp8 weights: its damage must be about as large as with 16-bit weights, even in a crowd."""
    if error := failed(fp8, plain):
        return {"verdict": f"not served: {error}"}
    figures = {
        "weights alone": pair(fp8, "auto/alone", plain, "auto/alone"),
        "damage beside fp8": pair(fp8, "k4v4/alone", fp8, "auto/alone"),
        "damage beside 16 bits": pair(plain, "k4v4/alone", plain, "auto/alone"),
        "auto in a crowd": pair(fp8, "auto/crowded", fp8, "auto/alone"),
        "k4v4 in a crowd": pair(fp8, "k4v4/crowded", fp8, "k4v4/alone"),
    }
    damage, crowd = figures["damage beside fp8"]["mean_kl"], figures["k4v4 in a crowd"]["mean_kl"]
    return row({**figures, "said": fp8["k4v4/crowded"]["said"]}, {
        "weights are not quantized": figures["weights alone"]["mean_kl"] > 0,
        "the cache does more damage than with 16 bits": damage <= 1.6 * figures["damage beside 16 bits"]["mean_kl"],
        "a crowd changes answers": crowd <= damage + CROWD * figures["auto in a crowd"]["mean_kl"],
    })  # fmt: skip


def sleep_row(runs: Runs) -> dict[str, Any]:
    """Judge sleep mode: answers after a sleep may differ from the first answers only as much as repeated answers do."""
    if error := failed(runs):
        return {"verdict": f"not served: {error}"}
    figures, holds = dict[str, Any](), dict[str, bool]()
    for name, run in runs.items():
        again, woken = (agreement(run["answers"], run[which]) for which in ("again", "woken"))
        figures |= {f"{name} again": again, f"{name} woken": woken, f"{name} said": run["said"]}
        holds[f"answers of {name} change after sleep"] = woken["mean_kl"] <= again["mean_kl"] + 1e-4
        holds[f"{name} has not slept"] = any("Sleep mode freed" in line for line in run["said"])
    return row(figures, holds)


def adapter_row(model: Path, merged: Path, runs: Runs) -> dict[str, Any]:
    """Judge a batch in which some requests use a LoRA adapter. Each answer must fit the weights of its request."""
    if error := failed(runs):
        return {"verdict": f"not served: {error}"}
    (run,) = runs.values()
    figures = {
        f"{which} from {what} {codec}": from_oracle(Oracle(folder, codec), run["prompts"], run[answers])
        for which, answers in (("adapter", "answers"), ("model", "unadapted"))
        for what, folder in (("merged", merged), ("model", model))
        for codec in ("k4v4", "auto")
    }
    holds = {}
    for which, own, other in (("adapter", "merged", "model"), ("model", "model", "merged")):
        right = figures[f"{which} from {own} k4v4"]
        holds[f"answers of the {which} do not fit its weights"] = right <= NEAR * figures[f"{which} from {other} k4v4"]
        holds[f"the {which}'s codec differs from transformers"] = right <= NEAR * figures[f"{which} from {own} auto"]
    return row({**figures, "counters": run["counters"], "said": run["said"]}, holds)


def spread_row(one: Runs, two: Runs) -> dict[str, Any]:
    """Judge the run `two` on several GPUs by its divergence from the run `one` on one GPU.

    The limit is NEAR times the divergence of `k4v4` from `auto` on one GPU.
    """
    if error := failed(one, two):
        return {"verdict": f"not served: {error}"}
    figures = {f"{name} from one GPU": pair(two, name, one, name) for name in two}
    figures["on one GPU, k4v4/codec from auto"] = pair(one, "k4v4/codec", one, "auto/crowded")
    figures["k4v4/crowded from auto"] = pair(one, "k4v4/crowded", one, "auto/crowded")
    damage = figures["k4v4/crowded from auto"]["mean_kl"]
    found = {name: figures[f"{name} from one GPU"] for name in two}
    counters = {name: run["counters"] for name, run in two.items() if "counters" in run}
    return row({**figures, "counters": counters, "said": two["k4v4/crowded"]["said"]}, {
        **{f"{name} differs from one GPU": x["mean_kl"] <= NEAR * damage for name, x in found.items()},
        "logits are not numbers": not any(x["not_a_number"] for x in found.values()),
    })  # fmt: skip


def details_rows(model: Path, runs: Runs) -> dict[str, dict[str, Any]]:
    """Compare prompt logprobs and samples with transformers (same codec), and check structured output by its schema."""
    names = ("prompt logprobs", "parallel samples", "structured output")
    if error := failed(runs):
        return {name: {"verdict": f"not served: {error}"} for name in names}
    (run,) = runs.values()
    prompts = run["prompts"]
    read, drawn = dict[str, float](), dict[str, float]()
    for codec in ("k4v4", "auto"):
        oracle = Oracle(model, codec)
        read[codec] = median(
            abs(found - wanted) for prompt, own in zip(prompts, run["prompt_logprobs"], strict=True)
            for found, wanted in zip(own, oracle.logprobs(prompt[:1], prompt[1:]), strict=True)
        )  # fmt: skip
        drawn[codec] = median(
            abs(found - wanted) for prompt, samples in zip(prompts, run["samples"], strict=True) for one in samples
            for found, wanted in zip(one["logprobs"], oracle.logprobs(prompt, one["tokens"]), strict=True)
        )  # fmt: skip
    distinct = min(len({tuple(one["tokens"]) for one in samples}) for samples in run["samples"])
    right, wild = (sum(map(fits, run[which])) for which in ("structured", "free"))
    return {
        names[0]: row({OFF: read}, {"not the codec's logprobs": read["k4v4"] <= NEAR * read["auto"]}),
        names[1]: row({OFF: drawn, "distinct": distinct}, {
            "not the codec's logprobs": drawn["k4v4"] <= NEAR * drawn["auto"], "samples are the same": distinct > 1,
        }),
        names[2]: row({"answers": len(prompts), "of the schema": right, "of it without the option": wild}, {
            "an answer violates its schema": right == len(prompts), "free answers follow it": wild == 0,
        }),
    }  # fmt: skip


def fits(text: str) -> bool:
    """Return True if a text is JSON that follows the schema."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    fields = SCHEMA["properties"]
    return (
        isinstance(found, dict) and set(found) == set(SCHEMA["required"]) and found["city"] in fields["city"]["enum"]
        and isinstance(found["warm"], bool) and 1 <= found["days"] <= 9
    )  # fmt: skip
