"""Engines behind a service mesh's sidecar: mutual TLS with workload certificates, in front of plain HTTP."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvpilot_localcluster.certs import authority, certificate
from kvpilot_operator.mesh import CHAIN, KEY, ROOT


class Mesh:
    """Certificate authority of a mesh, which issues certificates to workloads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        authority(folder)

    def issue(self, namespace: str, account: str, into: Path) -> Path:
        """Write a workload's certificate and key, and the CA certificate, as Istio's agent does. Return the folder."""
        name = f"{namespace}-{account}"
        certificate(self._folder, name, "/O=workload", f"URI:spiffe://cluster.local/ns/{namespace}/sa/{account}")
        into.mkdir(exist_ok=True)
        for source, target in ((f"{name}.crt", CHAIN), (f"{name}.key", KEY), ("ca.crt", ROOT)):
            # Rename into place, so that no client reads half a file.
            shutil.copy(self._folder / source, into / f".{target}")
            (into / f".{target}").rename(into / target)
        return into


@dataclass
class Sidecar:
    """A running sidecar: its address, the SPIFFE URIs of admitted clients, and the ALPN protocol of each connection."""

    url: str = ""
    let_through: list[str] = field(default_factory=list)
    spoken: list[str | None] = field(default_factory=list)


@asynccontextmanager
async def sidecar(
    engine: str, certificates: Path, speaks: tuple[str, ...] = ("http/1.1",), host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Sidecar]:
    """Terminate mutual TLS on loopback in front of an engine. Refuse plain HTTP and certificates of other CAs.

    Args:
        engine: URL of the engine, `http://host:port`.
        certificates: folder from `Mesh.issue`.
        speaks: ALPN protocols that the sidecar offers.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / CHAIN, certificates / KEY)
    tls.load_verify_locations(certificates / ROOT)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.set_alpn_protocols(list(speaks))
    target, found = urlsplit(engine), Sidecar()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("ssl_object")
        found.let_through += [name for kind, name in connection.getpeercert()["subjectAltName"] if kind == "URI"]
        found.spoken.append(connection.selected_alpn_protocol())
        inner_reader, inner_writer = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(connected, host, port, ssl=tls)
    found.url = f"https://{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
