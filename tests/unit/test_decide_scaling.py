"""Sources of the replica count, and the times at which it is reset."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.decide.steps.scaling import after_decision, kept, target_replicas
from kvpilot_operator.state.status import Option, Scaling
from support.services import NOW, manifest, spec_of

LATER = NOW + timedelta(minutes=5)


def spec(count=1, mode="Operator", **changes):
    scaling = {"mode": mode, "minReplicas": 1, "maxReplicas": 8} | changes
    return spec_of(manifest(replicas=count, scaling=scaling))


def decided(action, count):
    option = Option(action=action, dtype="auto", replicas=count, outcome="Chosen", message="m")
    return PolicyDecision((option,), "MemoryBound", "m")


def test_the_operator_starts_from_the_users_number():
    scaling = kept(spec(3), Scaling(), NOW)
    assert (scaling.desired_replicas, scaling.spec_replicas, scaling.changed_time) == (3, 3, NOW)


def test_the_operators_number_is_kept_until_the_user_changes_the_spec():
    chosen = after_decision(spec(3), kept(spec(3), Scaling(), NOW), decided("ScaleOut", 5), "auto", NOW)
    assert target_replicas(spec(3), kept(spec(3), chosen, LATER)) == 5
    anew = kept(spec(2), chosen, LATER)
    assert (target_replicas(spec(2), anew), anew.changed_time) == (2, LATER)


def test_max_replicas_bounds_the_number_that_the_operator_has_chosen():
    chosen = after_decision(spec(3), kept(spec(3), Scaling(), NOW), decided("ScaleOut", 7), "auto", NOW)
    assert target_replicas(spec(3), kept(spec(3, maxReplicas=4), chosen, LATER)) == 4


def test_a_service_scaled_to_0_stays_at_0():
    stopped = spec(0, minReplicas=0)
    assert target_replicas(stopped, kept(stopped, Scaling(), NOW)) == 0


def test_an_autoscalers_number_is_used_within_the_limits():
    external = spec(20, mode="External")
    scaling = after_decision(external, kept(external, Scaling(), NOW), decided("ScaleOut", 5), "auto", NOW)
    assert scaling.desired_replicas is None
    assert target_replicas(external, scaling) == 8


def test_the_number_that_would_be_chosen_is_always_recommended():
    external = spec(3, mode="External")
    wanted = Option(action="ScaleOut", dtype="auto", replicas=5, outcome="NotOwner", message="m")
    held = PolicyDecision(decided("Stay", 3).options, "NotOwner", "m", hold="h", wanted=wanted)
    assert after_decision(external, kept(external, Scaling(), NOW), held, "auto", NOW).recommended_replicas == 5
    assert (
        after_decision(spec(3), kept(spec(3), Scaling(), NOW), decided("Stay", 3), "auto", NOW).recommended_replicas
        == 3
    )


def test_mode_recommend_changes_nothing():
    only = spec_of(manifest(replicas=2, kvCache={"mode": "Recommend"}))
    scaling = after_decision(only, kept(only, Scaling(), NOW), decided("ScaleOut", 4), "auto", NOW)
    assert (target_replicas(only, scaling), scaling.recommended_replicas) == (2, 4)


def test_a_change_of_owner_starts_from_the_users_number():
    chosen = after_decision(spec(3), kept(spec(3), Scaling(), NOW), decided("ScaleOut", 7), "auto", NOW)
    given = kept(spec(3, mode="External"), chosen, LATER)
    assert target_replicas(spec(3, mode="External"), given) == 3
    assert target_replicas(spec(3), kept(spec(3), given, LATER)) == 3


@given(
    st.integers(0, 20), st.sampled_from(["Operator", "External"]), st.integers(0, 4), st.integers(4, 9),
    st.none() | st.integers(0, 20), st.none() | st.integers(0, 20),
)  # fmt: skip
def test_the_target_number_of_replicas_is_always_within_the_limits_and_stable(count, mode, least, most, had, of):
    s = spec(count, mode, minReplicas=least, maxReplicas=most)
    once = kept(s, Scaling(desired_replicas=had, spec_replicas=of), NOW)
    assert least <= target_replicas(s, once) <= most
    assert kept(s, once, LATER) == once
