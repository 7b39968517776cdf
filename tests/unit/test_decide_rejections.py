"""What the API server refuses is told with the spec's field and the remedy; the words are a real server's (1.20)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.rejections import finding
from kvpilot_operator.decide.remedies import TABLE
from kvpilot_operator.errors import NotStarted
from kvpilot_operator.state.objects import Rejection

BOX = "spec.template.spec.containers[0]"
TEMPLATE = "spec.engine.podTemplate"
LABEL = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
HALF = (
    'resource.Quantity{i:resource.int64Amount{value:5, scale:-1}, d:resource.infDecAmount{Dec:(*inf.Dec)(nil)}, s:""}'
)


def invalid(*causes: tuple[str, str], kind: str = "Deployment") -> Rejection:
    """A write that was answered with 422."""
    message = ", ".join(f"{field}: {words}" for field, words in causes)
    return Rejection(kind, "chat-1", "Invalid", f'Deployment.apps "chat-1" is invalid: {message}', causes)


def refused(message: str, reason: str = "Forbidden", kind: str = "Deployment") -> Rejection:
    """A write that was refused without causes, or a pod that could not be created."""
    return Rejection(kind, "chat-1", reason, message)


CASES = [
    (
        invalid((f"{BOX}.resources.requests", 'Invalid value: "2Gi": must be less than or equal to memory limit')),
        "RequestAboveLimit", "spec.engine.resources.requests.memory: ", "raise spec.engine.resources.limits.memory",
    ),
    (
        refused('spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit'),
        "RequestAboveLimit", "spec.engine.resources.requests.cpu: ", "LimitRange",
    ),
    (
        invalid((f"{BOX}.resources.requests", 'Invalid value: "1": must be equal to nvidia.com/gpu limit')),
        "RequestNotLimit", "spec.engine.resources.requests.nvidia.com/gpu: ", "the same number",
    ),
    (
        invalid((f"{BOX}.resources.limits", "Required value: Limit must be set for non overcommitable resources")),
        "LimitMissing", "spec.engine.resources.limits: ", "set a limit",
    ),
    (
        invalid((f"{BOX}.resources.limits[nvidia.com/gpu]", f"Invalid value: {HALF}: must be an integer")),
        "NotAWholeNumber", "spec.engine.resources.limits[nvidia.com/gpu]: must be an integer", "a whole number",
    ),
    (
        invalid((f"{BOX}.resources.limits[gpu]", 'Invalid value: "gpu": must be a standard resource for containers')),
        "UnknownResource", "spec.engine.resources.limits[gpu]: ", "nvidia.com/gpu",
    ),
    (
        invalid(("spec.template.spec.nodeSelector", f'Invalid value: "a b": {LABEL}')),
        "InvalidLabel", "spec.engine.podTemplate.spec.nodeSelector: ", "at most 63",
    ),
    (
        invalid(("spec.template.spec.tolerations[1].key", f'Invalid value: "a b": {LABEL}')),
        "InvalidLabel", "spec.engine.podTemplate.spec.tolerations[1].key: ", "at most 63",
    ),
    (
        refused("no PriorityClass with name nope was found"),
        "PriorityClassMissing", "spec.engine.podTemplate.spec.priorityClassName: ", "create the PriorityClass nope",
    ),
    (
        refused('error looking up service account default/nope: serviceaccount "nope" not found'),
        "ServiceAccountMissing", "spec.engine.podTemplate.spec.serviceAccountName: ", "create the ServiceAccount nope",
    ),
    (
        refused('pod rejected: RuntimeClass "nope" not found'),
        "RuntimeClassMissing", "spec.engine.podTemplate.spec.runtimeClassName: ", "create the RuntimeClass nope",
    ),
    (
        refused("exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3"),
        "QuotaExceeded", "spec.replicas: ", "raise ResourceQuota team",
    ),
    (
        refused(
            'services "chat" is forbidden: exceeded quota: team, requested: count/services=1,services=1, '
            "used: count/services=0,services=0, limited: count/services=0,services=0", kind="Service",
        ),
        "QuotaExceeded", "exceeded quota: team", "raise ResourceQuota team",
    ),
    (
        refused(
            "exceeded quota: team, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=0, "
            "limited: requests.nvidia.com/gpu=0"
        ),
        "QuotaExceeded", "spec.engine.resources: ", "raise ResourceQuota team",
    ),
    (
        refused(
            'persistentvolumeclaims "chat-weights" is forbidden: exceeded quota: team, requested: requests.storage=9, '
            "used: requests.storage=0, limited: requests.storage=1Gi", kind="PersistentVolumeClaim",
        ),
        "QuotaExceeded", "spec.cache.weights: ", "ask for less storage",
    ),
    (
        invalid(
            ("spec.resources.requests.storage", "Forbidden: field can not be less than previous value"),
            kind="PersistentVolumeClaim",
        ),
        "ClaimCannotShrink", "spec.cache.weights.size: ", "or more",
    ),
    (
        invalid(
            ("spec.resources.requests.storage", "Forbidden: field can not be less than status.capacity"),
            kind="PersistentVolumeClaim",
        ),
        "ClaimCannotShrink", "spec.cache.weights.size: ", "or more",
    ),
    (
        invalid(
            ("spec", "Forbidden: spec is immutable after creation except resources.requests for bound claims"),
            kind="PersistentVolumeClaim",
        ),
        "ClaimCannotChange", "spec.cache.weights: ", "delete the PersistentVolumeClaim",
    ),
    (
        refused(
            'persistentvolumeclaims "chat-weights" is forbidden: only dynamically provisioned pvc can be resized and '
            "the storageclass that provisions the pvc must support resize", kind="PersistentVolumeClaim",
        ),
        "ClaimCannotGrow", "spec.cache.weights.size: ", "allowVolumeExpansion",
    ),
    (
        refused("failed quota: team: must specify requests.cpu"),
        "QuotaNeedsResources", "spec.engine.resources.requests.cpu: ", "ResourceQuota team",
    ),
    (
        refused("failed quota: team: must specify limits.cpu for: engine,proxy; limits.memory for: engine,proxy"),
        "QuotaNeedsResources", "spec.engine.resources.limits.cpu: ", "ResourceQuota team",
    ),
    (
        refused("failed quota: team: must specify limits.cpu for: proxy; limits.memory for: proxy"),
        "QuotaNeedsResources", "spec.engine.podTemplate.spec.containers: ", "resources.limits.cpu of container proxy",
    ),
    (
        refused(
            "failed to create typed patch object: .spec.template.spec.resourceClaims: field not declared in schema",
            reason="",
        ),
        "ResourceClaimsUnsupported", f"{TEMPLATE}.spec.resourceClaims: ", "1.34",
    ),
    (
        refused(
            'failed to create typed patch object: .spec.template.spec.initContainers[name="proxy"].restartPolicy: '
            "field not declared in schema", reason="",
        ),
        "SidecarsUnsupported", f"{TEMPLATE}.spec.initContainers: ", "under containers",
    ),
    (
        refused(
            "[minimum cpu usage per Container is 100m, but request is 10m, maximum memory usage per Container is 1Gi, "
            "but limit is 4Gi]"
        ),
        "LimitRangeViolated", "spec.engine.resources.requests.cpu: minimum cpu", "LimitRange",
    ),
    (
        refused("maximum cpu usage per Pod is 1.  No limit is specified"),
        "LimitRangeViolated", "spec.engine.resources: ", "LimitRange",
    ),
    (
        refused(
            'failed to create typed patch object: .spec.template.spec.volumes[name="model"].image: field not declared '
            "in schema", reason="",
        ),
        "ImageVolumesUnsupported", "spec.model.source: ", "pvc://",
    ),
    (
        refused(
            'failed to create typed patch object: .spec.template.spec.containers[name="engine"].env: duplicate entries '
            'for key [name="HF_HOME"]', reason="",
        ),
        "DuplicateVariable", "spec.engine.env: ", "set HF_HOME once",
    ),
    (
        refused('violates PodSecurity "restricted:latest": runAsNonRoot != true'),
        "PodSecurityViolated", "spec.engine: ", "pod-security.kubernetes.io/enforce",
    ),
    (
        refused(
            'pods "chat-1-" is forbidden: unable to validate against any security context constraint: [provider '
            '"anyuid": Forbidden: not usable by user or serviceaccount, provider restricted-v2: '
            '.spec.securityContext.fsGroup: '
            "Invalid value: []int64{65532}: 65532 is not an allowed group"
        ),
        "SecurityContextRefused", f"{TEMPLATE}.spec.securityContext: ", "leave out runAsUser",
    ),
    (
        refused('admission webhook "images.example.org" denied the request: image is not signed'),
        "DeniedByWebhook", 'admission webhook "images.example.org"', "exception",
    ),
    (
        refused(
            'Internal error occurred: failed calling webhook "w.example.org": Post "https://127.0.0.1:1/x": '
            "dial tcp 127.0.0.1:1: connect: connection refused", reason="InternalError",
        ),
        "WebhookUnavailable", "Internal error occurred", "administrator",
    ),
    (
        refused('deployments.apps "chat-1" is forbidden: unable to create new content in namespace team because it is '
                "being terminated"),
        "NamespaceTerminating", "unable to create", "another namespace",
    ),
    (
        invalid(
            ("spec.inferencePool.endpointPickerRef", "Required value"),
            ("<nil>", 'Invalid value: "null": some validation rules were not checked because the object was invalid'),
            kind="InferencePool",
        ),
        "EndpointPickerMissing", "spec.inferencePool.endpointPickerRef: the InferencePools of this API server need an "
        "endpoint picker (Required value): name one", "itself, or remove spec.inferencePool (InferencePool chat-1)",
    ),
    (
        refused('inferencepools.inference.networking.k8s.io "chat" is forbidden: User "operator" cannot get resource '
                '"inferencepools" in API group "inference.networking.k8s.io"', kind="InferencePool"),
        "OperatorForbidden", "spec.inferencePool: ", "rbac.inferencePools",
    ),
    (
        refused('httproutes.gateway.networking.k8s.io "chat" is forbidden: User "operator" cannot create resource '
                '"httproutes" in API group "gateway.networking.k8s.io" in the namespace "team"', kind="HTTPRoute"),
        "OperatorForbidden", "spec.route: ", "rbac.httpRoutes",
    ),
    (
        refused('deployments.apps "chat-1" is forbidden: User "system:serviceaccount:kvpilot:operator" cannot patch '
                'resource "deployments" in API group "apps" in the namespace "team"'),
        "OperatorForbidden", "User ", "role",
    ),
    (
        refused("Service team/chat exists and is not kvpilot's", reason="NameTaken", kind="Service"),
        "NameTaken", "metadata.name: ", "rename the QuantizedLLMService",
    ),
    (
        refused(NotStarted("Deployment", "PersistentVolumeClaim", "team", "chat-weights", missing=False).message,
                reason="NameTaken"),
        "NameTaken", "spec.cache.weights: ", "spec.cache.weightsClaimName",
    ),
    (
        refused(NotStarted("Deployment", "PersistentVolumeClaim", "team", "chat-weights", missing=True).message,
                reason="ObjectMissing"),
        "ObjectMissing", "no pod of this Deployment is started: ", "why it could not",
    ),
    (
        invalid(("spec.selector", "Invalid value: v1.LabelSelector{}: field is immutable")),
        "NameTaken", "metadata.name: ", "rename the QuantizedLLMService",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rejection", "reason", "begin", "remedy"), CASES, ids=[case[1] for case in CASES])
def test_a_common_refusal_names_field_and_remedy(rejection: Rejection, reason: str, begin: str, remedy: str) -> None:
    found = finding([rejection])
    assert found.reason == reason
    assert found.message.startswith(begin)
    assert remedy in found.message
    assert found.message.endswith(f"({rejection.kind} chat-1)")
    assert "resource.Quantity" not in found.message


def test_every_row_of_the_table_is_tried() -> None:
    words = [text for rejection, *_ in CASES for text in (rejection.message, *(words for _, words in rejection.causes))]
    words.append("a Deployment of this name exists and is not kvpilot's")
    words.append("the InferencePools of this API server need an endpoint picker")
    for row in TABLE:
        assert any(re.search(row.words, text, re.DOTALL) for text in words), row.reason


@pytest.mark.parametrize(
    ("field", "own"),
    [
        (f"{BOX}.env[2].valueFrom.fieldRef.fieldPath", "spec.engine.env.valueFrom.fieldRef.fieldPath"),
        (f"{BOX}.image", "spec.engine.image"),
        (
            "spec.template.spec.topologySpreadConstraints[0].topologyKey",
            f"{TEMPLATE}.spec.topologySpreadConstraints[0].topologyKey",
        ),
        (
            "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ".nodeSelectorTerms[0].matchExpressions[1].values",
            f"{TEMPLATE}.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ".nodeSelectorTerms[0].matchExpressions[1].values",
        ),
        ("spec.template.spec.imagePullSecrets[0].name", f"{TEMPLATE}.spec.imagePullSecrets[0].name"),
        ("spec.template.spec.volumes[1].persistentVolumeClaim.claimName", "spec.cache"),
        (
            "spec.template.spec.containers[1].volumeMounts[0].name",
            f"{TEMPLATE}.spec.containers[*].volumeMounts[0].name",
        ),
        ("spec.containers[0].resources.claims[0].name", f"{TEMPLATE}.spec.containers[*].resources.claims[0].name"),
        ("spec.template.spec.initContainers[0].image", f"{TEMPLATE}.spec.initContainers[0].image"),
        ("spec.template.spec.volumes[3].csi.driver", f"{TEMPLATE}.spec.volumes[*].csi.driver"),
        ("spec.template.spec.securityContext.fsGroup", f"{TEMPLATE}.spec.securityContext.fsGroup"),
        ("spec.template.labels", f"{TEMPLATE}.metadata.labels"),
        ("spec.template.spec.dnsPolicy", "spec.template.spec.dnsPolicy"),
    ],
)
def test_what_no_row_knows_is_told_in_the_servers_words_with_the_specs_field(field: str, own: str) -> None:
    found = finding([invalid((field, "Invalid value: 7: something new"))])
    assert found.reason == "Invalid"
    assert found.message == f"{own}: Invalid value: 7: something new (Deployment chat-1)"


def test_all_that_is_refused_is_told_and_what_is_told_twice_once() -> None:
    memory = (f"{BOX}.resources.requests", 'Invalid value: "2Gi": must be less than or equal to memory limit')
    cpu = (f"{BOX}.resources.requests", 'Invalid value: "2": must be less than or equal to cpu limit')
    found = finding([invalid(memory, cpu, memory), refused("failed quota: team: must specify limits.cpu")])
    assert found.reason == "RequestAboveLimit"
    assert found.message.count("to memory limit") == 1
    assert "to cpu limit" in found.message
    assert "ResourceQuota team" in found.message


@given(st.text(max_size=300), st.text(max_size=40), st.lists(st.tuples(st.text(max_size=40), st.text(max_size=80))))
def test_any_words_have_a_reason_that_a_condition_can_hold(
    message: str, reason: str, causes: list[tuple[str, str]]
) -> None:
    found = finding([Rejection("Deployment", "chat-1", reason, message, tuple(causes))])
    assert found.reason.isascii()
    assert found.reason.isalnum()
    assert found.message
