"""Faults of gpu_faults.py. Each function makes one fault, and waits until the service has recovered from it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.operator.gpu_engines import Engine, requests_of, send
from benchmarks.operator.gpu_service import POLL_SECONDS, Bench, FaultFailed, Row

GOOD = "k4v4"
_LONG_STAGES = ("Starting", "Probing", "Shifting")
START_SECONDS = 240.0
TRIAL_SECONDS = 300.0
HANG_SECONDS = 45.0
_HOG = """
import sys, torch
torch.cuda.init()
print("ready", flush=True)
sys.stdin.readline()
held, size = [], 2**30
while size >= 2**20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


async def kill(bench: Bench) -> None:
    """Kill all processes of an engine while it streams answers."""
    await _replaced(bench, _sends(signal.SIGKILL), 60)


async def terminate(bench: Bench) -> None:
    """Delete an engine's pod while the engine streams answers."""
    await _replaced(bench, bench.delete, 60)


async def stop(bench: Bench) -> None:
    """Stop all processes of an engine (SIGSTOP), and wait until the kubelet has replaced them after liveness probes."""
    await _replaced(bench, _sends(signal.SIGSTOP), 120)


async def _replaced(bench: Bench, strike: Callable[[Engine], Awaitable[None]], leave_seconds: float) -> None:
    """Apply the fault `strike` to an engine that streams answers.

    Wait until the engine leaves the Kubernetes Service, and then until two engines are ready again.
    """
    engine = await bench.busy()
    bench.strike(engine)
    await strike(engine)
    await bench.left(engine, leave_seconds)
    await bench.recovered(engine, START_SECONDS)


def _sends(number: signal.Signals) -> Callable[[Engine], Awaitable[None]]:
    async def strike(engine: Engine) -> None:
        send(number, engine.processes())

    return strike


async def hang(bench: Bench) -> None:
    """Stop the process that uses the GPU. No kubelet probe notices this fault, so let the process continue later."""
    engine = await bench.busy()
    core = engine.core()
    if not core:
        raise FaultFailed(f"{engine.name} has no separate process for the GPU")
    bench.strike(engine)
    send(signal.SIGSTOP, core)
    try:
        with contextlib.suppress(FaultFailed):
            await bench.left(engine, HANG_SECONDS)
    finally:
        send(signal.SIGCONT, core)
    done = bench.load.stats.ok + bench.row.in_flight
    await bench.until(lambda _: bench.whole() and bench.load.stats.ok > done, "both engines answer", START_SECONDS)
    bench.row.until, bench.row.seconds = "the requests that waited are answered", bench.passed()


async def memory(bench: Bench) -> None:
    """Take the rest of a GPU's memory, and send the GPU's engine the longest prompt.

    If the engine does not fail, send the prompt again with `prompt_logprobs`, which needs more memory.
    """
    engine = await bench.busy()
    hog = _hog(engine.gpu())
    try:
        if await asyncio.to_thread(_said, hog) != "ready":
            raise FaultFailed("the process that should take the GPU's memory has ended")
        bench.row.done += f" ({await asyncio.to_thread(_said, hog, 'go')} bytes stayed free)"
        for more in ({}, {"prompt_logprobs": 1}):
            bench.row.in_flight = await requests_of(engine)
            bench.strike(engine)
            said = await _longest(bench, engine, more)
            bench.row.done += f"; the prompt{' with prompt_logprobs' if more else ''}: {said}"
            with contextlib.suppress(FaultFailed):
                await bench.left(engine, 15)
                break
        else:
            raise FaultFailed("the engine did not run out of memory")
    finally:
        # End the process that holds the memory, because the engine could not start again beside it.
        hog.kill()
        hog.wait()
    await bench.recovered(engine, START_SECONDS)


def _hog(gpu: str) -> subprocess.Popen[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _HOG], env=env, stdin=pipe, stdout=pipe, text=True)


def _said(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line to a process, and return the next line that it prints; empty if the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("the process has pipes")
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


async def _longest(bench: Bench, engine: Engine, more: dict[str, Any]) -> str:
    """Send an engine a prompt that fills the model's context, and return the outcome."""
    count = bench.world.example["spec"]["model"]["maxModelLen"] - 8
    prompt = [1000 + i * 7919 % 40_000 for i in range(count)]
    body = {"model": bench.world.model, "prompt": prompt, "max_tokens": 4, **more}
    try:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            answer = await client.post(f"{engine.url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    return f"HTTP {answer.status_code}"


async def dtype(bench: Bench) -> None:
    """Request another dtype, and let new engines ignore the request. The canary must fail."""
    await _refused(bench, "k8v4", None)


async def rollback(bench: Bench) -> None:
    """Make the same fault as `dtype`, and also kill the operator in each stage of the canary."""
    # The fault `dtype` had k8v4 denied, so the operator would not try it again now. Request another dtype.
    await _refused(bench, "k4v2", [])


async def _refused(bench: Bench, asked: str, killed: list[str] | None) -> None:
    before, newest = bench.now.at("kvCache", "activeDtype"), bench.now.trial
    bench.flag.touch()
    try:
        await _trial(bench, asked, lambda: bench.now.trial not in ({}, newest) and bench.whole(), killed)
    finally:
        bench.flag.unlink()
    trial = bench.now.trial
    bench.row.until = f"the canary has ended: {trial.get('verdict')}, {trial.get('reason')}"
    await bench.world.patch({"spec": {"kvCache": {"dtype": before}}})


async def operator(bench: Bench) -> None:
    """Request another dtype, whose canary passes, and kill the operator in each stage of the canary."""
    await _trial(bench, GOOD, lambda: bench.now.at("kvCache", "activeDtype") == GOOD and bench.whole(), [])
    bench.row.until = "the canary is promoted, and only its engines are left"


async def _trial(bench: Bench, asked: str, ended: Callable[[], bool], killed: list[str] | None) -> None:
    """Request a dtype, and wait until its canary has ended.

    Args:
        ended: function that returns True once the service shows the expected result.
        killed: stages in which the operator was killed. Kill it once in each other stage, and add the stage; None to
            never kill it.

    Raises:
        FaultFailed: the canary did not end in time.
    """
    bench.strike()
    await bench.world.patch({"spec": {"kvCache": {"dtype": asked}}})
    ends = time.monotonic() + TRIAL_SECONDS
    while bench.now.at("canary") or not ended():
        if time.monotonic() > ends:
            raise FaultFailed(f"the canary of {asked} did not end in {TRIAL_SECONDS:.0f} s; {bench.now.summary}")
        stage = bench.now.at("canary", "stage")
        if killed is not None and stage and stage not in killed:
            killed.append(stage)
            if stage in _LONG_STAGES:
                await asyncio.sleep(1.0)
            bench.world.kill_operator()
            bench.note(f"the operator is killed in stage {stage}")
            await asyncio.sleep(1.0)
            bench.world.start_operator()
        await asyncio.sleep(POLL_SECONDS)
    bench.row.seconds = bench.passed()
    if killed is not None:
        bench.row.done += f": {', '.join(killed)}"


@dataclass(frozen=True)
class Fault:
    """Description of one fault.

    Attributes:
        act: function that makes the fault and waits until the service has recovered.
        done: text about the fault, for the table.
        spares: True if no request may fail; False if the requests on the engine may fail.
        hangs: True if the engine still accepts requests until it leaves the Service.
    """

    act: Callable[[Bench], Awaitable[None]]
    done: str
    spares: bool = False
    hangs: bool = False

    def lost(self, row: Row) -> int:
        """Return the number of failed requests that kvpilot should have prevented."""
        if self.spares:
            return row.failed
        return row.failed_sent["later"] + (0 if self.hangs else row.failed_sent["until_unready"])


_ALL = "of all processes of an engine that streams answers"
_SPAWNED = "engines ignore --kv-cache-dtype and start with 16 bits"
FAULTS = {
    "kill": Fault(kill, f"kill -9 {_ALL}"),
    "terminate": Fault(terminate, "pod of an engine that streams answers deleted (SIGTERM)", spares=True),
    "operator": Fault(operator, "operator killed (-9) in stages of a canary", spares=True),
    "dtype": Fault(dtype, f"new {_SPAWNED}", spares=True),
    "memory": Fault(memory, "another process takes the rest of a GPU's memory, then its engine gets a full context"),
    "hang": Fault(hang, f"SIGSTOP of the engine's GPU process for {HANG_SECONDS:.0f} s", spares=True, hangs=True),
    "stop": Fault(stop, f"SIGSTOP {_ALL}", hangs=True),
    "rollback": Fault(rollback, f"new {_SPAWNED}; operator killed (-9) in stages of their canary", spares=True),
}
