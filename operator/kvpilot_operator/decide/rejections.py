"""Report objects that the API server refused, with the server's field and message, and the remedy if one is known."""

import re
from collections.abc import Sequence

from kvpilot_operator.api.names import INFERENCE_POOL_API, deployment_name
from kvpilot_operator.render.workloads import KINDS
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import Rejection
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
# Pattern of refused values that are whole structures. Messages omit such values, because they are long and may hold
# secrets.
_STRUCTURE = re.compile(r"Invalid value: [\w.*&\[\]]*\{.*\}(?=: )", re.DOTALL)
_FORBIDDEN = re.compile(r'User "[^"]*" cannot \S+ resource')

_REMEDIES = (
    (
        "", 'volumes[name="model"].image',
        "spec.model.source oci:// needs image volumes (Kubernetes 1.31 and newer, feature gate ImageVolume): copy the "
        "model to a claim and write pvc://CLAIM/PATH, or take it from hf://",
    ),
    (
        "", "spec.containers[0].resources.requests: ",
        "set requests in spec.engine.resources, and limits at or above them: without them, kvpilot requests CPU and "
        "memory for each GPU, and a LimitRange of the namespace may add lower limits",
    ),
    (
        "PersistentVolumeClaim", ": Forbidden: ",
        "spec.cache.weights: a claim keeps its class and access mode, and cannot shrink; ask for the values with which "
        "it was created, or delete the PersistentVolumeClaim and let engines download the weights again",
    ),
    (
        "InferencePool", "endpointPickerRef",
        "name a picker in spec.inferencePool.endpointPickerRef, and one in canaryEndpointPickerRef for the canary's "
        "pool; or install the Gateway API Inference Extension v1.6.0 or newer, or remove spec.inferencePool",
    ),
)  # fmt: skip
"""Kind of the object (empty for any), text in the API server's message, and the remedy to show if both match."""
_RIGHTS = {"InferencePool": "rbac.inferencePools of the chart", "HTTPRoute": "rbac.httpRoutes of the chart"}


def rejected(s: Snapshot) -> tuple[Rejection, ...]:
    """Return all rejections: objects refused at the last write, pods that a workload could not create, and
    InferencePools if the API server does not serve them."""
    pods = [
        Rejection(view.kind, deployment_name(s.key.name, view.revision), "FailedCreate", view.failure)
        for view in s.deployments.values()
        if view.failure is not None
    ]
    spec = None if s.unread(Question.ROUTE) else s.spec
    if spec is not None and spec.inference_pool is not None and not s.server.inference_pools:
        words = (
            f"spec.inferencePool: this API server does not serve {INFERENCE_POOL_API}: install the Gateway API "
            "Inference Extension, or remove the field"
        )
        pods.append(Rejection("InferencePool", s.key.name, "InferencePoolsNotServed", words))
    return (*(s.rejections or ()), *pods)


def refused(s: Snapshot) -> tuple[str, ...]:
    """Return the reason of each object that the API server refused, for metrics."""
    return tuple(finding([one]).reason for one in rejected(s))


def of_workload(s: Snapshot, revision: str, rejections: Sequence[Rejection]) -> list[Rejection]:
    """Return the rejections of the workload that runs a revision."""
    name = deployment_name(s.key.name, revision)
    return [one for one in rejections if one.kind in KINDS and one.name == name]


def finding(rejections: Sequence[Rejection]) -> Cause:
    """Report all rejections (at least one) in one message, with the reason of the first."""
    reason = rejections[0].reason
    return Cause(reason if _REASON.fullmatch(reason) else "Rejected", "; ".join(map(_told, rejections)))


def _told(one: Rejection) -> str:
    """Describe why the API server refused an object: its fields and messages, the object, and a remedy if known."""
    # Leave out a note that newer API servers add about their own checks, because it does not help users.
    causes = [cause for cause in one.causes if "some validation rules were not checked" not in cause[1]]
    words = ", ".join(dict.fromkeys(f"{field}: {text}" for field, text in causes)) or one.message or "no message"
    if _FORBIDDEN.search(words):
        remedy = f"give the operator this right ({_RIGHTS.get(one.kind, 'the roles of the same version')})"
    else:
        remedy = next((text for kind, part, text in _REMEDIES if kind in ("", one.kind) and part in words), "")
    shown = _STRUCTURE.sub("Invalid value", words)
    return f"{shown} ({one.kind} {one.name}){': ' + remedy if remedy else ''}"
