"""Make engines on GPUs, and the operator, fail under a load. Record what users see, and how kvpilot reacts.

    python -m benchmarks.operator.gpu_faults --out faults.json [--faults NAME ...]

The host must be fit for the demo's story on GPUs (docs/localcluster.md). Four engines run at a time: two replicas, and
two of another revision. On a host with fewer than four GPUs, engines share GPUs. All faults run in one local cluster,
one after another, in this order:

kill       kill -9 of all processes of an engine that streams answers
terminate  deletion of an engine's pod (SIGTERM) while it streams answers
operator   kill -9 of the operator in each stage of a canary that is promoted
dtype      the canary's engine ignores --kv-cache-dtype and starts with 16 bits
memory     another process takes the rest of a GPU's memory, then the engine gets its longest prompt (needs four GPUs)
hang       SIGSTOP of the process that has the GPU, for 45 s; the engine's HTTP server goes on
stop       SIGSTOP of all processes of an engine
rollback   as dtype, and kill -9 of the operator in each stage until the canary is rolled back

The results are written after each fault. SIGTERM ends the benchmark and all processes that it has started.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.operator.gpu_fault_kinds import FAULTS
from benchmarks.operator.gpu_service import ALIVE, REPLICAS, Bench, Row, Users, manifest, wrapped
from kvpilot_demo import checks, gpus
from kvpilot_demo.load import LoadError
from kvpilot_demo.service import DemoError
from kvpilot_demo.world import World, run_folder
from kvpilot_formats.untrusted import KvpilotError
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.gpus import find
from kvpilot_localcluster.images import DEFAULT_TABLE
from kvpilot_operator.cluster.objects import Object

DEVICES = 2 * REPLICAS
_SETTLE_SECONDS = 3.0


async def measure(bench: Bench, names: Sequence[str], save: Callable[[Row], None]) -> None:
    """Run faults one after another. Save the row of each, even if the fault fails.

    Raises:
        FaultFailed: a fault did not end as expected. Later faults are then skipped, because they would show nothing.
    """
    for name in names:
        fault = FAULTS[name]
        row = Row(name, fault.done)
        await bench.begin(row)
        try:
            await fault.act(bench)
            # A request that is still in flight may fail because of the fault, so wait before `end` counts failures.
            await asyncio.sleep(_SETTLE_SECONDS)
        except BaseException as error:
            # Catch BaseException, because a cancellation, for example at a time limit, is a failure, too.
            row.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            bench.end()
            row.lost = fault.lost(row)
            save(row)


async def run(
    names: Sequence[str], folder: Path, example: Object, users: Users, save: Callable[[Row], None], **world: Any
) -> None:
    """Start a cluster and the service, and run the faults. `world` has arguments of World.up, such as `resources`."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    table, flag = wrapped(world.pop("table", DEFAULT_TABLE), folder)
    began = time.monotonic()
    async with World.up(folder / "world", lambda *_: None, table, newer=False, example=example, **world) as found:
        bench = Bench(found, users, flag)
        try:
            await bench.start()
            print(f"{time.monotonic() - began:.0f} s: {REPLICAS} engines serve {users.count} users", flush=True)
            await measure(bench, names, save)
        finally:
            await bench.stop()


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table. It has the columns of docs/reliability.md and some more."""
    head = "| fault | until | seconds | answered | failed | connections | lost | longest wait (s) | dtype, state |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        until = row.error or row.until
        lines.append(
            f"| {row.done} | {until} | {row.seconds} | {row.ok} | {row.failed} | {row.connections} | {row.lost} | "
            f"{row.longest_first_token} | {row.dtype}, {row.state} |"
        )
    return "\n".join(lines)


def _faults(names: Sequence[str]) -> list[str]:
    """Return the reasons why this machine cannot run the faults `names`."""
    found = gpus.found_faults(DEVICES) or checks.faults(local=True, installed=True)
    if not found and "memory" in names and (count := len(find())) < DEVICES:
        found = [f"--faults: memory needs {DEVICES} GPUs, because engines would share its GPU, and "
                 f"nvidia-smi lists {count}: leave memory out"]  # fmt: skip
    return found


def _machine() -> dict[str, Any]:
    versions = {}
    for name in ("vllm", "torch", "kvpilot"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    names = [f"{gpu.name}, driver {gpu.driver}" for gpu in find()]
    return {"measuredAt": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": names, "versions": versions}


def main() -> int:
    """Run the benchmark. Return 0 if every fault ended as expected and no request was lost."""
    parser = argparse.ArgumentParser(
        prog="gpu_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if found := _faults(options.faults):
        print("\n".join(f"gpu_faults: {fault}" for fault in found), file=sys.stderr)
        return 1
    rows: list[Row] = []
    users, example, why = Users(), manifest(gpus.manifest(imagined=False)), ""
    about = {**_machine(), "devices": DEVICES, "users": asdict(users), "livenessProbe": ALIVE}

    def write() -> None:
        options.out.write_text(json.dumps({**about, "failure": why, "rows": [asdict(row) for row in rows]}, indent=2))

    def save(row: Row) -> None:
        rows.append(row)
        write()
        print(f"{row.fault}: {row.seconds} s, {row.ok} answered, {row.failed} failed, {row.lost} lost {row.error}")

    folder = run_folder()
    try:
        asyncio.run(run(options.faults, folder, example, users, save, gpu_devices=DEVICES))
    except (KeyboardInterrupt, asyncio.CancelledError):
        why = "ended by a signal"
    except (DemoError, KvpilotError, LocalClusterError, LoadError, OSError, TimeoutError) as error:
        why = f"{type(error).__name__}: {error}"
    write()
    print(table(rows))
    if why:
        print(f"gpu_faults: {why}; logs: {folder}", file=sys.stderr)
    return 1 if why or any(row.lost for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
