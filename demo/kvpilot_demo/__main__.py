"""Start a cluster with kvpilot, show what it does step by step, and stop everything again.

--keep     leave it running at the end and print kubectl commands to try; Ctrl-C ends it
--plain    print lines instead of a live screen (default without a terminal)
--record   write the observations as JSON (the end-to-end test reads them)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path

from kvpilot_demo.load import LoadError
from kvpilot_demo.screen import Screen
from kvpilot_demo.story import BAD, GOOD, Record, Story, StoryFailed
from kvpilot_demo.world import World, run_folder
from kvpilot_formats.installed import add_version
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_operator.errors import KvpilotError
from kvpilot_smallmodels.models import ModelError


def main() -> int:
    """Run the demo. Return 0 if every step succeeded, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="kvpilot_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(parser)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    screen = Screen(plain=options.plain or not sys.stdout.isatty())
    try:
        return asyncio.run(_tell(options, screen))
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.note("stopped; all processes have been ended")
        return 130
    except (StoryFailed, KvpilotError, LocalClusterError, ModelError, LoadError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1


async def _tell(options: argparse.Namespace, screen: Screen) -> int:
    task = asyncio.current_task()
    if task is not None:
        # Python turns SIGINT into a cancellation; do the same for SIGTERM.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    folder = run_folder()
    try:
        await _in_a_world(options, screen, folder)
    except asyncio.CancelledError:
        shutil.rmtree(folder)
        raise
    # Keep the logs only after a failure.
    shutil.rmtree(folder)
    return 0


async def _in_a_world(options: argparse.Namespace, screen: Screen, folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with screen.live():
            with screen.step("start control plane, node, model and operator"), screen.progress() as report:
                world = await stack.enter_async_context(World.up(folder, report))
            screen.note(f"logs: {folder}")
            record = await Story(world, screen).run()
        screen.close(_ending(record))
        if options.record is not None:
            options.record.write_text(json.dumps(record.as_json(), indent=2))
        if options.keep:
            _print_commands(world)
            await asyncio.Event().wait()


def _ending(record: Record) -> list[tuple[str, str]]:
    good, bad = record.good_probe, record.bad_probe
    told = [
        ("why", record.decision),
        (
            "gain",
            f"{record.capacity_before:,} -> {record.capacity_after:,} KV tokens ({record.capacity_ratio:.2f}x) "
            f"by vLLM's own metrics\n{record.requests} requests during the change, {record.failed_requests} failed\n"
            f"{GOOD}: {_figures(good)}",
        ),
    ]
    if not bad:
        return told
    answers = "\n\n".join(record.bad_answers.split(" | "))
    return [*told, (f"caught: {BAD}", f"{_figures(bad)}\n\n{answers}")]


def _figures(probe: dict[str, int]) -> str:
    return (
        f"excess KL divergence {probe['excessKLMicronats'] / 1000:.1f} (nats x 1000), top-1 agreement "
        f"{probe['top1AgreementPermille'] / 10:.1f}%"
    )


def _print_commands(world: World) -> None:
    print(f"\nStill running. In another terminal:\n\n  export KUBECONFIG={world.kubeconfig}")
    for command in (
        "kubectl get qllm",
        f"kubectl describe qllm {world.name}",
        "kubectl get deploy,pods,svc",
        f"kubectl get qllm {world.name} -o jsonpath='{{.status.decisions}}'",
    ):
        print(f"  {command}")
    print(f"\nLogs: {world.logs}\nCtrl-C ends everything.")


if __name__ == "__main__":
    sys.exit(main())
