"""The operator listens on the address families of its pod: IPv4, IPv6 or both."""

import asyncio
import socket

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kvpilot_operator.control.http import serve_http
from kvpilot_operator.options import parse_arguments


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_without_an_address_the_port_accepts_ipv4_and_ipv6(address: str) -> None:
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::", 0))
        port = free.getsockname()[1]
    host = parse_arguments([]).http_host
    runner = await serve_http(host, port, CollectorRegistry(), asyncio.Event())
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}:{port}/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
    finally:
        await runner.cleanup()
