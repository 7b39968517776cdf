"""`kvpilot-operator`: connects, watches, decides, acts, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from datetime import UTC, datetime

import kopf

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.control.http import serve_http
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.control.watches import registry
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.windows import Windows
from kvpilot_operator.render.names import HTTP_ROUTE_API
from kvpilot_operator.state.snapshot import ServerFacts

_EXTRA_FIELDS = ("service", "pod", "from_dtype", "to_dtype", "probe")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the service that it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """Render the record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in _EXTRA_FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="kvpilot-operator", description=__doc__)
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace only (may be repeated; default: all)"
    )
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="pause between scrapes of the fleet (5)")
    parser.add_argument("--http-host", default="0.0.0.0", help="address of /healthz, /readyz and /metrics (all)")  # noqa: S104
    parser.add_argument("--http-port", type=int, default=8080, help="port of /healthz, /readyz and /metrics (8080)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point of the `kvpilot-operator` command."""
    options = parse_arguments(sys.argv[1:])
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    cluster = await Cluster.connect()
    server = ServerFacts(
        pod_disruption_budgets=await cluster.serves("policy/v1"), http_routes=await cluster.serves(HTTP_ROUTE_API)
    )
    windows, telemetry = Windows(), Telemetry()
    observer = Observer(cluster, windows, server, _now)
    prober = Prober(cluster)
    pilot = Pilot(observer, Actor(cluster), prober, windows, telemetry, options.scrape_seconds)
    ready = asyncio.Event()
    http = await serve_http(options.http_host, options.http_port, telemetry.registry, ready)
    work = asyncio.create_task(pilot.run())
    work.add_done_callback(lambda _: stop.set())
    try:
        await kopf.operator(
            registry=registry(pilot),
            clusterwide=not options.namespace,
            namespaces=options.namespace,
            standalone=True,
            stop_flag=stop,
            ready_flag=ready,
        )
    finally:
        work.cancel()
        ended = (await asyncio.gather(work, return_exceptions=True))[0]
        await prober.close()
        await http.cleanup()
        await observer.close()
        await cluster.close()
    if isinstance(ended, Exception):
        raise ended


def _now() -> datetime:
    return datetime.now(UTC)
