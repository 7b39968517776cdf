"""Process that answers /metrics for every engine of the fleet, at each pod's address and port 8000.

    python -m benchmarks.operator.fleet_engines EARLY LATER PODS

EARLY and LATER are files with two metrics pages of one real vLLM. Every counter grows at the rate between these two
pages, multiplied by the pod's pace (one of sixteen factors). KV-cache usage and running requests go up and down. /stats
returns a histogram of the time between two scrapes of a pod.
"""

import asyncio
import json
import math
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.operator.fleet_kubelets import numbered

PORT = 8000
PACES = 16
_SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?) (\S+)$")
_COUNTED = re.compile(r"^[^{ ]+_(total|bucket|sum|count)(\{|$)")


class Pages:
    """Metrics pages of all pods, which change every second. Pods of the same pace share a page."""

    def __init__(self, early: str, later: str) -> None:
        before = {m[1]: m[2] for m in map(_SERIES.match, early.splitlines()) if m}
        self._lines: list[tuple[str, str, float, float]] = []
        for line in later.splitlines():
            series = _SERIES.match(line)
            name, value = (series[1], series[2]) if series else (line, "")
            name = name.replace('cache_dtype="k4v4"', 'cache_dtype="auto"')
            grown = float(value) - float(before.get(series[1], value)) if series and _COUNTED.match(series[1]) else 0.0
            self._lines.append((name, value, float(value) if value else 0.0, grown))
        self._began = time.time()
        self._made: dict[int, tuple[int, bytes]] = {}

    def of(self, pace: int) -> bytes:
        """Return the HTTP answer with the current metrics page of pods with this pace."""
        second = int(time.time() - self._began)
        known = self._made.get(pace)
        if known is None or known[0] != second:
            body = self._page(pace, second).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
            known = self._made[pace] = (second, head.encode() + body)
        return known[1]

    def _page(self, pace: int, second: int) -> str:
        often = second / 30 * (0.5 + pace / PACES)
        usage = 0.3 + 0.12 * math.sin(second / 40 + pace)
        told = []
        for name, text, value, grown in self._lines:
            if grown:
                more = grown * often
                text = str(value + (math.floor(more) if value.is_integer() else more))
            elif name.startswith("vllm:kv_cache_usage_perc"):
                text = f"{usage:.6f}"
            elif name.startswith("vllm:num_requests_running"):
                text = str(float(round(8 * usage / 0.3)))
            told.append(f"{name} {text}" if text else name)
        return "\n".join(told) + "\n"


class Engines:
    """Engines of all pods, which record the time between two scrapes of a pod."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._last: dict[str, float] = {}
        self._gaps: Counter[int] = Counter()

    def metrics(self, address: str) -> bytes:
        """Return the HTTP answer of the pod with this address, and record the scrape."""
        now = time.monotonic()
        last = self._last.get(address)
        if last is not None:
            self._gaps[int((now - last) * 10)] += 1
        self._last[address] = now
        _, _, a, b = address.split(".")
        return self.pages.of((int(a) * 256 + int(b)) % PACES)

    def stats(self) -> bytes:
        """Return the HTTP answer of /stats, as JSON.

        `pods` is the number of pods that were scraped so far. `gaps` is a histogram of the time between two scrapes of
        a pod: the number of gaps by their length in tenths of a second. Each call clears the histogram.
        """
        body = json.dumps({"pods": len(self._last), "gaps": self._gaps}).encode()
        self._gaps = Counter()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Connection(asyncio.Protocol):
    """Connection of one client. A request always fits in one segment."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the connection's transport, to send answers later."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the HTTP request that has arrived."""
        path = data.split(b" ", 2)[1]
        if path == b"/metrics":
            self._transport.write(self._engines.metrics(self._transport.get_extra_info("sockname")[0]))
        elif path == b"/stats":
            self._transport.write(self._engines.stats())
        else:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def serve(early: str, later: str, pods: int) -> None:
    """Answer requests to `pods` pods forever. `early` and `later` are the texts of the two metrics pages."""
    engines = Engines(Pages(early, later))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Address number 0 belongs to no pod. It answers /stats.
    addresses = [numbered(number) for number in range(pods + 1)]
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engines), addresses, PORT, backlog=64)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).read_text(), Path(sys.argv[2]).read_text(), int(sys.argv[3])))
