"""A write into a broken network does not arrive after the network recovers."""

import json
import subprocess
import sys

import pytest

# Program for its own network namespace, with a server and our client. It takes the loopback interface down during a
# write, and up again after the client gave up. It prints the requests that reached the server.
_SCENE = """
import asyncio, fcntl, json, socket, struct, sys
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.cluster.transport import give_up_early
from kvpilot_operator.errors import ClusterError

def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", flags | 1 if up else flags & ~1))

async def main():
    loopback(True)
    asked = []

    async def answer(request):
        asked.append(request.method)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 8001).start()
    api = ApiClient(Configuration(host="http://127.0.0.1:8001"))
    if sys.argv[1] == "careful":
        give_up_early(api)
    cluster = Cluster(api)
    await cluster.serves("kvpilot.io/v1alpha1")
    loopback(False)
    try:
        async with asyncio.timeout(5):
            await cluster.delete(Ref("v1", "Pod", "a", "b"))
    except (ClusterError, TimeoutError):
        pass
    await cluster.close()
    loopback(True)
    for _ in range(30 if sys.argv[1] == "careless" else 10):
        await asyncio.sleep(1)
        if "DELETE" in asked:
            break
    print(json.dumps(asked))

asyncio.run(main())
"""


def test_an_abandoned_write_does_not_arrive_later_but_would_with_ordinary_sockets():
    scenes = {
        kind: subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", _SCENE, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in ("careful", "careless")
    }
    said = {}
    for kind, process in scenes.items():
        out, errors = process.communicate(timeout=900)
        if "unshare" in errors:
            pytest.skip(f"no network namespace can be made here: {errors.strip()}")
        assert process.returncode == 0, errors
        said[kind] = json.loads(out)
    assert said == {"careful": ["GET"], "careless": ["GET", "DELETE"]}
