"""Run the process of `kvpilot-operator`, and define the handlers that kopf calls."""

import argparse
import asyncio
import logging
import os
import secrets
import socket
import sys
from contextlib import AsyncExitStack
from typing import Any

import kopf

from kvpilot_operator.api.names import API_VERSION, KIND, PLURAL
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.lease import Candidate, Timing
from kvpilot_operator.control.http import MetricsAccess, serve_http
from kvpilot_operator.control.leader import Election, Leader, Replica, prepare
from kvpilot_operator.control.logs import configure
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import LeadershipLost

log = logging.getLogger(__name__)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Connect to the API server, and answer /healthz and /metrics, even as a standby."""
    configure_kopf(settings)
    await memo.operator.start()


@kopf.on.login()
async def lead(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Wait until this replica leads, then give kopf a connection. Before that, kopf watches nothing."""
    session: kopf.AiohttpSession = await memo.operator.lead()
    return session


@kopf.on.event(API_VERSION, PLURAL)
async def observe_service(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Process an event of a service that was created, changed or deleted."""
    memo.operator.leader.services.take(event["type"], event["object"])


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Finish the writes in progress, and hand over to another replica."""
    await memo.operator.stop()


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Configure kopf: it stores no state on objects, posts no events, and never gives up."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    # A watch without an event for 75 s is dead, because an API server sends a bookmark about every minute.
    settings.watching.inactivity_timeout = 75
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 15
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = Backoff(0.2, 5.0)
    # Keep a task and a queue only for services with recent events.
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = 0.5


class Operator:
    """The operator's process: its connections, its leadership, and the error that ended it, if there was one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._fence = WriteFence()
        self._telemetry = Telemetry()
        self._ready = asyncio.Event()
        self._closing = AsyncExitStack()
        self._end: asyncio.Task[None] | None = None
        self.identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}"
        self.stopped = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def leader(self) -> Leader:
        """Watches, reconciles, scrapes and probes that this replica runs while it is the leader."""
        leader = self._replica.leader
        assert leader is not None  # noqa: S101 - kopf watches nothing before `lead` has returned
        return leader

    async def start(self) -> None:
        """Connect to the API server, and start the HTTP server for health checks and metrics."""
        options = self._options
        prepare()
        agent = f"kvpilot-operator ({self.identity})"
        self._cluster = await Cluster.connect(self._fence, agent, self._telemetry.api_request)
        self._closing.push_async_callback(self._cluster.close)
        # The election needs its own client. A standby must write the Lease although the write fence blocks all other
        # writes, and renewals must not wait behind reads for the services.
        beside = await Cluster.connect(WriteFence.opened(), agent, self._telemetry.api_request)
        self._closing.push_async_callback(beside.close)
        access = MetricsAccess(beside) if options.metrics_authentication else None
        http = await serve_http(options.http_host, options.http_port, self._telemetry.registry, self._ready, access)
        self._closing.push_async_callback(http.cleanup)
        election = None
        if options.leader_elect:
            timing = Timing(options.lease_seconds)
            candidate = Candidate(self.identity, options.lease_namespace, options.lease_name, timing)
            election = Election(beside, self._fence, candidate, self._ready)
        leader = Leader(self._cluster, self._fence, self._telemetry, options, self._ready)
        self._replica = Replica(self._fence, leader.start, election)

    async def lead(self) -> kopf.AiohttpSession:
        """Wait until this replica leads, and return kopf's connection."""
        if self._end is None:
            try:
                await self._replica.lead()
            except Exception as error:
                self._fail(error)
                raise kopf.PermanentError(str(error)) from error
            self._end = asyncio.create_task(self._until_ended())
        namespaces = self._options.namespace or [""]
        return self._cluster.session_for_kopf(API_VERSION, KIND, namespaces, self.leader.services.listed)

    async def stop(self) -> None:
        """Hand over to another replica, and close all connections."""
        if self._end is not None:
            self._end.cancel()
            await asyncio.gather(self._end, return_exceptions=True)
        await self._replica.end()
        await self._closing.aclose()

    async def _until_ended(self) -> None:
        try:
            await self._replica.ended()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.stopped.set()


async def run(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT. Raise LeadershipLost if this replica loses the Lease."""
    operator = Operator(options)
    # Give kopf an identity. Without one, it looks up the name of its user, and user 65532 has no name.
    identity: Any = operator.identity
    try:
        await kopf.operator(
            identity=identity,
            standalone=True,
            clusterwide=not options.namespace,
            namespaces=options.namespace,
            memo=kopf.Memo(operator=operator),
            stop_flag=operator.stopped,
        )
    finally:
        if operator.error is not None:
            raise operator.error


def main(options: argparse.Namespace) -> None:
    """Run the process. Exit with status 1 if this replica lost the Lease."""
    configure(options.log_level)
    try:
        asyncio.run(run(options))
    except LeadershipLost as error:
        log.error("stopping: %s", error)
        sys.exit(1)
