"""Find faults of an object that the API server has accepted, before the operator acts on it.

Unlike the CRD's rules, this check parses engine arguments in every spelling that vLLM accepts, and knows which access
to nodes the administrator allows. It also finds faults of objects that were stored before a limit or rule existed.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from kvpilot_formats.arguments import Arguments, rules
from kvpilot_formats.untrusted import shown
from kvpilot_operator.api import pod_template
from kvpilot_operator.api.record import Json
from kvpilot_operator.api.spec import Spec, parse

MAX_SPEC_BYTES = 128 * 1024
"""Size limit of a spec as JSON. Real specs have a few KiB, and the operator keeps all specs in memory."""

_PRIVATE = re.compile(
    r"\bengine\.(extraArgs|(?:podTemplate\..*)?(?:env\[\d+\]\.value|command|args|volumeAttributes))\b"
)
"""Pattern of fields that may hold keys and tokens. Messages omit their values."""

_BEFORE_QUERY = re.compile("^([^?]*://[^?]*|[^?]*([?]([^=]*$)?)?)")
"""Pattern of the part of a value that messages show. It cuts the query (from `?` on) off an address, because the query
may hold a signature."""


class Fault(NamedTuple):
    """One fault of an object: the field (such as spec.a.b[0]), and a message with the remedy. The message quotes the
    field's value unless it may be secret."""

    field: str
    message: str


def judge(obj: Json, allowed: Collection[str] = ()) -> Spec | tuple[Fault, ...]:
    """Return the spec of a QuantizedLLMService, or its faults.

    `allowed` lists the kinds of access to nodes (`pod_template.KINDS`) that engines may have.
    """
    given = obj.get("spec") if isinstance(obj, Mapping) else None
    if not isinstance(given, Mapping):
        return (Fault("spec", "is missing: use a QuantizedLLMService manifest with a spec"),)
    size = len(msgspec.json.encode(given))
    if size > MAX_SPEC_BYTES:
        text = f"is {size} bytes of JSON: use at most {MAX_SPEC_BYTES}, shorten engine.env most of all"
        return (Fault("spec", text),)
    try:
        spec = parse(obj)
    except msgspec.ValidationError as error:
        return (_explained(str(error), obj),)
    found = [*_gpus(spec), *_arguments(spec)]
    if not spec.engine.image:
        found.append(
            Fault("spec.engine.image", "is missing: set it, or engines.image of kvpilot's chart for all services")
        )
    if spec.kv_cache.mode == "Fixed" and spec.kv_cache.dtype is None:
        # The API server has the same rule, but an object may have been stored before the rule existed.
        text = "is missing, and kvCache.mode is Fixed: set dtype, or use another mode"
        found.insert(0, Fault("spec.kvCache.dtype", text))
    host = pod_template.host_access(spec.engine.pod_template, allowed)
    found += (Fault(f"spec.engine.podTemplate{at}", text) for at, text in host)
    return tuple(found) or spec


def faults(obj: Json, allowed: Collection[str] = ()) -> tuple[Fault, ...]:
    """Return the faults of a QuantizedLLMService; () if there are none."""
    judged = judge(obj, allowed)
    return () if isinstance(judged, Spec) else judged


def _explained(error: str, obj: Mapping[str, Json]) -> Fault:
    """Turn msgspec's message, which ends in the field's path, into a fault with value and remedy."""
    wrong, _, place = error.partition(" - at `$.")
    field = place.rstrip("`").replace("[...]", "")
    if missing := re.search("missing required field `(.*)`", wrong):
        field = f"{field}.{missing[1]}".lstrip(".")
        return Fault(field, f"is missing: set {missing[1]}")
    remedy = f"use a value that the API accepts ({wrong[0].lower()}{wrong[1:]})"
    return Fault(field, f"is {_shown(_at(obj, field), field)}: {remedy}")


def _at(value: Json, field: str) -> Json:
    """Return the value at a place such as a.b[0]; None if there is none."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        if key:
            value = value.get(key) if isinstance(value, Mapping) else None
        else:
            value = value[int(index)] if isinstance(value, list) and int(index) < len(value) else None
    return value


def _shown(value: Json, field: str) -> str:
    """Return a value as text without secrets. Omit private values, and the query and credentials of an address."""
    if _PRIVATE.search(field):
        return "a value that is not shown"
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list"
    if isinstance(value, str):
        before = _BEFORE_QUERY.match(value)
        value = shown(before[0] if before else "")
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


_OFFLOAD = (rules.OFFLOAD, "--kv-offloading-backend", rules.TRANSFER)
_NODES = (rules.PIPELINE_PARALLEL, "--prefill-context-parallel-size", "--distributed-executor-backend",
          "--master-addr", "--master-port", *rules.SEVERAL_ENGINES)  # fmt: skip
_NOT_OVER_NODES = (*rules.SPECULATION, *_OFFLOAD)
_ADAPTERS = ("--lora-modules", "--enable-lora")


def _arguments(spec: Spec) -> Iterator[Fault]:
    """Yield the faults of extraArgs: reserved options in any spelling, and options that contradict another field.
    kvpilot-serve checks its command line by the same rules. Messages quote no argument's value, which may be secret."""
    arguments = spec.engine.arguments
    found = [*arguments.faults, *rules.reserved(arguments), *_contradictions(arguments, spec)]
    for place, item in enumerate(spec.engine.extra_args):
        # Kubernetes replaces the variable after this check, so the item could become any option.
        if item.startswith("-") and "$(" in item.partition("=")[0]:
            found.append((place, "a variable names the option: write the option in full, OPTION=$(NAME), in one item"))
    for place, message in sorted(found):
        yield Fault(f"spec.engine.extraArgs[{place}]", message)


def _gpus(spec: Spec) -> Iterator[Fault]:
    """Yield a fault if an engine uses more or fewer GPUs than its pod's limit."""
    engine = spec.engine
    used, limit = engine.tensor_parallel * engine.groups, engine.gpu_limit
    if limit not in (0, used):
        options = [one for one in rules.GROUPS_OF_GPUS if engine.arguments.count(one) > 1]
        yield Fault(
            "spec.engine.tensorParallelSize",
            f"is {engine.tensor_parallel}, so that {used} GPUs are used{' with ' if options else ''}"
            f"{' and '.join(options)}, but resources.limits has {limit}: set the limit to {used}, or change "
            f"{' or '.join(['tensorParallelSize', *options])}",
        )


def _contradictions(arguments: Arguments, spec: Spec) -> Iterator[tuple[int, str]]:
    """Yield (place in extraArgs, message) of options that contradict another field of the spec."""
    offload, nodes = spec.kv_cache.offload is not None, spec.engine.nodes > 1
    beside: list[tuple[bool, tuple[str, ...], str]] = [
        (offload, _OFFLOAD, "kvCache.offload sets it: remove the argument, or kvCache.offload"),
        (offload, rules.SEVERAL_ENGINES, "several engines would start in a pod, and each would take the whole memory "
         "of kvCache.offload: remove the argument, or kvCache.offload"),
        (nodes, _NODES, "engine.nodes spreads a replica over nodes: remove the argument, or set engine.nodes to 1"),
        (nodes, _NOT_OVER_NODES, "no test has shown right answers with it over several nodes: remove it, or set "
         "engine.nodes to 1"),
        (bool(spec.model.adapters), _ADAPTERS, "model.adapters loads adapters, too: remove it"),
    ]  # fmt: skip
    for given in arguments.given:
        for asked, options, message in beside:
            if asked and given.name in options:
                yield given.places[0], f"{given.name}: {message}"
