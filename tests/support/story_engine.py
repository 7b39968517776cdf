"""Cheap engine for the demo's story: a small cache that depends on the dtype, a queue, and latencies in its metrics.

It uses only the standard library, as its base does (`kvpilot_localcluster.engines.faulty`).
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvpilot_localcluster.engines import faulty

BLOCKS = {"auto": 400, "k4v4": 1440, "k2v2": 2400}
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
ANSWER = {"choices": [{"message": {"content": "Paris."}}]}


class Engine(faulty.Engine):
    """Engine whose requests wait until their blocks are free."""

    def __init__(self, dtype: str, model: str) -> None:
        super().__init__(dtype, model)
        self._waiting = 0
        self._seen: dict[str, list[float]] = {name: [] for name in ("time_to_first_token", "inter_token_latency")}
        self._lengths: list[float] = []

    async def _answer(self, path: str, body: faulty.Json, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/chat/completions":
            faulty._send(writer, json.dumps(ANSWER).encode())
        else:
            await super()._answer(path, body, writer)

    async def _complete(self, body: faulty.Json, writer: asyncio.StreamWriter) -> None:
        began, wanted = time.monotonic(), int(body["max_tokens"])
        need = len(body["prompt"]) + wanted
        self._waiting += 1
        while self.running and (sum(self._held.values()) + need) / faulty.BLOCK_TOKENS > 0.95 * faulty.BLOCKS:
            await asyncio.sleep(0.01)
        self._waiting -= 1
        started = time.monotonic()
        await super()._complete(body, writer)
        self._lengths.append(wanted)
        self._seen["time_to_first_token"].append(started - began + faulty.TOKEN_SECONDS)
        self._seen["inter_token_latency"] += [(time.monotonic() - started) / wanted] * (wanted - 1)

    def page(self) -> bytes:
        """Return the metrics page of the base class, with a queue and latency histograms added."""
        label = f'engine="0",model_name="{self._model}"'
        waiting = f"vllm:num_requests_waiting{{{label}}}"
        text = super().page().decode().replace(f"{waiting} 0", f"{waiting} {self._waiting}")
        seconds = {f"vllm:{name}_seconds": values for name, values in self._seen.items()}
        lines = [
            line
            for name, values in {**seconds, "vllm:request_generation_tokens": self._lengths}.items()
            for line in _histogram(name, label, values)
        ]
        decoding = sum(self._seen["inter_token_latency"])
        prefill = faulty.TOKEN_SECONDS * len(self._lengths)
        lines += [
            f"vllm:request_decode_time_seconds_sum{{{label}}} {decoding}",
            f"vllm:request_prefill_time_seconds_sum{{{label}}} {prefill}",
        ]
        return (text + "\n".join(lines) + "\n").encode()


def _histogram(name: str, label: str, values: list[float]) -> list[str]:
    below = [f'{name}_bucket{{le="{b}",{label}}} {sum(v <= b for v in values)}' for b in BOUNDS]
    ends = [f'{name}_bucket{{le="+Inf",{label}}} {len(values)}', f"{name}_count{{{label}}} {len(values)}"]
    return [*below, *ends, f"{name}_sum{{{label}}} {sum(values)}"]


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
    faulty.BLOCKS = BLOCKS[dtype]
    faulty.Engine = Engine  # type: ignore[misc]  # main() makes the engine by this name
    asyncio.run(faulty.main())
