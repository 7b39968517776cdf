"""Probes and hooks of a container, run as by a kubelet."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpilot_localcluster.container import Command
from kvpilot_localcluster.paths import rewrite

Handler = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Container that probes and hooks act on.

    Attributes:
        address: the pod's IP address.
        ports: the container's named ports.
        command: the container's command. Exec actions use its environment and folders.
    """

    address: str
    ports: Mapping[str, int]
    command: Command

    def port(self, value: int | str) -> int:
        """Return a port by its number or name. For an unknown name return 0, where nothing listens."""
        if isinstance(value, int) or value.isdigit():
            return int(value)
        return self.ports.get(value, 0)


async def act(handler: Handler, target: Target) -> str:
    """Run one action of the kind httpGet, tcpSocket, exec or sleep.

    Return the error message, or the empty string if the action succeeded.
    """
    try:
        if "httpGet" in handler:
            return await _http(handler["httpGet"], target)
        if "tcpSocket" in handler:
            return await _tcp(handler["tcpSocket"], target)
        if "exec" in handler:
            return await _exec(handler["exec"]["command"], target)
        if "sleep" in handler:
            await asyncio.sleep(handler["sleep"]["seconds"])
            return ""
    except (OSError, aiohttp.ClientError) as error:
        return str(error) or type(error).__name__
    return f"this node does not support {'grpc' if 'grpc' in handler else 'the action'}: use httpGet, tcpSocket or exec"


async def _http(get: Mapping[str, Any], target: Target) -> str:
    scheme = get.get("scheme", "HTTP").lower()
    path = get.get("path") or "/"
    url = f"{scheme}://{get.get('host') or target.address}:{target.port(get['port'])}/{path.removeprefix('/')}"
    headers = {
        "User-Agent": "kvpilot-localcluster",
        **{one["name"]: one["value"] for one in get.get("httpHeaders", [])},
    }
    # A kubelet does not verify certificates, either.
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as answer:
        if 200 <= answer.status < 400:
            return ""
        return f"HTTP probe failed with statuscode: {answer.status}"


async def _tcp(socket: Mapping[str, Any], target: Target) -> str:
    _, writer = await asyncio.open_connection(socket.get("host") or target.address, target.port(socket["port"]))
    writer.close()
    return ""


async def _exec(command: list[str], target: Target) -> str:
    argv = [rewrite(part, target.command.folders) for part in command]
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(target.command.env),
        cwd=target.command.cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return "" if process.returncode == 0 else said.decode(errors="replace")[-1024:] or f"exit code {process.returncode}"


async def probe(
    spec: Mapping[str, Any], target: Target, verdict: Callable[[bool, str], Awaitable[None]], *, initially: bool | None
) -> None:
    """Probe a container forever. Report each change of the result and, from the failure threshold on, every failure.

    Args:
        spec: a Probe object.
        target: the container.
        verdict: callback that gets (success, error).
        initially: result before the first probe; None if there is none.
    """
    await asyncio.sleep(spec.get("initialDelaySeconds", 0))
    period, timeout = spec.get("periodSeconds") or 10, spec.get("timeoutSeconds") or 1
    needed = {True: spec.get("successThreshold") or 1, False: spec.get("failureThreshold") or 3}
    current, last, count = initially, None, 0
    while True:
        try:
            async with asyncio.timeout(timeout):
                fault = await act(spec, target)
        except TimeoutError:
            fault = f"no answer within {timeout} s"
        result = not fault
        count = count + 1 if result == last else 1
        last = result
        if count >= needed[result] and (result != current or not result):
            current = result
            await verdict(result, fault)
        await asyncio.sleep(period)
