"""The part of a kubelet's HTTPS API that returns container logs, for `kubectl logs`."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

LogFolder = Callable[[str, str], Path | None]
"""Function that returns a pod's log folder, given namespace and name; None for an unknown pod. The log folder has one
folder for each container.
"""

_PAUSE = 0.2


def last_lines(text: bytes, count: int) -> bytes:
    """Return the last `count` lines of a text."""
    return b"".join(text.splitlines(keepends=True)[-count:]) if count > 0 else b""


class LogServer:
    """HTTPS server of container logs on a loopback port. Only the API server may use it."""

    def __init__(self, folder: LogFolder, certificate: Path, key: Path) -> None:
        self._folder = folder
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        # Logs may hold secrets, so require a client certificate that the cluster's authority has signed.
        self._context.load_verify_locations(certificate.with_name("ca.crt"))
        self._context.verify_mode = ssl.CERT_REQUIRED

    async def start(self, address: str) -> int:
        """Listen on a free port, and return the port."""
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, address, 0, ssl_context=self._context)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        info, query = request.match_info, request.query
        folder = self._folder(info["namespace"], info["pod"])
        runs = sorted(folder.glob(f"{info['container']}/*.log"), key=lambda file: int(file.stem)) if folder else []
        index = -2 if query.get("previous") == "true" else -1
        if len(runs) < -index:
            # Use 400, because the API server would hide the message of a 404.
            raise web.HTTPBadRequest(text=f"there is no such log of container {info['container']}")
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        with runs[index].open("rb") as log:
            text = log.read()
            if "tailLines" in query:
                text = last_lines(text, int(query["tailLines"]))
            await answer.write(text)
            # `kubectl logs -f` ends when the container restarts or the agent forgets its pod.
            while query.get("follow") == "true" and self._folder(info["namespace"], info["pod"]) is not None:
                if text := log.read():
                    await answer.write(text)
                elif (runs[index].parent / f"{int(runs[index].stem) + 1}.log").exists():
                    break
                else:
                    await asyncio.sleep(_PAUSE)
        return answer
