"""Facts about lists, selectors and watches."""

import pytest

from bigfleet.operator.kubernetes.api import ApiError, EventType, Json, JsonObject
from bigfleet.operator.kubernetes.resources import (
    CAPACITY_REQUESTS,
)
from tests.api_facts.world import Fact, FactWorld, events_until, refused


async def a_list_comes_in_pages_of_one_version(world: FactWorld) -> None:
    """By name; what changes between two pages is not seen."""
    for name in ("c", "a", "b"):
        await world.create_request(name)
    first = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, limit=2)
    await world.api.delete(CAPACITY_REQUESTS, "c", namespace=world.namespace)
    await world.create_request("d")
    token = first.continue_token
    last = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, limit=2, continue_token=token)

    assert [each.metadata.name for each in first.items + last.items] == ["a", "b", "c"]
    assert first.resource_version == last.resource_version
    assert last.continue_token == ""


async def labels_select(world: FactWorld) -> None:
    """By equality, by sets and by presence, all terms together."""
    labels: dict[str, Json] = {
        "a": {"tier": "web", "zone": "1"},
        "b": {"tier": "web", "zone": "2"},
        "c": {"tier": "db"},
    }
    for name, given in labels.items():
        await world.create_request(name, labels=given)
    expected = {
        "tier=web": "ab",
        "tier==db": "c",
        "tier!=web": "c",
        "zone": "ab",
        "!zone": "c",
        "zone in (2, 3)": "b",
        "zone notin (2, 3)": "ac",
        "tier=web,zone notin (2)": "a",
        "zone!=1": "bc",
    }

    for selector, names in expected.items():
        page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, label_selector=selector)
        assert "".join(each.metadata.name for each in page.items) == names, selector


async def fields_select(world: FactWorld) -> None:
    """Those that the kind declares; any other is refused."""
    for name in ("a", "b"):
        await world.create_request(name)
    acknowledged: JsonObject = {"status": {"phase": "Acknowledged"}}
    await world.api.patch(CAPACITY_REQUESTS.status, "b", acknowledged, namespace=world.namespace)
    expected = {
        "metadata.name=a": "a",
        "metadata.name!=a": "b",
        "status.phase=Acknowledged": "b",
        "status.phase!=Acknowledged": "a",
    }

    for selector, names in expected.items():
        page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, field_selector=selector)
        assert "".join(each.metadata.name for each in page.items) == names, selector
    call = world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace, field_selector="spec.priority=0")
    error = await refused(call)
    assert error.status == 400
    assert "field label not supported: spec.priority" in str(error)


async def a_watch_continues_where_a_list_ended(world: FactWorld) -> None:
    """Every change after it, in order, each with its version."""
    await world.create_request("before")
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    await world.create_request("a")
    await world.api.patch(CAPACITY_REQUESTS, "a", {"spec": {"priority": 1}}, namespace=world.namespace)
    await world.api.delete(CAPACITY_REQUESTS, "a", namespace=world.namespace)
    events = await events_until(world, CAPACITY_REQUESTS, page.resource_version, 3)

    assert [each.type for each in events] == [EventType.ADDED, EventType.MODIFIED, EventType.DELETED]
    assert [each.object.metadata.name for each in events if each.object] == ["a", "a", "a"]
    assert [each.object.spec.priority for each in events if each.object] == [0, 1, 1]
    assert all(each.object and each.object.metadata.resource_version == each.resource_version for each in events)
    assert [int(each.resource_version) for each in events] == sorted({int(each.resource_version) for each in events})


async def a_watch_without_a_version_begins_with_what_exists(world: FactWorld) -> None:
    """Each object as ADDED."""
    for name in ("a", "b"):
        await world.create_request(name)
    events = await events_until(world, CAPACITY_REQUESTS, "0", 2)

    assert {(each.type, each.object.metadata.name if each.object else "") for each in events} == {
        (EventType.ADDED, "a"),
        (EventType.ADDED, "b"),
    }


async def a_watch_with_a_selector_sees_objects_come_and_go(world: FactWorld) -> None:
    """An object that comes to match is ADDED; one that ceases to is DELETED."""
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    await world.create_request("a")
    for value in ("yes", "no"):
        patch: JsonObject = {"metadata": {"labels": {"seen": value}}}
        await world.api.patch(CAPACITY_REQUESTS, "a", patch, namespace=world.namespace)
    selector = "seen=yes"
    events = await events_until(world, CAPACITY_REQUESTS, page.resource_version, 2, label_selector=selector)

    assert [each.type for each in events] == [EventType.ADDED, EventType.DELETED]


async def a_watch_ends_at_its_timeout(world: FactWorld) -> None:
    """Without an error."""
    page = await world.api.list_page(CAPACITY_REQUESTS, namespace=world.namespace)
    version = page.resource_version
    types = set()
    async with world.api.watch(
        CAPACITY_REQUESTS, resource_version=version, namespace=world.namespace, timeout_seconds=1
    ) as stream:
        async for event in stream:
            types.add(event.type)

    assert types <= {EventType.BOOKMARK}


async def a_watch_from_a_forgotten_version_has_expired(world: FactWorld) -> None:
    """Which is said in the stream."""
    await world.create_request("a")
    await world.forget_history()
    with pytest.raises(ApiError) as caught:
        await events_until(world, CAPACITY_REQUESTS, "1", 1)

    assert (caught.value.status, caught.value.is_expired) == (410, True)


FACTS: list[Fact] = [
    a_list_comes_in_pages_of_one_version,
    labels_select,
    fields_select,
    a_watch_continues_where_a_list_ended,
    a_watch_without_a_version_begins_with_what_exists,
    a_watch_with_a_selector_sees_objects_come_and_go,
    a_watch_ends_at_its_timeout,
    a_watch_from_a_forgotten_version_has_expired,
]
