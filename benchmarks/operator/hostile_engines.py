"""Engines that hostile.py scrapes: one process answers for all good engines, and one for all hostile engines.

    python -m benchmarks.operator.hostile_engines good
    python -m benchmarks.operator.hostile_engines hostile

An engine's address, 127.(100 + kind).x.y, determines its behaviour. `KINDS` lists the kinds: 0 is a good engine, which
answers as vLLM does, and each other kind is hostile in its own way. For an engine with a quantized dtype, x is at least
128. /stats returns the number of scrapes by address.
"""

import asyncio
import contextlib
import json
import resource
import sys
from collections import Counter

from benchmarks.operator.fleet_kubelets import KINDS
from kvpilot_localcluster.engines.faulty import END, Engine

PORT = 8000
# Largest number of pods of one kind over the whole run.
ADDRESSES = 150
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
    """Engine that answers some paths harmfully, depending on its kind, and all other paths as a good engine."""

    def __init__(self, kind: str, dtype: str) -> None:
        super().__init__(dtype, "m")
        self._kind = kind

    async def answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send the harmful answer of this kind of engine. Return False if the kind answers this path well."""
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
    """Answer one request on one connection."""
    address = writer.get_extra_info("sockname")[0]
    _, kind, number, _ = address.split(".")
    engine = ENGINES.get(address)
    if engine is None:
        engine = ENGINES[address] = HostileEngine(KINDS[int(kind) - 100], "k8v4" if int(number) >= 128 else "auto")
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


async def main(side: str) -> None:
    """Answer requests forever, at the addresses of the good engines or, for any other `side`, of the hostile ones."""
    kinds = [0] if side == "good" else range(1, len(KINDS))
    hosts = [f"127.{100 + kind}.{half}.{i}" for kind in kinds for half in (0, 128) for i in range(1, ADDRESSES)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    async with await asyncio.start_server(serve, hosts, PORT, backlog=1024) as server:
        await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
