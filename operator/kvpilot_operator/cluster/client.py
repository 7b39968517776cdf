"""A small client over kubernetes-asyncio's transport and credentials: plain JSON objects, typed errors."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, ApiException, Configuration

from kvpilot_operator.cluster.gate import Gate
from kvpilot_operator.cluster.sockets import give_up_early
from kvpilot_operator.errors import ClusterError, Conflict, NotFound, Throttled
from kvpilot_operator.render.names import FIELD_MANAGER

TIMEOUT_SECONDS = 15.0
# An API server ends a watch after this long by itself; meanwhile it sends a bookmark about every minute, so one that
# says nothing for longer than `SILENCE_SECONDS` is dead.
WATCH_SECONDS = 300
SILENCE_SECONDS = 75.0
_PAGE = "500"

Object = dict[str, Any]

# Called after every request: method (LIST and WATCH are told from GET), kind, HTTP status (0: not reached), seconds.
OnRequest = Callable[[str, str, int, float], None]
# Called after every write: kind, namespace, name, and the object as it is now, or None where it was deleted.
OnWrite = Callable[[str, str, str, Object | None], None]

# Everything the operator touches, with the path its collection has.
_COLLECTIONS = {
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{namespace}/configmaps",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("v1", "Node"): "/api/v1/nodes",
    ("coordination.k8s.io/v1", "Lease"): "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    ("apps/v1", "Deployment"): "/apis/apps/v1/namespaces/{namespace}/deployments",
    ("policy/v1", "PodDisruptionBudget"): "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): (
        "/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes"
    ),
    ("kvpilot.io/v1alpha1", "QuantizedLLMService"): (
        "/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices"
    ),
}


def path_of(api_version: str, kind: str, namespace: str = "", name: str = "") -> str:
    """The REST path of a collection, of all namespaces where none is named, or of one object in it."""
    collection = _COLLECTIONS[(api_version, kind)]
    if not namespace:
        collection = collection.replace("/namespaces/{namespace}", "")
    collection = collection.format(namespace=quote(namespace))
    return f"{collection}/{quote(name)}" if name else collection


class Cluster:
    """Reads and writes objects as JSON; every failure is a ClusterError."""

    def __init__(
        self,
        api: ApiClient,
        gate: Gate | None = None,
        on_request: OnRequest | None = None,
        on_write: OnWrite | None = None,
    ) -> None:
        self._api = api
        self._gate = gate or Gate.opened()
        self._on_request = on_request or (lambda method, kind, status, seconds: None)
        self._on_write = on_write or (lambda kind, namespace, name, obj: None)

    @classmethod
    async def connect(
        cls, gate: Gate | None = None, agent: str = "kvpilot-operator", on_request: OnRequest | None = None
    ) -> Cluster:
        """Use KUBECONFIG, the default kubeconfig or the pod's service account; `agent` stands in audit logs."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config()
        configuration = Configuration.get_default_copy()
        # Watches hold a connection each, as many as namespaces are watched: a write must never wait for one of them.
        configuration.connection_pool_maxsize = 0
        api = ApiClient(configuration)
        api.user_agent = agent
        give_up_early(api)
        return cls(api, gate, on_request)

    def telling(self, on_write: OnWrite) -> Cluster:
        """The same connections, for one who wants to know of every write."""
        return Cluster(self._api, self._gate, self._on_request, on_write)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        """One object; NotFound where there is none."""
        return await self._request("GET", kind, path_of(api_version, kind, namespace, name))

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """One object or None."""
        try:
            return await self.get(api_version, kind, namespace, name)
        except NotFound:
            return None

    async def list(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Object]:
        """The objects with these labels."""
        return [item async for items, _ in self.pages(api_version, kind, namespace, selector) for item in items]

    async def pages(
        self, api_version: str, kind: str, namespace: str, selector: str
    ) -> AsyncIterator[tuple[Sequence[Object], str]]:
        """The objects with these labels, some hundred at a time, each time with the list's resourceVersion."""
        query = {"labelSelector": selector, "limit": _PAGE}
        while True:
            path = path_of(api_version, kind, namespace)
            found = await self._request("GET", kind, path, query=query, verb="LIST")
            metadata = found.get("metadata") or {}
            yield found.get("items") or [], str(metadata.get("resourceVersion", ""))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def watch(
        self, api_version: str, kind: str, namespace: str, selector: str, version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """What happens after `version`: ADDED, MODIFIED, DELETED and BOOKMARK, each with its object.

        Ends when the server has had enough, which is the usual end. Raises ClusterError: status 410 where the server
        does not know the version any more, 0 where the connection broke or nothing, not even a bookmark, came.
        """
        path = path_of(api_version, kind, namespace)
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        status, began = 0, time.perf_counter()
        try:
            answer: aiohttp.ClientResponse = await self._call("GET", path, query, None, "", limits, stream=True)
            async with answer:
                status = answer.status
                if status != 200:
                    raise _typed("WATCH", path, status, await answer.text(), answer.headers)
                async for kind_of_event, found in _events(answer):
                    if kind_of_event == "ERROR":
                        status = int(found.get("code") or 500)
                        raise ClusterError("WATCH", path, status, str(found.get("message")))
                    yield kind_of_event, found
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise ClusterError("WATCH", path, 0, f"{type(error).__name__}: {error}") from error
        finally:
            self._on_request("WATCH", kind, status, time.perf_counter() - began)

    async def apply(self, manifest: Object, *, subresource: str = "") -> Object:
        """Server-side apply with our field manager: the object, or its subresource, as this manifest says."""
        metadata = manifest["metadata"]
        about = (manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._write("PATCH", *about, query, manifest, "application/apply-patch+yaml", subresource)

    async def merge(self, api_version: str, kind: str, namespace: str, name: str, patch: Object) -> Object:
        """JSON merge patch."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write(
            "PATCH", api_version, kind, namespace, name, query, patch, "application/merge-patch+json"
        )

    async def create(self, manifest: Object) -> Object:
        """Create a new object."""
        about = (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"], "")
        return await self._write("POST", *about, {"fieldManager": FIELD_MANAGER}, manifest)

    async def replace(self, manifest: Object) -> Object:
        """Write a whole object; Conflict where its resourceVersion has moved on."""
        metadata = manifest["metadata"]
        about = (manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._write("PUT", *about, {"fieldManager": FIELD_MANAGER}, manifest)

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Delete an object and, in the background, what it owns; fine if it is gone already."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        with contextlib.suppress(NotFound):
            await self._request("DELETE", kind, path_of(api_version, kind, namespace, name), body=options)
        self._on_write(kind, namespace, name, None)

    async def _write(
        self,
        method: str,
        api_version: str,
        kind: str,
        namespace: str,
        name: str,
        query: Mapping[str, str],
        body: Object,
        content_type: str = "application/json",
        subresource: str = "",
    ) -> Object:
        path = path_of(api_version, kind, namespace, name) + (f"/{subresource}" if subresource else "")
        answer = await self._request(method, kind, path, query=query, body=body, content_type=content_type)
        self._on_write(kind, namespace, name or body["metadata"].get("name", ""), answer)
        return answer

    async def serves(self, api_version: str) -> bool:
        """True where the server knows this API version."""
        try:
            await self._request("GET", "", f"/apis/{api_version}")
        except NotFound:
            return False
        return True

    async def version(self) -> tuple[int, int]:
        """The server's version, e.g. (1, 27)."""
        found = await self._request("GET", "", "/version")
        numbers = [re.match(r"\d+", str(found.get(part, ""))) for part in ("major", "minor")]
        major, minor = (int(number[0]) if number else 0 for number in numbers)
        return major, minor

    async def _request(
        self,
        method: str,
        kind: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        verb: str = "",
    ) -> Object:
        status, began = 0, time.perf_counter()
        try:
            if method == "GET":
                answer = await self._send(method, path, query or {}, body, content_type, _exactly(TIMEOUT_SECONDS))
            else:
                with self._gate.write(method, path) as left:
                    seconds = min(TIMEOUT_SECONDS, left)
                    # The server, too, gives up when we do: no write of ours lands later.
                    limited = {**(query or {}), "timeout": f"{seconds * 1000:.0f}ms"}
                    answer = await self._send(method, path, limited, body, content_type, _exactly(seconds))
            status = 200
        except ClusterError as error:
            status = error.status
            raise
        finally:
            self._on_request(verb or method, kind, status, time.perf_counter() - began)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        limit: aiohttp.ClientTimeout,
    ) -> Object:
        try:
            answer = await self._call(method, path, query, body, content_type, limit)
        except ApiException as error:
            raise _typed(method, path, int(error.status or 0), error.body or error.reason, error.headers) from None
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            raise ClusterError(method, path, 0, f"{type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise ClusterError(method, path, 200, f"the answer is no JSON object but {str(answer)[:100]!r}")
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        limit: aiohttp.ClientTimeout,
        *,
        stream: bool = False,
    ) -> Any:
        return await self._api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type or "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            response_types_map=dict.fromkeys((200, 201, 202), "object"),
            _return_http_data_only=True,
            _preload_content=not stream,
            _request_timeout=limit,
        )


def _exactly(seconds: float) -> aiohttp.ClientTimeout:
    """A limit for a whole request; without the second argument it would be rounded up to a full second."""
    return aiohttp.ClientTimeout(total=seconds, ceil_threshold=math.inf)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Object]]:
    """One JSON object a line; lines are put together here since a large object exceeds aiohttp's own limit."""
    begun = bytearray()
    async for chunk in answer.content.iter_any():
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            whole = bytes(begun) + line
            begun.clear()
            if whole.strip():
                event = msgspec.json.decode(whole)
                yield event["type"], event["object"]
        begun += rest


def _typed(method: str, path: str, status: int, body: Any, headers: Mapping[str, str] | None) -> ClusterError:
    try:
        details = json.loads(body or "{}")
    except ValueError:
        details = {}
    message = str((details.get("message") if isinstance(details, dict) else None) or body or "no message")
    if len(message) > 1000:
        # A refused value may be long itself: what is wrong with it stands at the end.
        message = f"{message[:300]} … {message[-600:]}"
    if status == 409:
        return Conflict(method, path, status, message)
    if status == 404:
        return NotFound(method, path, status, message)
    wait = (headers or {}).get("Retry-After", "")
    if status in (429, 503) and wait.isdigit():
        return Throttled(method, path, status, message, float(wait))
    return ClusterError(method, path, status, message)
