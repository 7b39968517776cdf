"""A bounded cache is compared with answers from an unbounded one, and rolls out like any other change."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpilot_operator.api.spec import parse
from kvpilot_operator.decide import decide
from kvpilot_operator.state.decision import Capture, Decision, Measure, ProbeResult
from kvpilot_operator.state.status import Status
from support.model_cluster import ModelCluster
from support.services import manifest, measurement, revision_of, running
from support.trials import end_of


def service(window: int | None, dtype: str = "auto", **spec: Any) -> dict[str, Any]:
    """Return a service in mode Fixed. It keeps every token if `window` is None."""
    bound = {"retention": {"sinkTokens": 4, "windowTokens": window}}
    return manifest(kvCache={"mode": "Fixed", "dtype": dtype, **({} if window is None else bound)}, **spec)


@dataclass
class Forgetful(ModelCluster):
    """Cluster whose engines answer garbage if their window is below `asked` tokens."""

    asked: int = 1024
    captured: list[str] = field(default_factory=list)
    """Revisions from which a baseline was captured."""

    def _answer(self, decision: Decision) -> None:
        super()._answer(decision)
        request = decision.probe
        if isinstance(request, Capture):
            self.captured.append(request.pod.rpartition("-")[0])
        kept = parse(self.obj).kv_cache.retention
        short = kept is not None and kept.window_tokens < self.asked
        if isinstance(request, Measure) and short:
            self.probe = ProbeResult(request, measurement(9_000_000, 10))


def ended(cluster: ModelCluster) -> tuple[Status, str, str]:
    status = cluster.settle()
    assert status.last_trial is not None
    return status, end_of(status), status.last_trial.reason


def test_a_bound_that_forgets_what_probes_ask_for_is_rolled_back_and_a_longer_one_is_promoted() -> None:
    cluster = Forgetful(service(None))
    cluster.settle()
    whole = revision_of(cluster.obj, "auto")

    cluster.edit(service(64))
    status, stage, reason = ended(cluster)
    assert (stage, reason) == ("RolledBack", "AccuracyRegressed")
    assert cluster.traffic == whole
    assert cluster.captured == [whole]
    # The bound, not the dtype, caused the damage, so the operator does not deny the dtype.
    assert status.kv_cache.denied == ()

    cluster.edit(service(4096))
    _, stage, reason = ended(cluster)
    assert stage == "Promoted"
    assert cluster.traffic == revision_of(cluster.obj, "auto") != whole
    assert cluster.captured == [whole]


@pytest.mark.parametrize(("window", "stage"), [(64, "RolledBack"), (4096, "Promoted")])
def test_a_service_that_had_the_bound_from_the_start_is_judged_by_a_whole_cache_too(window: int, stage: str) -> None:
    """A 16-bit replica with the same bound would forget the same tokens, and every canary would pass."""
    cluster = Forgetful(service(window))
    cluster.settle()
    cluster.edit(service(window, "k4v4"))
    assert ended(cluster)[1] == stage
    assert cluster.captured == [revision_of(service(None), "auto")]
    assert list(cluster.deployments) == [cluster.traffic]


def test_leaving_the_bound_away_again_goes_out_as_a_canary_that_passes() -> None:
    cluster = Forgetful(service(4096))
    cluster.settle()
    cluster.edit(service(None))
    assert ended(cluster)[1] == "Promoted"
    assert cluster.traffic == revision_of(service(None), "auto")


def test_bounded_16_bits_are_not_called_what_accuracy_is_measured_against() -> None:
    def told(obj: dict[str, Any]) -> tuple[str, str]:
        found = next(c for c in decide(running(obj, "auto")).status.conditions if c.type == "AccuracyVerified")
        return found.status, found.reason

    assert told(service(None)) == ("True", "Reference")
    assert told(service(4096)) == ("Unknown", "NotProbed")
