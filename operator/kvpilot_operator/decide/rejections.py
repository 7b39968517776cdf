"""What did the API server refuse, in which field of the spec, and what helps? From its words to the user's.

Its words are of the objects that we render and differ a little between versions. The reasons and remedies are those of
`remedies`; what is not in there is told as the server said it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, deployment_name
from kvpilot_operator.decide.remedies import TABLE
from kvpilot_operator.render.workloads import KINDS
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.objects import Rejection
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
# A path in front of what is wrong with it, in the words of a validation.
_FIELD = re.compile(r"(?P<field>(?:spec|metadata)(?:\.\w+|\[[^\]]*\])+): (?P<words>.*)", re.DOTALL)
_ABOUT = re.compile(r'^[\w.-]+ "[^"]*" is (?:forbidden|invalid): ')
_GO = re.compile(r"^Invalid value: (?:resource|core|v1)\.\w+\{.*\}: ", re.DOTALL)

_POD = r"^spec\.(?:(?:template|leaderWorkerTemplate\.\w+)\.spec\.)?"
_TEMPLATE = "spec.engine.podTemplate"
# The engine is the first container; of a list that the user's items follow ours in, no index of theirs is known.
_FIELDS = (
    (_POD + r"containers\[0\]\.resources(?!\.claims)", "spec.engine.resources"),
    (_POD + r"containers\[0\]\.env(?:\[\d+\])?", "spec.engine.env"),
    (_POD + r"containers\[0\]\.image", "spec.engine.image"),
    (_POD + r"containers\[0\]\.args", "spec.engine.extraArgs"),
    (_POD + r"containers\[\d+\]", f"{_TEMPLATE}.spec.containers[*]"),
    (_POD + r"volumes\[1\]\.image.*", "spec.model.source"),
    (_POD + r"volumes\[\d+\]\.persistentVolumeClaim.*", "spec.cache"),
    (_POD + r"terminationGracePeriodSeconds", "spec.drain"),
    (_POD + r"volumes\[\d+\]", f"{_TEMPLATE}.spec.volumes[*]"),
    (
        _POD + r"(nodeSelector|tolerations|affinity|topologySpreadConstraints|imagePullSecrets|serviceAccountName"
        r"|runtimeClassName|priorityClassName|initContainers|resourceClaims|schedulerName|securityContext|hostIPC"
        r"|hostNetwork|hostPID)",
        rf"{_TEMPLATE}.spec.\1",
    ),
    (r"^spec\.template\.(labels|annotations)", rf"{_TEMPLATE}.metadata.\1"),
    (r"^spec\.minAvailable", "spec.disruption.minAvailable"),
    (r"^metadata\.name$", "metadata.name"),
)


def rejected(s: Snapshot) -> tuple[Rejection, ...]:
    """What the API server would not have, pods that a workload cannot create included."""
    pods = [
        Rejection(view.kind, deployment_name(s.key.name, view.revision), "FailedCreate", view.failure)
        for view in s.deployments.values()
        if view.failure is not None
    ]
    return (*(_of_pool(s, one) for one in s.rejections or ()), *pods, *_not_served(s))


def _of_pool(s: Snapshot, one: Rejection) -> Rejection:
    """With the spec's field for a pool's picker: which one it is, its pool's name tells."""
    if one.kind != "InferencePool":
        return one
    own = "spec.inferencePool." + ("endpointPickerRef" if one.name == s.key.name else "canaryEndpointPickerRef")
    causes = ((field.replace("spec.endpointPickerRef", own), words) for field, words in _faults(one))
    return replace(one, causes=tuple(causes))


def of_workload(s: Snapshot, revision: str, rejections: Sequence[Rejection]) -> list[Rejection]:
    """Those of them that are about what runs a revision, of whatever kind it is."""
    name = deployment_name(s.key.name, revision)
    return [one for one in rejections if one.kind in KINDS and one.name == name]


def _not_served(s: Snapshot) -> tuple[Rejection, ...]:
    """The pools and the route of a spec that asks for some, where the API server has no such kind: it is sent none."""
    if s.spec is None or s.unread(Question.ROUTE):
        return ()
    asked = (
        ("InferencePool", "inferencePool", INFERENCE_POOL_API, "the Gateway API Inference Extension",
         s.spec.inference_pool is not None and not s.server.inference_pools),
        ("HTTPRoute", "route", HTTP_ROUTE_API, "the Gateway API",
         s.spec.route is not None and not s.server.http_routes),
    )  # fmt: skip
    return tuple(
        Rejection(
            kind,
            s.key.name,
            f"{kind}sNotServed",
            f"spec.{field}: this API server does not serve {api}; install {what}, which is noticed within half a "
            "minute, or remove the field",
        )
        for kind, field, api, what, missing in asked
        if missing
    )


def finding(rejections: Sequence[Rejection]) -> Cause:
    """All of it (at least one) in one message, with the reason of the first."""
    told = [(one, [_piece(one, field, words) for field, words in _faults(one)]) for one in rejections]
    message = "; ".join(
        f"{', '.join(dict.fromkeys(words for _, words in pieces))} ({rejection.kind} {rejection.name})"
        for rejection, pieces in told
    )
    return Cause(told[0][1][0][0], message)


def _faults(rejection: Rejection) -> Iterator[tuple[str, str]]:
    """Field ("" where there is none) and words, by the server's own list or else out of its message."""
    if rejection.causes:
        # Newer servers add that they have looked no further.
        known = [cause for cause in rejection.causes if "some validation rules were not checked" not in cause[1]]
        yield from known or rejection.causes
        return
    message = _ABOUT.sub("", rejection.message)
    for part in re.split(r", (?=(?:spec|metadata)\.)", message.strip("[]") if message.startswith("[") else message):
        found = _FIELD.fullmatch(part)
        yield (found["field"], found["words"]) if found is not None else ("", part)


def _piece(rejection: Rejection, field: str, words: str) -> tuple[str, str]:
    """Reason and words of one fault."""
    if rejection.kind == "Deployment" and field == "spec.selector":
        words = f"a Deployment of this name exists and is not kvpilot's ({words})"
    if field.startswith("spec.inferencePool.") and field.endswith("PickerRef") and words.startswith("Required value"):
        words = f"the InferencePools of this API server need an endpoint picker ({words})"
    shown, own = _GO.sub("", words), _field(field)
    for row in TABLE:
        found = re.search(row.words, words, re.DOTALL)
        if found is not None:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            own = row.field.format(**groups) or own
            return row.reason, f"{own + ': ' if own else ''}{shown}: {row.remedy.format(**groups)}"
    reason = rejection.reason if _REASON.fullmatch(rejection.reason) else "Rejected"
    return reason, f"{own}: {shown}" if own else shown


def _field(field: str) -> str:
    """The spec's field for one of an object; the object's own where no field of the spec is rendered into it alone."""
    for pattern, own in _FIELDS:
        replaced, count = re.subn(pattern, own, field)
        if count:
            return replaced
    return field
