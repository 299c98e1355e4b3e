"""What the client sends to an API server and makes of its answers, over real TCP on loopback."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from bigfleet.cli.certs.issuing import Authority, Bearer
from bigfleet.operator.kubernetes import http
from bigfleet.operator.kubernetes.access import Right, missing_rights
from bigfleet.operator.kubernetes.api import SILENT, ApiError, EventType, KubernetesApi, PatchKind, Resource, WatchEvent
from bigfleet.operator.kubernetes.credentials import Credential, CredentialError, FileContent, InlineContent
from bigfleet.operator.kubernetes.credentials import StoredCredentials as Stored
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.http import HttpKubernetesApi, probing_socket
from bigfleet.operator.kubernetes.reflector import Reflector, ReflectorSettings
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
    EVICTIONS,
    NODES,
    PERSISTENT_VOLUMES,
    PODS,
    TOKEN_REQUESTS,
)
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.http_server import (
    ITEMS_PATH,
    ApiServer,
    answer,
    dropped,
    hanging,
    line,
    serving,
    status,
    stream,
)
from tests.patience import PATIENCE_SECONDS, wait_until_async

NODE = {"metadata": {"name": "n1", "uid": "u", "resourceVersion": "7"}, "spec": {"providerID": "x://1"}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """A server without TLS."""
    async with serving() as served:
        yield served


@asynccontextmanager
async def client(server: ApiServer, **options: Any) -> AsyncIterator[HttpKubernetesApi]:
    """Open a client that is patient and in no hurry, unless said otherwise."""
    endpoint = options.pop("endpoint", {})
    made = ApiEndpoint(server=server.url, source="test", **endpoint)
    limits = {"qps": 0.0, "request_seconds_max": PATIENCE_SECONDS, "watch_quiet_seconds_max": PATIENCE_SECONDS}
    async with HttpKubernetesApi(made, clock=LoopClock(), **(limits | options)) as api:
        yield api


@pytest.fixture
async def api(server: ApiServer) -> AsyncIterator[HttpKubernetesApi]:
    """A client of the server."""
    async with client(server) as made:
        yield made


def cr(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "d", "uid": name, "resourceVersion": "5"}, "spec": spec}


async def test_it_is_a_kubernetes_api(api: HttpKubernetesApi) -> None:
    checked: KubernetesApi = api
    assert checked is api


# ---- requests ----------------------------------------------------------------------------------------------------


async def test_paths_name_group_namespace_object_and_subresource(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.extend(answer(NODE) for _ in range(6))
    await api.get(NODES, "n1")
    await api.get(PODS, "p", namespace="ns")
    await api.get(CAPACITY_REQUESTS, "cr", namespace="ns")
    await api.patch(CAPACITY_REQUESTS.status, "cr", {"status": {"phase": "Pending"}}, namespace="ns")
    await api.create(TOKEN_REQUESTS, {"spec": {}}, namespace="kube-system", name="boot")
    await api.get(NODES, "a b/../c?d")
    assert [f"{each.method} {each.path}" for each in server.seen] == [
        "GET /api/v1/nodes/n1",
        "GET /api/v1/namespaces/ns/pods/p",
        "GET /apis/bigfleet.lucy.sh/v1alpha1/namespaces/ns/capacityrequests/cr",
        "PATCH /apis/bigfleet.lucy.sh/v1alpha1/namespaces/ns/capacityrequests/cr/status",
        "POST /api/v1/namespaces/kube-system/serviceaccounts/boot/token",
        "GET /api/v1/nodes/a%20b%2F..%2Fc%3Fd",
    ]


async def test_each_write_has_its_content_type_and_body(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.extend(answer(NODE) for _ in range(6))
    spec = MappingProxyType({"unschedulable": True})
    await api.create(NODES, {"spec": spec})
    await api.replace(NODES, "n1", {"spec": spec})
    await api.apply(NODES, "n1", {"spec": spec}, field_manager="me")
    await api.patch(NODES, "n1", {"spec": spec})
    await api.patch(NODES, "n1", {"spec": spec}, kind=PatchKind.STRATEGIC)
    await api.patch(NODES, "n1", [{"op": "test", "path": "/spec", "value": spec}], kind=PatchKind.JSON)
    assert [(each.method, each.headers["Content-Type"]) for each in server.seen] == [
        ("POST", "application/json"),
        ("PUT", "application/json"),
        ("PATCH", "application/apply-patch+yaml"),
        ("PATCH", "application/merge-patch+json"),
        ("PATCH", "application/strategic-merge-patch+json"),
        ("PATCH", "application/json-patch+json"),
    ]
    assert server.seen[2].query == {"fieldManager": "me", "force": "true"}
    assert [each.query for each in server.seen[3:]] == [{}, {}, {}]
    assert server.seen[0].body == {"spec": {"unschedulable": True}}
    assert server.seen[5].body == [{"op": "test", "path": "/spec", "value": {"unschedulable": True}}]


async def test_a_deletion_names_uid_and_grace(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.extend(answer(status(200, "", "")) for _ in range(2))
    await api.delete(PODS, "p", namespace="ns", uid="u", grace_seconds=0)
    await api.delete(PODS, "p", namespace="ns")
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    assert server.seen[0].body == {**options, "preconditions": {"uid": "u"}, "gracePeriodSeconds": 0}
    assert server.seen[1].body == options


async def test_an_eviction_is_answered_with_a_status(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer({"kind": "Status", "status": "Success", "code": 201}, 201))
    done = await api.create(EVICTIONS, {"kind": "Eviction"}, namespace="ns", name="p")
    assert done.status == "Success"
    assert server.seen[0].path == "/api/v1/namespaces/ns/pods/p/eviction"


async def test_every_request_says_who_it_is_from(server: ApiServer) -> None:
    server.script.append(answer(NODE))
    credentials = Stored(token=InlineContent(b"secret\n"))
    async with client(server, user_agent="bigfleet-operator/1", endpoint={"credentials": credentials}) as api:
        await api.get(NODES, "n1")
    assert server.seen[0].headers["User-Agent"] == "bigfleet-operator/1"
    assert server.seen[0].headers["Authorization"] == "Bearer secret"


async def test_a_list_comes_in_pages(server: ApiServer, api: HttpKubernetesApi) -> None:
    for number in range(5):
        server.store.put(f"r{number}", spec={"priority": number})
    first = await api.list_page(CAPACITY_REQUESTS, limit=3, label_selector="a=b,c", field_selector="x=y")
    last = await api.list_page(CAPACITY_REQUESTS, limit=3, continue_token=first.continue_token)
    assert [each.spec.priority for each in first.items + last.items] == [0, 1, 2, 3, 4]
    assert (first.resource_version, last.continue_token) == ("105", "")
    assert server.seen[0].query == {"limit": "3", "labelSelector": "a=b,c", "fieldSelector": "x=y"}
    assert server.seen[1].query == {"limit": "3", "continue": first.continue_token}


async def test_a_continue_token_is_sent_back_as_it_came(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer({"metadata": {"resourceVersion": "9"}, "items": []}))
    await api.list_page(CAPACITY_REQUESTS, continue_token="a+b/c==&d")
    assert server.seen[0].query["continue"] == "a+b/c==&d"


async def test_a_list_of_nothing_is_empty(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer({"metadata": {"resourceVersion": "9"}, "items": None}))
    page = await api.list_page(CAPACITY_REQUESTS, namespace="ns", resource_version="5")
    assert (page.items, page.resource_version) == ([], "9")
    assert server.seen[0].query["resourceVersion"] == "5"


async def test_an_object_that_does_not_fit_does_not_hide_the_others(server: ApiServer, api: HttpKubernetesApi) -> None:
    """It was stored before its schema forbade it; what is left of it is its metadata."""
    server.script.append(
        answer({"metadata": {"resourceVersion": "9"}, "items": [cr("a", priority=1), cr("b", priority="high")]})
    )
    with capture_logs() as logs:
        page = await api.list_page(CAPACITY_REQUESTS)
    assert [(each.metadata.name, each.spec.priority) for each in page.items] == [("a", 1), ("b", 0)]
    assert api.undecodable_objects_total == 1
    assert [(each["event"], each["name"]) for each in logs] == [("operator.object_malformed", "b")]
    assert "priority" in logs[0]["error"]


# ---- refusals ----------------------------------------------------------------------------------------------------


async def refusal(api: HttpKubernetesApi) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await api.get(NODES, "n1")
    return caught.value


async def test_a_status_becomes_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    causes = [{"reason": "DisruptionBudget", "message": "needs 2", "field": ""}]
    server.script.append(answer(status(429, "TooManyRequests", "Cannot evict", details={"causes": causes}), 429))
    error = await refusal(api)
    assert (error.status, error.reason, error.causes) == (429, "TooManyRequests", ("DisruptionBudget",))
    assert error.retry_after_seconds is None
    assert str(error) == "get nodes n1: Cannot evict (HTTP 429)"
    assert error.is_transient


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry_After": "7"}, {}, 7.0),
        ({}, {"details": {"retryAfterSeconds": 3}}, 3.0),
        ({"Retry_After": "7"}, {"details": {"retryAfterSeconds": 3}}, 7.0),
        ({"Retry_After": "9" * 400}, {}, 600.0),
        ({"Retry_After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, None),
    ],
)
async def test_the_server_may_say_when_to_ask_again(
    server: ApiServer,
    api: HttpKubernetesApi,
    headers: dict[str, str],
    details: dict[str, Any],
    seconds: float | None,
) -> None:
    server.script.append(answer(status(429, "TooManyRequests", "later", **details), 429, **headers))
    assert (await refusal(api)).retry_after_seconds == seconds


async def test_a_kind_that_is_not_served_is_answered_in_plain_text(server: ApiServer, api: HttpKubernetesApi) -> None:
    """So does a load balancer that has no API server; neither says that an object is gone."""
    error = await refusal(api)
    assert error.is_kind_unserved
    assert not error.is_not_found
    assert error.is_transient
    assert str(error) == "get nodes n1: 404 page not found (HTTP 404)"


@pytest.mark.parametrize(
    "body",
    ["{}", '{"kind": "Status", "metadata": {}, "status": "Failure"}', "<html>log in</html>", '{"metadata": {}}'],
)
async def test_an_answer_that_is_no_list_empties_nothing(server: ApiServer, api: HttpKubernetesApi, body: str) -> None:
    server.script.append(answer(body))
    with pytest.raises(ApiError, match="the answer cannot be read") as raised:
        await api.list_page(CAPACITY_REQUESTS)
    assert raised.value.is_transient


@pytest.mark.parametrize("body", ["{}", '{"metadata": {}}', '{"status": {}}', '{"status": {"reason": "x"}}'])
async def test_an_answer_that_is_no_review_takes_no_right(server: ApiServer, api: HttpKubernetesApi, body: str) -> None:
    server.script += [answer(body)] * 2
    with pytest.raises(ApiError, match="the answer cannot be read") as raised:
        await missing_rights(api, [Right(resource=NODES, verbs=("get",))])
    assert raised.value.is_transient


async def test_an_answer_that_is_no_object_is_refused(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer("{}"))
    with pytest.raises(ApiError, match=r"get nodes n1: the answer cannot be read: it is no object"):
        await api.get(NODES, "n1")


@pytest.mark.parametrize(("code", "is_transient"), [(401, True), (302, True), (400, False), (403, False), (422, False)])
async def test_what_says_nothing_of_the_request_is_transient(
    server: ApiServer, api: HttpKubernetesApi, code: int, is_transient: bool
) -> None:
    server.script.append(answer("no", code))
    assert (await refusal(api)).is_transient == is_transient


async def test_a_long_page_of_a_proxy_is_cut(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer("<html>" + "x" * 10_000, 502))
    error = await refusal(api)
    assert error.status == 502
    assert error.is_transient
    assert len(str(error)) < 300


async def test_a_redirect_is_refused(server: ApiServer, api: HttpKubernetesApi) -> None:
    """It would hand the token to another server."""
    server.script.append(answer("go there", 302, Location=f"{server.url}/elsewhere"))
    assert (await refusal(api)).status == 302
    assert len(server.seen) == 1


@pytest.mark.parametrize("body", ["", "{", "[]", '{"metadata": {"name": 1}}', "nothing"])
async def test_an_answer_that_cannot_be_read_is_an_error(server: ApiServer, api: HttpKubernetesApi, body: str) -> None:
    server.script.append(answer(body))
    error = await refusal(api)
    assert (error.status, error.reason) == (0, "InvalidResponse")
    assert str(error).startswith("get nodes n1: the answer cannot be read: ")


@pytest.mark.parametrize("body", ["{", "[]", '{"items": 3}', '{"items": [3]}'])
async def test_a_list_that_cannot_be_read_is_an_error(server: ApiServer, api: HttpKubernetesApi, body: str) -> None:
    server.script.append(answer(body))
    with pytest.raises(ApiError, match="list nodes: the answer cannot be read") as caught:
        await api.list_page(NODES)
    assert caught.value.status == 0


async def test_a_dropped_connection_is_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    # Twice, because a request that changes nothing is sent again on a fresh connection.
    server.script.extend([dropped, dropped])
    error = await refusal(api)
    assert (error.status, error.reason) == (0, "Unreachable")
    # Whether it was closed or reset depends on the system.
    assert str(error).startswith(f"get nodes n1: {server.url}: ")
    assert "onnection" in str(error)


async def test_half_an_answer_is_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(stream(b'{"metadata": {"na', drops=True))
    error = await refusal(api)
    assert error.reason == "Unreachable"
    assert str(error).startswith(f"get nodes n1: {server.url}: ")
    assert "onnection" in str(error)


async def test_an_answer_without_end_is_an_error(
    server: ApiServer, api: HttpKubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES_MAX", 1_000_000)
    sent_bytes = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 100_000)
            sent_bytes += 100_000

    server.script.append(flood)
    with pytest.raises(ApiError, match=r"list .*: the server sent an answer of more than 1000000 bytes") as caught:
        await api.list_page(CAPACITY_REQUESTS)
    assert caught.value.is_transient
    server.store.put("r")
    assert [each.metadata.name for each in (await api.list_page(CAPACITY_REQUESTS)).items] == ["r"]
    # What the buffers of both sides hold, beside what was read.
    assert sent_bytes < 20_000_000


async def test_a_server_that_does_not_answer_is_an_error(server: ApiServer) -> None:
    server.script.append(hanging)
    async with client(server, request_seconds_max=0.05) as api:
        error = await refusal(api)
    assert (error.status, error.reason) == (0, "Timeout")
    assert str(error) == f"get nodes n1: {server.url}: no answer within 0.05 s"


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with client(ApiServer(url=url)) as api:
            error = await refusal(api)
    assert (error.status, error.reason) == (0, "Unreachable")
    assert str(error) == f"get nodes n1: {url}: Connection refused"


async def test_a_host_that_has_no_address_is_an_error() -> None:
    async with client(ApiServer(url="https://api.invalid")) as api:
        error = await refusal(api)
    assert error.reason == "Unreachable"
    assert "SSLContext" not in str(error)


async def test_a_closed_client_is_a_defect_of_its_user(api: HttpKubernetesApi) -> None:
    await api.aclose()
    await api.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await api.get(NODES, "n1")


# ---- watches -----------------------------------------------------------------------------------------------------


async def test_a_watch_carries_events_and_bookmarks(server: ApiServer, api: HttpKubernetesApi) -> None:
    bookmark = line("BOOKMARK", {"kind": "CapacityRequest", "metadata": {"resourceVersion": "90"}, "spec": {}})
    whole = line("ADDED", cr("a", priority=3)) + bookmark + line("DELETED", cr("a"))
    # However it is cut, also within a character of several bytes.
    server.script.append(stream(*(whole[at : at + 7] for at in range(0, len(whole), 7))))
    async with api.watch(CAPACITY_REQUESTS, resource_version="4", timeout_seconds=60, label_selector="a=b") as events:
        seen = [event async for event in events]
    assert [(each.type, each.resource_version) for each in seen] == [
        (EventType.ADDED, "5"),
        (EventType.BOOKMARK, "90"),
        (EventType.DELETED, "5"),
    ]
    assert seen[0].object is not None
    assert seen[0].object.spec.priority == 3
    assert seen[1].object is None
    assert server.seen[0].query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "4",
        "timeoutSeconds": "60",
        "labelSelector": "a=b",
    }


async def drain(api: HttpKubernetesApi, resource: Resource[Any], seen: list[WatchEvent[Any]]) -> None:
    """Watch until the watch ends."""
    async with api.watch(resource, resource_version="4") as events:
        async for event in events:
            seen.append(event)


async def watch_error(
    api: HttpKubernetesApi, *, events_before: int = 0, resource: Resource[Any] = CAPACITY_REQUESTS
) -> ApiError:
    """Watch until the watch fails after that many events."""
    seen: list[WatchEvent[Any]] = []
    with pytest.raises(ApiError) as caught:
        await drain(api, resource, seen)
    assert len(seen) == events_before
    return caught.value


async def test_an_error_in_the_stream_is_raised(server: ApiServer, api: HttpKubernetesApi) -> None:
    gone = line("ERROR", status(410, "Expired", "too old resource version: 4 (100)"))
    server.script.append(stream(line("ADDED", cr("a")) + gone))
    error = await watch_error(api, events_before=1)
    assert error.is_expired
    assert error.reason == "Expired"
    assert "too old resource version: 4 (100)" in str(error)


async def test_an_error_in_the_stream_of_a_kind_without_status_is_raised(
    server: ApiServer, api: HttpKubernetesApi
) -> None:
    server.script.append(stream(line("ERROR", status(410, "Expired", "too old"))))
    assert (await watch_error(api, resource=PERSISTENT_VOLUMES)).is_expired


async def test_a_watch_that_is_refused_is_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(answer(status(403, "Forbidden", "no"), 403))
    error = await watch_error(api)
    assert error.is_forbidden
    assert str(error) == "watch capacityrequests.bigfleet.lucy.sh: no (HTTP 403)"


async def test_a_watch_that_is_cut_is_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(stream(line("ADDED", cr("a")), drops=True))
    assert (await watch_error(api, events_before=1)).reason == "Unreachable"


async def test_half_a_line_at_the_end_is_an_error(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(stream(line("ADDED", cr("a")), line("ADDED", cr("b"))[:30]))
    assert (await watch_error(api, events_before=1)).reason == "InvalidResponse"


@pytest.mark.parametrize("text", [b"nonsense\n", b'{"type": "RENAMED", "object": {}}\n', b'{"object": {}}\n', b"[]\n"])
async def test_a_line_that_is_no_event_is_an_error(server: ApiServer, api: HttpKubernetesApi, text: bytes) -> None:
    server.script.append(stream(text))
    assert (await watch_error(api)).reason == "InvalidResponse"


async def test_a_silent_watch_is_an_error(server: ApiServer) -> None:
    server.script.append(stream(PATIENCE_SECONDS))
    async with client(server, watch_quiet_seconds_max=0.05) as api:
        error = await watch_error(api)
    assert (error.status, error.reason) == (0, SILENT)
    assert "nothing received for 0.05 s" in str(error)


async def test_an_event_that_does_not_fit_is_its_metadata(server: ApiServer, api: HttpKubernetesApi) -> None:
    server.script.append(stream(line("ADDED", cr("b", priority="high")) + line("ADDED", cr("a", priority=1))))
    with capture_logs() as logs:
        async with api.watch(CAPACITY_REQUESTS, resource_version="4") as events:
            seen = [event.object async for event in events]
    assert [(each.metadata.name, each.spec.priority) for each in seen if each] == [("b", 0), ("a", 1)]
    assert [each["name"] for each in logs] == ["b"]


async def test_an_object_may_be_larger_than_a_buffer(server: ApiServer, api: HttpKubernetesApi) -> None:
    large = {**cr("a"), "metadata": {**cr("a")["metadata"], "annotations": {"x": "y" * 1_500_000}}}
    server.script.append(stream(line("ADDED", large)))
    async with api.watch(CAPACITY_REQUESTS, resource_version="4") as events:
        seen = [event.object async for event in events]
    assert [len((each.metadata.annotations or {})["x"]) for each in seen if each] == [1_500_000]


async def test_leaving_a_watch_closes_its_connection(server: ApiServer, api: HttpKubernetesApi) -> None:
    async with api.watch(CAPACITY_REQUESTS, resource_version="100") as events:
        await wait_until_async(_async(lambda: server.watches))
        server.store.put("a")
        server.changed()
        await anext(aiter(events))
    await wait_until_async(_async(lambda: not server.watches))


def _async(condition: Any) -> Any:
    async def ask() -> object:
        return condition()

    return ask


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


# ---- with a reflector --------------------------------------------------------------------------------------------


async def test_a_view_follows_a_server_through_its_faults(server: ApiServer, api: HttpKubernetesApi) -> None:
    """Pages, events, a cut connection, 429, an outage of the kind, an expired version in the stream."""
    store = server.store
    for number in range(5):
        store.put(f"r{number}")
    settings = ReflectorSettings(page_size=2, backoff_first_seconds=0.01, backoff_seconds_max=0.02)
    reflector = Reflector(api, CAPACITY_REQUESTS, clock=LoopClock(), rng=random.Random(1), settings=settings)

    async def same() -> bool:
        return {each.metadata.key: each.metadata.resource_version for each in reflector} == store.names()

    running = asyncio.create_task(reflector.run())
    try:
        await reflector.wait_synced()
        assert await same()
        await wait_until_async(_async(lambda: server.watches))
        server.script.extend(
            [
                answer(status(429, "TooManyRequests", "slow down"), 429),
                answer("404 page not found\n", 404),
                stream(line("ADDED", cr("half"))[:20], drops=True),
            ]
        )
        server.cut_watches()
        store.put("r1")
        store.put("r9")
        await wait_until_async(_async(lambda: server.watches))
        await wait_until_async(same)
        assert reflector.lists_total == 1
        server.script.append(stream(line("ERROR", status(410, "Expired", "too old"))))
        server.cut_watches()
        store.delete("r0")
        store.compact()
        await wait_until_async(same)
        await wait_until_async(_async(lambda: server.watches))
        assert reflector.lists_total == 2
        assert not server.script
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert server.seen[0].path == ITEMS_PATH
