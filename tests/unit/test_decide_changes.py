"""The Event, the journal, the conditions and `kubectl kvpilot` name the spec fields that a rollout changes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_services import PLAIN

from kvpilot_formats import arguments
from kvpilot_kubectl import show
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.changes import move, spec_changes
from kvpilot_operator.decide.context import Context
from kvpilot_operator.observe.views import deployment_view
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Status
from support.services import KEY, NOW, manifest, pod, revision_of, running, spec_of

SCALING = {"mode": "External"}
OLD = manifest(scaling=SCALING)
OLD_REVISION = revision_of(OLD, "auto")
WAITS = {"waiting_reason": "ImagePullBackOff", "exit_message": "no such image"}
CRASHES = {"waiting_reason": "CrashLoopBackOff", "exit_message": "no kernel for this GPU", "restarts": 1}
PENDING = {"unschedulable": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"}
UNHEARD = {"unheard_since": NOW}


def view(obj: dict[str, Any]) -> DeploymentView:
    """Return the Deployment of the manifest's engines with dtype auto, as the API server shows it."""
    template = pod_template(KEY.name, spec_of(obj), "auto")
    labels = {"kvpilot.io/revision": revision_of(obj, "auto"), "kvpilot.io/dtype": "auto"}
    return deployment_view({"metadata": {"labels": labels}, "spec": {"replicas": 1, "template": template}})


def serving_old(obj: dict[str, Any], **changes: Any) -> Snapshot:
    """Return a snapshot in which the old revision serves and `obj` is the newest spec."""
    there = running(OLD, "auto")
    given = {"status": there.status, "deployments": {OLD_REVISION: view(OLD)}, "pods": there.pods}
    return replace(running(obj, "auto"), **{**given, "traffic": OLD_REVISION, "samples": {}, **changes})


def on_trial(obj: dict[str, Any], kubelet: Mapping[str, Any] = WAITS) -> tuple[Decision, Decision]:
    """Return the decision that starts the canary, and a later decision while its pod does not start."""
    first = decide(serving_old(obj))
    name = revision_of(obj, "auto")
    deployments = {OLD_REVISION: view(OLD), name: view(obj)}
    pods = (pod(OLD_REVISION), pod(name, ready=False, ip=None, **kubelet))
    later = serving_old(obj, status=first.status, now=NOW + timedelta(minutes=5), pods=pods, deployments=deployments)
    return first, decide(later)


def told(status: Status, kind: str) -> tuple[str, str]:
    condition = status.condition(kind)
    assert condition is not None
    return condition.reason, condition.message


IMAGE = manifest(scaling=SCALING, engine={"image": "kvpilot/runtime:2"})
SAYS_IMAGE = "the spec has changed: image kvpilot/runtime:1 -> kvpilot/runtime:2"


def test_an_image_change_is_reported_when_its_canary_starts() -> None:
    first, _ = on_trial(IMAGE)
    (event,) = [one for one in first.events if one.reason == "CanaryStarted"]
    assert event.message == SAYS_IMAGE
    newest = first.status.decisions[0]
    assert (newest.action, newest.reason, newest.message) == ("StartCanary", "SpecChanged", SAYS_IMAGE)
    assert told(first.status, "CanaryHealthy") == ("SpecChanged", f"auto: {SAYS_IMAGE}")
    assert told(first.status, "Reconciling")[1] == f"auto: {SAYS_IMAGE}"


@pytest.mark.parametrize(
    ("kubelet", "reason", "words"),
    [
        (WAITS, "ImageUnavailable", "ImagePullBackOff"),
        (CRASHES, "CrashLoopBackOff", "CrashLoopBackOff"),
        (PENDING, "Unschedulable", PENDING["unschedulable"]),
        (UNHEARD, "Unschedulable", "the scheduler says nothing about pod"),
    ],
)
def test_an_image_change_is_reported_with_its_cause_while_its_canary_hangs(
    kubelet: Mapping[str, Any], reason: str, words: str
) -> None:
    _, later = on_trial(IMAGE, kubelet)
    found, message = told(later.status, "CanaryHealthy")
    assert found == reason
    assert message.startswith("auto: ")
    assert SAYS_IMAGE in message
    assert words in message
    # `kubectl get` shows the reason of Ready.
    assert told(later.status, "Ready")[0] == told(later.status, "Reconciling")[0] == reason
    obj = {**IMAGE, "status": json.loads(json.dumps(later.status.as_written(), default=str))}
    text = show.rendered([show.listed([obj], everywhere=False)], PLAIN)
    assert f"CanaryHealthy=Unknown ({reason})" in text
    lines = show.rendered(show.timeline(obj, NOW), PLAIN)
    assert "trial: auto Starting; " in lines
    assert "auto -> auto" not in text + lines


def test_a_rollout_still_reports_its_changes_while_it_is_probed() -> None:
    first, _ = on_trial(IMAGE)
    assert first.status.canary is not None
    name = revision_of(IMAGE, "auto")
    canary = replace_message(first.status, "answers are compared")
    pods = (pod(OLD_REVISION), pod(name, ready=False))
    later = decide(
        serving_old(IMAGE, status=canary, pods=pods, deployments={OLD_REVISION: view(OLD), name: view(IMAGE)})
    )
    assert SAYS_IMAGE in told(later.status, "Reconciling")[1]


def replace_message(status: Status, message: str) -> Status:
    return msgspec.structs.replace(status, canary=msgspec.structs.replace(status.canary, message=message))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"source": "hf://Qwen/Qwen3-14B"}}, "model Qwen/Qwen3-8B -> Qwen/Qwen3-14B"),
        ({"model": {"maxModelLen": 4096}}, "argument --max-model-len added (4096)"),
        ({"engine": {"extraArgs": ["--max-num-seqs=64"]}}, "argument --max-num-seqs added (64)"),
        ({"engine": {"extraArgs": ["--seed", "7", "--async-scheduling"]}}, "argument --seed added (7)"),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "the pods' template (such as resources"),
        ({"engine": {"image": "kvpilot/runtime:2"}, "model": {"maxModelLen": 4096}}, "; argument --max-model-len"),
    ],
)
def test_each_change_of_the_spec_is_named(spec: dict[str, Any], words: str) -> None:
    first, _ = on_trial(manifest(scaling=SCALING, **spec))
    assert first.status.canary is not None
    assert words in first.status.canary.message


def test_simultaneous_changes_of_dtype_and_image_are_both_reported() -> None:
    obj = manifest(scaling=SCALING, engine={"image": "b:2"}, kvCache={"mode": "Fixed", "dtype": "k4v4"})
    first = decide(serving_old(obj))
    assert first.status.canary is not None
    wanted = "spec.kvCache.dtype is k4v4; the spec has changed, too: image kvpilot/runtime:1 -> b:2"
    assert first.status.canary.message == wanted
    assert move(first.status.canary) == "auto -> k4v4"


def changed_from(*old: str) -> str:
    """Return the description of a change from an engine with these arguments to `IMAGE`."""
    s = serving_old(IMAGE, deployments={OLD_REVISION: replace(view(OLD), arguments=old)})
    assert s.spec is not None
    assert s.status.stable is not None
    return spec_changes(Context.of(s, s.spec), s.status.stable)


def test_values_of_options_that_may_be_secret_are_not_shown() -> None:
    said = changed_from("--api-key=old-secret", "--seed=1")
    assert "argument --api-key changed" in said
    assert "old-secret" not in said


def test_only_four_options_of_vllm_and_kvpilot_hide_their_values() -> None:
    options = json.loads((Path(arguments.__file__).parent / "vllm.json").read_text())["options"]
    hidden = {name for name in (*options, *arguments.KVPILOT) if f"argument {name} changed" in changed_from(name, "7")}
    assert hidden == {"--allow-credentials", "--api-key", "--hf-token", "--ssl-keyfile"}


def test_a_change_of_the_recent_window_is_shown_with_both_values() -> None:
    wide, none = (
        manifest(scaling=SCALING, kvCache={"mode": "Fixed", "dtype": "k4v4", "recentTokens": tokens})
        for tokens in (64, 0)
    )
    before = running(wide, "k4v4")
    template = {"spec": pod_template(KEY.name, spec_of(wide), "k4v4")["spec"]}
    there = deployment_view({"metadata": {}, "spec": {"replicas": 1, "template": template}})
    s = replace(running(none, "k4v4"), status=before.status, deployments={revision_of(wide, "k4v4"): there})
    assert s.spec is not None
    assert s.status.stable is not None
    assert spec_changes(Context.of(s, s.spec), s.status.stable) == "argument --recent-tokens 64 -> 0"


def test_without_changes_of_the_spec_nothing_is_reported() -> None:
    s = serving_old(OLD)
    assert s.spec is not None
    assert s.status.stable is not None
    assert spec_changes(Context.of(s, s.spec), s.status.stable) == ""


@given(st.lists(st.text(max_size=300), max_size=8).map(tuple))
def test_the_description_of_changes_is_short_for_any_arguments(arguments: tuple[str, ...]) -> None:
    s = serving_old(IMAGE, deployments={OLD_REVISION: replace(view(OLD), arguments=arguments)})
    assert s.spec is not None
    assert s.status.stable is not None
    assert spec_changes(Context.of(s, s.spec), s.status.stable)
