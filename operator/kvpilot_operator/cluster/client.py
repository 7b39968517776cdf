"""A small client over kubernetes-asyncio's transport and credentials: plain JSON objects, typed errors."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, ApiException

from kvpilot_operator.errors import ClusterError, Conflict, NotFound
from kvpilot_operator.render.names import FIELD_MANAGER

TIMEOUT_SECONDS = 15

Object = dict[str, Any]

# Everything the operator touches, with the path its collection has.
_COLLECTIONS = {
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{namespace}/configmaps",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("v1", "Node"): "/api/v1/nodes",
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
    """The REST path of a collection, or of one object in it."""
    collection = _COLLECTIONS[(api_version, kind)].format(namespace=quote(namespace))
    return f"{collection}/{quote(name)}" if name else collection


class Cluster:
    """Reads and writes objects as JSON; every failure is a ClusterError."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    @classmethod
    async def connect(cls) -> Cluster:
        """Use KUBECONFIG, the default kubeconfig or the pod's service account."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config()
        return cls(ApiClient())

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        """One object; NotFound where there is none."""
        return await self._request("GET", path_of(api_version, kind, namespace, name))

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """One object or None."""
        try:
            return await self.get(api_version, kind, namespace, name)
        except NotFound:
            return None

    async def list(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Object]:
        """The objects with these labels."""
        found = await self._request(
            "GET", path_of(api_version, kind, namespace), query={"labelSelector": selector, "limit": "500"}
        )
        items: list[Object] = found.get("items", [])
        return items

    async def apply(self, manifest: Object, *, subresource: str = "") -> Object:
        """Server-side apply with our field manager: the object, or its subresource, as this manifest says."""
        metadata = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._request(
            "PATCH",
            f"{path}/{subresource}" if subresource else path,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    async def merge(self, api_version: str, kind: str, namespace: str, name: str, patch: Object) -> Object:
        """JSON merge patch."""
        return await self._request(
            "PATCH",
            path_of(api_version, kind, namespace, name),
            query={"fieldManager": FIELD_MANAGER},
            body=patch,
            content_type="application/merge-patch+json",
        )

    async def create(self, manifest: Object) -> Object:
        """Create a new object."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
        return await self._request("POST", path, query={"fieldManager": FIELD_MANAGER}, body=manifest)

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Delete an object and, in the background, what it owns; fine if it is gone already."""
        try:
            await self._request(
                "DELETE",
                path_of(api_version, kind, namespace, name),
                body={"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"},
            )
        except NotFound:
            return

    async def serves(self, api_version: str) -> bool:
        """True where the server knows this API version."""
        try:
            await self._request("GET", f"/apis/{api_version}")
        except NotFound:
            return False
        return True

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        try:
            answer = await self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                response_types_map=dict.fromkeys((200, 201, 202), "object"),
                _return_http_data_only=True,
                _request_timeout=TIMEOUT_SECONDS,
            )
        except ApiException as error:
            raise _typed(method, path, error) from None
        except (OSError, TimeoutError) as error:
            raise ClusterError(method, path, 0, f"{type(error).__name__}: {error}") from error
        return answer if isinstance(answer, dict) else {}


def _typed(method: str, path: str, error: ApiException) -> ClusterError:
    status = int(error.status or 0)
    try:
        details = json.loads(error.body or "{}")
    except ValueError:
        details = {}
    message = str(details.get("message") or error.reason or "no message")
    if len(message) > 1000:
        # A refused value may be long itself: what is wrong with it stands at the end.
        message = f"{message[:300]} … {message[-600:]}"
    if status == 409:
        return Conflict(method, path, status, message)
    if status == 404:
        return NotFound(method, path, status, message)
    return ClusterError(method, path, status, message)
