"""Find the processes of engines in the local cluster, signal them, and count their requests and connections."""

import contextlib
import json
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvpilot_localcluster.procs import identify, read_record
from kvpilot_operator.api.names import ENGINE_CONTAINER, ENGINE_PORT

_ESTABLISHED = "01"


@dataclass(frozen=True)
class Engine:
    """Engine pod, and the folder that the local cluster's node agent keeps for it."""

    name: str
    address: str
    restarts: int
    folder: Path

    def processes(self) -> list[int]:
        """Return the IDs of the container's processes, the oldest first."""
        runs = sorted(self.folder.glob(f"{ENGINE_CONTAINER}/[0-9]*"), key=lambda run: int(run.name))
        shim = read_record(runs[-1] / "shim.json") if runs else None
        return _below(shim.pid) if shim is not None else []

    def core(self) -> list[int]:
        """Return the IDs of the processes that use CUDA. They do not include the first process, which answers HTTP."""
        return [pid for pid in self.processes()[1:] if "EngineCore" in _command(pid) or _uses_cuda(pid)]

    def gpu(self) -> str:
        """Return the index of the engine's GPU, as text."""
        given: dict[str, list[str]] = json.loads((self.folder / "gpus.json").read_text())
        return given[ENGINE_CONTAINER][0]

    @property
    def url(self) -> str:
        """URL of the engine's own HTTP server."""
        return f"http://{self.address}:{ENGINE_PORT}"


def send(number: signal.Signals, processes: list[int]) -> None:
    """Send a signal to processes, the youngest first. Skip processes that have ended meanwhile."""
    for pid in reversed(processes):
        if (found := identify(pid)) is not None:
            found.signal(number)


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                found += [child, *_below(child)]
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _uses_cuda(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any("nvidia-uvm" in str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


async def requests_of(engine: Engine) -> int:
    """Return the number of an engine's running and waiting requests; 0 if it does not answer."""
    total = 0.0
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
            for line in (await client.get(f"{engine.url}/metrics")).text.splitlines():
                if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{")):
                    total += float(line.rpartition(" ")[2])
    return int(total)


def connections(address: str, port: int = ENGINE_PORT) -> int:
    """Return the number of established TCP connections to an address of this machine."""
    far = f"{socket.inet_aton(address)[::-1].hex().upper()}:{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[2] == far and fields[3] == _ESTABLISHED for fields in lines)
