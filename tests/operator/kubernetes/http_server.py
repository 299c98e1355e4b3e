"""Serves the Kubernetes API over real TCP on loopback, in the process of a test, with faults as scripts."""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.resources import NODES
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.object_store import ObjectStore
from tests.patience import PATIENCE_SECONDS

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
NODE = {"metadata": {"name": "n1", "uid": "u", "resourceVersion": "7"}, "spec": {"providerID": "x://1"}}
ITEMS_PATH = "/apis/bigfleet.lucy.sh/v1alpha1/capacityrequests"


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    #: As on the wire.
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class ApiServer:
    """One server: answers by script first, then from the store of CapacityRequests."""

    store: ObjectStore = field(default_factory=ObjectStore)
    seen: list[Seen] = field(default_factory=list)
    #: Answers to the next requests, one each.
    script: deque[Answer] = field(default_factory=deque)
    url: str = ""
    #: What wakes each open watch, and its request.
    watches: dict[asyncio.Event, web.Request] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.seen.append(
            Seen(
                request.method,
                request.rel_url.raw_path,
                dict(request.query),
                dict(request.headers),
                json.loads(text) if text else None,
            )
        )
        if self.script:
            return await self.script.popleft()(request)
        if request.path == ITEMS_PATH and request.method == "GET":
            return await (self._watch(request) if "watch" in request.query else self._list(request))
        return web.Response(status=404, text="404 page not found\n")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        items, version, token = self.store.page(int(request.query.get("limit", "0")), request.query.get("continue", ""))
        return web.json_response(
            {
                "apiVersion": "bigfleet.lucy.sh/v1alpha1",
                "kind": "CapacityRequestList",
                "metadata": {"resourceVersion": str(version), "continue": token, "remainingItemCount": 1},
                "items": items,
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        if version < self.store.compacted:
            await response.write(line("ERROR", status(410, "Expired", "too old resource version")))
            return response
        position = self.store.position(version)
        wake = asyncio.Event()
        self.watches[wake] = request
        try:
            while request.transport is not None:
                while position < len(self.store.history):
                    change = self.store.history[position]
                    position += 1
                    await response.write(line(change.type, change.object))
                wake.clear()
                await wake.wait()
        finally:
            del self.watches[wake]
        return response

    def changed(self) -> None:
        """Send what has changed to the open watches."""
        for wake in self.watches:
            wake.set()

    def cut_watches(self) -> None:
        """Drop the connections of all open watches."""
        for request in self.watches.values():
            cut(request)


def status(code: int, reason: str, message: str, **more: Any) -> dict[str, Any]:
    """Return a Status of a failure."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
        **more,
    }


def line(kind: str, found: dict[str, Any]) -> bytes:
    """Return one event of a watch as it is sent."""
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def answer(body: Any, code: int = 200, **headers: str) -> Answer:
    """Answer with a body: text as it is, anything else as JSON."""

    async def send(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, str):
            return web.Response(status=code, text=body, headers=named)
        return web.json_response(body, status=code, headers=named)

    return send


def stream(*parts: bytes | float, drops: bool = False) -> Answer:
    """Answer with a chunked stream; a number is a pause. It ends well, or the connection is cut."""

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for part in parts:
            await (response.write(part) if isinstance(part, bytes) else asyncio.sleep(part))
        if drops:
            cut(request)
        return response

    return send


def cut(request: web.Request) -> None:
    """Drop the connection of a request without a word."""
    if request.transport is not None:
        request.transport.abort()


async def dropped(request: web.Request) -> web.StreamResponse:
    """Drop the connection in place of an answer."""
    cut(request)
    return web.Response()


async def hanging(request: web.Request) -> web.StreamResponse:
    """Take the request and never answer."""
    await asyncio.Event().wait()
    return web.Response()


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    """Serve on a free port of loopback."""
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"{'https' if context else 'http'}://127.0.0.1:{port}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client(server: ApiServer, **options: Any) -> AsyncIterator[HttpKubernetesApi]:
    """Open a client that is patient and in no hurry, unless said otherwise."""
    endpoint = options.pop("endpoint", {})
    made = ApiEndpoint(server=server.url, source="test", **endpoint)
    limits = {"qps": 0.0, "request_seconds_max": PATIENCE_SECONDS, "watch_quiet_seconds_max": PATIENCE_SECONDS}
    async with HttpKubernetesApi(made, clock=LoopClock(), **(limits | options)) as api:
        yield api


async def refusal(api: HttpKubernetesApi) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await api.get(NODES, "n1")
    return caught.value
