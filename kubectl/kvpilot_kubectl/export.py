"""`kubectl kvpilot export SERVICE`: print a service's manifest.

If the serving dtype passed its probes, the manifest has it as kvCache.startDtype, with the evidence as an annotation.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import Json, at, items, text, whole, words
from kvpilot_operator.api.names import CANARY_ANNOTATION, SPEC_ANNOTATION, deployment_name

EVIDENCE = "kvpilot.io/start-dtype-evidence"
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_LADDER = ("fp8", "k8v4", "k4v4")


def export(cluster: Cluster, name: str) -> tuple[dict[str, Any], str]:
    """Return the service's manifest, and a sentence about its kvCache.startDtype."""
    obj, serves = _as_serving(cluster, cluster.service(name))
    given, labels = at(obj, "metadata", "annotations"), at(obj, "metadata", "labels")
    annotations = {**(given if isinstance(given, Mapping) else {})}
    for left_out in (_APPLIED, EVIDENCE, CANARY_ANNOTATION):
        annotations.pop(left_out, None)
    spec = copy.deepcopy(dict(obj["spec"]))
    kv_cache = spec.setdefault("kvCache", {})
    kv_cache.pop("startDtype", None)
    dtype, why = _earned(obj)
    if dtype:
        kv_cache["startDtype"], annotations[EVIDENCE] = dtype, why
    metadata = {"name": text(obj, "metadata", "name"), "namespace": text(obj, "metadata", "namespace"),
                "labels": labels, "annotations": annotations}  # fmt: skip
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {key: value for key, value in metadata.items() if value},
        "spec": spec,
    }, serves + (f"kvCache.startDtype is {dtype}: {why}" if dtype else f"no kvCache.startDtype: {why}")


def _as_serving(cluster: Cluster, obj: Json) -> tuple[Json, str]:
    """Return the service with the spec of its serving revision, and a sentence if this is not the newest spec."""
    name, revision = text(obj, "metadata", "name"), text(obj, "status", "stable", "revision")
    if not revision:
        return obj, ""
    try:
        made = cluster.workload(deployment_name(name, revision))
        noted = json.loads(str(at(made, "metadata", "annotations", SPEC_ANNOTATION) or "{}"))
    except (ToolError, ValueError, RecursionError) as error:
        return obj, f"the spec is the newest one, because the spec of the serving revision is unknown ({error}); "
    served, newest, spec = whole(noted, "generation"), whole(obj, "metadata", "generation"), at(noted, "spec")
    if served is None or served == newest or not isinstance(spec, Mapping):
        return obj, ""
    why = next((text(one, "message") for one in items(obj, "status", "conditions") if _says_why(one)), "")
    told = f"the spec is that of generation {served}, which serves, not the newest (generation {newest})"
    return {**obj, "spec": spec}, f"{told}{f' ({why})' if why else ''}; "


def _says_why(condition: Json) -> bool:
    return (text(condition, "type"), text(condition, "status")) in (("Stalled", "True"), ("Reconciling", "True"))


def _earned(obj: Json) -> tuple[str, str]:
    """Return the serving dtype and the evidence if the dtype passed its probes, otherwise "" and the reason."""
    dtype, kv_cache = text(obj, "status", "kvCache", "activeDtype"), at(obj, "spec", "kvCache")
    if text(kv_cache, "mode") == "Fixed":
        return "", "in mode Fixed, kvCache.dtype names the dtype"
    if dtype not in (words(kv_cache, "ladder") or _LADDER):
        return "", f"{dtype or 'no dtype'} serves, which is not in kvCache.ladder"
    passed = next((one for one in items(obj, "status", "history") if _of(one, dtype, "Passed")), None)
    last = at(obj, "status", "accuracy", "last")
    measured = _of(last, dtype, "Passed")
    if passed is None and not measured:
        return "", f"{dtype} serves, but the status has no probe that it passed"
    told = [] if passed is None else [
        f"{dtype} passed its trial at {text(passed, 'time')} on {text(passed, 'gpu')} with {text(passed, 'image')}"
    ]  # fmt: skip
    if measured:
        kl, same = (whole(last, name) or 0 for name in ("excessKLMicronats", "top1AgreementPermille"))
        told.append(
            f"the probe at {text(last, 'probeTime')} found an excess KL of {kl / 1000:.1f} millinats and a top-1 "
            f"agreement of {same / 10:.1f}%"
        )
    return dtype, "; ".join(told)


def _of(found: Json, dtype: str, verdict: str) -> bool:
    return (text(found, "dtype"), text(found, "verdict")) == (dtype, verdict)
