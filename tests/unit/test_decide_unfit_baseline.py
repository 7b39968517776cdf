"""A 16-bit engine with unstable answers is no reference: canaries cannot pass, no dtype is denied, users are told."""

from dataclasses import dataclass

from kvpilot_operator.decide import decide
from kvpilot_operator.state.accuracy import Accuracy
from kvpilot_operator.state.decision import Capture, Decision, Find, Measure, NothingKept, ProbeFailed, ProbeResult
from kvpilot_operator.state.status import Status
from support.model_cluster import ModelCluster
from support.services import baseline, manifest, reporting, revision_of, running
from support.trials import NEW, OLD, ended, service

RANDOM = "the 16-bit engine differs from its own answers by a mean KL of 4800.0 millinats (limit 20)"

TOLD = reporting((revision_of(manifest(), "auto"), "auto"))


@dataclass
class Ill(ModelCluster):
    """Model cluster whose 16-bit engines answer at random until `mended` is set. No random answers are stored."""

    mended: bool = False
    captures: int = 0

    def _answer(self, decision: Decision) -> None:
        if self.mended or not isinstance(decision.probe, Capture | Find):
            super()._answer(decision)
        elif isinstance(decision.probe, Find):
            self.probe = ProbeResult(decision.probe, NothingKept())
        elif self.probe is None or self.probe.request.identity != decision.probe.identity:
            self.captures += 1
            self.probe = ProbeResult(decision.probe, ProbeFailed("BaselineUnfit", f"pod p: {RANDOM}"))


def ill() -> Ill:
    cluster = Ill(service(OLD), start_ticks=1, requests=50.0)
    cluster.settle()
    cluster.edit(service(NEW))
    return cluster


def _no_traffic(cluster: ModelCluster, revision: str) -> None:
    assert cluster.shares().get(revision, 0.0) == 0


def test_a_canary_beside_a_noisy_16_bit_engine_gets_no_traffic_and_no_denial():
    cluster = ill()
    new = revision_of(cluster.obj, NEW)
    cluster.watch = lambda world: _no_traffic(world, new)
    last = cluster.until(ended).last_trial
    status = cluster.parsed()
    assert last is not None
    assert (last.verdict, last.reason) == ("Inconclusive", "BaselineUnfit")
    assert RANDOM in last.message
    assert status.kv_cache.denied == ()
    assert status.accuracy.baseline is None
    assert cluster.baseline is None
    assert cluster.captures == cluster.obj["spec"]["accuracy"]["consecutiveErrorLimit"]
    told = next(one for one in status.decisions if one.reason == "BaselineUnfit")
    assert (told.action, RANDOM in told.message) == ("RollBack", True)


def test_a_trial_ended_by_a_noisy_16_bit_engine_is_not_retried_at_once():
    cluster = ill()
    cluster.until(ended)
    captures = cluster.captures
    settled = cluster.settle()
    assert (settled.kv_cache.active_dtype, settled.canary) == (OLD, None)
    assert cluster.captures == captures


def test_an_unfit_baseline_is_reported_by_the_condition_and_one_event():
    cluster = Ill(manifest(), start_ticks=1)
    warned = []
    for _ in range(30):
        decision = cluster.tick()
        assert decision is not None
        warned += [event for event in decision.events if event.reason == "BaselineUnfit"]
    for kept in (cluster.probe, None):
        # A repeated capture has no result yet, and neither has an operator that has just started.
        cluster.probe = kept
        told = decide(cluster.snapshot()).status.condition("AccuracyVerified")
        assert told is not None
        assert (told.status, told.reason) == ("False", "BaselineUnfit")
        assert RANDOM in told.message
    assert [event.type for event in warned] == ["Warning"]
    cluster.mended, cluster.probe = True, None
    told = cluster.settle().condition("AccuracyVerified")
    assert told is not None
    assert (told.status, told.reason) == ("True", "Reference")


def test_a_noisy_kept_baseline_is_captured_again():
    loud = baseline(control_mean_kl_micronats=4_800_000, control_top1_agreement_permille=0)
    status = Status(accuracy=Accuracy(baseline=loud))
    decision = decide(running(manifest(), "auto", status=status, samples=TOLD))
    assert isinstance(decision.probe, Capture)
    told = decision.status.condition("AccuracyVerified")
    assert told is not None
    assert (told.status, told.reason) == ("False", "BaselineUnfit")


def test_a_serving_dtype_is_not_judged_by_a_noisy_baseline():
    loud = baseline(control_mean_kl_micronats=4_800_000, control_top1_agreement_permille=0)
    decision = decide(running(manifest(), "k8v4", status=Status(accuracy=Accuracy(baseline=loud))))
    assert isinstance(decision.probe, Find)
    assert not isinstance(decision.probe, Measure)


def test_changed_limits_start_a_new_capture():
    asked = []
    for limit in (20, 6000):
        decision = decide(running(manifest(accuracy={"maxExcessKLMillinats": limit}), "auto", samples=TOLD))
        assert decision.probe is not None
        asked.append(decision.probe.identity)
    assert asked[0] != asked[1]
