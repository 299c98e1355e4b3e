"""Who leads, when leadership passes on, and that two never lead at once."""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.api import ApiError, JsonObject, Resource
from bigfleet.operator.kubernetes.lease import ElectionSettings, LeaderElector, LeadershipLost
from bigfleet.operator.kubernetes.resources import LEASES
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from tests.engine.proof import in_proportion
from tests.operator.kubernetes.fake_api import FakeApi, T, unreachable
from tests.operator.kubernetes.object_store import ObjectStore

pytestmark = pytest.mark.virtual_time


class Ids:
    """Ids that count."""

    def __init__(self) -> None:
        self._next = 0

    def new_id(self) -> str:
        self._next += 1
        return f"{self._next}"


IDS = Ids()


class Connection(FakeApi):
    """One candidate's way to the API server that all of them share."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self.stores["leases"] = store
        #: What is written is stored, and the answer is lost.
        self.loses_answers = False
        self.seconds_per_read = 0.0

    async def get(self, resource: Resource[T], name: str, *, namespace: str = "") -> T:
        await self.clock.sleep(self.seconds_per_read)
        return await super().get(resource, name, namespace=namespace)

    async def create(self, resource: Resource[T], body: JsonObject, *, namespace: str = "", name: str = "") -> T:
        return await self._sent(super().create(resource, body, namespace=namespace, name=name))

    async def replace(self, resource: Resource[T], name: str, body: JsonObject, *, namespace: str = "") -> T:
        return await self._sent(super().replace(resource, name, body, namespace=namespace))

    async def _sent(self, request: Coroutine[Any, Any, T]) -> T:
        """Wait for a request that the server goes on with although no caller waits for it any more."""
        under_way = asyncio.create_task(request)
        # A failure after that has no caller.
        under_way.add_done_callback(lambda done: done.cancelled() or done.exception())
        found = await asyncio.shield(under_way)
        await self.clock.sleep(self.seconds_per_request)
        if self.loses_answers:
            raise unreachable("reset")
        return found


class Candidate:
    """A process that leads when it may, and starts over when it has lost."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.api = Connection(world.store)
        self.ends_after_seconds = 0.0
        self.work_ends: ApiError | bool = False
        self.elector = LeaderElector(
            self.api,
            namespace="bigfleet",
            name="bigfleet-operator",
            host=f"pod-{number}",
            ids=IDS,
            clock=LoopClock(),
            rng=random.Random(number),
        )
        self.losses: list[str] = []
        self.forbidden_losses = 0
        self.task = asyncio.create_task(self._run())

    @property
    def leads(self) -> bool:
        return self in self.world.leading

    async def _run(self) -> None:
        while True:
            try:
                await self.elector.run(self._lead)
            except LeadershipLost as lost:
                self.losses.append(str(lost))
                self.forbidden_losses += lost.is_forbidden

    async def _lead(self) -> None:
        assert self.elector.is_leader
        self.world.leading.append(self)
        self.world.leaders_max = max(self.world.leaders_max, len(self.world.leading))
        try:
            await asyncio.Event().wait()
        finally:
            # What is under way ends: a patch, a stream.
            await asyncio.sleep(self.ends_after_seconds)
            self.world.leading.remove(self)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class World:
    """One Lease and those who want it."""

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.leading: list[Candidate] = []
        self.leaders_max = 0
        self.candidates: list[Candidate] = []

    def add(self, count: int) -> list[Candidate]:
        added = [Candidate(self, len(self.candidates) + number) for number in range(count)]
        self.candidates += added
        return added

    @property
    def lease(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.store.objects["bigfleet", "bigfleet-operator"]["spec"]
        return spec

    async def close(self) -> None:
        for candidate in self.candidates:
            await candidate.stop()


@pytest.fixture
async def world() -> Any:
    """A world that ends with its test."""
    made = World()
    yield made
    await made.close()


async def test_the_first_candidate_leads(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(61)
    assert (one.leads, two.leads) == (True, False)
    assert one.elector.is_leader
    assert not two.elector.is_leader
    assert two.elector.holder == one.elector.identity
    assert world.lease == {
        "holderIdentity": one.elector.identity,
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:01:00.000000Z",
        "leaseTransitions": 0,
    }


async def test_a_leader_that_stops_releases_after_its_work_has_ended(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(10)
    one.ends_after_seconds = 30
    stopping = asyncio.create_task(one.stop())
    await asyncio.sleep(29)
    # The work still ends: it is protected as before.
    assert (one.leads, two.leads) == (True, False)
    await asyncio.sleep(4)
    assert (one.leads, two.leads) == (False, True)
    assert world.lease["leaseTransitions"] == 1
    await stopping


async def test_a_leader_that_vanished_is_followed_when_its_lease_has_run_out(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(10.5)
    one.api.fault = unreachable()
    one.task.cancel()
    # Renewed for the last time at 10 s; seen by the other one at 10.x or 12.x s.
    await asyncio.sleep(14)
    assert world.leading == []
    await asyncio.sleep(6)
    assert two.leads


async def test_a_leader_that_lacks_the_right_to_renew_says_so(world: World) -> None:
    """Also if the last attempt, just before the end, is not answered any more."""
    (one,) = world.add(1)
    await asyncio.sleep(10.5)
    one.api.seconds_per_read = 0.3
    one.api.fault = ApiError(403, "Forbidden", "may not update leases")
    await asyncio.sleep(12)
    assert one.losses == ["lease bigfleet/bigfleet-operator: not renewed within 10 s: may not update leases"]
    assert one.forbidden_losses == 1
    one.api.fault = None
    await asyncio.sleep(30)
    assert one.leads
    one.api.fault = unreachable("connection refused")
    await asyncio.sleep(12)
    assert len(one.losses) == 2
    assert one.forbidden_losses == 1


async def test_a_leader_that_cannot_renew_ends_its_work_in_time(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(10.5)
    one.api.fault = unreachable("connection refused")
    await asyncio.sleep(9.4)
    assert one.leads
    await asyncio.sleep(0.2)
    assert world.leading == []
    assert one.losses == [
        "lease bigfleet/bigfleet-operator: not renewed within 10 s: connection refused",
    ]
    await asyncio.sleep(10)
    assert two.leads
    one.api.fault = None
    await asyncio.sleep(100)
    assert (one.leads, two.leads) == (False, True)
    assert world.leaders_max == 1


async def test_a_server_that_hangs_ends_a_leadership_as_well(world: World) -> None:
    (one,) = world.add(1)
    await asyncio.sleep(10.5)
    one.api.seconds_per_request = 3600
    await asyncio.sleep(9.4)
    before = one.leads
    await asyncio.sleep(0.2)
    assert (before, one.leads) == (True, False)
    assert "no answer in time" in one.losses[0]


async def test_a_lease_that_another_has_taken_ends_a_leadership_at_once(world: World) -> None:
    """Somebody wrote another holder into it by hand."""
    (one,) = world.add(1)
    await asyncio.sleep(10.5)
    world.store.put("bigfleet-operator", "bigfleet", spec={**world.lease, "holderIdentity": "other"})
    await asyncio.sleep(2)
    assert not one.leads
    assert one.losses == ["lease bigfleet/bigfleet-operator: other holds it"]
    await asyncio.sleep(20)
    assert one.leads


async def test_a_renewal_that_meets_another_writer_is_repeated(world: World) -> None:
    (one,) = world.add(1)
    await asyncio.sleep(10.5)
    one.api.faults = [ApiError(409, "Conflict", "modified")]
    await asyncio.sleep(30)
    assert one.leads
    assert one.losses == []


async def test_a_lease_that_is_deleted_is_not_taken_from_its_holder(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(10.5)
    one.api.fault = unreachable()
    world.store.delete("bigfleet-operator", "bigfleet")
    await asyncio.sleep(9)
    assert (one.leads, two.leads) == (True, False)
    one.api.fault = None
    await asyncio.sleep(30)
    assert (one.leads, two.leads) == (True, False)


async def test_a_renewal_whose_answer_was_lost_loses_nothing(world: World) -> None:
    one, two = world.add(2)
    await asyncio.sleep(10.5)
    one.api.loses_answers = True
    await asyncio.sleep(4)
    one.api.loses_answers = False
    await asyncio.sleep(30)
    assert (one.leads, two.leads) == (True, False)


async def test_what_others_write_into_the_metadata_stays(world: World) -> None:
    (one,) = world.add(1)
    await asyncio.sleep(1)
    stored = world.store.objects["bigfleet", "bigfleet-operator"]
    stored["metadata"]["labels"] = {"team": "x"}
    sent: list[JsonObject] = []
    replace = one.api.replace

    async def look(resource: Any, name: str, body: JsonObject, *, namespace: str = "") -> Any:
        sent.append(body)
        return await replace(resource, name, body, namespace=namespace)

    one.api.replace = look  # type: ignore[method-assign]
    await asyncio.sleep(2)
    metadata = sent[0]["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["labels"] == {"team": "x"}


async def test_work_that_returns_ends_the_election_and_releases() -> None:
    api = FakeApi()
    elector = LeaderElector(api, namespace="d", name="l", host="pod", ids=IDS, clock=LoopClock(), rng=random.Random(1))

    async def work() -> None:
        await asyncio.sleep(60)

    await elector.run(work)
    assert api.store(LEASES).objects["d", "l"]["spec"]["holderIdentity"] == ""
    assert not elector.is_leader


async def test_what_the_work_raises_is_raised_and_the_lease_released() -> None:
    api = FakeApi()
    elector = LeaderElector(api, namespace="d", name="l", host="pod", ids=IDS, clock=LoopClock(), rng=random.Random(1))

    async def work() -> None:
        raise LookupError("a defect")

    with pytest.raises(LookupError, match="a defect"):
        await elector.run(work)
    assert api.store(LEASES).objects["d", "l"]["spec"]["holderIdentity"] == ""


def test_times_must_fit_together() -> None:
    with pytest.raises(ValueError, match=r"lease 10 s, renewal 10 s, retry 2 s: each must be longer than the next"):
        ElectionSettings(lease_seconds=10)


FAULTS = st.sampled_from(["down", "up", "slow", "very slow", "fast", "loses", "answers", "restart", "wait"])
COURSES = st.lists(st.tuples(FAULTS, st.integers(0, 2), st.floats(0.01, 30.0)), max_size=40)


def _act(world: World, fault: str, candidate: Candidate) -> None:
    api = candidate.api
    match fault:
        case "down":
            api.fault = unreachable()
        case "up":
            api.fault = None
        case "slow":
            api.seconds_per_request = 1.7
        case "very slow":
            api.seconds_per_request = 4.9
        case "fast":
            api.seconds_per_request = 0.0
        case "loses":
            api.loses_answers = True
        case "answers":
            api.loses_answers = False
        case "restart":
            candidate.task.cancel()
            # The process is gone in the moment of its cancellation, but for what it ends.
            world.candidates[world.candidates.index(candidate)] = Candidate(world, random.Random(1).randrange(100))


def _cleanups() -> Iterator[float]:
    while True:
        yield from (0.0, 4.9, 1.0)


@settings(max_examples=in_proportion(400))
@given(course=COURSES)
def test_two_never_lead_at_once(course: list[tuple[str, int, float]]) -> None:
    """With any loss of the API server's answers, and although a leader's work takes seconds to end."""

    async def main() -> None:
        world = World()
        world.add(3)
        for candidate, seconds in zip(world.candidates, _cleanups(), strict=False):
            candidate.ends_after_seconds = seconds
        for fault, number, seconds in course:
            _act(world, fault, world.candidates[number])
            await asyncio.sleep(seconds)
            assert world.leaders_max <= 1
        for candidate in world.candidates:
            _act(world, "up", candidate)
            _act(world, "fast", candidate)
            _act(world, "answers", candidate)
        await asyncio.sleep(60)
        # Somebody leads again, and knows it.
        assert len(world.leading) == 1
        assert [each for each in world.candidates if each.elector.is_leader] == world.leading
        assert world.leaders_max == 1
        await world.close()

    run_virtual(main)
