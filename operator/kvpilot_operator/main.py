"""`kvpilot-operator`: connects, watches, decides, acts, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.gate import Gate
from kvpilot_operator.cluster.lease import Timing
from kvpilot_operator.control.election import Election
from kvpilot_operator.control.http import serve_http
from kvpilot_operator.control.leader import Leader, prepare
from kvpilot_operator.control.logs import configure
from kvpilot_operator.control.replica import alone, elected
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import LeadershipLost

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="kvpilot-operator", description=__doc__)
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace only (may be repeated; default: all)"
    )
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="how often every engine is read (5)")
    parser.add_argument("--http-host", default="0.0.0.0", help="address of /healthz, /readyz and /metrics (all)")  # noqa: S104
    parser.add_argument("--http-port", type=int, default=8080, help="port of /healthz, /readyz and /metrics (8080)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--leader-elect", action="store_true", help="act only while holding the Lease, for several replicas"
    )
    parser.add_argument("--lease-name", default="kvpilot-operator", help="the Lease of --leader-elect")
    parser.add_argument(
        "--lease-namespace", default=os.environ.get("POD_NAMESPACE", ""), help="its namespace ($POD_NAMESPACE)"
    )
    parser.add_argument(
        "--lease-seconds", type=_lease_seconds, default=15, help="others take over this long after a leader died (15)"
    )
    options = parser.parse_args(arguments)
    if options.leader_elect and not options.lease_namespace:
        parser.error("--leader-elect needs --lease-namespace NAMESPACE, or POD_NAMESPACE in the environment")
    return options


def _lease_seconds(text: str) -> int:
    try:
        seconds = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds") from None
    if not 15 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{seconds} is not between 15 and 300 seconds")
    return seconds


def main() -> None:
    """Entry point of the `kvpilot-operator` command."""
    options = parse_arguments(sys.argv[1:])
    configure(options.log_level)
    try:
        asyncio.run(run(options))
    except LeadershipLost as error:
        log.error("stopping: %s", error)
        sys.exit(1)


async def run(options: argparse.Namespace) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        LeadershipLost: it led and may not any more; whoever started it starts it again.
    """
    stop, ready = asyncio.Event(), asyncio.Event()
    gate, telemetry = Gate(), Telemetry()
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
    agent = f"kvpilot-operator ({identity})"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    prepare()
    async with AsyncExitStack() as stack:
        cluster = await Cluster.connect(gate, agent, telemetry.api_request)
        stack.push_async_callback(cluster.close)
        http = await serve_http(options.http_host, options.http_port, telemetry.registry, ready)
        stack.push_async_callback(http.cleanup)
        start = partial(
            Leader.start,
            cluster,
            gate,
            telemetry,
            namespaces=options.namespace,
            scrape_seconds=options.scrape_seconds,
            ready=ready,
        )
        if not options.leader_elect:
            await alone(gate, start, stop)
            return
        # Connections of its own: a renewal never waits behind a fleet's reads.
        leases = await Cluster.connect(Gate.opened(), agent, telemetry.api_request)
        stack.push_async_callback(leases.close)
        timing = Timing(options.lease_seconds)
        names = (options.lease_namespace, options.lease_name)
        await elected(Election(leases, gate, identity, *names, timing, ready), start, stop)
