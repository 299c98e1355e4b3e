"""Stands between programs and a real API server, and misbehaves on command: refuses, hangs, cuts and spoils answers.

    async with ApiProxy(plane) as proxy:
        kubeconfig = proxy.kubeconfig(plane_kubeconfig)  # the same token, through the proxy
        proxy.answer = too_many_requests(retry_after_seconds=1)
        proxy.answer = forward
        proxy.cut_watches()

It speaks plain HTTP on loopback, and TLS to the API server. It decides nothing: whoever misbehaves is the test.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import aiohttp
from aiohttp import web

from bigfleet.demo.kubernetes.control_plane import ControlPlane

#: Returns what answers a request in the place of the API server, None to pass it on.
Answer = Callable[[web.Request], web.Response | None]

_HOP_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})


def forward(request: web.Request) -> web.Response | None:
    """Pass every request on."""
    return None


def is_watch(request: web.Request) -> bool:
    return request.query.get("watch") == "true"


def status_text(code: int, reason: str, message: str) -> str:
    """Return a Status as API servers write it."""
    status = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return json.dumps({**status, "code": code, "reason": reason, "message": message})


def too_many_requests(*, retry_after_seconds: int) -> Answer:
    """Refuse everything as an overloaded API server does."""
    text = status_text(429, "TooManyRequests", "Too many requests, please try again later.")
    headers = {"Retry-After": str(retry_after_seconds)}
    return lambda request: web.Response(status=429, text=text, headers=headers, content_type="application/json")


def expired_watches(request: web.Request) -> web.Response | None:
    """Refuse each new watch: its version is too old."""
    if not is_watch(request):
        return None
    return web.Response(
        status=410, text=status_text(410, "Expired", "too old resource version"), content_type="application/json"
    )


def page(code: int) -> Answer:
    """Answer everything with a page for browsers, as what stands before an API server does."""
    return lambda request: web.Response(
        status=code, text="<html>no API server here</html>", content_type="text/html", headers={"Location": "/login"}
    )


def empty_objects(request: web.Request) -> web.Response:
    """Answer everything with an empty JSON object."""
    return web.json_response({})


class ApiProxy:
    """A reverse proxy of one control plane. Use it as an async context manager."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        #: Asked for each request.
        self.answer: Answer = forward
        self._passes = asyncio.Event()
        self._passes.set()
        #: The open watches by a number of ours, each with what it sends before it ends.
        self._watches: dict[int, tuple[web.Request, asyncio.Future[bytes]]] = {}
        self.requests_total = 0
        self._watches_total = 0

    async def __aenter__(self) -> "ApiProxy":
        context = ssl.create_default_context(cafile=str(self._plane.files.certificate))
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._passes.set()
        self.cut_watches()
        await self._runner.cleanup()
        await self._client.close()

    def kubeconfig(self, original: Path) -> Path:
        """Write a copy of a kubeconfig that leads through here, and return its path."""
        document = json.loads(original.read_text(encoding="utf-8"))
        for cluster in document["clusters"]:
            cluster["cluster"] = {"server": self.url}
        path = original.with_suffix(".proxied.kubeconfig")
        path.touch(mode=0o600)
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    # ---- misbehaviour

    def hang(self) -> None:
        """Let no byte of any answer through until `resume`; connections are accepted all the same."""
        self._passes.clear()

    def resume(self) -> None:
        self._passes.set()

    def cut_watches(self) -> int:
        """Break the connection of each open watch; return how many there were."""
        for request, _words in self._watches.values():
            if request.transport is not None:
                request.transport.abort()
        return len(self._watches)

    def end_watches(self, last_words: bytes) -> int:
        """End each open watch in order, after some bytes of ours; return how many there were."""
        for _request, words in self._watches.values():
            if not words.done():
                words.set_result(last_words)
        return len(self._watches)

    # ---- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests_total += 1
        await self._passes.wait()
        answer = self.answer(request)
        if answer is not None:
            return answer
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        try:
            async with self._client.request(
                request.method, self._plane.url + request.raw_path, headers=headers, data=body, allow_redirects=False
            ) as found:
                if is_watch(request) and found.status == 200:
                    return await self._stream(request, found)
                text = await found.read()
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"proxy: {error}")
        await self._passes.wait()
        kept = {name: value for name, value in found.headers.items() if name.lower() not in _HOP_HEADERS}
        return web.Response(status=found.status, body=text, headers=kept)

    async def _stream(self, request: web.Request, found: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        words: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        number = self._watches_total
        self._watches_total += 1
        self._watches[number] = (request, words)
        reading: asyncio.Task[bytes] | None = None
        try:
            while True:
                reading = reading or asyncio.ensure_future(found.content.readany())
                await asyncio.wait((reading, words), return_when=asyncio.FIRST_COMPLETED)
                await self._passes.wait()
                if words.done():
                    await response.write(words.result())
                    return response
                chunk = await reading
                reading = None
                if not chunk:
                    return response
                await response.write(chunk)
        finally:
            if reading is not None:
                reading.cancel()
            del self._watches[number]
