"""Every socket between operator and API server is closed if its data stays unacknowledged for too long."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.transport import UNACKNOWLEDGED_MILLISECONDS, give_up_early


def own_socket(address: tuple[str, int]) -> socket.socket:
    """Return a duplicate handle of this process's socket with this address."""
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(one.stat().st_mode):
                found = socket.socket(fileno=os.dup(int(one.name)))
                if found.family == socket.AF_INET and found.getsockname() == address:
                    return found
                found.close()
    raise AssertionError(f"no socket of this process has {address}")


async def test_the_clients_sockets_have_the_timeout_for_unacknowledged_data():
    app, seen = web.Application(), []

    async def answer(request):
        with own_socket(request.transport.get_extra_info("peername")) as used:
            seen.append(used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return web.json_response({})

    app.router.add_get("/apis/x", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.SockSite(runner, listening := socket.create_server(("127.0.0.1", 0)))
    await site.start()
    api = ApiClient(Configuration(host=f"http://127.0.0.1:{listening.getsockname()[1]}"))
    give_up_early(api)
    cluster = Cluster(api)
    await cluster.serves("x")
    await cluster.close()
    await runner.cleanup()
    assert seen == [UNACKNOWLEDGED_MILLISECONDS]
