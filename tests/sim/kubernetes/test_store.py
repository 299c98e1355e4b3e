"""The history, the garbage, and what acts past the API of the simulated server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.api import ApiError, EventType, JsonObject
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, NODES, PODS
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from bigfleet.sim.kubernetes.client import InMemoryApi
from bigfleet.sim.kubernetes.kinds import POD_DISRUPTION_BUDGETS, REPLICA_SETS
from bigfleet.sim.kubernetes.server import InMemoryApiServer


def node(name: str, **labels: str) -> JsonObject:
    """Return a node as it is written."""
    return {"metadata": {"name": name, "labels": labels}}


@pytest.mark.virtual_time
async def test_the_history_of_one_kind_is_bounded() -> None:
    """A watch from before it has expired; the histories of other kinds are not shortened."""
    server = InMemoryApiServer(LoopClock(), history_max=3)
    api = InMemoryApi(server)
    server.put(PODS, {"metadata": {"name": "p", "namespace": "default"}})
    for number in range(5):
        server.put(NODES, node(f"n{number}"))
    async with api.watch(NODES, resource_version="1") as nodes, api.watch(PODS, resource_version="1") as pods:
        with pytest.raises(ApiError) as caught:
            await anext(nodes)
        event = await anext(pods)

    assert caught.value.is_expired
    assert event.type is EventType.ADDED


@pytest.mark.virtual_time
async def test_a_list_cannot_be_continued_after_a_compaction() -> None:
    """410, and the list is read again."""
    server = InMemoryApiServer(LoopClock())
    api = InMemoryApi(server)
    for number in range(3):
        server.put(NODES, node(f"n{number}"))
    page = await api.list_page(NODES, limit=2)
    server.store.compact()
    with pytest.raises(ApiError) as caught:
        await api.list_page(NODES, limit=2, continue_token=page.continue_token)

    assert caught.value.is_expired


@pytest.mark.virtual_time
async def test_a_list_as_of_a_later_version_is_refused() -> None:
    """With 504, as from a server whose cache is behind."""
    server = InMemoryApiServer(LoopClock())
    with pytest.raises(ApiError) as caught:
        await InMemoryApi(server).list_page(NODES, resource_version="1000")

    assert (caught.value.status, caught.value.is_transient) == (504, True)


@pytest.mark.virtual_time
async def test_garbage_is_collected_through_generations_of_owners() -> None:
    """An object with one owner left stays."""
    server = InMemoryApiServer(LoopClock())
    top = server.put(NODES, node("top"))

    def owned(name: str, *uids: str) -> dict[str, Any]:
        references = [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": uid} for uid in uids]
        return {"metadata": {"name": name, "ownerReferences": references}}

    middle = server.put(NODES, owned("middle", top.metadata.uid))
    server.put(NODES, owned("bottom", middle.metadata.uid))
    other = server.put(NODES, node("other"))
    server.put(NODES, owned("shared", top.metadata.uid, other.metadata.uid))
    server.remove(NODES, "top")

    assert server.collect_garbage() == 2
    assert [each.metadata.name for each in server.read_all(NODES)] == ["other", "shared"]
    assert server.collect_garbage() == 0


@pytest.mark.virtual_time
async def test_what_is_put_past_the_api_is_stored_as_it_is() -> None:
    """Status, uid and deletion included; a second put replaces and counts the generation."""
    server = InMemoryApiServer(LoopClock())
    body: JsonObject = {
        "metadata": {"name": "a", "namespace": "default", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"priority": 1},
        "status": {"phase": "Acknowledged"},
    }
    first = server.put(CAPACITY_REQUESTS, body)
    second = server.put(CAPACITY_REQUESTS, {**body, "spec": {"priority": 2}})

    assert (first.metadata.uid, first.status.phase, first.metadata.generation) == ("u", "Acknowledged", 1)
    assert first.metadata.deletion_timestamp == "2026-01-01T00:00:00Z"
    assert (second.metadata.generation, second.spec.priority) == (2, 2)


@pytest.mark.virtual_time
async def test_a_budget_counts_the_pods_that_a_controller_wants() -> None:
    """One of three pods is missing, and one may be: none is evicted."""
    server = InMemoryApiServer(LoopClock())
    owner = server.put(REPLICA_SETS, {"metadata": {"name": "web", "namespace": "default"}, "spec": {"replicas": 3}})
    reference = {"kind": "ReplicaSet", "name": "web", "uid": owner["metadata"]["uid"], "controller": True}
    for name in ("a", "b"):
        metadata = {"name": name, "namespace": "default", "labels": {"app": "web"}, "ownerReferences": [reference]}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        server.put(PODS, {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status})
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    server.put(POD_DISRUPTION_BUDGETS, {"metadata": {"name": "web", "namespace": "default"}, "spec": spec})
    with pytest.raises(ApiError) as caught:
        server.evict(PODS, {}, ("default", "a"))

    assert caught.value.causes == ("DisruptionBudget",)


_NAMES = st.sampled_from(["a", "b", "c"])
_CHANGES = st.one_of(
    st.tuples(st.just("put"), _NAMES, st.sampled_from(["yes", "no"])), st.tuples(st.just("remove"), _NAMES, st.just(""))
)


@given(st.lists(_CHANGES, max_size=30), st.integers(0, 30), st.booleans())
def test_a_watch_rebuilds_what_a_list_says(changes: list[tuple[str, str, str]], opened: int, selects: bool) -> None:
    """With any changes before and after it is opened, with and without a selector."""

    async def run() -> None:
        server = InMemoryApiServer(LoopClock())
        selector = "seen=yes" if selects else ""
        api = InMemoryApi(server)

        def change(kind: str, name: str, value: str) -> None:
            if kind == "put":
                server.put(NODES, node(name, seen=value))
            elif server.read(NODES, name) is not None:
                server.remove(NODES, name)

        for each in changes[:opened]:
            change(*each)
        page = await api.list_page(NODES, label_selector=selector)
        seen = {each.metadata.name: each.metadata.resource_version for each in page.items}
        async with api.watch(
            NODES, resource_version=page.resource_version, label_selector=selector, timeout_seconds=1
        ) as stream:
            for each in changes[opened:]:
                change(*each)
            async for event in stream:
                if event.object is None:
                    continue
                if event.type is EventType.DELETED:
                    del seen[event.object.metadata.name]
                else:
                    assert (event.object.metadata.name in seen) is (event.type is EventType.MODIFIED)
                    seen[event.object.metadata.name] = event.resource_version
        page = await api.list_page(NODES, label_selector=selector)
        assert seen == {each.metadata.name: each.metadata.resource_version for each in page.items}

    run_virtual(run)
