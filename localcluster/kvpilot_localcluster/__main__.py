"""Command line: python -m kvpilot_localcluster build|up|down|node|kubeconfig|logs."""

import argparse
import asyncio
import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from kvpilot_localcluster import build, images
from kvpilot_localcluster.backoff import Backoff
from kvpilot_localcluster.cluster import LocalCluster, down
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.node import Options, serve
from kvpilot_localcluster.pod import LOGS_ANNOTATION
from kvpilot_localcluster.rest import ApiError, Rest


def _pairs(entries: list[str]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in entries)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="localcluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the control plane's programs into the cache")
    commands.add_parser("up", help="start a cluster with one node and stay until Ctrl-C")
    for name, text in (("down", "end a cluster"), ("kubeconfig", "print the path of a cluster's client configuration")):
        commands.add_parser(name, help=text)
    for name in ("up", "down", "kubeconfig"):
        default = build.builds_folder() / "run"
        commands.choices[name].add_argument("--folder", type=Path, default=default, help="the cluster's run folder")
    one = commands.add_parser("node", help="run a node agent and forward Services")
    one.add_argument("--kubeconfig", type=Path, required=True)
    one.add_argument("--folder", type=Path, required=True, help="folder for records, volumes and logs")
    one.add_argument("--name", default="local")
    one.add_argument("--images", type=Path, default=images.DEFAULT_TABLE, help="the image table")
    one.add_argument("--resource", action="append", default=[], metavar="NAME=N", help="such as nvidia.com/gpu=4")
    one.add_argument("--gpu-devices", type=int, default=0, help="number of devices that share the GPUs")
    one.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
    one.add_argument("--backoff", type=float, default=Backoff.initial, help="seconds before the second restart")
    one.add_argument("--starter", type=int, metavar="PID", help="end the cluster when the process PID has ended")
    one.add_argument("--control-plane", type=Path, help="run folder of the control plane that --starter ends")
    one.add_argument("--no-services", action="store_true", help="do not forward Services")
    one = commands.add_parser("logs", help="print a container's log")
    one.add_argument("--kubeconfig", type=Path, required=True)
    one.add_argument("--namespace", "-n", default="default")
    one.add_argument("--container", "-c")
    one.add_argument("--previous", action="store_true")
    one.add_argument("pod")
    return parser


def _build() -> None:
    binaries = build.tell()
    print(f"the programs are in {binaries.kube_apiserver.parent}")
    for lack in binaries.missing:
        print(f"missing: {lack}", file=sys.stderr)


def _up(args: argparse.Namespace) -> None:
    with LocalCluster(args.folder) as cluster:
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        while True:
            time.sleep(1)
            cluster.check()


def _node(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    options = Options(
        kubeconfig=args.kubeconfig,
        folder=args.folder.absolute(),
        name=args.name,
        table=args.images,
        resources=_pairs(args.resource),
        gpu_devices=args.gpu_devices,
        labels=_pairs(args.label),
        backoff=Backoff(initial=args.backoff),
        services=not args.no_services,
        starter=args.starter,
        control_plane=args.control_plane,
    )
    asyncio.run(serve(options))


def _logs(args: argparse.Namespace) -> None:
    pod: dict[str, Any] = Rest.of_kubeconfig(args.kubeconfig).get(
        f"/api/v1/namespaces/{args.namespace}/pods/{args.pod}"
    )
    container = args.container or pod["spec"]["containers"][0]["name"]
    folder = Path(pod["metadata"].get("annotations", {}).get(LOGS_ANNOTATION, "")) / container
    runs = sorted(folder.glob("*.log"), key=lambda file: int(file.stem))
    index = -2 if args.previous else -1
    if len(runs) < -index:
        raise LocalClusterError(f"no such log of container {container!r} below {folder}")
    sys.stdout.write(runs[index].read_text(errors="replace"))


def _terminated(_: int, __: FrameType | None) -> None:
    # Raise an exception on SIGTERM, so that every context manager cleans up.
    raise SystemExit(143)


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    args = _parser().parse_args(argv)
    if args.command != "node":
        signal.signal(signal.SIGTERM, _terminated)
    try:
        if args.command == "build":
            _build()
        elif args.command == "up":
            _up(args)
        elif args.command == "down":
            print("ended:", ", ".join(down(args.folder)) or "nothing")
        elif args.command == "kubeconfig":
            print(args.folder / "controlplane" / "admin.kubeconfig")
        elif args.command == "node":
            _node(args)
        else:
            _logs(args)
    except (LocalClusterError, ApiError, OSError) as error:
        print(f"localcluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
