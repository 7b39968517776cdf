"""A test's namespace of the local cluster: its pods, their logs, and time limits for waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.pod import LOGS_ANNOTATION
from kvpilot_localcluster.rest import ApiError, until

Json = dict[str, Any]


def field(path: str) -> Json:
    """Return an entry of `env` whose value comes from a field of its own pod (fieldRef)."""
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def container(**more: Any) -> Json:
    """Return the container spec of a test pod, whose state and log the test reads."""
    return {"name": "main", "image": "python:3.11", **more}


class Tenant:
    """One test's namespace in the local cluster."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.core = f"/api/v1/namespaces/{namespace}"
        self.apps = f"/apis/apps/v1/namespaces/{namespace}"

    def run(self, name: str, *containers: Json, labels: Json | None = None, **spec: Any) -> None:
        spec.setdefault("volumes", [{"name": "state", "emptyDir": {}}])
        body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"containers": list(containers), **spec}}
        path = f"{self.core}/pods"
        until(lambda: self.cluster.rest.get(f"{self.core}/serviceaccounts/default").get("secrets"), "service account")
        self.cluster.rest.create(path, body)

    def pod(self, name: str) -> Json:
        found: Json = self.cluster.rest.get(f"{self.core}/pods/{name}")
        return found

    def status(self, name: str) -> Json:
        found: Json = (self.pod(name)["status"].get("containerStatuses") or [{}])[0]
        return found

    def wait(self, name: str, question: Callable[[Json], Any], what: str) -> Json:
        """Wait until the first container's status satisfies a condition."""
        return dict(until(lambda: question(s := self.status(name)) and s, f"{name}: {what}"))

    def wait_ready(self, *names: str) -> None:
        for name in names:
            self.wait(name, lambda status: status.get("ready"), "ready")

    def log(self, name: str, run: int = 0) -> str:
        folder = self.pod(name)["metadata"]["annotations"][LOGS_ANNOTATION]
        return (Path(folder) / "main" / f"{run}.log").read_text()

    def delete(self, name: str, **more: Any) -> None:
        self.cluster.rest.delete(f"{self.core}/pods/{name}", **more)

    def until_gone(self, name: str) -> None:
        def gone() -> bool:
            try:
                self.pod(name)
            except ApiError as error:
                return error.status == 404
            return False

        until(gone, f"{name} is gone")

    def serve(self, name: str, selector: Json) -> str:
        body = {
            "metadata": {"name": name},
            "spec": {"selector": selector, "ports": [{"port": 80, "targetPort": "http"}]},
        }
        return str(self.cluster.rest.create(f"{self.core}/services", body)["spec"]["clusterIP"])
