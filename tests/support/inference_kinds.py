"""InferencePool of the Gateway API Inference Extension, reduced to the fields that tests need."""

from kvpilot_operator.api.names import INFERENCE_POOL_API
from kvpilot_operator.cluster.objects import Object
from support.community_kinds import definition

_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
_PORT = {"type": "object", "required": ["number"], "properties": {"number": _NUMBER}}
_PICKER = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "maxLength": 253},
        "kind": {"type": "string", "default": "Service", "minLength": 1, "maxLength": 63},
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "port": _PORT,
        "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
    },
    "x-kubernetes-validations": [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "a Service as the picker needs its port"}
    ],
}
_SPEC = {
    "type": "object",
    "required": ["endpointPickerRef", "selector", "targetPorts"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 63},
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "x-kubernetes-list-type": "atomic",
            "minItems": 1,
            "maxItems": 8,
            "items": _PORT,
            "x-kubernetes-validations": [
                {"rule": "self.all(a, self.exists_one(b, a.number == b.number))", "message": "ports must differ"}
            ],
        },
        "appProtocol": {"type": "string", "enum": ["http", "kubernetes.io/h2c"], "default": "http"},
        "endpointPickerRef": _PICKER,
    },
}
POOL_CRD = definition("inference.networking.k8s.io", "InferencePool", "inferencepools", _SPEC)
"""InferencePool v1, with the limits of its spec. The status has no schema, because gateways write it.

Releases v1.0 to v1.5 of the extension require an endpoint picker.
"""
POOL_CRD_1_6 = definition(
    "inference.networking.k8s.io",
    "InferencePool",
    "inferencepools",
    {**_SPEC, "required": ["selector", "targetPorts"]},
)
"""CRD of v1.6, in which a pool needs no picker."""


def picker_name(pool: str) -> str:
    """Return the name of a pool's endpoint picker in tests."""
    return f"{pool}-epp"


def pool(name: str, namespace: str, labels: dict[str, str]) -> Object:
    """Return an InferencePool as a user writes it."""
    spec = {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": picker_name(name), "port": {"number": 9002}},
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": INFERENCE_POOL_API, "kind": "InferencePool", "metadata": metadata, "spec": spec}
