"""Wrong QuantizedLLMServices, each with the field that is at fault and a word of the remedy.

One table for two judges: the operator's own check (tests/unit/test_api_faults.py) and the real API server
(tests/cluster/test_crd_modern.py).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

GOOD: dict[str, Any] = {
    "apiVersion": "kvpilot.io/v1alpha1",
    "kind": "QuantizedLLMService",
    "metadata": {"name": "good"},
    "spec": {"model": {"source": "hf://Qwen/Qwen3-8B"}, "engine": {"image": "example.org/runtime:1"}},
}

MISSING = object()
"""As a value: take the field away."""


@dataclass(frozen=True)
class Bad:
    """`changes` to GOOD (dotted path -> value) that `judge` refuses at `field` with `word` in the message.

    judge is "schema" where any API server refuses, in its own words, and "rule" where CEL does, in ours.
    """

    name: str
    changes: dict[str, Any]
    field: str
    word: str
    judge: Literal["schema", "rule"]

    @property
    def manifest(self) -> dict[str, Any]:
        obj = copy.deepcopy(GOOD)
        for path, value in self.changes.items():
            *parents, last = path.split(".")
            here = obj
            for parent in parents:
                here = here.setdefault(parent, {})
            if value is MISSING:
                del here[last]
            else:
                here[last] = value
        return obj


def _rule(name: str, changes: dict[str, Any], field: str, word: str) -> Bad:
    return Bad(name, changes, field, word, "rule")


def _schema(name: str, changes: dict[str, Any], field: str, word: str) -> Bad:
    return Bad(name, changes, field, word, "schema")


_SOURCE = "spec.model.source"
_ENV = "spec.engine.env"

BAD: tuple[Bad, ...] = (
    _schema("no model source", {"spec.model": {}}, _SOURCE, "set source"),
    _schema("no engine", {"spec.engine": MISSING}, "spec.engine", "set engine"),
    _schema("unknown dtype", {"spec.kvCache": {"mode": "Fixed", "dtype": "fp4"}}, "spec.kvCache.dtype", "k4v4"),
    _schema("unknown dtype in the ladder", {"spec.kvCache.ladder": ["fp8", "q4"]}, "spec.kvCache.ladder[1]", "k4v4"),
    _schema("empty ladder", {"spec.kvCache.ladder": []}, "spec.kvCache.ladder", "at least 1"),
    _schema("quantized baseline", {"spec.kvCache.baseline": "fp8"}, "spec.kvCache.baseline", "bfloat16"),
    _schema("unknown mode", {"spec.kvCache.mode": "auto"}, "spec.kvCache.mode", "Recommend"),
    _schema("negative replicas", {"spec.replicas": -1}, "spec.replicas", "at least 0"),
    _schema("replicas as text", {"spec.replicas": "two"}, "spec.replicas", "integer"),
    _schema("half a replica", {"spec.replicas": 1.5}, "spec.replicas", "integer"),
    _schema(
        "no replicas at most",
        {"spec.scaling": {"minReplicas": 0, "maxReplicas": 0}, "spec.disruption.minAvailable": 0},
        "spec.scaling.maxReplicas",
        "at least 1",
    ),
    _schema("over 100 percent", {"spec.kvCache.pressure.highPercent": 101}, "spec.kvCache.pressure.highPercent", "100"),
    _schema("negative recent window", {"spec.kvCache.recentTokens": -64}, "spec.kvCache.recentTokens", "0, 64, 128"),
    _schema("odd recent window", {"spec.kvCache.recentTokens": 100}, "spec.kvCache.recentTokens", "0, 64, 128"),
    _schema("endless recent window", {"spec.kvCache.recentTokens": 1024}, "spec.kvCache.recentTokens", "256, 512"),
    _schema("no probe sets", {"spec.accuracy.probeSets": []}, "spec.accuracy.probeSets", "at least 1"),
    _schema(
        "one probe set twice",
        {"spec.accuracy.probeSets": ["builtin/general", "builtin/general"]},
        "spec.accuracy.probeSets[1]",
        "remove",
    ),
    _schema(
        "one variable twice",
        {_ENV: [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        f"{_ENV}[1]",
        "remove",
    ),
    _schema("variable with a dash", {_ENV: [{"name": "A-B"}]}, f"{_ENV}[0].name", "matches"),
    _schema("served name too long", {"spec.model.servedName": "a" * 129}, "spec.model.servedName", "at most 128"),
    _schema(
        "memory in words",
        {"spec.engine.resources": {"requests": {"memory": "much"}}},
        "spec.engine.resources.requests.memory",
        "matches",
    ),
    _schema(
        "route that climbs",
        {"spec.canary.routeRef": {"name": "../../../../../../api/v1/configmaps"}},
        "spec.canary.routeRef.name",
        "matches",
    ),
    _schema("route above", {"spec.canary.routeRef": {"name": ".."}}, "spec.canary.routeRef.name", "matches"),
    _schema("route with a query", {"spec.canary.routeRef": {"name": "a?b=c"}}, "spec.canary.routeRef.name", "matches"),
    _schema(
        "secret with an empty part in its name",
        {"spec.model.tokenSecretRef": {"name": "a..b"}},
        "spec.model.tokenSecretRef.name",
        "matches",
    ),
    _schema("claim that climbs", {"spec.cache.compileClaimName": "../a"}, "spec.cache.compileClaimName", "matches"),
    _schema(
        "service account in capitals",
        {"spec.engine.serviceAccountName": "Me"},
        "spec.engine.serviceAccountName",
        "matches",
    ),
    _schema(
        "pull secret with a dash after a dot",
        {"spec.engine.imagePullSecrets": [{"name": "a.-b"}]},
        "spec.engine.imagePullSecrets[0].name",
        "matches",
    ),
    _schema(
        "variable from a ConfigMap that climbs",
        {_ENV: [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "..", "key": "k"}}}]},
        f"{_ENV}[0].valueFrom.configMapKeyRef.name",
        "matches",
    ),
    _rule(
        "probe set that climbs",
        {"spec.accuracy.probeSets": ["configmap/../a"]},
        "spec.accuracy.probeSets[0]",
        "configmap/NAME",
    ),
    _rule(
        "probe set with two dots",
        {"spec.accuracy.probeSets": ["configmap/a..b"]},
        "spec.accuracy.probeSets[0]",
        "configmap/NAME",
    ),
    _rule("claim in a source with two dots", {_SOURCE: "pvc://a..b/c"}, _SOURCE, "use pvc://CLAIM/PATH"),
    _rule(
        "label name without end",
        {"spec.engine.nodeSelector": {"a" * 318: "b"}},
        "spec.engine.nodeSelector",
        "at most 317",
    ),
    _rule(
        "resource name without end",
        {"spec.engine.resources": {"limits": {"a" * 318: 1}}},
        "spec.engine.resources.limits",
        "at most 317",
    ),
    _schema("never-ending drain", {"spec.drain.timeoutSeconds": 10**6}, "spec.drain.timeoutSeconds", "7200"),
    _rule("long name", {"metadata.name": "a" * 41}, "metadata.name", "at most 40"),
    _rule("name with a dot", {"metadata.name": "llama.3"}, "metadata.name", "start with a letter"),
    _rule("name with a leading digit", {"metadata.name": "3-llama"}, "metadata.name", "start with a letter"),
    _rule("source without scheme", {_SOURCE: "Qwen/Qwen3-8B"}, _SOURCE, "use hf://"),
    _rule("source by http", {_SOURCE: "https://example.org/model"}, _SOURCE, "use hf://"),
    _rule("hub source with three parts", {_SOURCE: "hf://a/b/c"}, _SOURCE, "use hf://ORG/MODEL"),
    _rule("claim without a name", {_SOURCE: "pvc:///path"}, _SOURCE, "use pvc://CLAIM/PATH"),
    _rule("image without a repository", {_SOURCE: "oci://registry"}, _SOURCE, "use oci://"),
    _rule("relative file", {_SOURCE: "file://models/x"}, _SOURCE, "use file:///PATH"),
    _rule("path that climbs", {_SOURCE: "file:///models/../etc"}, _SOURCE, "in full"),
    _rule("source with a newline", {_SOURCE: "hf://Qwen/Qwen3-8B\n"}, _SOURCE, "use hf://ORG/MODEL"),
    _rule(
        "token for a file",
        {_SOURCE: "file:///m", "spec.model.tokenSecretRef": {"name": "hf"}},
        "spec.model.tokenSecretRef",
        "remove tokenSecretRef",
    ),
    _rule(
        "revision of a claim",
        {_SOURCE: "pvc://models/qwen", "spec.model.revision": "main"},
        "spec.model.revision",
        "remove revision",
    ),
    _rule(
        "download cache without a download",
        {_SOURCE: "file:///m", "spec.cache.weightsClaimName": "models"},
        "spec.cache.weightsClaimName",
        "remove cache.weightsClaimName",
    ),
    _rule("image with a space", {"spec.engine.image": "a b"}, "spec.engine.image", "REGISTRY/NAME:TAG"),
    _rule("image by https", {"spec.engine.image": "https://x/y"}, "spec.engine.image", "without a scheme"),
    _rule("own argument", {"spec.engine.extraArgs": ["--port=9"]}, "spec.engine.extraArgs[0]", "remove it"),
    _rule(
        "own argument with underscores",
        {"spec.engine.extraArgs": ["--enforce-eager", "--kv_cache_dtype", "fp8"]},
        "spec.engine.extraArgs[1]",
        "remove it",
    ),
    _rule("own short argument", {"spec.engine.extraArgs": ["-tp=2"]}, "spec.engine.extraArgs[0]", "remove it"),
    _rule(
        "own argument of the runtime",
        {"spec.engine.extraArgs": ["--recent_tokens", "128"]},
        "spec.engine.extraArgs[0]",
        "use the field",
    ),
    _rule("locked engine", {"spec.engine.extraArgs": ["--api-key=x"]}, "spec.engine.extraArgs[0]", "gateway"),
    _rule("engine locked in short", {"spec.engine.extraArgs": ["--api_k.a=x"]}, "spec.engine.extraArgs[0]", "gateway"),
    _rule("part of an engine", {"spec.engine.extraArgs": ["--nnodes=2"]}, "spec.engine.extraArgs[0]", "of its own"),
    _rule(
        "other logprobs",
        {"spec.engine.extraArgs": ["--logprobs-mode=raw_logits"]},
        "spec.engine.extraArgs[0]",
        "accuracy",
    ),
    _rule(
        "token in plain text", {"spec.engine.extraArgs": ["--hf-token=x"]}, "spec.engine.extraArgs[0]", "tokenSecretRef"
    ),
    _rule(
        "arguments from a file",
        {"spec.engine.extraArgs": ["--config", "x.yaml"]},
        "spec.engine.extraArgs[0]",
        "one by one",
    ),
    _rule("argument from a variable", {"spec.engine.extraArgs": ["$(OPTION)"]}, "spec.engine.extraArgs[0]", "in full"),
    _rule(
        "value and source",
        {_ENV: [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
        f"{_ENV}[0]",
        "remove one",
    ),
    _rule("source without a place", {_ENV: [{"name": "A", "valueFrom": {}}]}, f"{_ENV}[0].valueFrom", "set one"),
    _rule(
        "two places",
        {
            _ENV: [
                {
                    "name": "A",
                    "valueFrom": {
                        "secretKeyRef": {"name": "s", "key": "k"},
                        "configMapKeyRef": {"name": "c", "key": "k"},
                    },
                }
            ]
        },
        f"{_ENV}[0].valueFrom",
        "exactly one",
    ),
    _rule("own variable", {_ENV: [{"name": "KVPILOT_SERVE_HOST"}]}, f"{_ENV}[0].name", "remove it"),
    _rule(
        "recent tokens as a variable",
        {_ENV: [{"name": "KVPILOT_RECENT_TOKENS", "value": "0"}]},
        f"{_ENV}[0].name",
        "recentTokens",
    ),
    _rule(
        "two hub tokens",
        {"spec.model.tokenSecretRef": {"name": "hf"}, _ENV: [{"name": "HF_TOKEN", "value": "x"}]},
        _ENV,
        "remove one",
    ),
    _rule(
        "two homes of the hub's cache",
        {"spec.cache.weightsClaimName": "models", _ENV: [{"name": "HF_HOME", "value": "/x"}]},
        _ENV,
        "remove one",
    ),
    _rule(
        "two homes of compiled code",
        {"spec.cache.compileClaimName": "compiled", _ENV: [{"name": "VLLM_CACHE_ROOT", "value": "/x"}]},
        _ENV,
        "remove one",
    ),
    _rule(
        "more GPUs than the limit",
        {"spec.engine.tensorParallelSize": 4, "spec.engine.resources": {"limits": {"nvidia.com/gpu": 2}}},
        "spec.engine.tensorParallelSize",
        "raise the limit",
    ),
    _rule(
        "more GPUs than the limit in text",
        {"spec.engine.tensorParallelSize": 4, "spec.engine.resources": {"limits": {"nvidia.com/gpu": "2"}}},
        "spec.engine.tensorParallelSize",
        "raise the limit",
    ),
    *(
        _rule(
            f"more GPUs than the limit of {limit}",
            {"spec.engine.tensorParallelSize": size, "spec.engine.resources": {"limits": {"nvidia.com/gpu": limit}}},
            "spec.engine.tensorParallelSize",
            "raise the limit",
        )
        for size, limit in (
            (4, "2000m"),
            (4, "3.0"),
            (1, 0),
            (1, "0k"),
            (1, "0m"),
            (1, "0Gi"),
            (64, "63000m"),
            (8, "0007"),
        )
    ),
    *(
        _rule(
            f"a limit of {limit} GPUs",
            {"spec.engine.resources": {"limits": {"nvidia.com/gpu": limit}}},
            "spec.engine.resources.limits",
            "whole number",
        )
        for limit in ("0.5", "1.5", "1.5k", "1500m", "1m", "100m", -1)
    ),
    _rule(
        "toleration of any value with a value",
        {"spec.engine.tolerations": [{"key": "gpu", "operator": "Exists", "value": "yes"}]},
        "spec.engine.tolerations[0].value",
        "remove value",
    ),
    _rule(
        "toleration of nothing",
        {"spec.engine.tolerations": [{"value": "yes"}]},
        "spec.engine.tolerations[0].key",
        "set key",
    ),
    _rule(
        "toleration for a time of an effect without one",
        {"spec.engine.tolerations": [{"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5}]},
        "spec.engine.tolerations[0].tolerationSeconds",
        "NoExecute",
    ),
    _rule(
        "node affinity In nothing",
        {"spec.engine.nodeAffinity": [{"key": "zone", "operator": "In"}]},
        "spec.engine.nodeAffinity[0].values",
        "set at least one",
    ),
    _rule(
        "node affinity that a label exists with a value",
        {"spec.engine.nodeAffinity": [{"key": "zone", "operator": "Exists", "values": ["a"]}]},
        "spec.engine.nodeAffinity[0].values",
        "remove values",
    ),
    _rule(
        "node affinity above a word",
        {"spec.engine.nodeAffinity": [{"key": "gpus", "operator": "Gt", "values": ["many"]}]},
        "spec.engine.nodeAffinity[0].values",
        "whole number",
    ),
    _rule("Fixed without dtype", {"spec.kvCache.mode": "Fixed"}, "spec.kvCache.dtype", "set dtype"),
    _rule("dtype without Fixed", {"spec.kvCache.dtype": "k4v4"}, "spec.kvCache.dtype", "set mode to Fixed"),
    _rule("ladder with a duplicate", {"spec.kvCache.ladder": ["fp8", "k4v4", "k4v4"]}, "spec.kvCache.ladder", "twice"),
    _rule("ladder upwards", {"spec.kvCache.ladder": ["k4v4", "fp8"]}, "spec.kvCache.ladder", "order the dtypes"),
    _rule("ladder on the spot", {"spec.kvCache.ladder": ["fp8", "fp8_e5m2"]}, "spec.kvCache.ladder", "not smaller"),
    _rule("ladder with 16 bits", {"spec.kvCache.ladder": ["auto", "k4v4"]}, "spec.kvCache.ladder[0]", "remove it"),
    _rule("unknown layer", {"spec.kvCache.skipLayers": ["first"]}, "spec.kvCache.skipLayers[0]", "layer number"),
    _rule(
        "recent window beyond the context",
        {"spec.kvCache": {"recentTokens": 64}, "spec.model.maxModelLen": 63},
        "spec.kvCache.recentTokens",
        "lower recentTokens",
    ),
    _rule(
        "thresholds crossed",
        {"spec.kvCache.pressure": {"highPercent": 50, "lowPercent": 60}},
        "spec.kvCache.pressure.lowPercent",
        "lower lowPercent",
    ),
    _rule(
        "threshold above a default",
        {"spec.kvCache.pressure.lowPercent": 85},
        "spec.kvCache.pressure.lowPercent",
        "raise highPercent",
    ),
    _rule(
        "min above max",
        {"spec.scaling": {"minReplicas": 5, "maxReplicas": 2}},
        "spec.scaling.minReplicas",
        "lower minReplicas",
    ),
    _rule(
        "steps that fall",
        {"spec.canary.steps": [{"weightPercent": 50}, {"weightPercent": 5}]},
        "spec.canary.steps",
        "above the one before",
    ),
    _rule(
        "unknown probe set", {"spec.accuracy.probeSets": ["general"]}, "spec.accuracy.probeSets[0]", "configmap/NAME"
    ),
    _rule(
        "more available than there may be",
        {"spec.disruption.minAvailable": 9},
        "spec.disruption.minAvailable",
        "lower disruption.minAvailable",
    ),
)


def with_gpus(size: int, limit: int | str) -> dict[str, Any]:
    """GOOD with this tensorParallelSize and this limit of nvidia.com/gpu."""
    resources = {"limits": {"nvidia.com/gpu": limit}}
    return {
        **GOOD,
        "spec": {**GOOD["spec"], "engine": {"image": "a/b:1", "tensorParallelSize": size, "resources": resources}},
    }


GOOD_GPU_LIMITS: tuple[tuple[int, int | str], ...] = (
    (4, 4), (4, "4"), (4, "4.0"), (4, "4000m"), (64, "64000m"), (4, "0004"), (4, "0004000m"), (64, "1k"), (64, "1.0k"),
    (64, "1Ki"), (64, "1E"), (64, 100), (64, "100000m"), (1, "1"), (1, "9" * 32),
    (1, "9" * 31 + "G"), (1, "9" * 28 + "000m"),
)  # fmt: skip
"""tensorParallelSize, and spellings of limits of nvidia.com/gpu that are enough for it."""
