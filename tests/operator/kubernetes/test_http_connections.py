"""How the client connects to an API server: credentials, TLS, proxies, and how many connections it opens."""

import asyncio
import contextlib
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.operator.kubernetes.credentials import Credential, CredentialError, FileContent, InlineContent
from bigfleet.operator.kubernetes.credentials import StoredCredentials as Stored
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.http import HttpKubernetesApi, probing_socket
from bigfleet.operator.kubernetes.resources import (
    NODES,
)
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.http_server import (
    NODE,
    ApiServer,
    answer,
    client,
    refusal,
    serving,
    status,
)

# ---- credentials -------------------------------------------------------------------------------------------------


async def test_a_rotated_token_is_read_again(server: ApiServer, tmp_path: Path) -> None:
    """The file has changed between the request and its refusal: the request is sent once more."""
    path = tmp_path / "token"
    path.write_text("old")
    credentials = Stored(token=FileContent(path, place="test"))

    async def rotate(request: Any) -> Any:
        path.write_text("new")
        return await answer(status(401, "Unauthorized", "Unauthorized"), 401)(request)

    server.script.extend([answer(NODE), rotate, answer(NODE), answer(NODE)])
    async with client(server, endpoint={"credentials": credentials}) as api:
        await api.get(NODES, "n1")
        assert (await api.get(NODES, "n1")).metadata.name == "n1"
        await api.get(NODES, "n1")
    assert [each.headers["Authorization"][7:] for each in server.seen] == ["old", "old", "new", "new"]


async def test_a_token_that_is_still_refused_is_an_error(server: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    refused = answer(status(401, "Unauthorized", "Unauthorized"), 401)

    async def rotate(request: Any) -> Any:
        path.write_text("new")
        return await refused(request)

    server.script.extend([refused, rotate, refused])
    credentials = Stored(token=FileContent(path, place="test"))
    async with client(server, endpoint={"credentials": credentials}) as api:
        assert (await refusal(api)).status == 401
        # It is the same one still: nothing would change.
        assert len(server.seen) == 1
        assert (await refusal(api)).status == 401
    assert len(server.seen) == 3


async def test_a_credential_that_cannot_be_read_is_an_error(server: ApiServer) -> None:
    class Broken:
        async def current(self) -> Credential:
            raise CredentialError("config: users[x].user.exec: 'login' failed; log in again")

        def invalidate(self, refused: Credential) -> None:
            pass

    async with client(server, endpoint={"credentials": Broken()}) as api:
        error = await refusal(api)
    assert (error.status, error.reason) == (0, "Credentials")
    assert str(error) == "get nodes n1: config: users[x].user.exec: 'login' failed; log in again"
    assert server.seen == []


# ---- TLS ---------------------------------------------------------------------------------------------------------


class Tls:
    """An authority, a server's context that asks for client certificates, and a client's certificate."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        now = datetime.now(UTC)
        self._authority = Authority.create(now)
        issued = self._authority.issue(Bearer(name="server", hosts=hosts), now, 1)
        pem = folder / "server.pem"
        pem.write_bytes(issued.certificate + issued.key)
        self.authority_pem = self._authority.pems.certificate
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=self.authority_pem.decode())
        self.context.load_cert_chain(pem)
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.server_pem = issued.certificate
        self.client = self._authority.issue(Bearer(name="client", uris=("bigfleet://admin/x",)), now, 1)


async def test_a_server_is_trusted_by_its_authority(tmp_path: Path) -> None:
    tls = Tls(tmp_path, "127.0.0.1")
    async with serving(tls.context) as server:
        server.script.append(answer(NODE))
        async with client(server, endpoint={"authority": InlineContent(tls.authority_pem)}) as api:
            assert (await api.get(NODES, "n1")).metadata.name == "n1"


async def test_a_server_may_be_its_own_authority(tmp_path: Path) -> None:
    """A kubeconfig may name the server's certificate in place of its issuer's."""
    tls = Tls(tmp_path, "127.0.0.1")
    async with serving(tls.context) as server:
        server.script.append(answer(NODE))
        async with client(server, endpoint={"authority": InlineContent(tls.server_pem)}) as api:
            assert (await api.get(NODES, "n1")).metadata.name == "n1"


async def test_a_server_of_another_authority_is_refused(tmp_path: Path) -> None:
    tls = Tls(tmp_path, "127.0.0.1")
    other = Authority.create(datetime.now(UTC)).pems.certificate
    async with serving(tls.context) as server:
        for endpoint in ({}, {"authority": InlineContent(other)}):
            async with client(server, endpoint=endpoint) as api:
                error = await refusal(api)
            assert (error.status, error.reason) == (0, "Unreachable")
            assert "certificate verify failed" in str(error)
        server.script.append(answer(NODE))
        async with client(server, endpoint={"verifies": False}) as api:
            await api.get(NODES, "n1")
    assert len(server.seen) == 1


async def test_a_server_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    tls = Tls(tmp_path, "kubernetes.default.svc")
    trust = {"authority": InlineContent(tls.authority_pem)}
    async with serving(tls.context) as server:
        async with client(server, endpoint=trust) as api:
            assert "mismatch" in str(await refusal(api))
        server.script.append(answer(NODE))
        async with client(server, endpoint={**trust, "tls_server_name": "kubernetes.default.svc"}) as api:
            await api.get(NODES, "n1")


async def test_a_client_certificate_is_shown(tmp_path: Path) -> None:
    tls = Tls(tmp_path, "127.0.0.1")
    shown: list[Any] = []

    async def look(request: Any) -> Any:
        shown.append(request.transport.get_extra_info("peercert"))
        return await answer(NODE)(request)

    credentials = Stored(certificate=InlineContent(tls.client.certificate), key=InlineContent(tls.client.key))
    async with serving(tls.context) as server:
        server.script.append(look)
        endpoint = {"authority": InlineContent(tls.authority_pem), "credentials": credentials}
        async with client(server, endpoint=endpoint) as api:
            await api.get(NODES, "n1")
    assert shown[0]["subject"] == ((("commonName", "client"),),)


@pytest.mark.parametrize("part", ["authority", "certificate", "key"])
async def test_a_pem_that_is_none_is_an_error(tmp_path: Path, part: str) -> None:
    tls = Tls(tmp_path, "127.0.0.1")
    pems = {"authority": tls.authority_pem, "certificate": tls.client.certificate, "key": tls.client.key}
    content = {name: InlineContent(pem) for name, pem in (pems | {part: b"nonsense"}).items()}
    endpoint = {
        "authority": content["authority"],
        "credentials": Stored(certificate=content["certificate"], key=content["key"]),
    }
    async with client(ApiServer(url="https://127.0.0.1:9"), endpoint=endpoint) as api:
        error = await refusal(api)
    assert (error.status, error.reason) == (0, "Credentials")
    assert ("authority" in str(error)) == (part == "authority")
    assert "PEM" in str(error)


# ---- proxies and pools -------------------------------------------------------------------------------------------


class Proxy:
    """Connects clients to the one server that there is, and notes for which one they ask."""

    def __init__(self, server: ApiServer) -> None:
        self._port = int(server.url.rpartition(":")[2])
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.decode().splitlines()[0])
        inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self._copy(reader, outer), self._copy(inner, writer))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()


async def test_a_server_is_reached_through_a_proxy(tmp_path: Path) -> None:
    """The proxy is asked for the server by name; the name of its certificate is checked all the same."""
    tls = Tls(tmp_path, "api.example")
    async with serving(tls.context) as server:
        server.script.append(answer(NODE))
        proxy = Proxy(server)
        listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        endpoint = {
            "authority": InlineContent(tls.authority_pem),
            "proxy_url": f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}",
        }
        async with client(ApiServer(url="https://api.example:6443"), endpoint=endpoint) as api:
            assert (await api.get(NODES, "n1")).metadata.name == "n1"
        async with client(ApiServer(url="https://other.example"), endpoint=endpoint) as api:
            assert "mismatch" in str(await refusal(api))
        listening.close()
    assert proxy.asked == ["CONNECT api.example:6443 HTTP/1.1", "CONNECT other.example:443 HTTP/1.1"]


async def test_no_more_connections_are_open_than_allowed(server: ApiServer) -> None:
    under_way = 0
    under_way_max = 0

    async def wait_a_little(request: Any) -> Any:
        nonlocal under_way, under_way_max
        under_way += 1
        under_way_max = max(under_way_max, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return await answer(NODE)(request)

    server.script.extend([wait_a_little] * 10)
    async with client(server, connections_max=2) as api:
        await asyncio.gather(*(api.get(NODES, "n1") for _ in range(10)))
    assert (len(server.seen), under_way_max) == (10, 2)


def test_a_peer_that_is_gone_is_looked_for() -> None:
    with probing_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        probes = [
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
    assert probes == [15, 5, 3]


async def test_requests_wait_for_their_turn(server: ApiServer) -> None:
    """The throttle waits on the clock that is handed in."""
    waits: list[float] = []

    class Clock(LoopClock):
        async def sleep(self, seconds: float) -> None:
            waits.append(seconds)

    server.script.extend([answer(NODE)] * 5)
    made = ApiEndpoint(server=server.url, source="test")
    async with HttpKubernetesApi(made, clock=Clock(), qps=0.001, burst=3) as api:
        for _ in range(5):
            await api.get(NODES, "n1")
    assert [round(seconds, -3) for seconds in waits] == [1000, 2000]
