"""A client of the API server. It takes and returns plain JSON objects, and raises typed errors."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import kopf
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.kopf_session import KopfSession, Listed
from kvpilot_operator.cluster.objects import Object, Ref, path_of
from kvpilot_operator.cluster.transport import OnRequest, Request, Transport, give_up_early
from kvpilot_operator.errors import NotFound

_PAGE = 500
# Read lists in small pages, because the metadata of one object may have more than 1 MiB.
_METADATA_PAGE = 4
_METADATA_ALONE = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_FIELD_MANAGER = {"fieldManager": "kvpilot"}

# Callback after every write. It gets kind, namespace, name, and the new object (None if it was deleted).
OnWrite = Callable[[str, str, str, Object | None], None]


class Cluster:
    """A client that reads and writes objects. Every failure is a ClusterError. It calls `on_write` after each write."""

    def __init__(self, api: ApiClient, fence: WriteFence | None = None, on_request: OnRequest | None = None) -> None:
        self._transport = Transport(api, fence or WriteFence.opened(), on_request or (lambda *_: None))
        self.on_write: OnWrite = lambda *_: None

    @classmethod
    async def connect(
        cls, fence: WriteFence | None = None, agent: str = "kvpilot-operator", on_request: OnRequest | None = None
    ) -> "Cluster":
        """Connect with the pod's service account, else with a kubeconfig (KUBECONFIG). Audit logs show `agent`."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config()
        api = ApiClient(Configuration.get_default_copy())
        api.user_agent = agent
        give_up_early(api)
        return cls(api, fence, on_request)

    def session_for_kopf(
        self, api_version: str, kind: str, namespaces: Sequence[str], listed: Listed
    ) -> kopf.AiohttpSession:
        """Return a session by which kopf watches this kind in these namespaces ("" for all).

        The session uses our server, credentials, write fence and metrics. It passes each complete list to `listed`.
        """
        return KopfSession(self._transport, api_version, kind, namespaces, listed).login()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.api.close()

    async def get(self, ref: Ref) -> Object:
        """Read one object. Raise NotFound if it does not exist."""
        return await self._transport.send(Request("GET", ref.kind, ref.path))

    async def find(self, ref: Ref) -> Object | None:
        """Read one object. Return None if it does not exist."""
        try:
            return await self.get(ref)
        except NotFound:
            return None

    async def find_json(self, ref: Ref, *, most: int) -> bytes | None:
        """Return one object's unparsed JSON, or None if it does not exist. Raise OverBudget above `most` bytes."""
        try:
            return await self._transport.read(Request("GET", ref.kind, ref.path), most=most)
        except NotFound:
            return None

    async def list(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Object]:
        """Return the objects that match a label selector."""
        return [item async for items, _ in self.pages(api_version, kind, namespace, selector) for item in items]

    async def first(
        self, api_version: str, kind: str, namespace: str, *, fields: str = "", limit: int
    ) -> Sequence[Object]:
        """Return the first `limit` objects, in the order of names, that match a field selector."""
        async with contextlib.aclosing(
            self.pages(api_version, kind, namespace, "", fields=fields, limit=limit)
        ) as pages:
            return (await anext(pages))[0]

    async def pages(
        self,
        api_version: str,
        kind: str,
        namespace: str,
        selector: str,
        *,
        fields: str = "",
        accept: str = "application/json",
        limit: int = _PAGE,
    ) -> AsyncGenerator[tuple[Sequence[Object], str], None]:
        """Yield (objects, resourceVersion of the list) for each page of objects that match `selector` and `fields`.

        An empty `namespace` lists all namespaces. A page has at most `limit` objects.
        """
        query = {"labelSelector": selector, "limit": str(limit)} | ({"fieldSelector": fields} if fields else {})
        while True:
            request = Request("GET", kind, path_of(api_version, kind, namespace), query, accept=accept)
            found = await self._transport.send(request, verb="LIST")
            metadata = found.get("metadata") or {}
            yield found.get("items") or [], str(metadata.get("resourceVersion", ""))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def metadata(
        self, api_version: str, kind: str, namespace: str, selector: str, *, most: int
    ) -> AsyncIterator[Object]:
        """Yield the metadata of matching objects: at most `most`, rounded up to a whole page of the list."""
        seen = 0
        pages = self.pages(api_version, kind, namespace, selector, accept=_METADATA_ALONE, limit=_METADATA_PAGE)
        async for items, _ in pages:
            for item in items:
                yield item["metadata"]
            seen += len(items)
            if seen >= most:
                return

    def watch(
        self, api_version: str, kind: str, namespace: str, selector: str, version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield (event type, object) for each event after `version`, bookmarks too, until the server ends the watch."""
        query = {"labelSelector": selector, "resourceVersion": version}
        return self._transport.watch(Request("GET", kind, path_of(api_version, kind, namespace), query))

    async def apply(self, manifest: Object, *, subresource: str = "") -> Object:
        """Apply a manifest, or its subresource, by server-side apply with our field manager."""
        return await self._patch(Ref.to(manifest), subresource, manifest, "apply-patch+yaml", {"force": "true"})

    async def merge(self, ref: Ref, patch: Object, *, subresource: str = "") -> Object:
        """Send a JSON merge patch for an object, or for its subresource."""
        return await self._patch(ref, subresource, patch, "merge-patch+json", {})

    async def _patch(self, ref: Ref, subresource: str, body: Object, content: str, more: dict[str, str]) -> Object:
        path = f"{ref.path}/{subresource}" if subresource else ref.path
        return await self._write(
            Request("PATCH", ref.kind, path, _FIELD_MANAGER | more, body, f"application/{content}")
        )

    async def create(self, manifest: Object) -> Object:
        """Create a new object."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
        return await self._write(Request("POST", manifest["kind"], path, _FIELD_MANAGER, manifest))

    async def replace(self, manifest: Object) -> Object:
        """Replace a whole object. Raise Conflict if its resourceVersion is not the newest."""
        return await self._write(Request("PUT", manifest["kind"], Ref.to(manifest).path, _FIELD_MANAGER, manifest))

    async def delete(self, ref: Ref, *, uid: str = "") -> None:
        """Delete an object and, in the background, its dependents. Raise Conflict if `uid` is not the object's."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        with contextlib.suppress(NotFound):
            await self._transport.send(Request("DELETE", ref.kind, ref.path, body=options))
        self.on_write(ref.kind, ref.namespace, ref.name, None)

    async def review(self, api_version: str, kind: str, spec: Object) -> Object:
        """Send a TokenReview or a SubjectAccessReview, which the server does not store, and return its status."""
        body = {"apiVersion": api_version, "kind": kind, "spec": spec}
        answer = await self._transport.send(Request("POST", kind, path_of(api_version, kind), body=body))
        return answer.get("status") or {}

    async def serves(self, api_version: str) -> bool:
        """Return True if the server knows this API version."""
        try:
            await self._transport.send(Request("GET", "", f"/apis/{api_version}"))
        except NotFound:
            return False
        return True

    async def _write(self, request: Request) -> Object:
        answer = await self._transport.send(request)
        metadata = answer["metadata"]
        self.on_write(request.kind, metadata.get("namespace", ""), metadata["name"], answer)
        return answer
