"""What a client of the simulated API server sees of faults, down to watches that fall silent."""

from typing import Any

import pytest

from bigfleet.operator.kubernetes.api import ApiError, EventType, KubernetesApi
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, NODES, PODS
from bigfleet.sim.kernel.virtual_time import LoopClock
from bigfleet.sim.kubernetes.client import REQUEST_TIMEOUT_SECONDS, InMemoryApi
from bigfleet.sim.kubernetes.faults import ApiCall, ApiFaults, fail_times
from bigfleet.sim.kubernetes.server import InMemoryApiServer

pytestmark = pytest.mark.virtual_time

NODE: dict[str, Any] = {"metadata": {"name": "n"}}


def server_with_a_node() -> InMemoryApiServer:
    """Return a server with one node."""
    server = InMemoryApiServer(LoopClock())
    server.put(NODES, NODE)
    return server


async def error_of(api: KubernetesApi) -> ApiError:
    """Return the error of a read."""
    with pytest.raises(ApiError) as caught:
        await api.get(NODES, "n")
    return caught.value


async def test_latency_delays_the_effect_and_is_added_up() -> None:
    """That of the server and that of the client; the answer is as of the time of arrival."""
    server = server_with_a_node()
    server.faults.latency_seconds = 2.0
    api = InMemoryApi(server, faults=ApiFaults(latency_seconds=1.0))
    before = server.clock.monotonic_seconds()
    await api.delete(NODES, "n")

    assert server.clock.monotonic_seconds() - before == 3.0
    assert server.read(NODES, "n") is None


async def test_a_server_that_is_down_refuses_connections_and_breaks_watches() -> None:
    """With status 0; once it is up again everything is as it was."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    async with api.watch(NODES, resource_version="1") as stream:
        assert (await anext(stream)).type is EventType.ADDED
        server.go_down()
        with pytest.raises(ApiError) as caught:
            await anext(stream)
    error = await error_of(api)
    server.come_up()

    assert (caught.value.status, error.status, error.reason, error.is_transient) == (0, 0, "Unreachable", True)
    assert (await api.get(NODES, "n")).metadata.name == "n"


async def test_one_client_is_cut_off_and_another_is_not() -> None:
    """Its watches break, those of the other go on."""
    server = server_with_a_node()
    one, other = InMemoryApi(server), InMemoryApi(server)
    async with one.watch(NODES, resource_version="1") as cut, other.watch(NODES, resource_version="1") as whole:
        one.disconnect()
        assert (await anext(whole)).type is EventType.ADDED
        await anext(cut)
        with pytest.raises(ApiError):
            await anext(cut)
    assert (await error_of(one)).status == 0
    assert (await other.get(NODES, "n")).metadata.name == "n"
    one.reconnect()
    assert (await one.get(NODES, "n")).metadata.name == "n"


async def test_a_server_that_hangs_is_given_up_after_a_while() -> None:
    """A call after its timeout, a watch when it has been silent for too long."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    async with api.watch(NODES, resource_version=str(server.store.version)) as stream:
        server.faults.is_hanging = True
        server.put(NODES, {"metadata": {"name": "unseen"}})
        before = server.clock.monotonic_seconds()
        error = await error_of(api)
        waited = server.clock.monotonic_seconds() - before
        with pytest.raises(ApiError) as caught:
            await anext(stream)

    assert (error.status, waited) == (0, REQUEST_TIMEOUT_SECONDS)
    assert caught.value.status == 0


async def test_what_a_short_silence_held_back_arrives_later() -> None:
    """In order, with the next event or bookmark."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    async with api.watch(NODES, resource_version=str(server.store.version)) as stream:
        server.faults.is_hanging = True
        server.put(NODES, {"metadata": {"name": "a"}})
        server.faults.is_hanging = False
        server.put(NODES, {"metadata": {"name": "b"}})
        names = [event.object.metadata.name for event in [await anext(stream), await anext(stream)] if event.object]

    assert names == ["a", "b"]


async def test_a_call_that_is_refused_has_no_effect() -> None:
    """Only so many of one verb and resource are."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    api.faults.refuse = fail_times(2, ApiError(500, "InternalError", "etcd"), verb="delete", resource="nodes")
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await api.delete(NODES, "n")
        assert caught.value.status == 500
        assert (await api.get(NODES, "n")).metadata.name == "n"
    await api.delete(NODES, "n")

    assert server.read(NODES, "n") is None


async def test_a_call_whose_answer_is_lost_has_its_effect() -> None:
    """The client cannot know."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    api.faults.lose_answer = lambda call: call.verb == "delete"
    with pytest.raises(ApiError) as caught:
        await api.delete(NODES, "n")

    assert caught.value.status == 0
    assert server.read(NODES, "n") is None


async def test_calls_are_recorded_in_order() -> None:
    """Those that failed too."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    await api.get(NODES, "n")
    with pytest.raises(ApiError):
        await api.patch(CAPACITY_REQUESTS.status, "a", {}, namespace="default")

    assert list(api.calls) == [
        ApiCall("get", "nodes", "", "n"),
        ApiCall("patch", "capacityrequests.bigfleet.lucy.sh/status", "default", "a"),
    ]
    assert [str(call) for call in api.calls][1] == "patch capacityrequests.bigfleet.lucy.sh/status default/a"


async def test_bookmarks_come_once_a_minute_and_at_the_end() -> None:
    """With the version of the whole server, also when nothing of the kind has changed."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    server.put(PODS, {"metadata": {"name": "p", "namespace": "default"}})
    async with api.watch(NODES, resource_version=str(server.store.version), timeout_seconds=90) as stream:
        events = [(event.type, event.resource_version, server.clock.monotonic_seconds()) async for event in stream]

    version = str(server.store.version)
    assert events == [(EventType.BOOKMARK, version, 60.0), (EventType.BOOKMARK, version, 90.0)]


async def test_a_dropped_watch_ends_without_an_error() -> None:
    """As servers end watches now and then."""
    server = server_with_a_node()
    api = InMemoryApi(server)
    async with api.watch(NODES, resource_version=str(server.store.version)) as stream:
        server.drop_watches()
        events = [event async for event in stream]

    assert events == []
    assert server.watches == []


async def test_a_kind_that_is_not_served_is_named_so() -> None:
    """Nor watched."""
    server = server_with_a_node()
    server.unserved.add(("", "nodes"))
    api = InMemoryApi(server)
    assert (await error_of(api)).is_kind_unserved
    with pytest.raises(ApiError) as caught:
        async with api.watch(NODES, resource_version=""):
            pass
    assert caught.value.is_kind_unserved
