"""Minimal gateway that splits requests by the weights of one HTTPRoute, read from the API server."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from aiohttp import web

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import NotFound
from support.community_kinds import definition

API = "gateway.networking.k8s.io/v1"
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_PARENT = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "default": "gateway.networking.k8s.io", "maxLength": 253},
        "kind": {"type": "string", "default": "Gateway", "minLength": 1, "maxLength": 63},
        "namespace": {"type": "string", "minLength": 1, "maxLength": 63},
        "name": _NAME,
        "sectionName": _NAME,
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
}
_OBJECT = {
    "group": {"type": "string", "default": "", "maxLength": 253},
    "kind": {"type": "string", "default": "Service", "minLength": 1, "maxLength": 63},
    "namespace": {"type": "string", "minLength": 1, "maxLength": 63},
    "name": _NAME,
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
}
_WEIGHT = {"type": "integer", "default": 1, "minimum": 0, "maximum": 1_000_000}
_BACKEND = {
    "type": "object",
    "required": ["name"],
    "properties": {**_OBJECT, "weight": _WEIGHT},
    "x-kubernetes-validations": [
        {
            "rule": "self.kind != 'Service' || (has(self.group) && self.group != '') || has(self.port)",
            "message": "a Service needs its port",
        }
    ],
}
_MIRROR = {
    "type": "object",
    "required": ["backendRef"],
    "properties": {
        "backendRef": {**_BACKEND, "properties": _OBJECT},
        "percent": {"type": "integer", "minimum": 0, "maximum": 100},
    },
}
_FILTER = {"type": "object", "required": ["type"], "properties": {"requestMirror": _MIRROR}, **_OPEN}
_MATCHES = [{"path": {"type": "PathPrefix", "value": "/"}}]
_RULE = {
    "type": "object",
    "properties": {
        "matches": {"type": "array", "default": _MATCHES, "maxItems": 64, "items": {"type": "object", **_OPEN}},
        "backendRefs": {"type": "array", "maxItems": 16, "items": _BACKEND},
        "filters": {"type": "array", "maxItems": 16, "items": _FILTER},
    },
    **_OPEN,
}
_HOST = {**_NAME, "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
_SPEC = {
    "type": "object",
    "properties": {
        "parentRefs": {"type": "array", "maxItems": 32, "items": _PARENT},
        "hostnames": {"type": "array", "maxItems": 16, "items": _HOST},
        "rules": {"type": "array", "default": [{"matches": _MATCHES}], "maxItems": 16, "items": _RULE},
    },
}
ROUTE_CRD = definition("gateway.networking.k8s.io", "HTTPRoute", "httproutes", _SPEC)
"""HTTPRoute v1, rewritten here with the limits and defaults of the fields that tests use.

RequestMirror is the only filter with a schema. The status has no schema, because gateways write it.
"""


class Gateway:
    """Gateway that sends every request to one backend of the route's first rule, drawn at random by weight.

    `port` is the port of the backend Services.
    """

    def __init__(self, cluster: Cluster, namespace: str, route: str, port: int) -> None:
        self._cluster, self._namespace, self._route, self._port = cluster, namespace, route, port
        self._random = random.Random(0)
        self._http = httpx.AsyncClient(timeout=300, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.sent: Counter[str] = Counter()
        """Number of requests by backend."""
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> "AsyncIterator[Gateway]":
        """Run the gateway on a free loopback port until the block ends."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
            await self._http.aclose()

    async def weights(self) -> dict[str, int]:
        """Return the weight by backend of the route's first rule."""
        route = await self._cluster.get(Ref(API, "HTTPRoute", self._namespace, self._route))
        return {b["name"]: b.get("weight", 1) for b in route["spec"]["rules"][0]["backendRefs"]}

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        weights = await self.weights()
        name = self._random.choices(list(weights), list(weights.values()))[0]
        try:
            service = await self._cluster.get(Ref("v1", "Service", self._namespace, name))
        except NotFound:
            return web.Response(status=503, text=f"no Service {name}")
        self.sent[name] += 1
        url = f"http://{service['spec']['clusterIP']}:{self._port}{request.rel_url}"
        body = await request.read()
        async with self._http.stream(
            request.method, url, content=body, headers={"Content-Type": request.content_type}
        ) as answer:
            out = web.StreamResponse(
                status=answer.status_code, headers={"Content-Type": answer.headers["content-type"]}
            )
            await out.prepare(request)
            async for chunk in answer.aiter_bytes():
                await out.write(chunk)
            await asyncio.sleep(0)
            await out.write_eof()
            return out
