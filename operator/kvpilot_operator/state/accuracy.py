"""`.status.accuracy`: the reference, the last measurement, and what became of the periodic ones.

KL divergences are integers in micronats, shares in permille, times in UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from kvpilot_operator.api.record import Count, Permille, Record, Word
from kvpilot_operator.api.words import Verdict


class Baseline(Record, frozen=True, kw_only=True):
    """The 16-bit reference and its control run against itself."""

    config_map: Annotated[str, Meta(max_length=253)]
    """The ConfigMap that holds it."""
    identity: Annotated[str, Meta(max_length=128)]
    """Hash of model, revision, baseline dtype and the probe sets' content; a change captures anew."""
    dtype: Word
    """The dtype it was captured with."""
    captured_time: datetime
    """When it was captured."""
    prompts: Count
    """Prompts that were asked."""
    positions: Count
    """Token positions that were compared."""
    control_mean_kl_micronats: Count
    """Mean KL divergence of the control run."""
    control_p99_kl_micronats: Count
    """99th percentile of the control run's KL divergence."""
    control_top1_agreement_permille: Permille
    """Positions, in thousandths, at which the control run finds the same token most likely."""


class Bucket(Record, frozen=True, kw_only=True):
    """Damage at context positions [from, to)."""

    from_position: Count
    """First position of the bucket."""
    to_position: Count
    """First position after the bucket."""
    mean_kl_micronats: Count
    """Mean KL divergence from the baseline."""
    top1_agreement_permille: Permille
    """Positions, in thousandths, at which the baseline's most likely token is this one's too."""


class Sample(Record, frozen=True, kw_only=True):
    """One prompt and the two answers, for people to compare."""

    prompt: Annotated[str, Meta(max_length=2048)]
    """The end of the prompt."""
    stable: Annotated[str, Meta(max_length=2048)]
    """The stable revision's answer."""
    canary: Annotated[str, Meta(max_length=2048)]
    """The probed revision's answer."""


class Measured(Record, frozen=True, kw_only=True):
    """The last probe run."""

    revision: Word
    """The revision that was probed."""
    dtype: Word
    """Its KV cache dtype."""
    verdict: Verdict
    """Its outcome."""
    probe_time: datetime
    """When it ended."""
    prompts: Count
    """Prompts that were asked."""
    positions: Count
    """Token positions that were compared."""
    mean_kl_micronats: Count
    """Mean KL divergence from the baseline."""
    p99_kl_micronats: Count
    """99th percentile of the KL divergence from the baseline."""
    excess_kl_micronats: int
    """Mean KL divergence above that of the control run; negative when below it."""
    top1_agreement_permille: Permille
    """Positions, in thousandths, at which the baseline's most likely token is this one's too."""
    pod: Annotated[str, Meta(max_length=253)] | None = None
    """The replica that was asked."""
    buckets: Annotated[tuple[Bucket, ...], Meta(max_length=8)] = ()
    """The same by position in the context."""
    sample: Sample | None = None


class Accuracy(Record, frozen=True, kw_only=True):
    """What the probes measured. KL divergences in millionths of a nat, agreement in thousandths."""

    baseline: Baseline | None = None
    last: Measured | None = None
    checked_time: datetime | None = None
    """When the serving replicas were last probed, or when they began to serve."""
    failures: Count = 0
    """Probe runs in a row that the serving replicas failed."""
    errors: Count = 0
    """Probe runs in a row of the serving replicas without a verdict."""
