"""One process that answers for every engine of hostile.py's fleet, good and hostile: port 8000 of all of 127.0.0.0/8.

    python operator/benchmarks/hostile_engines.py

The address says what an engine does: 127.(100 + kind).x.y, with x from 128 where it serves a quantized dtype. A good
one (kind 0) answers as vLLM does. /stats tells how often each address was asked for its page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter

from fleet_kubelets import KINDS

from support.faulty_engine import END, Engine

PORT = 8000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
USAGE = b"vllm:kv_cache_usage_perc"
PAGES = {
    "label": [USAGE + b"{" + b"a" * 60_000 + b"} 0.5\n"],
    "quoted": [USAGE + b'{a="' + b"b" * 4_100_000 + b'"} 0.5\n'],
    "large": [USAGE + b" 0.5\n", *[b"vllm:num_requests_running 1\n" * 2400] * 60],
    "lines": [USAGE + b" 0.5\n", *[b"\n" * 65536] * 60],
}
OBJECTS = b"{" + b'"tokens":[' + b"{}," * (16 * 1024 * 1024 // 3) + b"{}]}"
COUNTED: Counter[str] = Counter()


class HostileEngine(Engine):
    """Does what its kind does, and is a good engine in all else."""

    def __init__(self, kind: str, dtype: str) -> None:
        super().__init__(dtype, "m")
        self._kind = kind

    async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer in the way of this kind; False where it has none for this path."""
        if path == "/metrics" and self._kind in PAGES:
            writer.write(HEAD)
            for chunk in PAGES[self._kind]:
                writer.write(chunk)
                await writer.drain()
        elif path == "/metrics" and self._kind == "drip":
            writer.write(HEAD)
            while True:
                writer.write(b"#")
                await writer.drain()
                await asyncio.sleep(0.2)
        elif path == "/metrics" and self._kind == "hang":
            await reader.read()
        elif path == "/tokenize" and self._kind == "objects":
            writer.write(HEAD + OBJECTS)
            await writer.drain()
        elif path in ("/tokenize", "/v1/completions") and self._kind == "probe-hang":
            await reader.read()
        else:
            return False
        return True


ENGINES: dict[str, HostileEngine] = {}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request on one connection."""
    address = writer.get_extra_info("sockname")[0]
    _, kind, number, _ = address.split(".")
    engine = ENGINES.get(address)
    if engine is None:
        engine = ENGINES[address] = HostileEngine(
            KINDS[int(kind) - 100] if int(kind) >= 100 else "good", "k8v4" if int(number) >= 128 else "auto"
        )
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(END)
        path = head.split(b" ", 2)[1].decode()
        if path == "/stats":
            body = json.dumps(COUNTED).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            COUNTED[address] += path == "/metrics"
            if not await engine.answer(path, reader, writer):
                whole = asyncio.StreamReader()
                whole.feed_data(head)
                length = int(next((h[15:] for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0))
                whole.feed_data(await reader.readexactly(length))
                await engine.serve(whole, writer)
                return
        await writer.drain()
    writer.close()


async def main() -> None:
    """Answer for ever."""
    anywhere = "0.0.0.0"  # noqa: S104 - every address of loopback
    async with await asyncio.start_server(serve, anywhere, PORT, backlog=4096) as server:
        await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
