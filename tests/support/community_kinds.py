"""CRDs of other projects, reduced to the fields that tests need."""

from typing import Any


def definition(group: str, kind: str, plural: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the CRD of a namespaced kind, version v1, with this schema of its spec.

    The status has no schema, because other controllers write it.
    """
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # API servers require this annotation for every kind in a *.k8s.io group.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests only"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
