"""`.status.accuracy`: the baseline, the last probe run, and counters of periodic runs."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from kvpilot_operator.api.record import Count, Record, Text, Thousand, Word
from kvpilot_operator.api.words import Verdict


class Baseline(Record, frozen=True, kw_only=True):
    """The 16-bit baseline, and its control run: the comparison of the baseline with itself."""

    identity: Annotated[str, Meta(max_length=128)]
    """Hash of model, revision, baseline dtype and the probe sets' content. If one of them changes, kvpilot captures the
    baseline anew. The ConfigMap NAME-baseline-IDENTITY holds the answers."""
    positions: Count
    """Number of token positions that the control run compared."""
    control_mean_kl_micronats: Count
    """Mean KL divergence of the control run, in millionths of a nat."""
    control_top1_agreement_permille: Thousand
    """Share of positions, in thousandths, at which the control run finds the same token most likely."""


class Measured(Record, frozen=True, kw_only=True):
    """The last probe run."""

    revision: Word
    """The revision that was probed."""
    dtype: Word
    """KV cache dtype of the revision."""
    verdict: Verdict
    """Verdict of the run."""
    probe_time: datetime
    """Time at which the run ended."""
    excess_kl_micronats: int
    """Mean KL divergence from the baseline less that of the control run, in millionths of a nat. It may be negative."""
    top1_agreement_permille: Thousand
    """Share of positions, in thousandths, at which the revision and the baseline find the same token most likely."""
    pod: Text | None = None
    """The pod that was probed."""
    covered: Text | None = None
    """Kinds of prompts that the run found sound; after "not:", the kinds with too few prompts or no prompt; then the
    tokens and seconds of the run, and of periodic runs the GPU-seconds that they take a day at most."""


class Accuracy(Record, frozen=True, kw_only=True):
    """Results of probes."""

    baseline: Baseline | None = None
    last: Measured | None = None
    checked_time: datetime | None = None
    """Time at which the serving replicas were last probed, or began to serve."""
    failures: Count = 0
    """Number of probe runs in a row that the serving replicas failed."""
    errors: Count = 0
    """Number of probe runs of the serving replicas in a row that gave no verdict."""
