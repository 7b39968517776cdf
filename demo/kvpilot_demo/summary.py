"""Summary of the demo, for readers who have not read the docs."""

from __future__ import annotations

from typing import Any

from kvpilot_demo.story import BAD, GOOD, USERS, Record


def summary(record: Record, limit: int) -> list[tuple[str, str]]:
    """Return the lines of the summary, each as (title, text). `limit` is the allowed KL divergence in nats x 1000."""
    good, bad = record.good_probe, record.bad_probe
    return [
        ("Problem", f"With 16 bits the KV cache held {record.capacity_before:,} tokens. {USERS} users filled it."),
        (
            "Change",
            f"kvpilot started an engine with {GOOD} (4 bits) and compared its answers with the 16-bit ones: "
            f"{_damage(good, limit)}. It passed, and took over.",
        ),
        (
            "Gain",
            f"The same memory holds {record.capacity_after:,} tokens, {record.capacity_ratio:.1f} times as many. "
            f"{record.requests} requests ran during the change, {record.failed_requests} failed.",
        ),
        (
            "Mistake",
            f"You asked for {BAD} (2 bits) without its recent window. The engine started and looked healthy.",
        ),
        (
            "Caught",
            f"Its answers differed too much: {_damage(bad, limit)}. "
            f"{'It had' if record.canary_had_traffic else 'It never got'} a user's request. "
            f"{record.final_dtype} kept serving.",
        ),
        *(("Compare", part.strip()) for part in record.bad_answers.split(" | ")),
    ]


def _damage(probe: dict[str, Any], limit: int) -> str:
    return (
        f"damage {probe['excessKLMicronats'] / 1000:.1f} of {limit} allowed (KL divergence, nats x 1000), "
        f"{probe['top1AgreementPermille'] / 10:.0f}% of the words agree"
    )
