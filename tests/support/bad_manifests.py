"""Invalid QuantizedLLMServices from bad_manifests.yaml, each with the field at fault and a word of the remedy.

Two tests share this table: tests/unit/test_api_faults.py for the operator's own check, and
tests/cluster/test_crd_modern.py for the real API server.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

GOOD: dict[str, Any] = {
    "apiVersion": "kvpilot.io/v1alpha1",
    "kind": "QuantizedLLMService",
    "metadata": {"name": "good"},
    "spec": {"model": {"source": "hf://Qwen/Qwen3-8B"}, "engine": {"image": "example.org/runtime:1"}},
}


Judge = Literal["schema", "rule", "operator", "kubernetes", "administrator"]


@dataclass(frozen=True)
class Bad:
    """Test case: the manifest GOOD with `changes` is invalid, and `judge` must report the error at `field`.

    `changes` maps a dotted path to a value; None removes the field. bad_manifests.yaml describes the five judges. Only
    messages that kvpilot writes (judges "rule", "operator" and "administrator") must contain `word`.
    """

    name: str
    changes: dict[str, Any]
    field: str
    word: str
    judge: Judge

    @property
    def manifest(self) -> dict[str, Any]:
        obj = copy.deepcopy(GOOD)
        for path, value in self.changes.items():
            *parents, last = path.split(".")
            here = obj
            for parent in parents:
                here = here.setdefault(parent, {})
            if value is None:
                del here[last]
            else:
                here[last] = copy.deepcopy(value)
        return obj


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
_JUDGES: tuple[Judge, ...] = ("schema", "rule", "operator", "kubernetes", "administrator")

BAD = tuple(Bad(judge=judge, **row) for judge in _JUDGES for row in _TABLE[judge])
GOOD_GPU_LIMITS: tuple[tuple[int, int | str], ...] = tuple((size, limit) for size, limit in _TABLE["gpu_limits"])
"""Pairs of a tensorParallelSize and a sufficient limit of nvidia.com/gpu, in every accepted spelling."""


def with_gpus(size: int, limit: int | str) -> dict[str, Any]:
    """Return GOOD with this tensorParallelSize and this limit of nvidia.com/gpu."""
    resources = {"limits": {"nvidia.com/gpu": limit}}
    return {
        **GOOD,
        "spec": {**GOOD["spec"], "engine": {"image": "a/b:1", "tensorParallelSize": size, "resources": resources}},
    }
