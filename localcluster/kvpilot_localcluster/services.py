"""Forwarder in user space: every Service with a ClusterIP answers at its own loopback address.

The API server assigns cluster IPs from a range inside 127.0.0.0/8, so the forwarder can listen on a Service's address.
It sends each new connection to a random ready endpoint of the real controller's EndpointSlices. It skips an endpoint
that does not answer. A connection stays open even if its endpoint is removed from the Service. While a Service has no
ready endpoint, nothing listens at its address, so connections are refused.

In contrast to kube-proxy it supports only TCP, and no session affinity, node ports or external addresses.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from kubernetes.aio.client import ApiException

from kvpilot_localcluster.addresses import service_port
from kvpilot_localcluster.kube import Json, Kube

log = logging.getLogger("kvpilot_localcluster.services")

Address = tuple[str, int]


def slice_key(thing: Mapping[str, Any]) -> str:
    """Return the key NAMESPACE/NAME of a Service or an EndpointSlice."""
    return f"{thing['metadata']['namespace']}/{thing['metadata']['name']}"


def ready_endpoints(service: Mapping[str, Any], port: Mapping[str, Any], slices: Iterable[Json]) -> list[Address]:
    """Return the sorted addresses to which connections to one port of a Service may go.

    Args:
        service: the Service.
        port: one entry of its spec.ports.
        slices: any EndpointSlices. Those of other Services are ignored.
    """
    found = set()
    for one in slices:
        labels = one["metadata"].get("labels") or {}
        if one["metadata"]["namespace"] != service["metadata"]["namespace"]:
            continue
        if labels.get("kubernetes.io/service-name") != service["metadata"]["name"]:
            continue
        numbers = [
            entry["port"] for entry in one.get("ports") or [] if (entry.get("name") or "") == port.get("name", "")
        ]
        for endpoint in one.get("endpoints") or []:
            # By the API's definition, a missing condition counts as ready.
            if (endpoint.get("conditions") or {}).get("ready") is not False:
                found |= {(address, number) for address in endpoint["addresses"] for number in numbers}
    return sorted(found)


class Forwarder:
    """Forwarder for all Services of one cluster. `run` continues until it is cancelled.

    Attributes:
        services: all Services by namespace/name, always up to date.
    """

    def __init__(self, kube: Kube, services: dict[str, Json]) -> None:
        self._kube = kube
        self.services = services
        self._slices: dict[str, Json] = {}
        self._targets: dict[Address, list[Address]] = {}
        self._servers: dict[Address, asyncio.Server] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow Services and EndpointSlices, and keep the listeners up to date."""
        slices = await self._slices_path()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow("/api/v1/services", self.services))
                group.create_task(self._follow(slices, self._slices))
                group.create_task(self._apply())
        finally:
            for server in self._servers.values():
                server.close()

    async def _slices_path(self) -> str:
        versions = ("v1", "v1beta1")
        for version in versions:
            with contextlib.suppress(ApiException):
                await self._kube.call("GET", f"/apis/discovery.k8s.io/{version}/endpointslices?limit=1")
                return f"/apis/discovery.k8s.io/{version}/endpointslices"
        raise RuntimeError(f"the server serves no EndpointSlices in {' or '.join(versions)}")

    async def _follow(self, path: str, store: dict[str, Json]) -> None:
        listed: set[str] = set()
        async for kind, thing in self._kube.watch(path):
            if kind == "SYNCED":
                for key in set(store) - listed:
                    del store[key]
                listed = set()
            elif kind == "DELETED":
                store.pop(slice_key(thing), None)
            elif kind in ("LISTED", "ADDED", "MODIFIED"):
                store[slice_key(thing)] = thing
                if kind == "LISTED":
                    listed.add(slice_key(thing))
                    continue  # an object of a list: wait for the whole list, and apply it as one change
            self._changed.set()

    async def _apply(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._targets = self._wanted()
            for address in [one for one in self._servers if not self._targets.get(one)]:
                self._servers.pop(address).close()
            for address, targets in self._targets.items():
                if targets and address not in self._servers:
                    await self._listen(address)

    def _wanted(self) -> dict[Address, list[Address]]:
        found: dict[Address, list[Address]] = {}
        for key, service in self.services.items():
            ip = service["spec"].get("clusterIP", "")
            if not ip.startswith("127."):
                continue  # skip Services that are headless, external, or have an address outside loopback
            for port in service["spec"].get("ports") or []:
                if port.get("protocol", "TCP") != "TCP":
                    continue
                if key == "default/kubernetes":
                    server = urlsplit(self._kube.server)
                    found[ip, port["port"]] = [(server.hostname or "127.0.0.1", server.port or 443)]
                else:
                    found[ip, port["port"]] = ready_endpoints(service, port, self._slices.values())
        return found

    async def _listen(self, address: Address) -> None:
        host, port = address

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._carry(address, reader, writer)

        number = service_port(port)
        try:
            self._servers[address] = await asyncio.start_server(accept, host, number, backlog=1024)
        except OSError as error:
            log.warning("service port %s:%d: %s", host, port, error)
            return
        if number != port:
            log.warning("service port %s:%d is reached at port %d, for want of privilege", host, port, number)

    async def _carry(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets = self._targets.get(address, [])
        for host, port in random.sample(targets, len(targets)):
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(host, port)
                try:
                    await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
                finally:
                    far_writer.close()
                    writer.close()
                return
        writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from `reader` to `writer` until the input ends, then close `writer` for writing."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()
