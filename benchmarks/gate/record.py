"""Record of the gates that benchmarks.gate.gpu runs."""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from benchmarks.engine.gpu_engine_process import say, versions
from kvpilot_operator.decide import Judgement
from kvpilot_probes.codec import Baseline, BaselinePrompt
from kvpilot_probes.stats import Measurement


class Record:
    """The figures so far, in a JSON file that is written after each stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out, self._began = args.out, time.monotonic()
        self.gates: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            "command": " ".join(["python", "-m", "benchmarks.gate.gpu", *sys.argv[1:]]), **versions(),
            "model": args.model.name if args.model else args.shape, "dtype": args.dtype,
            "max_model_len": args.max_model_len, "packs": list(args.packs), "users": args.users,
            "error": "interrupted", "gates": self.gates,
        }  # fmt: skip

    @property
    def verdicts(self) -> Counter[str]:
        """Return how many gates ended with each verdict."""
        return Counter(str(gate["verdict"]) for gate in self.gates if "verdict" in gate)

    @contextmanager
    def stage(self, into: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
        """Time the `with` block, and yield a dictionary for its figures, which is stored as `into[name]`."""
        row: dict[str, Any] = {}
        into[name] = row
        began = time.monotonic()
        try:
            yield row
        finally:
            row["seconds"] = round(time.monotonic() - began, 1)
            self.write()
            say(f"{self._out.stem}: {name}: {row}")

    def write(self) -> None:
        """Write the file, with the seconds since the program's start."""
        self.facts["seconds_in_all"] = round(time.monotonic() - self._began, 1)
        self.facts["verdicts"] = dict(self.verdicts)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.facts, indent=1) + "\n")


def figures(found: Measurement, kept: Baseline, judged: Judgement) -> dict[str, Any]:
    """Return the verdict, and the damage of all prompts and of each bucket. Damage is KL divergence in millinats.

    `bounds` is the 95% confidence interval of the damage, from the spread between prompts.
    """
    assert kept.control is not None  # noqa: S101 - `_measured` has added it
    noise, excess = kept.control.mean_kl_micronats, found.mean_kl_micronats - kept.control.mean_kl_micronats
    half = 1.96 * found.stderr_kl_micronats
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found.seen:
        groups[one.bucket].append(1000 * one.kl)
    lengths = buckets(kept)
    return {
        "verdict": judged.verdict, "reason": judged.reason, "message": judged.message, "covered": judged.covered,
        "prompts": len(found.seen), "excess_kl_millinats": round(excess / 1000, 2),
        "bounds": [round((excess + side) / 1000, 2) for side in (-half, half)],
        "control_kl_millinats": round(noise / 1000, 2),
        "agreement_percent": found.top1_agreement_permille / 10,
        "buckets": {
            name: {"judged": len(all_), "kl_millinats": round(sum(all_) / len(all_), 2),
                   "worst_millinats": round(max(all_), 1), **lengths.get(name, {})}
            for name, all_ in groups.items()
        },
    }  # fmt: skip


def buckets(kept: Baseline) -> dict[str, dict[str, int]]:
    """Return, by bucket, the number of prompts, their tokens without answers, and the tokens of the longest prompt."""
    found: dict[str, list[BaselinePrompt]] = defaultdict(list)
    for prompt in kept.prompts:
        found[prompt.bucket].append(prompt)
    lengths = {bucket: [len(prompt.tokens) for prompt in prompts] for bucket, prompts in found.items()}
    return {name: {"prompts": len(all_), "tokens": sum(all_), "longest": max(all_)} for name, all_ in lengths.items()}
