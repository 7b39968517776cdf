"""Show what kvpilot does with a service, step by step, on a cluster of its own or on yours.

--keep       leave it running at the end and print kubectl commands to try; Ctrl-C ends it
--plain      print lines instead of a live screen (default without a terminal)
--record     write the observations as JSON (the end-to-end test reads them)
--gpu        run three CUDA engines on this machine's GPUs (they share GPUs if there are fewer), with more steps
--cluster    run on the cluster of kubectl's current context, with --image= and --model=; --yes skips the question
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from kvpilot_demo import checks, gpus, user_cluster
from kvpilot_demo.load import LoadError
from kvpilot_demo.screen import Screen
from kvpilot_demo.service import DemoError, DemoService
from kvpilot_demo.story import IMAGINED, ON_GPUS, Record, Size, Story, StoryFailed
from kvpilot_demo.summary import figures, summary
from kvpilot_demo.world import World, run_folder
from kvpilot_formats.installed import add_version
from kvpilot_formats.untrusted import KvpilotError
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.gpus import RESOURCE
from kvpilot_operator.api.spec import parse
from kvpilot_smallmodels.models import ModelError

START = "start the cluster"


def main() -> int:
    """Run the demo. Return 0 if every step succeeded, 130 after Ctrl-C."""
    options = _parser().parse_args()
    if found := _faults(options):
        print("\n".join(f"demo: {fault}" for fault in found), file=sys.stderr)
        return 1
    screen = Screen(plain=options.plain or not sys.stdout.isatty())
    folder = run_folder()
    try:
        if not options.cluster:
            asyncio.run(_tell(options, screen, folder))
        elif not _tell_on_users_cluster(options, screen, folder):
            return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.note("stopped; nothing runs any more")
        if options.gpu:
            screen.note(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
        return 130
    except StoryFailed as error:
        _explain(error.step, str(error), error.log)
        return 1
    except (DemoError, KvpilotError, LocalClusterError, ModelError, LoadError, TimeoutError) as error:
        _explain(START, str(error), str(folder))
        return 1
    # Remove the logs after a success, because nobody needs them.
    shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpilot_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(parser)
    for name in ("--keep", "--plain", "--cluster", "--yes", "--gpu"):
        parser.add_argument(name, action="store_true")
    # For tests of --gpu without GPUs: engines run on CPUs, and the node only claims to have this many GPUs.
    parser.add_argument("--imagined-gpus", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--image", default="")
    parser.add_argument("--model", default=user_cluster.MODEL)
    return parser


def _faults(options: argparse.Namespace) -> list[str]:
    """Return the reasons why the story on GPUs cannot run on this machine. Without --gpu there are none."""
    if not options.gpu:
        return []
    found = [] if options.imagined_gpus else gpus.found_faults()
    return found + checks.faults(local=True, installed=True)


def _explain(step: str, why: str, log: str) -> None:
    """Print which step failed and why, and which log to read."""
    print(f"\nThe demo failed at: {step}\n  why: {' '.join(why.split())}\n  log: {log}", file=sys.stderr)


def _tell_on_users_cluster(options: argparse.Namespace, screen: Screen, folder: Path) -> bool:
    """Run the demo on the user's cluster, if the user agrees. Return False otherwise."""
    if not options.image:
        raise DemoError("IMAGE is missing: build the runtime's image (docs/install.md), and name it as IMAGE=...")
    with user_cluster.current_context(folder):
        if agreed := _agreed(options):
            asyncio.run(_tell(options, screen, folder))
    return agreed


def _agreed(options: argparse.Namespace) -> bool:
    """Show what would run on the user's cluster, and ask for consent."""
    print(user_cluster.plan(options.image, options.model))
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise DemoError("nobody can be asked without a terminal: add YES=1 to go on")
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")


async def _tell(options: argparse.Namespace, screen: Screen, folder: Path) -> None:
    task = asyncio.current_task()
    if task is not None:
        # SIGINT cancels the main task. Let SIGTERM do the same, so that everything is cleaned up.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        with screen.live():
            with screen.step(START), screen.progress() as report:
                where: AbstractAsyncContextManager[DemoService] = (
                    user_cluster.UserCluster.up(folder, options.image, options.model)
                    if options.cluster
                    else World.up(folder, report, newer=False, **_hardware(options))
                )
                world = await stack.enter_async_context(where)
            size = _size(options)
            story = Story(world, screen, size, lambda record: _save(options, record))
            if options.gpu and not options.imagined_gpus:
                story.beside = lambda: gpus.compiled(world, screen.note)
            try:
                record = await story.run()
            except BaseException:
                if options.gpu:
                    screen.close(figures(story.record))
                raise
        lines = summary(record, parse(world.example).accuracy.max_excess_kl_millinats, size)
        screen.close([*lines, *(figures(record) if options.gpu else ())])
        if options.keep:
            _print_commands(world)
            await asyncio.Event().wait()


def _hardware(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of World.up for the story on GPUs."""
    if not options.gpu:
        return {}
    made = {"example": gpus.manifest(imagined=bool(options.imagined_gpus))}
    if options.imagined_gpus:
        return {**made, "resources": {RESOURCE: str(options.imagined_gpus), "cpu": "32"}}
    return {**made, "gpu_devices": gpus.DEVICES}


def _size(options: argparse.Namespace) -> Size:
    return (IMAGINED if options.imagined_gpus else ON_GPUS) if options.gpu else Size()


def _save(options: argparse.Namespace, record: Record) -> None:
    if options.record is not None:
        options.record.write_text(json.dumps(record.as_json(), indent=2))


def _print_commands(world: DemoService) -> None:
    print("\nStill running. In another terminal:\n")
    if isinstance(world, World):
        print(f"  export KUBECONFIG={world.kubeconfig}")
    for command in (
        "get qllm",
        f"describe qllm {world.name}",
        "get deploy,pods,svc",
        f"get qllm {world.name} -o jsonpath='{{.status.decisions}}'",
    ):
        print(f"  kubectl -n {world.namespace} {command}")
    print(f"\nLogs: {world.logs}\nCtrl-C ends everything.")


if __name__ == "__main__":
    sys.exit(main())
