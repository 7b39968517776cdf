"""`.status.accuracy`: the reference, the last measurement, and the count of periodic ones."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from kvpilot_operator.api.record import Count, Record, Text, Thousand, Word
from kvpilot_operator.api.words import Verdict


class Baseline(Record, frozen=True, kw_only=True):
    """The 16-bit reference and its control run against itself."""

    identity: Annotated[str, Meta(max_length=128)]
    """Hash of model, revision, baseline dtype and the probe sets' content; a change captures anew. The ConfigMap
    NAME-baseline-IDENTITY holds the answers."""
    positions: Count
    """Token positions that were compared."""
    control_mean_kl_micronats: Count
    """Mean KL divergence of the control run."""
    control_top1_agreement_permille: Thousand
    """Positions, in thousandths, at which the control run finds the same token most likely."""


class Measured(Record, frozen=True, kw_only=True):
    """The last probe run."""

    revision: Word
    """The revision that was probed."""
    dtype: Word
    """Its KV cache dtype."""
    verdict: Verdict
    """Its verdict."""
    probe_time: datetime
    """Time at which it ended."""
    excess_kl_micronats: int
    """Mean KL divergence above that of the control run; negative when below it."""
    top1_agreement_permille: Thousand
    """Positions, in thousandths, at which both find the same token most likely."""
    pod: Text | None = None
    """The replica that was asked."""
    covered: Text | None = None
    """Cases that were shown to be sound; after "not:" those that were not, because their prompts were too few or not
    asked; and the tokens and seconds of the run."""


class Accuracy(Record, frozen=True, kw_only=True):
    """Results of probes. KL divergences are in millionths of a nat, agreement in thousandths."""

    baseline: Baseline | None = None
    last: Measured | None = None
    checked_time: datetime | None = None
    """Time at which the serving replicas were last probed, or began to serve."""
    failures: Count = 0
    """Probe runs in a row that the serving replicas failed."""
    errors: Count = 0
    """Probe runs in a row of the serving replicas without a verdict."""
