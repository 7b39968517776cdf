"""`kubectl kvpilot export SERVICE`: print a service's manifest with the dtype that it has earned, and the evidence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.fields import Json, at, items, text, whole, words

EVIDENCE = "kvpilot.io/start-dtype-evidence"
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_LADDER = ("fp8", "k8v4", "k4v4")


def export(cluster: Cluster, name: str) -> tuple[dict[str, Any], str]:
    """Return the service's manifest, and a sentence about its kvCache.startDtype."""
    obj = cluster.service(name)
    given, labels = at(obj, "metadata", "annotations"), at(obj, "metadata", "labels")
    annotations = {**(given if isinstance(given, Mapping) else {})}
    annotations.pop(_APPLIED, None)
    annotations.pop(EVIDENCE, None)
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
    }, f"kvCache.startDtype is {dtype}: {why}" if dtype else f"no kvCache.startDtype: {why}"


def _earned(obj: Json) -> tuple[str, str]:
    """Return the serving dtype if probes have proven it, else "", with the reason or the evidence."""
    dtype, kv_cache = text(obj, "status", "kvCache", "activeDtype"), at(obj, "spec", "kvCache")
    if text(kv_cache, "mode") == "Fixed":
        return "", "mode Fixed has its dtype in kvCache.dtype"
    if dtype not in (words(kv_cache, "ladder") or _LADDER):
        return "", f"{dtype or 'no dtype'} serves, which is no step of kvCache.ladder"
    passed = next((one for one in items(obj, "status", "history") if _of(one, dtype, "Passed")), None)
    last = at(obj, "status", "accuracy", "last")
    measured = _of(last, dtype, "Passed")
    if passed is None and not measured:
        return "", f"{dtype} serves, and no probe that it passed is known"
    told = [] if passed is None else [
        f"{dtype} passed its trial at {text(passed, 'time')} on {text(passed, 'gpu')} with {text(passed, 'image')}"
    ]  # fmt: skip
    if measured:
        kl, same = (whole(last, name) or 0 for name in ("excessKlMicronats", "top1AgreementPermille"))
        told.append(
            f"the probe at {text(last, 'probeTime')} found an excess KL of {kl / 1000:.1f} millinats and a top-1 "
            f"agreement of {same / 10:.1f}%"
        )
    return dtype, "; ".join(told)


def _of(found: Json, dtype: str, verdict: str) -> bool:
    return (text(found, "dtype"), text(found, "verdict")) == (dtype, verdict)
