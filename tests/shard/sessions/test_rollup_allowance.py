"""A cluster that reports more than is read waits, and no other cluster does (docs/spec/shard.md §4.4)."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from bigfleet.model.frames import (
    CAPABILITY_NEED_STATUS,
    ECHO_ROLLUP,
    ECHO_ROLLUP_DEFERRED,
    ECHO_ROLLUP_REJECTED,
    Acknowledgement,
    MalformedMessage,
)
from bigfleet.model.need import Need
from bigfleet.shard.sessions import rollup_allowance
from bigfleet.shard.sessions.rollup_allowance import ReadingTurns, RollUpAllowances
from bigfleet.shard.sessions.rollup_intake import ROWS_ON_LOOP_MAX
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.world import FakeOperator, Offer, World, need

pytestmark = pytest.mark.virtual_time

#: A hundredth of the real limits.
PER_SECOND, OWED, CHARGED = 20, 200, 1
LARGE = ROWS_ON_LOOP_MAX + 1


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the limits so small that few rows reach them."""
    monkeypatch.setattr(rollup_allowance, "ROWS_PER_SECOND_MAX", PER_SECOND)
    monkeypatch.setattr(rollup_allowance, "ROWS_OWED_MAX", OWED)
    monkeypatch.setattr(rollup_allowance, "ROWS_CHARGED_MIN", CHARGED)


def rows(cluster: str, count: int, *, first: int = 0) -> tuple[Need, ...]:
    """Return different rows."""
    return tuple(need(cluster, "4", priority=first + number) for number in range(count))


def acks(operator: FakeOperator, echo: str) -> list[Acknowledgement]:
    """Return the acks of one kind that the operator has read."""
    return [frame for frame in operator.frames if isinstance(frame, Acknowledgement) and frame.echo == echo]


def stamps(operator: FakeOperator, echo: str = ECHO_ROLLUP) -> list[int]:
    """Return the timestamps of the roll-ups that were acknowledged."""
    return [ack.rollup_timestamp_unix_nanos for ack in acks(operator, echo)]


async def report_often(world: World, operator: FakeOperator, *, seconds: int) -> None:
    """Send a different roll-up of 25 rows each second: more than the rate allows."""
    for second in range(seconds):
        offer = Offer(operator.session.cluster, rows(operator.session.cluster, 25, first=second), second + 1)
        world.shard.sessions.receive_rollup(operator.session, offer)
        await asyncio.sleep(1)


@pytest.mark.rule("shard 4.4/1", "shard 4.4/2")
async def test_a_cluster_over_its_rate_waits_and_its_newest_roll_up_is_read() -> None:
    """Of 60 roll-ups those beyond the allowance are replaced by newer ones; the operator is sent why, and the last
    one is read: nothing that it says is lost.
    """
    world = World()
    greedy, honest = world.connect("c1", CAPABILITY_NEED_STATUS), world.connect("c2", CAPABILITY_NEED_STATUS)
    lanes = [asyncio.create_task(world.shard.serve_rollups(each.session)) for each in (greedy, honest)]
    world.shard._trigger._wakeup.clear()
    await report_often(world, greedy, seconds=60)
    world.shard.sessions.receive_rollup(honest.session, Offer("c2", rows("c2", 3), 7))
    await asyncio.sleep(0.1)
    read = stamps(greedy)
    assert stamps(honest) == [7]
    assert 60 * PER_SECOND / 25 <= len(read) <= 60 * PER_SECOND / 25 + OWED / 25 + 2

    await asyncio.sleep(60)
    assert stamps(greedy)[-1] == 60
    assert len(stamps(greedy)) + world.metric("rollups_total", result="superseded") == 60
    assert world.metric("shed_total", limit="rollup_rows") == len(acks(greedy, ECHO_ROLLUP_DEFERRED)) > 0
    assert world.shard.intake.table.rows_of("c1")[0].profile.priority == 59
    reason = acks(greedy, ECHO_ROLLUP_DEFERRED)[0].error
    assert reason.startswith("over the limit of 20 rows a second for a cluster; the newest roll-up is read in ")
    assert acks(honest, ECHO_ROLLUP_DEFERRED) == []
    world.shard.stop_sessions()
    await asyncio.gather(*lanes)


@pytest.mark.rule("shard 4.4/1")
async def test_repetitions_are_not_limited() -> None:
    """They cost next to nothing, and an operator repeats itself every ten seconds."""
    world = World()
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    content = rows("c1", 3)
    for stamp in range(1, 201):
        world.shard.sessions.receive_rollup(operator.session, Offer("c1", content, stamp))
        await asyncio.sleep(0.001)

    assert len(stamps(operator)) == 200
    assert acks(operator, ECHO_ROLLUP_DEFERRED) == []
    world.shard.stop_sessions()
    await lane


@pytest.mark.rule("shard 4.4/2")
async def test_an_operator_without_need_status_waits_too() -> None:
    """It is sent nothing that it does not understand."""
    world = World()
    operator = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    await report_often(world, operator, seconds=60)

    assert world.metric("shed_total", limit="rollup_rows") > 0
    assert acks(operator, ECHO_ROLLUP_DEFERRED) == []
    world.shard.stop_sessions()
    await lane


class UnreadableOffer(Offer):
    """A roll-up of which only the head was read; the rest is no message."""

    @property
    def rows(self) -> int:
        """Raise what parsing raises."""
        raise MalformedMessage("rollup", "could not be read")


@pytest.mark.rule("shard 4.4/1")
async def test_a_roll_up_that_waited_unparsed_and_is_no_message_is_rejected() -> None:
    """Its operator is sent that, the last demand stays, and the next roll-up is taken."""
    world = World()
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    offers = (
        Offer("c1", rows("c1", 2), 1),
        UnreadableOffer("c1", (), 2, has_digest=False),
        Offer("c1", rows("c1", 3), 3),
    )
    for offer in offers:
        world.shard.sessions.receive_rollup(operator.session, offer)
        await asyncio.sleep(0.1)

    assert stamps(operator) == [1, 3]
    assert [ack.error for ack in acks(operator, ECHO_ROLLUP_REJECTED)] == ["rollup: could not be read"]
    assert world.metric("rollups_total", result="rejected") == 1
    world.shard.stop_sessions()
    await lane


class TimedCompute:
    """A compute that takes a second for every work, and notes how many run at a time and whose roll-ups they read."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.seconds: list[float] = []

    async def __call__(self, work: Callable[[], Any]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1)
        self.running -= 1
        self.seconds.append(asyncio.get_running_loop().time())
        return work()


@pytest.mark.rule("shard 4.4/3")
async def test_large_roll_ups_are_read_one_at_a_time_with_pauses() -> None:
    """Ten clusters have large ones: one is read at a time, at most half of the time; small ones are not held up."""
    compute = TimedCompute()
    world = World(compute=compute)
    many = [world.connect(f"c{number}", CAPABILITY_NEED_STATUS) for number in range(10)]
    small = world.connect("small")
    lanes = [asyncio.create_task(world.shard.serve_rollups(each.session)) for each in (*many, small)]
    for operator in many:
        cluster = operator.session.cluster
        world.shard.sessions.receive_rollup(operator.session, Offer(cluster, rows(cluster, LARGE), 1))
    await asyncio.sleep(1.5)
    world.shard.sessions.receive_rollup(small.session, Offer("small", rows("small", 2), 1))
    await asyncio.sleep(0.1)
    assert stamps(small) == [1]

    await asyncio.sleep(60)
    assert [stamps(operator) for operator in many] == [[1]] * 10
    assert compute.most == 1

    for operator in many:
        cluster = operator.session.cluster
        world.shard.sessions.receive_rollup(operator.session, Offer(cluster, rows(cluster, LARGE, first=1), 2))
    await asyncio.sleep(60)
    reasons = [ack.error for operator in many for ack in acks(operator, ECHO_ROLLUP_DEFERRED)]
    assert world.metric("shed_total", limit="reading_turn") == len(reasons) >= 9
    assert all(
        re.fullmatch(r"large roll-ups are read one at a time; .* is read in about \d+\.\d s", r) for r in reasons
    )
    # Two works for each: its digest, and its rows.
    assert compute.seconds[-1] - compute.seconds[0] >= 10 * 2 + 9 * 2 - 1
    world.shard.stop_sessions()
    await asyncio.gather(*lanes)


async def test_a_roll_up_of_few_rows_and_many_bytes_is_read_off_the_loop_and_charged_for_its_bytes() -> None:
    """Ten rows may have a million values, each of which takes a microsecond or two to be read."""
    compute = TimedCompute()
    world = World(compute=compute)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    size_bytes = 400 * (OWED + 60 * PER_SECOND)
    world.shard.sessions.receive_rollup(operator.session, Offer("c1", rows("c1", 10), 1, size_bytes=size_bytes))
    await asyncio.sleep(5)
    assert stamps(operator) == [1]
    assert len(compute.seconds) >= 2

    world.shard.sessions.receive_rollup(operator.session, Offer("c1", rows("c1", 11), 2))
    await asyncio.sleep(50)
    assert stamps(operator) == [1]
    assert len(acks(operator, ECHO_ROLLUP_DEFERRED)) == 1

    await asyncio.sleep(10)
    assert stamps(operator) == [1, 2]
    world.shard.stop_sessions()
    await lane


@pytest.mark.rule("shard 4.4/3")
async def test_who_had_fewer_rows_read_goes_first() -> None:
    """A cluster that was given much lately comes after those that were not, whenever it came."""
    turns, order = ReadingTurns(LoopClock()), []

    async def read(name: str, owed: float) -> None:
        async with turns.turn(owed):
            order.append(name)
            await asyncio.sleep(1)

    tasks = [asyncio.create_task(read(name, owed)) for name, owed in (("first", 0), ("greedy", 20_000), ("honest", 5))]
    await asyncio.gather(*tasks)
    assert order == ["first", "honest", "greedy"]


async def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    """Sessions end while they wait, while they are given the turn, and while they read."""
    turns, order = ReadingTurns(LoopClock()), []

    async def read(name: str) -> None:
        async with turns.turn(0):
            order.append(name)
            await asyncio.sleep(1)

    tasks = {name: asyncio.create_task(read(name)) for name in ("reads", "waits", "is given it", "last")}
    await asyncio.sleep(0.5)
    tasks["waits"].cancel()
    tasks["reads"].cancel()
    await asyncio.sleep(0)
    tasks["is given it"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["reads", "last"]


async def test_clusters_that_owe_nothing_are_forgotten() -> None:
    """One peer can invent names without end."""
    allowances = RollUpAllowances(LoopClock())
    for number in range(10_000):
        allowances.charge(f"c{number}", 1)
        await asyncio.sleep(CHARGED / PER_SECOND)

    assert len(allowances._paid_seconds) <= 128
    assert allowances.owed("c0") == 0
