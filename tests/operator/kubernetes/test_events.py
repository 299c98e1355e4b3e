"""Which Events are written about objects, how often, and what becomes of those that cannot be."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.events import EventRecorder, EventSeverity, reference_to
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, ObjectMeta, ObjectReference
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS, EVENTS
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.kubernetes.fake_api import FakeApi, unreachable

pytestmark = pytest.mark.virtual_time

WARNING = EventSeverity.WARNING
NODE = ObjectReference(api_version="v1", kind="Node", name="n1", uid="node-uid")


def request(name: str) -> ObjectReference:
    found = CapacityRequestObject(metadata=ObjectMeta(name=name, namespace="team", uid=f"uid-{name}"))
    return reference_to(CAPACITY_REQUESTS, found)


class World:
    def __init__(self) -> None:
        self.api = FakeApi()
        self.recorder = EventRecorder(
            self.api, component="bigfleet-operator", instance="pod-1", clock=LoopClock(), waiting_max=5
        )

    @property
    def written(self) -> list[dict[str, Any]]:
        return list(self.api.store(EVENTS).objects.values())


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A recorder whose task runs."""
    made = World()
    running = asyncio.create_task(made.recorder.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_event_names_its_object_and_who_reports_it(world: World) -> None:
    await asyncio.sleep(90)
    assert world.recorder.record(request("a"), WARNING, "RollupRejected", "the shard refused it")
    await asyncio.sleep(1)
    (event,) = world.api.bodies
    assert event["metadata"]["namespace"] == "team"
    assert event["metadata"]["name"].startswith("a.")
    del event["metadata"]
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "involvedObject": {
            "apiVersion": "bigfleet.lucy.sh/v1alpha1",
            "kind": "CapacityRequest",
            "name": "a",
            "namespace": "team",
            "uid": "uid-a",
        },
        "type": "Warning",
        "reason": "RollupRejected",
        "message": "the shard refused it",
        "source": {"component": "bigfleet-operator"},
        "reportingComponent": "bigfleet-operator",
        "reportingInstance": "pod-1",
        "firstTimestamp": "2026-01-01T00:01:30Z",
        "lastTimestamp": "2026-01-01T00:01:30Z",
        "count": 1,
    }


async def test_an_event_about_a_cluster_scoped_object_is_in_default(world: World) -> None:
    world.recorder.record(NODE, EventSeverity.NORMAL, "DrainStarted", "for a reclaim")
    await asyncio.sleep(1)
    assert [each["metadata"]["namespace"] for each in world.written] == ["default"]
    assert "namespace" not in world.written[0]["involvedObject"]


async def test_one_event_per_object_and_reason_in_ten_minutes(world: World) -> None:
    record = world.recorder.record
    assert record(NODE, WARNING, "A", "first")
    assert not record(NODE, WARNING, "A", "again")
    assert record(NODE, WARNING, "B", "another reason")
    assert record(request("a"), WARNING, "A", "another object")
    await asyncio.sleep(599)
    assert not record(NODE, WARNING, "A", "again")
    await asyncio.sleep(1)
    assert record(NODE, WARNING, "A", "once more")
    await asyncio.sleep(1)
    messages = [each["message"] for each in world.written]
    assert messages == ["first", "another reason", "another object", "once more"]


async def test_a_long_message_and_a_long_name_are_cut(world: World) -> None:
    about = ObjectReference(api_version="v1", kind="Node", name="n" * 253, uid="u")
    world.recorder.record(about, WARNING, "A", "m" * 5000)
    await asyncio.sleep(1)
    (event,) = world.written
    assert event["message"] == "m" * 1023 + "…"
    assert len(event["metadata"]["name"]) == 253


async def test_a_full_queue_drops_and_never_waits() -> None:
    world = World()
    recorded = [world.recorder.record(request(f"r{number}"), WARNING, "A", "x") for number in range(7)]
    assert recorded == [True] * 5 + [False] * 2
    assert world.recorder.dropped_total == 2
    running = asyncio.create_task(world.recorder.run())
    await asyncio.sleep(1)
    # What was dropped is not taken for a repetition.
    assert world.recorder.record(request("r6"), WARNING, "A", "x")
    await asyncio.sleep(1)
    assert world.recorder.written_total == 6
    running.cancel()


async def test_a_failure_that_passes_is_retried(world: World) -> None:
    slow = ApiError(429, "TooManyRequests", "slow down", retry_after_seconds=5)
    world.api.faults = [unreachable(), slow]
    world.recorder.record(NODE, WARNING, "A", "x")
    await asyncio.sleep(5)
    assert world.written == []
    await asyncio.sleep(2)
    assert len(world.written) == 1
    assert (world.recorder.written_total, world.recorder.failed_total) == (1, 0)


async def test_an_event_whose_answer_was_lost_is_written_once(world: World) -> None:
    create = world.api.create

    async def lose_the_answer(*args: Any, **options: Any) -> Any:
        await create(*args, **options)
        world.api.create = create  # type: ignore[method-assign]
        raise unreachable("reset")

    world.api.create = lose_the_answer  # type: ignore[method-assign]
    world.recorder.record(NODE, WARNING, "A", "x")
    await asyncio.sleep(10)
    assert len(world.written) == 1
    assert (world.recorder.written_total, world.recorder.failed_total) == (1, 0)


async def test_what_cannot_be_written_is_logged_once_a_minute(world: World) -> None:
    world.api.fault = ApiError(403, "Forbidden", "events is forbidden")
    with capture_logs() as logs:
        for number in range(4):
            world.recorder.record(request(f"r{number}"), WARNING, "A", "x")
            await asyncio.sleep(5)
        assert [each["events"] for each in logs] == [1]
        await asyncio.sleep(60)
        assert [(each["event"], each["events"], each["error"]) for each in logs] == [
            ("operator.events_lost", 1, "events is forbidden"),
            ("operator.events_lost", 3, "events is forbidden"),
        ]
        await asyncio.sleep(600)
        assert len(logs) == 2
    assert world.recorder.failed_total == 4


async def test_one_event_that_fails_does_not_hold_up_the_next(world: World) -> None:
    world.api.faults = [ApiError(422, "Invalid", "no")]
    world.recorder.record(request("a"), WARNING, "A", "x")
    world.recorder.record(request("b"), WARNING, "A", "x")
    await asyncio.sleep(1)
    assert [each["involvedObject"]["name"] for each in world.written] == ["b"]
