"""Talks to an API server over HTTP: implements KubernetesApi with aiohttp and decodes with msgspec.

Every failure is an ApiError that names the request. Requests are not retried here, with one exception: a request that
gets 401 is sent once more if the credentials have changed. This module must not log a header or a body.
"""

import os
import socket
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.api import (
    INVALID_RESPONSE,
    SILENT,
    ApiError,
    JsonObject,
    Page,
    PatchKind,
    Resource,
    WatchEvent,
)
from bigfleet.operator.kubernetes.credentials import Credential, CredentialError
from bigfleet.operator.kubernetes.decoding import MalformedAnswer, ObjectDecoder, WatchDecoder, error_of
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.throttle import RequestThrottle

T = TypeVar("T")

CONNECT_SECONDS_MAX = 10.0
#: An API server sends a bookmark each minute: a watch that is quiet for longer has lost its server.
WATCH_QUIET_SECONDS_MAX = 90.0
#: No line of a watch is longer: etcd stores objects of up to 1.5 MiB.
WATCH_LINE_BYTES_MAX = 16 * 1024 * 1024
#: No answer is longer: a page has at most 500 objects, most of which are a few KiB.
ANSWER_BYTES_MAX = 256 * 1024 * 1024
_APPLY = "application/apply-patch+yaml"
_JSON = "application/json"


class HttpKubernetesApi:
    """The API server behind an ApiEndpoint. Use it as an async context manager, or call `aclose`."""

    def __init__(
        self,
        endpoint: ApiEndpoint,
        *,
        clock: Clock,
        user_agent: str = "bigfleet",
        qps: float = 50.0,
        burst: int = 100,
        request_seconds_max: float = 30.0,
        watch_quiet_seconds_max: float = WATCH_QUIET_SECONDS_MAX,
        connections_max: int = 64,
        on_forbidden: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the endpoint and limits. `qps` of 0 means no limit; a watch occupies a connection while it is open.

        `on_forbidden` is called when a request is refused for want of a right.
        """
        self._endpoint = endpoint
        self._user_agent = user_agent
        self._throttle = RequestThrottle(clock=clock, per_second=qps, burst=burst)
        self._request_timeout = aiohttp.ClientTimeout(total=request_seconds_max, sock_connect=CONNECT_SECONDS_MAX)
        self._watch_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS_MAX, sock_read=watch_quiet_seconds_max
        )
        self._connections_max = connections_max
        self._on_forbidden = on_forbidden
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._tls: tuple[tuple[bytes, bytes, bytes], ssl.SSLContext] | None = None
        #: Objects that could not be decoded as a whole; their metadata alone is in the lists.
        self.undecodable_objects_total = 0

    async def __aenter__(self) -> "HttpKubernetesApi":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; running requests fail. Calling it again does nothing."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    # ---- reading ------------------------------------------------------------------------------------------------

    async def list_page(
        self,
        resource: Resource[T],
        *,
        namespace: str = "",
        limit: int = 500,
        continue_token: str = "",
        resource_version: str = "",
        label_selector: str = "",
        field_selector: str = "",
    ) -> Page[T]:
        """Return one page of the objects, of all namespaces when `namespace` is ""."""
        query = _given(
            limit=str(limit) if limit else "",
            labelSelector=label_selector,
            fieldSelector=field_selector,
            resourceVersion=resource_version,
        )
        query |= {"continue": continue_token} if continue_token else {}
        what = f"list {resource.label}"
        body = await self._request(what, "GET", _path(resource, namespace), query=query)
        with _Decoding(what):
            page, faults = ObjectDecoder.of(resource.type).page(body)
        self.undecodable_objects_total += faults
        return page

    async def get(self, resource: Resource[T], name: str, *, namespace: str = "") -> T:
        """Return one object."""
        return await self._object("get", "GET", resource, name, namespace)

    @asynccontextmanager
    async def _watch(
        self, resource: Resource[T], namespace: str, query: dict[str, str]
    ) -> AsyncIterator[AsyncIterator[WatchEvent[T]]]:
        what = f"watch {resource.label}"
        response = await self._send(what, "GET", _path(resource, namespace), query=query, timeout=self._watch_timeout)
        try:
            if response.status != 200:
                raise self._refusal(what, response, await self._read(what, response))
            events = self._events(what, response, WatchDecoder.of(resource.type))
            try:
                yield events
            finally:
                await events.aclose()
        finally:
            # Not released: what is left of a stream cannot be used for another request.
            response.close()

    def watch(
        self,
        resource: Resource[T],
        *,
        resource_version: str,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent[T]]]:
        """Open a watch with bookmarks; the iterator ends when the server closes it.

        Raises ApiError with status 410 when the version is too old, also in the middle of the stream, and with status 0
        when the connection is lost or silent for too long.
        """
        query = _given(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            timeoutSeconds=str(timeout_seconds),
            labelSelector=label_selector,
            fieldSelector=field_selector,
        )
        return self._watch(resource, namespace, query)

    async def _events(
        self, what: str, response: aiohttp.ClientResponse, decoder: WatchDecoder[T]
    ) -> AsyncGenerator[WatchEvent[T], None]:
        rest = b""
        while True:
            try:
                chunk = await response.content.readany()
            except TimeoutError as error:
                raise self._timed_out(what, self._watch_timeout) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._unreachable(what, error) from error
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > WATCH_LINE_BYTES_MAX:
                raise ApiError(
                    0, INVALID_RESPONSE, f"{what}: the server sent a line of more than {WATCH_LINE_BYTES_MAX} bytes"
                )
            for line in lines:
                if line:
                    yield self._event(what, line, decoder)
        if rest.strip():
            # The last line of a stream that ends well has a line feed; some servers leave it out.
            yield self._event(what, rest, decoder)

    def _event(self, what: str, line: bytes, decoder: WatchDecoder[T]) -> WatchEvent[T]:
        with _Decoding(what):
            event, is_whole = decoder.event(what, line)
        self.undecodable_objects_total += not is_whole
        return event

    # ---- writing ------------------------------------------------------------------------------------------------

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        """Create an object, or a subresource (`resource.subresource`) of the object `name`; return what was stored."""
        return await self._object("create", "POST", resource, name, namespace, body=body)

    async def replace(self, resource: Resource[T], name: str, body: JsonObject, *, namespace: str = "") -> T:
        """Replace an object; 409 when `metadata.resourceVersion` of the body is not the current one."""
        return await self._object("replace", "PUT", resource, name, namespace, body=body)

    async def apply(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject,
        *,
        namespace: str = "",
        field_manager: str,
        force: bool = True,
    ) -> T:
        """Apply server-side: the object is created if it is absent, and has afterwards the fields of the body."""
        query = {"fieldManager": field_manager, "force": "true" if force else "false"}
        return await self._object(
            "apply", "PATCH", resource, name, namespace, body=body, content_type=_APPLY, query=query
        )

    async def patch(
        self,
        resource: Resource[T],
        name: str,
        body: JsonObject | list[JsonObject],
        *,
        namespace: str = "",
        kind: PatchKind = PatchKind.MERGE,
    ) -> T:
        """Patch an object; 404 when it is absent."""
        return await self._object("patch", "PATCH", resource, name, namespace, body=body, content_type=kind.value)

    async def delete(
        self,
        resource: Resource[T],
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_seconds: int | None = None,
    ) -> None:
        """Delete an object; 404 when it is absent, 409 when `uid` is given and the object has another one."""
        options: dict[str, object] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        what = _named("delete", resource, name, namespace)
        await self._request(what, "DELETE", _path(resource, namespace, name), body=options)

    async def _object(
        self,
        verb: str,
        method: str,
        resource: Resource[T],
        name: str,
        namespace: str,
        *,
        body: object = None,
        content_type: str = _JSON,
        query: dict[str, str] | None = None,
    ) -> T:
        """Send a request that is answered with one object."""
        what = _named(verb, resource, name, namespace)
        path = _path(resource, namespace, name)
        answer = await self._request(what, method, path, body=body, content_type=content_type, query=query)
        with _Decoding(what):
            return ObjectDecoder.of(resource.type).object(answer)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def _request(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: object = None,
        content_type: str = _JSON,
    ) -> bytes:
        """Send a request and return the body of its answer. Raises ApiError."""
        response = await self._send(
            what,
            method,
            path,
            query=query or {},
            timeout=self._request_timeout,
            data=None if body is None else msgspec.json.encode(body, enc_hook=_plain),
            content_type=content_type,
        )
        async with response:
            answer = await self._read(what, response)
            if not 200 <= response.status < 300:
                raise self._refusal(what, response, answer)
            return answer

    def _refusal(self, what: str, response: aiohttp.ClientResponse, answer: bytes) -> ApiError:
        error = error_of(what, response.status, response.headers, answer)
        if error.is_forbidden:
            self._on_forbidden()
        return error

    async def _send(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: dict[str, str],
        timeout: aiohttp.ClientTimeout,
        data: bytes | None = None,
        content_type: str = _JSON,
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer of any status, with the body unread."""
        url = URL(self._endpoint.server + path, encoded=True).with_query(query)
        headers = {} if data is None else {"Content-Type": content_type}
        await self._throttle.take()
        credential = await self._credential(what)
        response = await self._send_as(credential, what, method, url, headers, data, timeout)
        if response.status != 401:
            return response
        # Rotated since it was read, or revoked before its time.
        self._endpoint.credentials.invalidate(credential)
        try:
            renewed = await self._credential(what)
        except BaseException:
            response.close()
            raise
        if renewed == credential:
            return response
        response.close()
        return await self._send_as(renewed, what, method, url, headers, data, timeout)

    async def _credential(self, what: str) -> Credential:
        try:
            return await self._endpoint.credentials.current()
        except CredentialError as error:
            raise ApiError(0, "Credentials", f"{what}: {error}") from error

    async def _send_as(
        self,
        credential: Credential,
        what: str,
        method: str,
        url: URL,
        headers: dict[str, str],
        data: bytes | None,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        if credential.token:
            headers = {**headers, "Authorization": f"Bearer {credential.token}"}
        try:
            return await self._opened().request(
                method,
                url,
                headers=headers,
                data=data,
                timeout=timeout,
                # A redirect would send the token elsewhere.
                allow_redirects=False,
                ssl=self._tls_context(what, credential) if url.scheme == "https" else True,
                server_hostname=self._endpoint.tls_server_name or None,
                proxy=self._endpoint.proxy_url or None,
            )
        except TimeoutError as error:
            raise self._timed_out(what, timeout) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(what, error) from error

    async def _read(self, what: str, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer. Raises ApiError, also when it is larger than `ANSWER_BYTES_MAX`."""
        chunks: list[bytes] = []
        size_bytes = 0
        try:
            async for chunk in response.content.iter_any():
                size_bytes += len(chunk)
                if size_bytes > ANSWER_BYTES_MAX:
                    # The rest stays unread: the connection cannot be used again.
                    response.close()
                    raise ApiError(
                        0, INVALID_RESPONSE, f"{what}: the server sent an answer of more than {ANSWER_BYTES_MAX} bytes"
                    )
                chunks.append(chunk)
            return b"".join(chunks)
        except TimeoutError as error:
            raise self._timed_out(what, self._request_timeout) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(what, error) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise RuntimeError("this HttpKubernetesApi is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections_max, socket_factory=probing_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Not compressed: within a data centre both sides spend more time on it than the network saves.
                headers={"User-Agent": self._user_agent, "Accept": _JSON, "Accept-Encoding": "identity"},
            )
        return self._session

    def _tls_context(self, what: str, credential: Credential) -> ssl.SSLContext:
        """Return the context for these credentials; a new one when a certificate has changed."""
        authority = self._endpoint.authority
        try:
            material = (authority.read() if authority else b"", credential.certificate_pem, credential.key_pem)
            if self._tls is None or self._tls[0] != material:
                self._tls = (material, tls_context(*material, verifies=self._endpoint.verifies))
        except CredentialError as error:
            raise ApiError(0, "Credentials", f"{what}: {error}") from error
        return self._tls[1]

    def _unreachable(self, what: str, error: Exception) -> ApiError:
        return ApiError(0, "Unreachable", f"{what}: {self._endpoint.server}: {_connection_fault(error)}")

    def _timed_out(self, what: str, timeout: aiohttp.ClientTimeout) -> ApiError:
        if timeout is self._watch_timeout:
            quiet = f"nothing received for {timeout.sock_read:g} s"
            return ApiError(0, SILENT, f"{what}: {self._endpoint.server}: {quiet}")
        return ApiError(0, "Timeout", f"{what}: {self._endpoint.server}: no answer within {timeout.total:g} s")


def probing_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address as `getaddrinfo` gives it, on which a peer that is gone is noticed within 30 s."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system lets a program say how often.
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def tls_context(authority_pem: bytes, certificate_pem: bytes, key_pem: bytes, *, verifies: bool) -> ssl.SSLContext:
    """Return a client's TLS context; empty parts are absent. Raises CredentialError for a PEM that cannot be used."""
    context = ssl.create_default_context()
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        if authority_pem and verifies:
            context = ssl.create_default_context(cadata=authority_pem.decode("ascii"))
            # As Go's clients do: the server's own certificate may be the authority, and authorities of many clusters
            # lack extensions that newer versions of Python insist on.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    except (ssl.SSLError, ValueError) as error:
        raise CredentialError(f"the certificate authority is no PEM certificate: {error}; write it again") from error
    if certificate_pem:
        try:
            # The library reads them from files alone.
            with tempfile.TemporaryDirectory(prefix="bigfleet-") as folder:
                path = os.path.join(folder, "client.pem")
                with open(path, "wb", opener=_private) as file:
                    file.write(certificate_pem + b"\n" + key_pem)
                context.load_cert_chain(path)
        except (ssl.SSLError, ValueError) as error:
            raise CredentialError(
                f"client certificate and key cannot be used: {error}; both must be PEM and belong together"
            ) from error
    return context


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _connection_fault(error: Exception) -> str:
    """Return the fault of a connection, for an error text."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError) or not cause.errno or cause.errno < 0:
            return cause.strerror or str(cause)
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was lost in the middle of an answer"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    return str(error) or type(error).__name__


class _Decoding:
    """Turns an answer that cannot be read into an ApiError of the request."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, MalformedAnswer):
            raise ApiError(0, INVALID_RESPONSE, f"{self._what}: the answer cannot be read: {error}") from error


def _plain(value: object) -> object:
    """Return what the encoder takes for a value that it does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _given(**parameters: str) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value}


def _named(verb: str, resource: Resource[T], name: str, namespace: str) -> str:
    """Return the name of a request in messages, such as `patch nodes/n1`."""
    return f"{verb} {resource.label}" + (f" {namespace}/{name}" if namespace else f" {name}" if name else "")


def _path(resource: Resource[T], namespace: str, name: str = "") -> str:
    """Return the path of an object or, without a name, of all objects."""
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    middle = f"/namespaces/{quote(namespace, safe='')}" if resource.namespaced and namespace else ""
    path = f"{root}{middle}/{resource.plural}"
    if name:
        path += f"/{quote(name, safe='')}"
    return f"{path}/{resource.subresource}" if resource.subresource else path
