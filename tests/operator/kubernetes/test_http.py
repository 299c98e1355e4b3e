"""What the client sends to an API server and makes of its answers, over real TCP on loopback."""

import asyncio
import random
import socket
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from bigfleet.operator.kubernetes import http
from bigfleet.operator.kubernetes.access import Right, missing_rights
from bigfleet.operator.kubernetes.api import SILENT, ApiError, EventType, KubernetesApi, PatchKind, Resource, WatchEvent
from bigfleet.operator.kubernetes.credentials import InlineContent
from bigfleet.operator.kubernetes.credentials import StoredCredentials as Stored
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
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
    NODE,
    ApiServer,
    answer,
    client,
    dropped,
    hanging,
    line,
    refusal,
    status,
    stream,
)
from tests.patience import PATIENCE_SECONDS, wait_until_async


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
