"""Custom resource definitions: create them, and route them from an older core to a newer server."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvpilot_localcluster.rest import ApiError, Rest, until

Definition = Mapping[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ROUTES = "/apis/apiregistration.k8s.io/v1/apiservices"
_BACKEND = "newer-apis"
_MARKER = "markers.localcluster.kvpilot.io"

log = logging.getLogger(__name__)


def served_paths(definition: Definition) -> Iterable[str]:
    """Yield the API paths of a CRD's resource, one for each served version."""
    spec = definition["spec"]
    for version in spec["versions"]:
        if version["served"]:
            yield f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"


def define(server: Rest, definitions: Sequence[Definition]) -> None:
    """Create CRDs on a server, and wait until it serves their resources.

    Raises:
        ApiError: the server refuses a definition.
        TimeoutError: the server does not serve one.
    """
    for definition in definitions:
        server.create(DEFINITIONS, definition)
        for path in served_paths(definition):
            until(partial(server.get, path), f"{path} is served")


def undefine(server: Rest, definition: Definition) -> None:
    """Delete a CRD with all its objects, and wait until it is gone."""
    path = f"{DEFINITIONS}/{definition['metadata']['name']}"
    server.delete(path)

    def gone() -> bool:
        try:
            server.get(path)
        except ApiError as error:
            return error.status == 404
        return False

    until(gone, f"{path} is gone")


class Aggregation:
    """Routes by which an older core API server forwards requests for newer APIs to servers on localhost."""

    def __init__(self, core: Rest) -> None:
        self._core = core
        self._routed: set[str] = set()
        self._stopped = threading.Event()

    def start(self, ports: Mapping[str, int]) -> None:
        """Create the Kubernetes Service to which the aggregator's routes refer, with the ports of all servers."""
        spec = {
            "type": "ExternalName",
            "externalName": "localhost",
            "ports": [{"name": name, "port": port} for name, port in ports.items()],
        }
        self._core.create("/api/v1/namespaces/kube-system/services", {"metadata": {"name": _BACKEND}, "spec": spec})

    def stop(self) -> None:
        """Stop following new definitions: end the thread as soon as its current watch returns."""
        self._stopped.set()

    def route(self, group: str, version: str, port: int, *, priority: int = 1000, version_priority: int = 1) -> None:
        """Forward requests for this version of a group to the server at `port`.

        The route replaces the core's own version, if there is one.

        Args:
            priority: rank of the group among all groups (groupPriorityMinimum).
            version_priority: rank of the version in its group (versionPriority). Clients prefer the highest one. The
                core's own versions have at least 9.
        """
        name = f"{version}.{group}"
        body: dict[str, Any] = {
            "metadata": {"name": name},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": priority,
                "versionPriority": version_priority,
                "insecureSkipTLSVerify": True,
                "service": {"name": _BACKEND, "namespace": "kube-system", "port": port},
            },
        }
        try:
            known = self._core.get(f"{_ROUTES}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            self._core.create(_ROUTES, body)
        else:
            # Remove the label that marks the registration as the core's own, so that a restart of the core does not
            # reset it.
            body["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
            self._core.call("PUT", f"{_ROUTES}/{name}", body)

    def take_definitions(self, newer: Rest, port: int) -> None:
        """Let the core forward requests for CRDs and their objects to the server `newer`, at `port`, from now on."""
        self.route("apiextensions.k8s.io", "v1", port, priority=16700, version_priority=20)
        # The aggregator reports Available before it uses the route. So create a definition that only `newer` has, and
        # wait until the aggregator returns it.
        newer.create(DEFINITIONS, _marker())
        until(partial(self._core.get, f"{DEFINITIONS}/{_MARKER}"), "definitions are routed")
        newer.delete(f"{DEFINITIONS}/{_MARKER}")
        threading.Thread(target=self._follow, args=(newer, port), name="routes", daemon=True).start()

    def _follow(self, newer: Rest, port: int) -> None:
        """Add routes for new definitions, and remove those of deleted ones."""
        while not self._stopped.is_set():
            try:
                listed = newer.get(DEFINITIONS)
                self._sync(newer, listed["items"], port)
                version = listed["metadata"]["resourceVersion"]
                for _ in newer.watch(DEFINITIONS, version):
                    self._sync(newer, newer.get(DEFINITIONS)["items"], port)
            except (ApiError, OSError, ValueError) as error:
                log.debug("definitions are not followed: %s", error)
                self._stopped.wait(0.2)

    def _sync(self, newer: Rest, definitions: Iterable[Definition], port: int) -> None:
        wanted = {tuple(path.split("/")[2:4]) for one in definitions if _established(one) for path in served_paths(one)}
        for group, version in sorted(wanted):
            name = f"{version}.{group}"
            if name not in self._routed:
                until(partial(newer.get, f"/apis/{group}/{version}"), f"{name} is served", seconds=30)
                self.route(group, version, port)
                self._routed.add(name)
        for name in self._routed - {f"{version}.{group}" for group, version in wanted}:
            self._core.delete(f"{_ROUTES}/{name}")
            self._routed.discard(name)


def _established(definition: Definition) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any((one["type"], one["status"]) == ("Established", "True") for one in conditions)


def _marker() -> dict[str, Any]:
    schema = {"openAPIV3Schema": {"type": "object"}}
    return {
        "metadata": {"name": _MARKER},
        "spec": {
            "group": "localcluster.kvpilot.io",
            "scope": "Cluster",
            "names": {"plural": "markers", "kind": "Marker"},
            "versions": [{"name": "v1", "served": False, "storage": True, "schema": schema}],
        },
    }
