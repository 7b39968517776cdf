"""JSON client with the few calls that the node agent and the forwarder need.

Both programs mostly pass objects on. Typed models would convert each object twice and drop unknown fields.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

Json = dict[str, Any]
log = logging.getLogger("kvpilot_localcluster")

STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"


class Kube:
    """Client of one API server, as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    async def __aenter__(self) -> Self:
        configuration = Configuration()
        await config.load_kube_config(config_file=str(self._kubeconfig), client_configuration=configuration)
        configuration.disable_strict_ssl_verification = True
        self._client = ApiClient(configuration)
        self.server = str(configuration.host)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def call(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Json:
        """Send one request to a path below the server's address, and return the JSON answer.

        Raises:
            ApiException: the server answered with an error; `.status` is the HTTP status.
            aiohttp.ClientError, TimeoutError: the server cannot be reached.
        """
        answer = await self._client.rest_client.request(
            method,
            self.server + path,
            headers={"Content-Type": content},
            body=body,
            _request_timeout=aiohttp.ClientTimeout(total=30),
        )
        data = await answer.read()
        if not 200 <= answer.status < 300:
            raise ApiException.from_response(http_resp=answer, body=data.decode(errors="replace"), data=None)
        decoded: Json = json.loads(data)
        return decoded

    async def watch(self, path: str, **selectors: str) -> AsyncIterator[tuple[str, Json]]:
        """Yield every object of a collection, and then every change, forever. Restore lost connections.

        Yield (kind, object):

        - LISTED: an object of the list.
        - SYNCED: the end of the list, with an empty object.
        - ADDED, MODIFIED, DELETED: a change after the list.

        After a lost connection the list comes again. No event reports objects that were deleted meanwhile, so at SYNCED
        the caller must compare the list with the objects that it knows.
        """
        while True:
            try:
                async for event in self._watch_once(path, selectors):
                    yield event
            except (ApiException, aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.debug("watch of %s ended: %s", path, error)
                await asyncio.sleep(0.2)

    async def _watch_once(self, path: str, selectors: Mapping[str, str]) -> AsyncIterator[tuple[str, Json]]:
        listed = await self.call("GET", f"{path}?{urlencode(selectors)}")
        for item in listed["items"]:
            yield "LISTED", item
        yield "SYNCED", {}
        version = listed["metadata"]["resourceVersion"]
        query = {**selectors, "watch": "1", "resourceVersion": version, "timeoutSeconds": "300"}
        answer = await self._client.rest_client.request(
            "GET",
            f"{self.server}{path}?{urlencode(query)}",
            headers={},
            _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=330),
        )
        async with answer.response as response:
            if response.status != 200:
                raise ApiException(status=response.status, reason=response.reason)
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    # Usually the status is 410, because the version is too old. The caller then lists again.
                    return
                yield event["type"], event["object"]
