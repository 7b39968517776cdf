"""Custom resource definitions on a server, and behind another server's aggregator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvpilot_localcluster.rest import ApiError, Rest, until

Definition = Mapping[str, Any]
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ROUTES = "/apis/apiregistration.k8s.io/v1/apiservices"
_BACKEND = "modern-crds"


def served_paths(definition: Definition) -> Iterable[str]:
    """Return the paths of a CRD's collections, one for each served version."""
    spec = definition["spec"]
    for version in spec["versions"]:
        if version["served"]:
            yield f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"


def directly(server: Rest, definitions: Sequence[Definition]) -> None:
    """Create definitions on a server and wait until it serves them.

    Raises:
        ApiError: the server refuses a definition.
        TimeoutError: it does not serve one.
    """
    for definition in definitions:
        server.create(_DEFINITIONS, definition)
        for path in served_paths(definition):
            until(partial(server.get, path), f"{path} is served")


def behind_aggregator(core: Rest, modern: Rest, definitions: Sequence[Definition], port: int) -> None:
    """Create definitions on `modern`, which listens on a port of localhost, and route their groups there from `core`.

    Raises:
        ApiError, TimeoutError: as `directly`.
    """
    directly(modern, definitions)
    service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    core.create("/api/v1/namespaces/kube-system/services", {"metadata": {"name": _BACKEND}, "spec": service})
    for definition in definitions:
        route(core, definition, port)


def route(core: Rest, definition: Definition, port: int) -> None:
    """Let `core` pass a definition's versions on to the server of `behind_aggregator`, which listens on this port."""
    for path in served_paths(definition):
        _, _, group, version, _ = path.split("/")
        spec = {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 1000,
            "versionPriority": 15,
            "insecureSkipTLSVerify": True,
            "service": {"name": _BACKEND, "namespace": "kube-system", "port": port},
        }
        body = {"metadata": {"name": f"{version}.{group}"}, "spec": spec}
        with contextlib.suppress(ApiError):  # a second definition of the same group and version
            core.create(_ROUTES, body)
        # The aggregator reports Available before it has the route, so the objects themselves are asked for.
        until(partial(core.get, path.rpartition("/")[0]), f"the group of {path} is routed")
        until(partial(core.get, path), f"{path} is routed")


def unroute(core: Rest, definition: Definition) -> None:
    """Take those routes back."""
    for version in definition["spec"]["versions"]:
        core.delete(f"{_ROUTES}/{version['name']}.{definition['spec']['group']}")
