"""How a view follows its server: lists, watches, what vanished meanwhile, outages, and what listeners hear."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bigfleet.operator.kubernetes.api import INVALID_RESPONSE, SILENT, ApiError
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, ObjectMeta
from bigfleet.operator.kubernetes.reflector import Reflector, ReflectorSettings
from bigfleet.operator.kubernetes.resources import CAPACITY_REQUESTS
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.operator.kubernetes.fake_api import FakeApi, unreachable
from tests.operator.kubernetes.object_store import ObjectStore, expired

pytestmark = pytest.mark.virtual_time

Request = CapacityRequestObject


class History:
    """Rebuilds the view from what a listener hears, and fails if that is not possible."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Request] = {}
        self.heard: list[str] = []

    def put(self, stored: Request, former: Request | None) -> None:
        key = stored.metadata.key
        assert self.known.get(key) is former
        if former is not None:
            assert former.metadata.uid == stored.metadata.uid
            assert former.metadata.resource_version != stored.metadata.resource_version
        self.known[key] = stored
        self.heard.append(f"{'change' if former else 'add'} {stored.metadata.name}")

    def remove(self, former: Request) -> None:
        assert self.known.pop(former.metadata.key) is former
        self.heard.append(f"remove {former.metadata.name}")


class World:
    """A server, a reflector that follows it, and a listener."""

    def __init__(self, **options: Any) -> None:
        self.api = FakeApi()
        self.store: ObjectStore = self.api.store(CAPACITY_REQUESTS)
        self.reflector = Reflector(self.api, CAPACITY_REQUESTS, clock=LoopClock(), rng=random.Random(7), **options)
        self.history = History()
        self.reflector.add_listener(self.history)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        task = asyncio.create_task(self.reflector.run())
        try:
            await self.reflector.wait_synced()
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def put(self, *names: str) -> None:
        for name in names:
            self.store.put(name)
        self.api.changed()

    def delete(self, name: str) -> None:
        self.store.delete(name)
        self.api.changed()

    @property
    def view(self) -> dict[tuple[str, str], str]:
        return {each.metadata.key: each.metadata.resource_version for each in self.reflector}

    def check(self) -> None:
        """The view equals the server, and so does what the listener made of what it heard."""
        assert self.view == self.store.names()
        assert len(self.reflector) == len(self.store.objects)
        assert {key: each.metadata.resource_version for key, each in self.history.known.items()} == self.view


async def test_a_view_holds_what_was_there_and_what_comes() -> None:
    world = World(settings=ReflectorSettings(page_size=2))
    world.put("a", "b", "c", "d", "e")
    async with world.running():
        world.check()
        assert world.api.requests.count(("list", CAPACITY_REQUESTS.label)) == 3
        world.put("b", "f")
        world.delete("a")
        await asyncio.sleep(1)
        world.check()
    assert world.history.heard[5:] == ["change b", "add f", "remove a"]
    assert world.reflector.get("b", "default") is not None
    assert world.reflector.get("a", "default") is None
    assert world.reflector.get("b") is None


async def test_a_view_is_not_synced_before_its_last_page() -> None:
    world = World(settings=ReflectorSettings(page_size=2))
    world.put("a", "b", "c")
    world.api.seconds_per_request = 10
    task = asyncio.create_task(world.reflector.run())
    await asyncio.sleep(15)
    early = world.reflector.is_synced
    await asyncio.sleep(10)
    assert (early, world.reflector.is_synced) == (False, True)
    world.check()
    task.cancel()


async def test_a_listener_that_comes_later_hears_what_is_there() -> None:
    world = World()
    world.put("a", "b")
    async with world.running():
        late = History()
        world.reflector.add_listener(late)
        world.put("c")
        await asyncio.sleep(1)
    assert late.heard == ["add a", "add b", "add c"]


async def test_what_vanished_while_nothing_was_watched_is_removed() -> None:
    """The list that follows names only what is there: the difference is what the listener must hear."""
    world = World()
    world.put("a", "b", "c")
    async with world.running():
        await asyncio.sleep(5)
        world.store.delete("a")
        world.store.put("b")
        world.store.put("d")
        world.store.compact()
        world.api.end_watches(expired())
        await asyncio.sleep(30)
        world.check()
    # What is new comes before what is gone, and c is as it was.
    assert world.history.heard[3:] == ["change b", "add d", "remove a"]


async def test_an_object_that_was_created_again_is_another_one() -> None:
    world = World()
    world.put("a")
    async with world.running():
        await asyncio.sleep(5)
        world.store.delete("a")
        world.store.put("a")
        world.store.compact()
        world.api.end_watches(expired())
        await asyncio.sleep(30)
        world.check()
    assert world.history.heard == ["add a", "remove a", "add a"]


async def test_a_list_of_an_unchanged_cluster_changes_nothing() -> None:
    world = World()
    world.put("a", "b")
    async with world.running():
        await asyncio.sleep(5)
        before = list(world.reflector)
        world.store.compact()
        world.api.end_watches(expired())
        await asyncio.sleep(30)
        assert world.reflector.lists_total == 2
        assert all(one is other for one, other in zip(before, world.reflector, strict=True))
    assert world.history.heard == ["add a", "add b"]


async def test_a_watch_that_ends_is_resumed_where_it_ended() -> None:
    world = World()
    world.put("a")
    async with world.running():
        await asyncio.sleep(5)
        world.api.end_watches(True)
        world.put("b")
        await asyncio.sleep(1)
        world.check()
        assert world.reflector.failing_seconds() == 0
        world.api.end_watches(unreachable("reset"))
        world.put("c")
        await asyncio.sleep(5)
        world.check()
    assert world.reflector.lists_total == 1


async def test_bookmarks_keep_a_quiet_watch_resumable() -> None:
    """The history is compacted up to the last bookmark, and no list is needed."""
    world = World()
    async with world.running():
        world.store.version += 50
        await asyncio.sleep(61)
        world.store.compact()
        world.api.end_watches(unreachable("reset"))
        await asyncio.sleep(30)
    assert world.reflector.lists_total == 1
    assert world.reflector.watches_total == 2


async def test_a_continue_token_that_expires_starts_the_list_again() -> None:
    world = World(settings=ReflectorSettings(page_size=2))
    world.put("a", "b", "c")
    world.api.seconds_per_request = 1
    task = asyncio.create_task(world.reflector.run())
    await asyncio.sleep(1.5)
    world.store.compact()
    world.store.put("d")
    await world.reflector.wait_synced()
    world.check()
    task.cancel()


async def test_failing_counts_from_the_first_failure_until_a_watch_is_healthy() -> None:
    world = World()
    world.put("a")
    async with world.running():
        await asyncio.sleep(100)
        assert world.reflector.failing_seconds() == 0
        world.api.fault = unreachable()
        world.api.end_watches(unreachable("reset"))
        await asyncio.sleep(90)
        assert world.reflector.failing_seconds() == pytest.approx(90, abs=0.1)
        assert len(world.reflector) == 1
        world.api.fault = None
        await asyncio.sleep(40)
        assert world.reflector.failing_seconds() == 0


async def test_a_watch_that_is_refused_as_soon_as_it_is_open_ends_no_failure() -> None:
    """An API server answers 200 first and says in the stream that the version is too old."""
    world = World()
    async with world.running():
        await asyncio.sleep(100)

        async def refuse() -> None:
            while True:
                world.api.end_watches(expired())
                await asyncio.sleep(0.01)

        refusing = asyncio.create_task(refuse())
        await asyncio.sleep(60)
        assert world.reflector.failing_seconds() > 59
        refusing.cancel()
        await asyncio.sleep(40)
        assert world.reflector.failing_seconds() == 0


async def test_a_silent_connection_counts_from_when_the_server_was_last_heard() -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(5)
        world.put("a")
        await asyncio.sleep(1)
        world.api.watchers[0].is_stalled = True
        await asyncio.sleep(89)
        world.api.fault = unreachable()
        world.api.end_watches(ApiError(0, SILENT, "nothing received for 90 s"))
        await asyncio.sleep(10)
        assert world.reflector.failing_seconds() == pytest.approx(100, abs=0.1)
        assert world.reflector.last_event_at == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(
    ("end", "level"),
    [
        (expired(), "info"),
        (ApiError(429, "TooManyRequests", "storage is (re)initializing"), "info"),
        (ApiError(0, SILENT, "nothing received for 90 s"), "info"),
        (unreachable(), "warning"),
    ],
    ids=["expired", "asked to wait", "silent", "unreachable"],
)
async def test_only_an_end_that_a_server_in_good_health_does_not_cause_is_a_warning(end: ApiError, level: str) -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(5)
        with capture_logs() as logs:
            world.api.end_watches(end)
            await asyncio.sleep(5)

    assert [line["log_level"] for line in logs if line["event"] == "operator.watch_failed"] == [level]


@pytest.mark.parametrize("end", [True, expired(), unreachable()], ids=["clean", "expired", "unreachable"])
async def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_end(end: ApiError | bool) -> None:
    world = World()
    async with world.running():

        async def end_all() -> None:
            while True:
                world.api.end_watches(end)
                await asyncio.sleep(0.05)

        ending = asyncio.create_task(end_all())
        await asyncio.sleep(600)
        ending.cancel()
    # Back-off with full jitter up to 30 s: about 40 attempts of a list and a watch in 10 minutes.
    assert 20 < len(world.api.requests) < 200


async def test_after_an_event_that_cannot_be_read_all_is_listed_again() -> None:
    """The same event would come again with the next watch."""
    world = World()
    async with world.running():
        await asyncio.sleep(5)
        lists = world.reflector.lists_total
        world.api.end_watches(ApiError(0, INVALID_RESPONSE, "the answer cannot be read"))
        await asyncio.sleep(5)
        assert world.reflector.lists_total == lists + 1


async def test_the_server_says_how_long_to_wait() -> None:
    world = World()
    world.api.faults = [ApiError(429, "TooManyRequests", "slow down", retry_after_seconds=20)]
    task = asyncio.create_task(world.reflector.run())
    await asyncio.sleep(19)
    assert len(world.api.requests) == 1
    await asyncio.sleep(2)
    assert world.reflector.is_synced
    task.cancel()


async def test_a_kind_that_appears_later_is_followed_then() -> None:
    world = World()
    world.put("a")
    world.api.fault = ApiError(404, "NotFound", "404 page not found")
    task = asyncio.create_task(world.reflector.run())
    await asyncio.sleep(300)
    assert world.reflector.failing_seconds() == pytest.approx(300)
    world.api.fault = None
    await asyncio.sleep(40)
    world.check()
    assert world.reflector.failing_seconds() == 0
    task.cancel()


async def test_objects_are_slimmed_before_they_are_stored() -> None:
    def slim(found: Request) -> Request:
        metadata = found.metadata
        return Request(
            metadata=ObjectMeta(
                name=metadata.name,
                namespace=metadata.namespace,
                uid=metadata.uid,
                resource_version=metadata.resource_version,
            )
        )

    world = World(transform=slim)
    world.store.put("a", spec={"priority": 5})
    async with world.running():
        world.store.put("b", spec={"priority": 6})
        world.api.changed()
        await asyncio.sleep(1)
        world.check()
        assert [each.spec.priority for each in world.reflector] == [0, 0]


async def test_other_tasks_run_while_a_long_list_is_handed_to_listeners() -> None:
    world = World(settings=ReflectorSettings(changes_at_once_max=10))
    world.put(*(f"r{number}" for number in range(100)))
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(len(world.reflector))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    async with world.running():
        looking.cancel()
    assert {10, 50, 100} <= seen
    world.check()


async def test_a_listener_that_raises_ends_the_reflector() -> None:
    """What it has missed is unknown: going on would be worse than a restart."""

    class Broken(History):
        def put(self, stored: Request, former: Request | None) -> None:
            raise LookupError("a defect")

    world = World()
    world.reflector.add_listener(Broken())
    world.put("a")
    with pytest.raises(LookupError, match="a defect"):
        await world.reflector.run()
    await asyncio.sleep(61)
    assert not world.reflector.is_synced
    assert world.reflector.failing_seconds() == pytest.approx(61)


async def test_a_reflector_that_was_cancelled_is_out_of_date() -> None:
    world = World()
    async with world.running():
        await asyncio.sleep(100)
        assert world.reflector.failing_seconds() == 0
    await asyncio.sleep(70)
    assert world.reflector.failing_seconds() == pytest.approx(70)


NAMES = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("recreate"), NAMES),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("expire"), st.none()),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("stall"), st.none()),
        st.tuples(st.just("down"), st.none()),
        st.tuples(st.just("up"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.5, 3.0, 70.0, 700.0])),
    ),
    max_size=40,
)


def _act(world: World, step: str, name: Any) -> None:
    """Do what one step says of the server."""
    api, store = world.api, world.store
    match step:
        case "put":
            store.put(name)
        case "delete":
            store.delete(name)
        case "recreate":
            store.delete(name)
            store.put(name)
        case "compact":
            store.compact()
        case "expire":
            store.compact()
            api.end_watches(expired())
        case "reset":
            api.end_watches(unreachable("reset"))
        case "close":
            api.end_watches(True)
        case "stall":
            for watcher in api.watchers:
                watcher.is_stalled = True
        case "down":
            api.fault = unreachable()
            api.end_watches(unreachable("reset"))
        case "up":
            api.fault = None
    api.changed()


@settings(max_examples=in_proportion(800))
@given(steps=STEPS, seconds_per_request=st.sampled_from([0.0, 0.3, 2.0]))
@example(
    steps=[("put", "d"), ("compact", None), ("down", None), ("put", "e"), ("wait", 700.0)], seconds_per_request=2.0
)
def test_a_view_equals_its_server_after_any_history(steps: list[tuple[str, Any]], seconds_per_request: float) -> None:
    """After any changes, disconnects and compactions; what listeners hear rebuilds it at every step."""

    async def main() -> None:
        world = World(settings=ReflectorSettings(page_size=2, changes_at_once_max=2))
        world.api.seconds_per_request = seconds_per_request
        world.put("a", "b", "c")
        async with world.running():
            for step, argument in steps:
                if step == "wait":
                    await asyncio.sleep(argument)
                    stalled = any(watcher.is_stalled for watcher in world.api.watchers)
                    if argument >= 3 and world.reflector.failing_seconds() == 0 and not stalled:
                        world.check()
                else:
                    _act(world, step, argument)
            world.api.fault = None
            world.api.end_watches(unreachable("healed"))
            # The longest back-off twice, as the server may have forgotten the version, a list of all pages and a watch.
            await asyncio.sleep(90)
            world.check()
            assert world.reflector.failing_seconds() == 0

    run_virtual(main)
