"""Translate a QuantizedLLMService into arguments of `kvpilot plan`, for the engine that the operator would start."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from kvpilot_cli import manifests
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.gpus import gpu_of_labels
from kvpilot_cli.plan.make import CONTEXTS
from kvpilot_formats.arguments import read as read_arguments
from kvpilot_formats.arguments.rules import PIPELINE_PARALLEL
from kvpilot_operator.api.engine_defaults import EngineDefaults
from kvpilot_operator.api.faults import judge
from kvpilot_operator.api.names import ENGINE_CONTAINER
from kvpilot_operator.api.pod_template import KINDS
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.engine import pod_template
from kvpilot_probes.loaded import FROM_OTHERS

Json = Any
_HUB = "hf://"
_NO_GPU = ("cpu", "unlabelled-")


def from_file(file: str, gpu: str | None, model: str | None) -> list[str]:
    """Return the arguments for the only service in a file. Without `gpu`, take the GPU that the service selects."""
    try:
        services, _ = manifests.services([file])
    except manifests.ManifestError as error:
        raise PlanError(f"-f: {error}") from error
    if len(services) != 1:
        names = ", ".join(one.name for one in services) or "none"
        raise PlanError(f"-f: {file} has {len(services)} QuantizedLLMServices ({names}); give a file with one")
    spec = _spec(services[0].obj)
    selected = _selected(spec.engine.pod_template.get("spec", {}))
    # If the spec selects no GPU, take the GPU of the last trial from the service's status.
    known = _known(selected) or _known(_tried(services[0].obj))
    if gpu is None and len(known) != 1:
        said = f"selects several kinds of GPU ({', '.join(known)})" if known else "selects no GPU by a node label"
        raise PlanError(f"--gpu: {file} {said}; name one, for example --gpu H100-80GB")
    return _arguments(spec, gpu or known[0], model)


def _arguments(spec: Spec, gpu: str, model: str | None) -> list[str]:
    source = spec.model.source
    if model is None and (not source.startswith(_HUB) or source.startswith(f"{_HUB}-") or source == _HUB):
        raise PlanError(
            f"spec.model.source {source!r} does not name a published model: name one, or a folder with its "
            "config.json, as MODEL"
        )
    containers = pod_template("plan", spec, spec.kv_cache.baseline)["spec"]["containers"]
    given = read_arguments(next(one["args"] for one in containers if one["name"] == ENGINE_CONTAINER))
    argv = [source.removeprefix(_HUB) if model is None else model, f"--gpu={gpu}"]
    argv.append(f"--gpus={given.count('--tensor-parallel-size')}")
    if (nodes := given.count(PIPELINE_PARALLEL)) > 1:
        argv.append(f"--nodes={nodes}")
    argv.append(f"--utilization={spec.engine.gpu_memory_utilization_percent / 100:g}")
    if given.on("--max-model-len"):
        longest = given.count("--max-model-len")
        argv.append(f"--context={','.join(map(str, (*(c for c in CONTEXTS if c < longest), longest)))}")
    if spec.kv_cache.recent_tokens is not None:
        argv.append(f"--recent-tokens={spec.kv_cache.recent_tokens}")
    if spec.connector and spec.connector not in FROM_OTHERS:
        argv.append("--connector")
    return argv


def _known(found: Iterator[str]) -> list[str]:
    return sorted({one for one in found if one and not one.startswith(_NO_GPU)})


def _tried(obj: Json) -> Iterator[str]:
    status = obj.get("status") or {}
    yield from (str(one.get("gpu") or "") for one in (status.get("history") or ())[:1])


def _selected(pod: Json) -> Iterator[str]:
    yield gpu_of_labels(pod.get("nodeSelector"))
    nodes = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in nodes.get("nodeSelectorTerms", ()):
        for one in term.get("matchExpressions", ()):
            if one["operator"] == "In":
                yield from (gpu_of_labels({one["key"]: value}) for value in one.get("values", ()))


def _spec(obj: Json) -> Spec:
    # The spec may lack an image, because the chart may set it for all services. Fill in any, as a plan does not use it.
    filled: Mapping[str, Json] = {**obj, "metadata": {"name": "plan"}}
    with contextlib.suppress(LookupError, TypeError):  # `judge` reports a service without an engine.
        filled = EngineDefaults(image="any").fill(filled)
    judged = judge(filled, allowed=KINDS)
    if not isinstance(judged, Spec):
        raise PlanError(f"{judged[0].field} {judged[0].message}; `kvpilot validate` shows all faults")
    return judged
