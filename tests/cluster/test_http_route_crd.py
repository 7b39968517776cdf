"""A server with the HTTPRoute CRD stores a canary's share as the operator writes it, and applies the CRD's limits."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define, undefine
from kvpilot_localcluster.rest import ApiError, Rest
from kvpilot_operator.api.names import HTTP_ROUTE_API
from kvpilot_operator.observe.views import route_view
from kvpilot_operator.render.route import Backend, weighted
from kvpilot_operator.state.snapshot import ServiceKey
from support.gateway import ROUTE_CRD

KEY = ServiceKey("default", "chat")
ROUTES = "/apis/gateway.networking.k8s.io/v1/namespaces/default/httproutes"
PARENT = {"name": "web", "namespace": "gateways", "sectionName": "https"}
RULES = ({"backendRefs": [{"name": KEY.name, "port": 80}]},)


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Iterator[Rest]:
    """Yield the API server with the CRD of HTTPRoute."""
    rest = cluster.rest
    define(rest, [ROUTE_CRD])
    yield rest
    undefine(rest, ROUTE_CRD)


def made(*rules: Any) -> dict[str, Any]:
    metadata = {"name": KEY.name, "namespace": KEY.namespace}
    spec = {"parentRefs": [PARENT], "rules": list(rules or RULES)}
    return {"apiVersion": HTTP_ROUTE_API, "kind": "HTTPRoute", "metadata": metadata, "spec": spec}


def applied(server: Rest, manifest: dict[str, Any]) -> dict[str, Any]:
    path = f"{ROUTES}/{KEY.name}?fieldManager=kvpilot&force=true"
    stored: dict[str, Any] = server.call("PATCH", path, manifest, content="application/apply-patch+yaml")
    return stored


def test_a_share_is_recognised_after_the_server_has_added_its_defaults(server: Rest) -> None:
    def share(rules: Any, percent: int, copies: int) -> Any:
        return weighted(rules, Backend(*KEY), percent, copies)

    try:
        for percent, copies in ((0, 50), (25, 0), (0, 100), (0, 0)):
            view = route_view(applied(server, made(*share(RULES, percent, copies))))
            assert share(view.rules, percent, copies) == view.rules
            assert sum("filters" in rule for rule in view.rules) == (copies > 0)
    finally:
        server.delete(f"{ROUTES}/{KEY.name}")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rules": [{"backendRefs": [{"name": "chat"}]}]}, "needs its port"),
        ({"rules": [{"backendRefs": [{"name": "chat", "port": 80, "weight": 2_000_000}]}]}, "weight"),
        ({"hostnames": ["Chat.example.com"]}, "hostnames"),
        ({"parentRefs": [{"sectionName": "https"}]}, "name"),
    ],
)
def test_the_tests_crd_refuses_invalid_routes(server: Rest, change: dict[str, Any], word: str) -> None:
    bad = made()
    with pytest.raises(ApiError) as refused:
        server.create(f"{ROUTES}?dryRun=All", {**bad, "spec": {**bad["spec"], **change}})
    assert refused.value.status == 422
    assert word in str(refused.value)
