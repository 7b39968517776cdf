"""Faults of spec.engine.extraArgs that take a parser: every spelling of a reserved option, and contradicted fields.

The CRD's rules refuse reserved options by their full names; they cannot follow vLLM's abbreviations. The rules
themselves are those of `kvpilot_formats.arguments`, which kvpilot-serve judges its command line by, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvpilot_formats.arguments import Arguments, read, rules

Json = Any

_OFFLOAD = (rules.OFFLOAD, "--kv-offloading-backend", rules.TRANSFER, "--kv-offloading-disk-path",
            "--kv-offloading-disk-size")  # fmt: skip
_NODES = (rules.PIPELINE_PARALLEL, "--prefill-context-parallel-size", "--distributed-executor-backend",
          "--master-addr", "--master-port", *rules.SEVERAL_ENGINES)  # fmt: skip
_NOT_OVER_NODES = (*rules.SPECULATION, *_OFFLOAD)
_ADAPTERS = ("--lora-modules", "--enable-lora")


def refused(spec: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield (field, message) of each fault; fields are relative to `spec`, with a leading dot.

    `spec` is defaulted and has no schema faults. No value of an argument is repeated.
    """
    arguments = read(spec["engine"]["extraArgs"])
    found = [*arguments.faults, *rules.reserved(arguments), *_contradictions(arguments, spec)]
    for place, message in sorted(found):
        yield f".engine.extraArgs[{place}]", message


def _contradictions(arguments: Arguments, spec: Mapping[str, Json]) -> Iterator[tuple[int, str]]:
    """Options that do not go with another field, each with its place."""
    cache, nodes = spec["kvCache"], spec["engine"]["nodes"] > 1
    beside: list[tuple[bool, tuple[str, ...], str]] = [
        ("offload" in cache, _OFFLOAD, "kvCache.offload sets it: remove the argument, or kvCache.offload"),
        ("offload" in cache, rules.SEVERAL_ENGINES, "it starts several engines in a pod, each of which would take as "
         "much memory as kvCache.offload says: remove the argument, or kvCache.offload"),
        (nodes, _NODES, "engine.nodes sets how a replica is spread over nodes: remove it, or set engine.nodes to 1"),
        (nodes, _NOT_OVER_NODES, "it was not seen right over the nodes that engine.nodes asks for: remove it, or set "
         "engine.nodes to 1"),
        (bool(spec["model"]["adapters"]), _ADAPTERS, "model.adapters loads adapters, too: remove it"),
    ]  # fmt: skip
    for given in arguments.given:
        for asked, options, message in beside:
            if asked and given.name in options:
                yield given.places[0], f"{given.name}: {message}"
    retention = cache.get("retention", {}).get("policy", "All")
    if retention != "All" and (found := rules.first_on(arguments, rules.BESIDE_BOUNDED)) is not None:
        at = next(one.places[0] for one in reversed(arguments.given) if one.name == found[0])
        yield at, f"{found[0]}: {found[1]} does not go with kvCache.retention {retention}: remove one of the two"
