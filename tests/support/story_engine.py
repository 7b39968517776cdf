"""Cheap engine for the demo's story: a small cache that depends on the dtype, a queue, and latencies in its metrics.

It uses only the standard library, as its base does (`kvpilot_localcluster.engines.faulty`).
"""

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from kvpilot_localcluster.engines import faulty

BLOCKS = {"auto": 400, "k4v4": 1440, "k2v2": 2400}
TOKEN_SECONDS = 0.02
"""Seconds that a token takes. If it took less, more than a hundred users would use all cores."""
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
ANSWER = {"choices": [{"message": {"content": "Paris."}}]}


class Histogram:
    """Counts of a metric's values below each bound, and their sum."""

    def __init__(self) -> None:
        self._below = dict.fromkeys((*BOUNDS, math.inf), 0)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Return the number of values."""
        return self._below[math.inf]

    def add(self, value: float, times: int = 1) -> None:
        """Count a value several times."""
        self.sum += value * times
        for bound in self._below:
            self._below[bound] += times * (value <= bound)

    def lines(self, name: str, label: str) -> list[str]:
        """Return the metric's lines of a page."""
        ends = {bound: "+Inf" if bound == math.inf else str(bound) for bound in self._below}
        buckets = [f'{name}_bucket{{le="{ends[bound]}",{label}}} {n}' for bound, n in self._below.items()]
        return [*buckets, f"{name}_count{{{label}}} {self.count}", f"{name}_sum{{{label}}} {self.sum}"]


class Engine(faulty.Engine):
    """Engine whose requests wait until their blocks are free."""

    def __init__(self, dtype: str, model: str) -> None:
        super().__init__(dtype, model)
        self._waiting = 0
        self._first, self._between, self._lengths = Histogram(), Histogram(), Histogram()
        self._ended = asyncio.Condition()

    async def _answer(self, path: str, body: faulty.Json, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/chat/completions":
            faulty._send(writer, json.dumps(ANSWER).encode())
        else:
            await super()._answer(path, body, writer)

    async def _complete(self, body: faulty.Json, writer: asyncio.StreamWriter) -> None:
        began, wanted = time.monotonic(), int(body["max_tokens"])
        need = len(body["prompt"]) + wanted
        self._waiting += 1

        def fits() -> bool:
            held = (sum(self._held.values()) + need) / faulty.BLOCK_TOKENS
            return not self.running or held <= 0.95 * faulty.BLOCKS

        async with self._ended:
            await self._ended.wait_for(fits)
            self._ended.notify()  # another waiting request may fit, too
        self._waiting -= 1
        started = time.monotonic()
        try:
            await super()._complete(body, writer)
        finally:
            async with self._ended:
                self._ended.notify()
        self._lengths.add(wanted)
        self._first.add(started - began + faulty.TOKEN_SECONDS)
        self._between.add((time.monotonic() - started) / wanted, wanted - 1)

    def page(self) -> bytes:
        """Return the metrics page of the base class, with a queue and latency histograms added."""
        label = f'engine="0",model_name="{self._model}"'
        waiting = f"vllm:num_requests_waiting{{{label}}}"
        text = super().page().decode().replace(f"{waiting} 0", f"{waiting} {self._waiting}")
        lines = [
            *self._first.lines("vllm:time_to_first_token_seconds", label),
            *self._between.lines("vllm:inter_token_latency_seconds", label),
            *self._lengths.lines("vllm:request_generation_tokens", label),
            f"vllm:request_decode_time_seconds_sum{{{label}}} {self._between.sum}",
            f"vllm:request_prefill_time_seconds_sum{{{label}}} {faulty.TOKEN_SECONDS * self._lengths.count}",
        ]
        return (text + "\n".join(lines) + "\n").encode()


def image(folder: Path, name: str) -> dict[str, Any]:
    """Write the engine to `folder` under the real program's name, and return its entry for the image table."""
    serve = folder / "bin" / "kvpilot-serve"
    serve.parent.mkdir(parents=True)
    paths = [Path(__file__).parents[1], Path(faulty.__file__).parents[2]]
    serve.write_text(
        f'#!/bin/sh\nPYTHONPATH={":".join(map(str, paths))} exec {sys.executable} -S -m support.story_engine "$@"\n'
    )
    serve.chmod(0o755)
    return {
        "match": [name],
        "entrypoint": ["kvpilot-serve"],
        "path": [str(serve.parent)],
        "env": {"KVPILOT_SERVE_HOST": "$(POD_IP)"},
    }


if __name__ == "__main__":
    dtype = next(one.partition("=")[2] for one in sys.argv if one.startswith("--kv-cache-dtype="))
    faulty.BLOCKS, faulty.TOKEN_SECONDS = BLOCKS[dtype], TOKEN_SECONDS
    faulty.Engine = Engine  # type: ignore[misc]  # main() makes the engine by this name
    asyncio.run(faulty.main())
