"""Requests to the API server, with the official client's connections and credentials. Writes pass the fence."""

import math
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.rest import RESTClientObject

from kvpilot_formats.untrusted import OverBudget, lines, read_body, shown, whole, whole_lines
from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError, Conflict, NotFound, Rejected, Throttled

# The kernel drops unacknowledged data after this time. By default it resends a request for minutes, even after the
# process was killed. The request could then arrive while another replica leads.
UNACKNOWLEDGED_MILLISECONDS = 4000


def connector(tls: ssl.SSLContext) -> aiohttp.TCPConnector:
    """Return a connector whose connections give up after UNACKNOWLEDGED_MILLISECONDS.

    The number of connections has no limit, because each watch holds one.
    """
    return aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=_socket)


class _Rest(RESTClientObject):  # type: ignore[misc]  # the official client has no types for us
    def _create_connector(self) -> aiohttp.TCPConnector:
        return connector(self.ssl_context)


def give_up_early(api: ApiClient) -> None:
    """Make all future connections of this client give up if data stays unacknowledged for 4 s."""
    # Do not take a proxy or credentials from the environment.
    api.configuration.client_session_kwargs = {"trust_env": False}
    api.rest_client = _Rest(api.configuration)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
    return made


TIMEOUT_SECONDS = 15.0
# We ask the API server to end a watch after this time. Until then it sends a bookmark about every minute, so a watch
# that is silent for longer than `SILENCE_SECONDS` is dead.
WATCH_SECONDS = 300
SILENCE_SECONDS = 75.0
# Ignore a Retry-After header of more than a day, and retry as after any other error.
_MAX_WAIT_SECONDS = 86_400

# Beginnings of HTTP 500 messages whose cause a retry does not remove: an unknown field, or a webhook that fails.
_LASTING = ("failed to create typed patch object", "failed calling webhook")

# Largest number of causes to keep if the API server refuses an object. A service's status cannot hold more.
_MAX_CAUSES = 8

REMEDIES = {
    401: " (its credentials are refused: is the ServiceAccount there?)",
    403: " (let the operator's role list and watch it)",
    404: " (install its CustomResourceDefinition: kubectl apply -f crds/)",
}
"""Remedies by HTTP status, for errors that do not pass by themselves."""

# Callback after every request. It gets method (GET, LIST, ...), kind, HTTP status (0: no answer) and seconds.
OnRequest = Callable[[str, str, int, float], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the API server, and the kind of the object that it is about."""

    method: str
    kind: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | None = None
    content_type: str = "application/json"
    accept: str = "application/json"


class Transport:
    """A sender of requests to the API server. It calls `on_request` after each. Every failure is a ClusterError."""

    def __init__(self, api: ApiClient, fence: WriteFence, on_request: OnRequest) -> None:
        self.api = api
        self.fence = fence
        self.on_request = on_request

    async def send(self, request: Request, *, verb: str = "") -> Object:
        """Send a request and return the object in the answer."""
        body = await self.read(request, verb=verb)
        try:
            return msgspec.json.decode(body, type=Object)
        except msgspec.DecodeError:
            words = f"the answer must be a JSON object, but is {shown(body.decode(errors='replace'))[:100]!r}"
            raise ClusterError(request.method, request.path, 200, words) from None

    async def read(self, request: Request, *, most: float = math.inf, verb: str = "") -> bytes:
        """Send a request and return the answer's bytes. Raise OverBudget if there are more than `most`.

        If the fence is closed, a write raises NotLeader at once.
        """
        status, began = 0, time.perf_counter()
        try:
            if request.method == "GET":
                body = await self._body(request, {}, TIMEOUT_SECONDS, most)
            else:
                with self.fence.write(request.method, request.path) as left:
                    seconds = min(TIMEOUT_SECONDS, left)
                    # Let the server give up when we do, so that no write takes effect later.
                    body = await self._body(request, {"timeout": f"{seconds * 1000:.0f}ms"}, seconds, most)
            status = 200
        except OverBudget:
            status = 200
            raise
        except ClusterError as error:
            status = error.status
            raise
        finally:
            self.on_request(verb or request.method, request.kind, status, time.perf_counter() - began)
        return body

    async def watch(self, request: Request) -> AsyncIterator[tuple[str, Object]]:
        """Yield (event type, object) for each event of a watch, until the server ends it."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        more = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        status, began = 0, time.perf_counter()
        try:
            async with await self._call(request, more, limits) as answer:
                status = answer.status
                if status != 200:
                    raise _typed(request, status, await answer.read(), answer.headers)
                async for line in whole_lines(answer.content.iter_any()):
                    event = msgspec.json.decode(line, type=Event)
                    if event.type == "ERROR":
                        code = event.object.get("code")
                        status = code if isinstance(code, int) and code else 500
                        raise ClusterError("WATCH", request.path, status, str(event.object.get("message")))
                    if not isinstance((event.object.get("metadata") or {}).get("resourceVersion"), str):
                        raise ClusterError("WATCH", request.path, status, "an event's object lacks a resourceVersion")
                    yield event.type, event.object
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise ClusterError("WATCH", request.path, 0, f"{type(error).__name__}: {error}") from error
        finally:
            self.on_request("WATCH", request.kind, status, time.perf_counter() - began)

    async def _body(self, request: Request, more: Mapping[str, str], seconds: float, most: float) -> bytes:
        # The limit covers the whole request. Without `ceil_threshold`, aiohttp rounds it up to a full second.
        limit = aiohttp.ClientTimeout(total=seconds, ceil_threshold=math.inf)
        try:
            async with await self._call(request, more, limit) as answer:
                if (answer.content_length or 0) > most:
                    raise OverBudget(f"{request.path}: {answer.content_length} bytes, more than {most}")
                body = await read_body(answer.content.iter_any(), most, request.path)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ClusterError(request.method, request.path, 0, f"{type(error).__name__}: {error}") from error
        if not 200 <= answer.status < 300:
            raise _typed(request, answer.status, body, answer.headers)
        return body

    async def _call(
        self, request: Request, more: Mapping[str, str], limit: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        method, url, headers, body, _ = await self.api.param_serialize(
            request.method,
            request.path,
            query_params=[*request.query.items(), *more.items()],
            header_params={"Accept": request.accept, "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        answer = await self.api.call_api(method, url, headers, body, _request_timeout=limit)
        response: aiohttp.ClientResponse = answer.response
        return response


class Event(msgspec.Struct):
    """One event of a watch: its type and its object."""

    type: str
    object: Object


def _typed(request: Request, status: int, body: bytes, headers: Mapping[str, str]) -> ClusterError:
    method, path = request.method, request.path
    try:
        said = msgspec.json.decode(body, type=Object)
    except msgspec.DecodeError:
        said = {}
    message = lines(str(said.get("message") or "") or body.decode(errors="replace") or "no message")
    causes = _causes(said.get("details"))
    lasting = status == 500 and any(words in message for words in _LASTING)
    if len(message) > 1000:
        # A refused value may be long, and the reason comes after it, so cut out the middle.
        message = f"{message[:300]} … {message[-600:]}"
    if status == 409 or (status == 422 and causes and all(field == "metadata.uid" for field, _ in causes)):
        # The uid in the write does not match, because another object has taken the name.
        return Conflict(method, path, status, message)
    if status == 404:
        return NotFound(method, path, status, message)
    if status in (400, 403, 422) or lasting:
        return Rejected(method, path, status, message, str(said.get("reason") or ""), causes)
    wait = whole(headers.get("Retry-After"), _MAX_WAIT_SECONDS)
    if status in (429, 503) and wait is not None:
        return Throttled(method, path, status, message, float(wait))
    return ClusterError(method, path, status, message)


def _causes(details: object) -> tuple[tuple[str, str], ...]:
    """Return (field, message) of each entry of a Status' `details.causes` that has both."""
    causes = details.get("causes") if isinstance(details, dict) else None
    found = [one for one in causes or () if isinstance(one, dict) and one.get("field") and one.get("message")]
    return tuple(dict.fromkeys((shown(str(one["field"]))[:300], shown(str(one["message"]))[-600:]) for one in found))[
        :_MAX_CAUSES
    ]
