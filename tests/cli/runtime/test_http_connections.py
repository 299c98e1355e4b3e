"""Connections to the HTTP endpoints are bounded, and a new one is always answered."""

import asyncio
import socket
from contextlib import suppress

from prometheus_client import CollectorRegistry

from bigfleet.cli.runtime import system
from tests.patience import PATIENCE_SECONDS, wait_until_async
from tests.processes import free_port

CROWD = 256


async def half_a_request(port: int, ended: list[int]) -> None:
    """Connect, send half a request, and note when the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: ")
    with suppress(ConnectionError):
        await reader.read()
    ended.append(1)
    writer.close()


async def answer_to(port: int, path: str) -> bytes:
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer


async def test_half_requests_keep_no_scrape_out() -> None:
    """All but as many as are allowed are closed, the oldest first; scrapes and probes are answered meanwhile."""
    port, ended = free_port(), list[int]()
    async with system.serve_http(("127.0.0.1", port), CollectorRegistry(), lambda: ""):

        async def is_up() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await wait_until_async(is_up)
        crowd = [asyncio.create_task(half_a_request(port, ended)) for _ in range(CROWD)]
        try:

            async def are_closed() -> bool:
                return len(ended) >= CROWD - system.HTTP_CONNECTIONS_MAX

            await wait_until_async(are_closed)
            for path in ("/metrics", "/healthz", "/readyz"):
                assert (await answer_to(port, path)).startswith(b"HTTP/1.1 200 OK")
            assert len(ended) <= CROWD - system.HTTP_CONNECTIONS_MAX + 3
        finally:
            for peer in crowd:
                peer.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
