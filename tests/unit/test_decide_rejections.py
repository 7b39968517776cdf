"""The status quotes the API server's rejections, and adds a remedy for objects that kvpilot renders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.rejections import finding
from kvpilot_operator.errors import NameTaken, NotStarted
from kvpilot_operator.state.objects import Rejection

FIELD = "spec.template.spec.containers[0].resources.requests"
MEMORY = (FIELD, 'Invalid value: "2Gi": must be less than or equal to memory limit')
CPU = (FIELD, 'Invalid value: "2": must be less than or equal to cpu limit')
SECRET = 'Invalid value: core.EnvVar{Name:"HF_TOKEN", Value:"hf_secret"}: may not be set'


def refused(kind: str, message: str, *causes: tuple[str, str], reason: str = "Invalid") -> Rejection:
    return Rejection(kind, "chat-1", reason, message, causes)


def test_the_message_has_the_servers_field_and_text() -> None:
    found = finding([refused("Deployment", "is invalid", MEMORY, CPU, MEMORY)])
    assert found.reason == "Invalid"
    told, _, remedy = found.message.partition(": set ")
    assert told == f"{FIELD}: {MEMORY[1]}, {FIELD}: {CPU[1]} (Deployment chat-1)"
    assert remedy.startswith("requests in spec.engine.resources")


def test_all_rejections_are_reported_with_the_reason_of_the_first() -> None:
    quota = "exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3"
    found = finding([refused("Deployment", quota, reason="FailedCreate"), refused("Service", "is invalid", MEMORY)])
    assert found.reason == "FailedCreate"
    assert found.message.startswith(f"{quota} (Deployment chat-1); {FIELD}: ")


@pytest.mark.parametrize("rejection", [refused("Job", f"env[0]: {SECRET}"), refused("Job", "x", ("env[0]", SECRET))])
def test_a_structure_in_the_servers_message_is_not_shown(rejection: Rejection) -> None:
    assert finding([rejection]).message == "env[0]: Invalid value: may not be set (Job chat-1)"


def test_a_newer_servers_note_about_skipped_checks_is_left_out() -> None:
    more = ("<nil>", 'Invalid value: "null": some validation rules were not checked because the object was invalid')
    assert "not checked" not in finding([refused("Deployment", "is invalid", MEMORY, more)]).message


@pytest.mark.parametrize(
    ("rejection", "remedy"),
    [
        (
            refused(
                "Deployment",
                'failed to create typed patch object: .spec.template.spec.volumes[name="model"].image: field not '
                "declared in schema",
            ),
            "spec.model.source oci://",
        ),
        (
            refused(
                "PersistentVolumeClaim", "is invalid",
                ("spec.resources.requests.storage", "Forbidden: field can not be less than previous value"),
            ),
            "spec.cache.weights: ",
        ),
        (
            refused("InferencePool", "is invalid", ("spec.endpointPickerRef", "Required value")),
            "spec.inferencePool.endpointPickerRef",
        ),
        (
            refused("HTTPRoute", 'User "operator" cannot patch resource "httproutes" in API group "x"'),
            "rbac.httpRoutes of the chart",
        ),
        (
            refused("Deployment", 'User "operator" cannot patch resource "deployments" in API group "apps"'),
            "the roles of the same version",
        ),
        (refused("Service", NameTaken("Service", "team", "chat").message), "rename the QuantizedLLMService"),
        (
            refused("Job", NotStarted("Job", "PersistentVolumeClaim", "team", "c", missing=False).message),
            "spec.cache.weightsClaimName",
        ),
    ],
)  # fmt: skip
def test_refusals_of_fields_that_kvpilot_renders_have_a_remedy(rejection: Rejection, remedy: str) -> None:
    assert remedy in finding([rejection]).message


def test_refusals_by_quotas_have_no_remedy() -> None:
    words = "exceeded quota: team, requested: requests.storage=9, used: requests.storage=0"
    found = finding([refused("PersistentVolumeClaim", words, reason="Forbidden")])
    assert found.message == f"{words} (PersistentVolumeClaim chat-1)"


@given(st.text(max_size=300), st.text(max_size=40), st.lists(st.tuples(st.text(max_size=40), st.text(max_size=80))))
def test_any_refusal_has_a_valid_condition_reason(message: str, reason: str, causes: list[tuple[str, str]]) -> None:
    found = finding([Rejection("Deployment", "chat-1", reason, message, tuple(causes))])
    assert found.reason.isascii()
    assert found.reason.isalnum()
    assert found.message
