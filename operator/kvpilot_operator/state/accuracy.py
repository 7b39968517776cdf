"""`.status.accuracy`: the reference, the last measurement, and what became of the periodic ones.

KL divergences are integers in micronats, shares in permille, times in UTC.
"""

from __future__ import annotations

from datetime import datetime

from kvpilot_operator.api.words import Verdict
from kvpilot_operator.state.struct import Struct


class Baseline(Struct, frozen=True, kw_only=True):
    """Where the 16-bit reference answers are kept, and the 16-bit-against-16-bit control."""

    config_map: str
    identity: str
    dtype: str
    captured_time: datetime
    prompts: int
    positions: int
    control_mean_kl_micronats: int
    control_p99_kl_micronats: int
    control_top1_agreement_permille: int


class Bucket(Struct, frozen=True, kw_only=True):
    """Damage at context positions [from, to)."""

    from_position: int
    to_position: int
    mean_kl_micronats: int
    top1_agreement_permille: int


class Sample(Struct, frozen=True, kw_only=True):
    """One prompt's tail with both sides' continuation, for a person to read."""

    prompt: str
    stable: str
    canary: str


class Measured(Struct, frozen=True, kw_only=True):
    """The last accuracy measurement; excess is over the control."""

    revision: str
    dtype: str
    verdict: Verdict
    probe_time: datetime
    prompts: int
    positions: int
    mean_kl_micronats: int
    p99_kl_micronats: int
    excess_kl_micronats: int
    top1_agreement_permille: int
    pod: str | None = None
    buckets: tuple[Bucket, ...] = ()
    sample: Sample | None = None


class Accuracy(Struct, frozen=True, kw_only=True):
    """Accuracy's reference, its last measurement, and what the periodic probes of the serving revision found."""

    baseline: Baseline | None = None
    last: Measured | None = None
    checked_time: datetime | None = None
    failures: int = 0
    errors: int = 0
