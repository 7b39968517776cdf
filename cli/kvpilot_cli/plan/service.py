"""Arguments of `kvpilot plan` for a QuantizedLLMService: the engine that the operator would start for it."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvpilot_cli import manifests
from kvpilot_cli.plan.facts import PlanError
from kvpilot_cli.plan.gpus import gpu_of_labels
from kvpilot_cli.plan.make import CONTEXTS
from kvpilot_formats.arguments import read as read_arguments
from kvpilot_formats.arguments.rules import PIPELINE_PARALLEL
from kvpilot_operator.api.faults import judge
from kvpilot_operator.api.names import ENGINE_CONTAINER
from kvpilot_operator.api.pod_template import KINDS
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.render.engine import pod_template

Json = Any
_HUB = "hf://"
_NO_GPU = ("cpu", "unlabelled-")


def from_file(file: str, gpu: str | None, model: str | None) -> list[str]:
    """Return the arguments for the only service in a file, with its GPU unless `gpu` names one."""
    try:
        services, _ = manifests.services([file])
    except manifests.ManifestError as error:
        raise PlanError(f"-f: {error}") from error
    if len(services) != 1:
        names = ", ".join(one.name for one in services) or "none"
        raise PlanError(f"-f: {file} has {len(services)} QuantizedLLMServices ({names}); give a file with one")
    obj = services[0].obj
    judged = judge({**obj, "metadata": {"name": "plan"}}, allowed=KINDS)
    if not isinstance(judged, Spec):
        raise PlanError(f"-f: {file}: {judged[0].field} {judged[0].message}; `kvpilot validate` shows all faults")
    known = sorted({one for one in selected_gpus(obj) if one and not one.startswith(_NO_GPU)})
    if gpu is None and len(known) != 1:
        said = f"selects several kinds of GPU ({', '.join(known)})" if known else "selects no GPU by a node label"
        raise PlanError(f"--gpu: {file} {said}; name one, for example --gpu H100-80GB")
    return arguments(obj, gpu or known[0], model)


def arguments(obj: Json, gpu: str, model: str | None = None) -> list[str]:
    """Translate a service into arguments of `kvpilot plan`. Missing fields keep plan's defaults.

    Raises:
        PlanError: the service does not name its model.
    """
    spec = _at(obj, "spec")
    source = _at(spec, "model", "source")
    source = source if isinstance(source, str) else ""
    if model is None and (not source.startswith(_HUB) or source.startswith(f"{_HUB}-") or source == _HUB):
        raise PlanError(
            f"spec.model.source {source!r} does not name a published model: name one, or a folder with its config.json"
        )
    argv = [source.removeprefix(_HUB) if model is None else model, f"--gpu={gpu}"]
    rendered = _rendered(obj)
    for option, path in (("--gpus", ("engine", "tensorParallelSize")), ("--nodes", ("engine", "nodes"))):
        count = rendered.get(option, _whole(spec, *path))
        argv += [f"{option}={count}"] if count is not None and (option, count) != ("--nodes", 1) else []
    if (percent := _whole(spec, "engine", "gpuMemoryUtilizationPercent")) is not None:
        argv.append(f"--utilization={percent / 100:g}")
    if (longest := rendered.get("--context", _whole(spec, "model", "maxModelLen"))) is not None:
        argv.append(f"--context={','.join(map(str, (*(c for c in CONTEXTS if c < longest), longest)))}")
    if (recent := _whole(spec, "kvCache", "recentTokens")) is not None:
        argv.append(f"--recent-tokens={recent}")
    return argv


def selected_gpus(obj: Json) -> Iterator[str]:
    """Yield the GPUs that the node selector and the required node affinity of the pods name."""
    pod = _at(obj, "spec", "engine", "podTemplate", "spec")
    yield gpu_of_labels(_at(pod, "nodeSelector"))
    required = _at(pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in _items(required, "nodeSelectorTerms"):
        for one in _items(term, "matchExpressions"):
            if _at(one, "operator") == "In":
                values = _at(one, "values")
                key = str(_at(one, "key"))
                yield from (gpu_of_labels({key: value}) for value in (values if isinstance(values, list) else ()))


def _rendered(obj: Json) -> dict[str, int]:
    """Return the numbers in the command line that the operator renders; nothing for a service that it refuses."""
    judged = judge({**obj, "metadata": {"name": "plan"}}, allowed=KINDS)
    if not isinstance(judged, Spec):
        return {}
    containers = pod_template("plan", judged, judged.kv_cache.baseline)["spec"]["containers"]
    given = read_arguments(next(one["args"] for one in containers if one["name"] == ENGINE_CONTAINER))
    options = {"--gpus": "--tensor-parallel-size", "--nodes": PIPELINE_PARALLEL, "--context": "--max-model-len"}
    values = {option: given.value(name) for option, name in options.items()}
    return {option: int(value) for option, value in values.items() if value is not None and value.isdecimal()}


def _at(value: Json, *path: str) -> Json:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _whole(value: Json, *path: str) -> int | None:
    found = _at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _items(value: Json, *path: str) -> Iterator[Json]:
    found = _at(value, *path)
    yield from found if isinstance(found, list) else ()
