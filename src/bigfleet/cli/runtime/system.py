"""Provides the real world: the system clock, ids, logs, signals, and the HTTP endpoints of a process.

Flows take these through their Protocols; only commands construct them. This module does not decide anything.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import structlog
import uvicorn
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from ulid import ULID
from uvicorn.protocols.http.h11_impl import H11Protocol

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.log_lines import encode_line

#: Connections to the HTTP endpoints of a process; for one more the oldest is closed.
HTTP_CONNECTIONS_MAX = 64


class SystemClock:
    """The real `Clock`: the loop's monotonic time and the machine's wall clock."""

    def monotonic_seconds(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def unix_nanos(self) -> int:
        """Return the wall clock in nanoseconds."""
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await asyncio.sleep(max(seconds, 0.0))


class SystemIds:
    """The real `IdSource`: ULIDs from the wall clock and the operating system's randomness."""

    def new_id(self) -> str:
        """Return a fresh ULID."""
        return str(ULID())


def system_rng() -> random.Random:
    """Return a generator seeded by the operating system."""
    return random.SystemRandom()


def configure_logging(component: str, level: str = "info") -> None:
    """Send JSON lines of bounded length to standard error, with `component` in each; stdlib logging joins them."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
    ]
    renderer = structlog.processors.JSONRenderer(serializer=encode_line)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(component=component)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def run_loop(main: Callable[[], Coroutine[Any, Any, int]], *, threads_seconds_max: float | None = None) -> int:
    """Run `main()` on a fresh event loop, uvloop when it is installed, and return its exit code.

    With `threads_seconds_max` the process exits with that code if threads still run after that time.
    """
    try:
        import uvloop  # optional extra; -10 to -20 % server CPU

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        code = runner.run(main())
        if threads_seconds_max is not None and not runner.run(_threads_ended(threads_seconds_max)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


async def _threads_ended(seconds_max: float) -> bool:
    """Return whether all threads of the loop end within a time."""
    ending = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    ended, _ = await asyncio.wait({ending}, timeout=seconds_max)
    return bool(ended)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    return stop


@contextmanager
def ended_by_signals(on_end: Callable[[], None]) -> Iterator[None]:
    """End the process with code 0 at SIGINT and SIGTERM until the context ends or `stop_on_signals` is called.

    For a start that reads state: nothing is served, and every file survives a killed process. `on_end` logs the end.
    """

    def end(_number: int, _frame: object) -> None:
        try:
            on_end()
        finally:
            # At once: a thread that reads state cannot be interrupted, and the interpreter would wait for it.
            os._exit(0)

    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


class _SignalFreeServer(uvicorn.Server):
    """uvicorn without its own signal handlers: a process has one place that stops it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield


@asynccontextmanager
async def serving(config: uvicorn.Config, listening: socket.socket) -> AsyncIterator[None]:
    """Serve an application on a bound socket while the context lasts, then close the socket."""
    server = _SignalFreeServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        listening.close()


def process_registry() -> CollectorRegistry:
    """Return a registry with what every process exports of itself; alerts compare `process_start_time_seconds`."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def http_application(registry: CollectorRegistry, readiness: Callable[[], str]) -> Starlette:
    """Return `/metrics`, `/healthz` (200 while this answers) and `/readyz`.

    The last is 200 when `readiness()` is "", else 503 with what it says.
    """
    # When a series began is asked for by no query, and nearly doubles the series of counters. The library types no
    # argument or result of this function.
    disable_created_metrics()  # type: ignore[no-untyped-call]

    async def metrics(_request: Request) -> Response:
        # Rendering reads every series; off the loop, so that a large registry never holds up a stream.
        body = await asyncio.to_thread(generate_latest, registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        reason = readiness()
        return PlainTextResponse(f"{reason or 'ready'}\n", status_code=503 if reason else 200)

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)])


def _bounded_protocol() -> type[H11Protocol]:
    """Return a protocol of which few connections are open at a time: of one more, the oldest is closed.

    A scrape and a probe are over soon. An old one is of a peer that is slow to send its request or to read its answer.
    """
    opened: dict[H11Protocol, asyncio.Transport] = {}

    class BoundedProtocol(H11Protocol):
        """Notes when its connection is made and lost."""

        def connection_made(  # type: ignore[override]  # as uvicorn's own narrows it: a socket is a Transport
            self, transport: asyncio.Transport
        ) -> None:
            """Close the oldest connection if this is one too many."""
            super().connection_made(transport)
            opened[self] = transport
            if len(opened) > HTTP_CONNECTIONS_MAX:
                opened.pop(next(iter(opened))).abort()

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget the connection."""
            opened.pop(self, None)
            super().connection_lost(exc)

    return BoundedProtocol


@asynccontextmanager
async def serve_http(
    address: tuple[str, int] | None, registry: CollectorRegistry, readiness: Callable[[], str]
) -> AsyncIterator[None]:
    """Serve `http_application` while the context lasts; None serves nothing.

    Raises RunFault when the address cannot be bound.
    """
    if address is None:
        yield
        return
    host, port = address
    config = uvicorn.Config(
        http_application(registry, readiness),
        http=_bounded_protocol(),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=1,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RunFault(f"--metrics-addr {host}:{port}: {error.strerror}; choose another address or off") from error
    async with serving(config, listening):
        yield
