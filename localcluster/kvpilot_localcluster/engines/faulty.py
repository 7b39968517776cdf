"""Cheap engine without a model, for fault tests. It has the part of vLLM's API that operator, probes and load use.

It is a separate program that uses only the standard library, so that a dozen can start at once:

    python faulty.py --port=8000 --kv-cache-dtype=auto --served-model-name=m --shutdown-timeout=10

It listens at KVPILOT_SERVE_HOST, and ignores all other arguments of kvpilot-serve. Its metrics match its work: running
requests hold blocks, and counters rise. POST /faults with a JSON object changes the named fields of `Faults`. The
environment variable FAULTY_ENGINE may hold such an object for the start.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, fields
from typing import Any

BLOCKS = 1000
BLOCK_TOKENS = 16
CONTEXT = 4096
TOKEN_SECONDS = 0.005
END = b"\r\n\r\n"
GARBAGE = b'vllm:kv_cache_usage_perc{engine="0"} banana\nvllm:num_requests_running -7\n\x00\xff\xfe}{\n' * 50
TEN_MEGABYTES = 10 * 1024 * 1024

Json = dict[str, Any]


@dataclass
class Faults:
    """The faults that an engine simulates now; none by default."""

    metrics: str = ""
    """Fault of /metrics: `garbage`, `huge` (10 MB), `endless`, `hang`, `drip` (a byte a second), `bomb` (compressed),
    or `error`.
    """
    completions: str = ""
    """Fault of /v1: `hang` (until it is lifted), or `random` (unpredictable tokens)."""
    reports: str = ""
    """KV-cache dtype that /metrics reports instead of the requested one."""
    only_dtype: str = ""
    """If set, `completions` and `reports` apply only to an engine with this dtype."""
    usage: float = -1.0
    """KV-cache use that /metrics reports with `running` and `waiting`; negative to report the true numbers."""
    running: int = 0
    waiting: int = 0
    stalled: bool = False
    """True if running requests generate no tokens while `usage` is set. Else each request generates one a scrape."""
    eat_mib: int = 0
    """Memory in MiB that the engine allocates."""

    def take(self, changes: Json) -> None:
        """Set these fields to these values.

        Raises:
            ValueError: there is no such field.
        """
        known = {f.name for f in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"no such fault: {name}")
            setattr(self, name, value)


class Engine:
    """State of one engine, and its answers to requests."""

    def __init__(self, dtype: str, model: str) -> None:
        self._dtype, self._model = dtype, model
        self._started = time.time()
        self._held: dict[object, int] = {}
        self._prompt_tokens = self._generation_tokens = self._finished = 0
        self._ballast: list[bytearray] = []
        self.faults = Faults()

    @property
    def running(self) -> int:
        """Return the number of running requests."""
        return len(self._held)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one HTTP request from a connection, answer it, and close the connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(END)).decode("latin-1")
            length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-le")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._answer(head.split(" ")[1], body, writer)
            await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: Json, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            _send(writer, b"")
        elif path == "/metrics":
            await self._metrics(writer)
        elif path == "/faults":
            self.faults.take(body)
            self._ballast = [bytearray(os.urandom(1024) * 1024) for _ in range(self.faults.eat_mib)]
            _send(writer, b"{}")
        elif path == "/tokenize":
            await self._maybe_hang()
            text = body.get("prompt") or json.dumps(body.get("messages"))
            _send(writer, json.dumps({"tokens": list(str(text).encode()), "max_model_len": CONTEXT}).encode())
        elif path == "/v1/completions":
            await self._complete(body, writer)
        else:
            _send(writer, b"{}", "404 Not Found")

    async def _maybe_hang(self) -> None:
        while self.faults.completions == "hang" and self._is_meant():
            await asyncio.sleep(0.05)

    def _is_meant(self) -> bool:
        return self.faults.only_dtype in ("", self._dtype)

    async def _complete(self, body: Json, writer: asyncio.StreamWriter) -> None:
        start, wanted, top_k = len(body["prompt"]), int(body["max_tokens"]), body.get("logprobs")
        request = object()
        self._held[request] = start
        try:
            await self._maybe_hang()
            self._prompt_tokens += start
            _head(writer, "text/event-stream")
            for i in range(wanted):
                await asyncio.sleep(TOKEN_SECONDS)
                self._held[request] += 1
                self._generation_tokens += 1
                astray = self.faults.completions == "random" and self._is_meant()
                token = int.from_bytes(os.urandom(2), "big") if astray else start + i
                writer.write(_event(token, top_k, last=i == wanted - 1))
                await writer.drain()
            usage = {"prompt_tokens": start, "completion_tokens": wanted}
            writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
            self._finished += 1
        finally:
            del self._held[request]

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        fault = self.faults.metrics
        while self.faults.metrics == "hang":
            await asyncio.sleep(0.05)
        if fault == "garbage":
            _send(writer, GARBAGE)
        elif fault == "error":
            _send(writer, b"out of order", "500 Internal Server Error")
        elif fault == "bomb":
            import gzip  # imported late, so that the engine starts faster

            _head(writer, "text/plain", "Content-Encoding: gzip")
            writer.write(gzip.compress(bytes(200 * 1024 * 1024), 1))
        elif fault == "huge":
            _send(writer, self.page() + b"# " + b"x" * TEN_MEGABYTES + b"\n")
        elif fault == "endless":
            _head(writer, "text/plain")
            while self.faults.metrics == "endless":
                writer.write(b"vllm:unknown 1\n" * 4096)
                await writer.drain()
        elif fault == "drip":
            _head(writer, "text/plain")
            for byte in self.page():
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1 if self.faults.metrics == "drip" else 0)
        else:
            _send(writer, self.page())

    def page(self) -> bytes:
        blocks = sum(-(-held // BLOCK_TOKENS) for held in self._held.values())
        usage, running, waiting = blocks / BLOCKS, self.running, 0
        if self.faults.usage >= 0:
            usage, running, waiting = self.faults.usage, self.faults.running, self.faults.waiting
            self._generation_tokens += 0 if self.faults.stalled else running
        label = f'engine="0",model_name="{self._model}"'
        dtype = self.faults.reports if self.faults.reports and self._is_meant() else self._dtype
        sizes = f'block_size="{BLOCK_TOKENS}",cache_dtype="{dtype}",engine="0",num_gpu_blocks="{BLOCKS}"'
        lines = [
            f"process_start_time_seconds {self._started}",
            'kvpilot_model_info{head_dim="64",kv_heads="2",layers="2",mla="false",window_layers="0"} 1.0',
            f"vllm:num_requests_running{{{label}}} {running}",
            f"vllm:num_requests_waiting{{{label}}} {waiting}",
            f"vllm:kv_cache_usage_perc{{{label}}} {usage}",
            f"vllm:num_preemptions_total{{{label}}} 0",
            f"vllm:prompt_tokens_total{{{label}}} {self._prompt_tokens}",
            f"vllm:generation_tokens_total{{{label}}} {self._generation_tokens}",
            f'vllm:request_success_total{{finished_reason="length",{label}}} {self._finished}',
            f"vllm:cache_config_info{{{sizes}}} 1.0",
            *(f"# filler {i}: a page of vLLM has some hundred lines that nobody here reads" for i in range(100)),
        ]
        return "\n".join(lines).encode() + b"\n"


def _event(token: int, top_k: int | None, *, last: bool) -> bytes:
    choice: Json = {"text": "x", "logprobs": None, "finish_reason": "length" if last else None}
    if top_k is not None:
        name = f"token_id:{token}"
        choice["logprobs"] = {
            "tokens": [name],
            "token_logprobs": [-0.1],
            "top_logprobs": [{name: -0.1, "token_id:99999": -3.0}],
        }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def _head(writer: asyncio.StreamWriter, kind: str, *more: str, status: str = "200 OK") -> None:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close", *more]
    writer.write("\r\n".join(lines).encode() + END)


def _send(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
    _head(writer, "text/plain", f"Content-Length: {len(body)}", status=status)
    writer.write(body)


async def main() -> None:
    """Serve until SIGTERM, then finish running requests within --shutdown-timeout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--served-model-name", default="m")
    parser.add_argument("--shutdown-timeout", type=float, default=0)
    options, _ = parser.parse_known_args()
    engine = Engine(options.kv_cache_dtype, options.served_model_name)
    engine.faults.take(json.loads(os.environ.get("FAULTY_ENGINE", "{}")))
    server = await asyncio.start_server(
        engine.serve, os.environ.get("KVPILOT_SERVE_HOST", "127.0.0.1"), options.port, backlog=1024
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    server.close()
    ends = time.monotonic() + options.shutdown_timeout
    while engine.running and time.monotonic() < ends:
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
