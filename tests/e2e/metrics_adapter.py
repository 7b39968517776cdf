"""Minimal metrics adapter: external.metrics.k8s.io and custom.metrics.k8s.io behind the API aggregator.

It reads the metrics pages of operator and engines, as Prometheus would, and records the queries.
"""

import json
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvpilot_localcluster import certs
from kvpilot_localcluster.rest import ApiError, Rest, until

VERSION = "v1beta1"
EXTERNAL, CUSTOM = "external.metrics.k8s.io", "custom.metrics.k8s.io"
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")

Json = dict[str, Any]


def page(url: str) -> list[tuple[str, Mapping[str, str], float]]:
    """Return the samples of a /metrics page: name, labels, value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:  # noqa: S310 (loopback)
        text = answer.read().decode()
    return [(s.name, s.labels, s.value) for f in text_string_to_metric_families(text) for s in f.samples]


class Adapter:
    """Adapter that answers an autoscaler's queries. `asked` holds the label selector of each query, by metric."""

    def __init__(self, rest: Rest, operator: Callable[[], str]) -> None:
        self._rest, self._operator = rest, operator
        self.asked: dict[str, list[str]] = {}

    def answer(self, path: str, selector: str) -> Json | None:
        """Return the answer to one GET; None means 404."""
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["apis", group, version]:
                return _resources(f"{group}/{version}")
            case ["apis", group, version, "namespaces", namespace, metric] if group == EXTERNAL:
                self.asked.setdefault(metric, []).append(selector)
                return _list(
                    "ExternalMetricValueList", f"{group}/{version}", self._external(namespace, metric, selector)
                )
            case ["apis", group, version, "namespaces", namespace, "pods", "*", metric]:
                self.asked.setdefault(metric, []).append(selector)
                return _list("MetricValueList", f"{group}/{version}", self._pods(namespace, metric, selector))
        return None

    def _external(self, namespace: str, metric: str, selector: str) -> list[Json]:
        """Return one of the operator's gauges for the requested labels."""
        wanted = dict(pair.split("=") for pair in selector.split(",")) | {"namespace": namespace}
        found = [
            value
            for name, labels, value in page(self._operator())
            if name == metric and wanted.items() <= labels.items()
        ]
        return [_value(value) | {"metricName": metric, "metricLabels": wanted} for value in found]

    def _pods(self, namespace: str, metric: str, selector: str) -> list[Json]:
        """Return the in-flight requests of each engine."""
        pods = self._rest.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
        found = []
        for pod in pods:
            if _ready(pod):
                samples = page(f"http://{pod['status']['podIP']}:8000")
                about = {"kind": "Pod", "namespace": namespace, "name": pod["metadata"]["name"], "apiVersion": "/v1"}
                in_flight = sum(value for name, _, value in samples if name in IN_FLIGHT)
                found.append(_value(in_flight) | {"metricName": metric, "describedObject": about})
        return found


@contextmanager
def serving(adapter: Adapter, rest: Rest, authority: Path) -> Iterator[None]:
    """Serve the adapter on loopback, behind the API server. `authority` is the folder with the cluster's CA."""
    certs.certificate(authority, "adapter", "/CN=localhost", "DNS:localhost,IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "adapter.crt", authority / "adapter.key")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            found = adapter.answer(url.path, parse_qs(url.query).get("labelSelector", [""])[0])
            body = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        _register(rest, server.server_address[1])
        yield
    finally:
        server.shutdown()
        server.server_close()


def _register(rest: Rest, port: int) -> None:
    _let_the_autoscaler_read(rest)
    backend = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    rest.create("/api/v1/namespaces/kube-system/services", {"metadata": {"name": "metrics-adapter"}, "spec": backend})
    for group in (EXTERNAL, CUSTOM):
        spec = {
            "group": group,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "metrics-adapter", "namespace": "kube-system", "port": port},
        }
        service = {"metadata": {"name": f"{VERSION}.{group}"}, "spec": spec}
        rest.create("/apis/apiregistration.k8s.io/v1/apiservices", service)
        until(partial(_routed, rest, group), f"{group} is routed")


def _let_the_autoscaler_read(rest: Rest) -> None:
    """Grant the controller manager the right to read external metrics, which its role lacks.

    The manifests of every metrics adapter grant this right.
    """
    name = "metrics-adapter-reader"
    api = "/apis/rbac.authorization.k8s.io/v1"
    rule = {"apiGroups": [EXTERNAL], "resources": ["*"], "verbs": ["get", "list"]}
    rest.create(f"{api}/clusterroles", {"metadata": {"name": name}, "rules": [rule]})
    reader = {"kind": "ServiceAccount", "namespace": "kube-system", "name": "horizontal-pod-autoscaler"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    rest.create(f"{api}/clusterrolebindings", {"metadata": {"name": name}, "roleRef": role, "subjects": [reader]})


def _routed(rest: Rest, group: str) -> bool:
    try:
        return bool(rest.get(f"/apis/{group}/{VERSION}")["resources"])
    except ApiError:
        return False


def _ready(pod: Json) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _resources(version: str) -> Json:
    names = ["pods/vllm_requests_in_flight"] if version.startswith(CUSTOM) else ["kvpilot_recommended_replicas"]
    kind = "MetricValueList" if version.startswith(CUSTOM) else "ExternalMetricValueList"
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {"name": n, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]} for n in names
        ],
    }


def _list(kind: str, version: str, items: list[Json]) -> Json:
    return {"kind": kind, "apiVersion": version, "metadata": {}, "items": items}


def _value(value: float) -> Json:
    return {"timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "value": f"{round(1000 * value)}m"}
