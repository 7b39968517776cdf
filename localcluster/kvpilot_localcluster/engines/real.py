"""Real vLLM on this machine's CPU, started by kvpilot-serve as in the image."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvpilot_localcluster.addresses import free_port

HANGS = 900
"""Seconds after which an engine's start, answer or end counts as hanging. Idle cores need at most 90 s for each."""
# Run the worker in the engine's process. vLLM does so by default with one GPU, but on a CPU it starts another process,
# which takes many seconds.
_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SERVE = str(Path(sys.executable).parent / "kvpilot-serve")


class Engine:
    """Running engine: its address, its process and its log."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self._client = httpx.Client(base_url=url, timeout=HANGS)

    def tokens(self, prompt: list[int], tokens: int) -> list[int]:
        """Return the engine's greedy answer to a prompt, with exactly `tokens` tokens."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json={**body, "return_token_ids": True}).raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def healthy(self) -> bool:
        """Return True if the engine answers its health check."""
        try:
            return self._client.get("/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def page(self) -> str:
        """Return the text of the engine's metrics page."""
        return self._client.get("/metrics").text

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its series."""
        return float(sum(s.value for s in self._samples(name)))

    def cache_config(self) -> Mapping[str, str]:
        """Return the labels of the metric vllm:cache_config_info."""
        labels: Mapping[str, str] = next(iter(self._samples("vllm:cache_config_info"))).labels
        return labels

    def _samples(self, name: str) -> list:  # type: ignore[type-arg]  # the parser's samples have no public type
        return [s for family in text_string_to_metric_families(self.page()) for s in family.samples if s.name == name]


@contextmanager
def engine(
    model: Path, dtype: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, serve: str = SERVE
) -> Iterator[Engine]:
    """Run kvpilot-serve on a free port until the block ends.

    Args:
        model: folder of the model.
        dtype: the KV-cache dtype.
        folder: folder for the log.
        arguments: additional arguments of kvpilot-serve.
        env: additional environment variables.
        serve: path of kvpilot-serve.
    """
    port = free_port()
    log = folder / f"{dtype}-{port}.log"
    command = [serve, f"--model={model}", "--served-model-name=m", f"--kv-cache-dtype={dtype}", f"--port={port}"]
    command += ["--max-model-len=2048", "--enforce-eager", *arguments]
    with process_group(command, log, {"KVPILOT_SERVE_HOST": "127.0.0.1", **(env or {})}) as process:
        running = Engine(f"http://127.0.0.1:{port}", process, log)
        _wait(running)
        yield running


@contextmanager
def process_group(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own process group, and kill the group when the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_VARIABLES, **env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(running: Engine) -> None:
    deadline = time.monotonic() + HANGS
    while True:
        if running.healthy():
            return
        end = running.log.read_text(errors="replace")[-2000:]
        if running.process.poll() is not None:
            raise RuntimeError(f"the engine ended with {running.process.returncode}: {end}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not start in {HANGS} s: {end}")
        time.sleep(0.5)
