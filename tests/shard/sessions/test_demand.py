"""What becomes of a roll-up between its frame and the table (docs/spec/shard.md §4, §6 safety limit 2)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import (
    CAPABILITY_NEED_STATUS,
    ECHO_ROLLUP,
    ECHO_ROLLUP_REJECTED,
    Acknowledgement,
    MalformedMessage,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shapes import DemandShape, Overhead
from bigfleet.model.states import MachineState
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions import demand_columns
from bigfleet.shard.sessions.demand import RollUpOutcome
from bigfleet.shard.sessions.rollup_intake import ROWS_ON_LOOP_MAX
from tests.shard.world import FakeOperator, Offer, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time


@dataclass(frozen=True)
class CountingOffer(Offer):
    """Counts how often its rows are read."""

    reads: list[int] = field(default_factory=list, compare=False)

    def needs(self) -> tuple[Need, ...]:
        """Return the rows."""
        self.reads.append(1)
        return super().needs()


def rows(count: int, *, cpu: str = "4") -> tuple[Need, ...]:
    """Return that many different rows of c1."""
    return tuple(need("c1", cpu, priority=100 + number) for number in range(count))


async def acks(operator: FakeOperator, echo: str) -> list[Acknowledgement]:
    """Return the acks of one kind that the operator has read."""
    for _ in range(40):
        await asyncio.sleep(0)
    return [frame for frame in operator.frames if isinstance(frame, Acknowledgement) and frame.echo == echo]


@pytest.mark.rule("shard 3/4", "shard 4/8")
async def test_an_accepted_roll_up_replaces_the_demand_and_wakes_the_cycle() -> None:
    """Never merged: what the last one does not name is gone. Its ack carries its timestamp."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(3))
    assert world.shard._trigger._wakeup.is_set()
    assert world.shard.take_rollup(operator.session, Offer("c1", rows(2), 77)) is RollUpOutcome.ACCEPTED

    assert [row.profile.priority for row in world.shard.intake.table.in_list_order()] == [101, 100]
    answer = (await acks(operator, ECHO_ROLLUP))[-1]
    assert (answer.rollup_timestamp_unix_nanos, answer.held, answer.shard_epoch) == (77, False, 1)
    assert world.metric("rollups_total", result="accepted") == 2


@pytest.mark.rule("shard 4/3")
async def test_an_unchanged_roll_up_is_acked_and_not_read() -> None:
    """Nothing is parsed, no cycle wakes, arrival stays; only the timestamp of the ack is new."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(2))
    arrivals = [row.arrival_unix_nanos for row in world.shard.intake.table.in_list_order()]
    world.shard._trigger._wakeup.clear()
    await world.shard._clock.sleep(30)
    again = CountingOffer("c1", rows(2), 99)
    assert world.shard.take_rollup(operator.session, again) is RollUpOutcome.UNCHANGED

    assert (again.reads, world.shard._trigger._wakeup.is_set()) == ([], False)
    assert arrivals == [row.arrival_unix_nanos for row in world.shard.intake.table.in_list_order()]
    assert (await acks(operator, ECHO_ROLLUP))[-1].rollup_timestamp_unix_nanos == 99


@pytest.mark.rule("shard 4/9")
async def test_a_row_that_was_there_keeps_its_arrival() -> None:
    """Otherwise equal priorities would change order with every report."""
    world = World()
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    await world.shard._clock.sleep(60)
    operator.report(need("c1", "8"), need("c1", "4", priority=50))
    old, new = world.shard.intake.table.in_list_order()

    assert new.arrival_unix_nanos - old.arrival_unix_nanos == 60_000_000_000


def in_zone(row: Need, zone: str, **changes: Any) -> Need:
    """Return the row with machines of one zone alone."""
    requirements = (*row.profile.requirements, Requirement(ZONE, Operator.IN, (zone,)))
    return replace(row, profile=replace(row.profile, requirements=requirements, **changes))


@pytest.mark.rule("shard 4/9")
async def test_a_gang_that_requires_more_of_its_machines_stays_as_old_as_it_is() -> None:
    """Its first pod runs, and the others must follow: an equal gang that came later must not take its machines."""
    world = World()
    first, second = world.connect("c1"), world.connect("c2")
    first.report(need("c1", "4", group="g"))
    await world.shard._clock.sleep(60)
    second.report(need("c2", "4", group="h"))
    table = world.shard.intake.table
    assert [row.cluster for row in table.in_list_order()] == ["c1", "c2"]
    await world.shard._clock.sleep(60)
    narrowed = in_zone(need("c1", "4", group="g"), "za", interruption_bucket=5)
    first.report(narrowed, at_unix_nanos=2)

    assert [(row.cluster, row.fingerprint) for row in table.in_list_order()] == [
        ("c1", narrowed.fingerprint),
        ("c2", need("c2", "4").fingerprint),
    ]
    assert list(table.buckets_in_list_order()) == [row.profile.interruption_bucket for row in table.in_list_order()]


@pytest.mark.rule("shard 4/9")
async def test_gangs_of_one_message_keep_their_order_when_one_of_them_requires_more() -> None:
    """A group may have several rows; rows that it did not have are as old as its oldest, and stand behind."""
    world = World()
    operator = world.connect("c1")
    groups = ("g", "h", "")
    operator.report(*(need("c1", "4", group=group) for group in groups))
    await world.shard._clock.sleep(60)
    gang, *others = (need("c1", "4", group=group) for group in groups)
    operator.report(*others, in_zone(gang, "za"), in_zone(gang, "zb"), in_zone(others[-1], "za"), at_unix_nanos=2)
    rows = world.shard.intake.table.in_list_order()

    assert [row.group for row in rows] == ["g", "h", "", "g", ""]
    assert len({row.arrival_unix_nanos for row in rows[:4]}) == 1
    assert rows[4].arrival_unix_nanos > rows[0].arrival_unix_nanos


async def test_overheads_are_in_force_with_the_rows_beside_them() -> None:
    """Those of a roll-up that is held are not; one whose overheads alone differ is not the same."""
    world = World()
    operator = world.connect("c1")
    daemons = (Overhead((), {"cpu": 100}),)

    def report(count: int, overheads: tuple[Overhead, ...]) -> RollUpOutcome:
        return world.shard.take_rollup(operator.session, Offer("c1", rows(count), said_overheads=overheads))

    assert report(30, ()) is RollUpOutcome.ACCEPTED
    assert report(30, daemons) is RollUpOutcome.ACCEPTED
    assert report(30, daemons) is RollUpOutcome.UNCHANGED
    assert report(0, ()) is RollUpOutcome.HELD
    assert world.shard.intake.table.overheads_by_cluster() == {"c1": daemons}


async def test_a_cycle_decides_with_the_overheads_in_force() -> None:
    """They reach the engine beside the demand."""
    world = World()
    await world.cycle()
    operator = world.connect("c1")
    daemons = (Overhead((), {"cpu": 100}),)
    world.shard.take_rollup(operator.session, Offer("c1", rows(1), said_overheads=daemons))
    report = await world.cycle()

    assert report.decision is not None
    assert report.decision.basis is not None
    assert report.decision.basis.options.overheads == {"c1": daemons}


@pytest.mark.rule("shard 4/6")
async def test_a_malformed_roll_up_is_refused_whole() -> None:
    """The last good demand stays, the refusal is counted, and who understands it hears where the fault is."""
    world = World()
    plain, told = world.connect("c1"), world.connect("c2", CAPABILITY_NEED_STATUS)
    plain.report(*rows(2))
    fault = MalformedMessage("needs[1].aggregate_resources['cpu']", "'-4' is negative")
    assert (plain.report(fault=fault), told.report(fault=fault)) == ("rejected", "rejected")

    assert len(world.shard.intake.table.in_list_order()) == 2
    assert [world.metric("rollups_rejected_total", cluster=cluster) for cluster in ("c1", "c2")] == [1, 1]
    assert await acks(plain, ECHO_ROLLUP_REJECTED) == []
    assert len(await acks(plain, ECHO_ROLLUP)) == 1
    assert [str(fault)] == [ack.error for ack in await acks(told, ECHO_ROLLUP_REJECTED)]


@pytest.mark.rule("shard 4/6", "shard 4/10")
async def test_a_malformed_roll_up_is_no_report() -> None:
    """A cluster that was never understood has not spoken: nothing of it may be reclaimed."""
    world = World()
    world.connect("c1").report(fault=MalformedMessage("needs[0].group", "is too long"))

    assert world.shard.intake.reported == set()


@pytest.mark.rule("shard 4/1")
async def test_a_roll_up_for_another_cluster_is_dropped() -> None:
    """It is counted; neither cluster's demand changes, nobody is acked."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(2))
    outcome = world.shard.take_rollup(operator.session, Offer("c2", (need("c2", "4"),)))

    assert (outcome, world.metric("rollups_total", result="misrouted")) == (RollUpOutcome.MISROUTED, 1)
    assert world.shard.intake.table.clusters == {"c1"}
    assert len(await acks(operator, ECHO_ROLLUP)) == 1


@pytest.mark.rule("shard 4/7", "shard 6/5", "shard 15/21")
async def test_a_sudden_loss_of_rows_is_held_twice_and_then_believed() -> None:
    """A held one is acked as such, wakes nothing, and counts as a report."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(20))
    world.shard._trigger._wakeup.clear()
    outcomes = [operator.report(), operator.report(*rows(1))]
    assert (outcomes, world.shard._trigger._wakeup.is_set()) == (["held", "held"], False)
    assert len(world.shard.intake.table.in_list_order()) == 20
    assert world.metric("rollup_quarantined", cluster="c1") == 1

    assert operator.report(*rows(1)) == "accepted"
    assert len(world.shard.intake.table.in_list_order()) == 1
    assert [ack.held for ack in await acks(operator, ECHO_ROLLUP)] == [False, True, True, False]
    assert world.metric("rollup_quarantined", cluster="c1") == 0


@pytest.mark.rule("shard 4/3", "shard 6/7")
async def test_an_unchanged_roll_up_ends_the_streak() -> None:
    """A flapping list never adds up to three."""
    world = World()
    operator = world.connect("c1")
    outcomes = [operator.report(*rows(count)) for count in (20, 0, 0, 20, 0, 0, 20)]

    assert outcomes == ["accepted", "held", "held", "unchanged", "held", "held", "unchanged"]


@pytest.mark.rule("shard 6/5", "shard 15/21", "shard 16/2")
@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [(9, 0, "accepted"), (10, 0, "held"), (10, 1, "accepted"), (11, 1, "held"), (20, 2, "accepted"), (21, 2, "held")],
)
async def test_the_borders_of_the_guard(before: int, after: int, outcome: str) -> None:
    """At least ten rows, or ten machines' worth, before, and less than a tenth of the demand now."""
    for reports in (
        (rows(before, cpu="1"), rows(after, cpu="1")),
        (rows(int(before > 0), cpu=str(before)), rows(int(after > 0), cpu=str(after))),
    ):
        operator = World().connect("c1")
        operator.report(*reports[0])
        assert outcome == operator.report(*reports[1])


@pytest.mark.rule("shard 6/5")
async def test_an_empty_roll_up_of_a_cluster_with_few_rows_and_many_pods_is_held() -> None:
    """Nine rows with hundreds of pods; an intended scale-down to zero is accepted with the third report."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(9, cpu="50"))
    with capture_logs() as logs:
        outcomes = [operator.report() for _ in range(3)]

    assert outcomes == ["held", "held", "accepted"]
    reasons = [line["reason"] for line in logs if line["event"] in ("rollup.quarantined", "rollup.confirmed")]
    assert reasons == ["the total of cpu fell from 450000 to 0 milli-units"] * 3


@pytest.mark.rule("shard 6/6")
async def test_a_row_of_ten_machines_that_vanishes_is_held() -> None:
    """Measured in the largest machine that is bound to the cluster, where there is one."""
    for machines, cpu, outcome in ((1, "40", "held"), (1, "39", "accepted"), (0, "10", "held"), (0, "9", "accepted")):
        provider = ScriptedProvider()
        provider.add(*(machine(f"m{number}", MachineState.CONFIGURED, cluster="c1") for number in range(machines)))
        provider.add(machine("large", MachineState.CONFIGURED, cluster="c2", allocatable={"cpu": "64"}))
        world = World(provider)
        operator = world.connect("c1")
        await world.step()
        others = rows(5, cpu="100")
        operator.report(*others, need("c1", cpu, priority=7))

        assert operator.report(*others) == outcome, (machines, cpu)


@pytest.mark.rule("shard 2/4", "shard 6/8")
async def test_the_first_roll_up_of_a_process_has_nothing_to_compare_with() -> None:
    """An empty one passes and is a statement."""
    world = World(ScriptedProvider(), epoch=2)
    operator = world.connect("c1")

    assert (operator.report(), world.shard.intake.reported) == ("accepted", {"c1"})


@pytest.mark.rule("shard 6/8")
async def test_the_guard_can_be_switched_off() -> None:
    """Then the first small one is believed."""
    world = World(settings=ShardSettings(empty_rollup_guard=False))
    operator = world.connect("c1")
    operator.report(*rows(20))

    assert operator.report() == "accepted"


@pytest.mark.rule("shard 4/11")
async def test_a_lost_session_changes_no_demand() -> None:
    """Silence never means that nothing is needed."""
    world = World()
    operator = world.connect("c1")
    operator.report(*rows(3))
    world.shard.stop_sessions()

    assert (operator.session.outbox.closed is not None, len(world.shard.intake.table.in_list_order())) == (True, 3)


@pytest.mark.rule("shard 14/3")
async def test_a_cluster_that_is_gone_leaves_no_series_behind() -> None:
    """Gone is: no session and no demand."""
    world = World()
    stays, goes = world.connect("c1"), world.connect("c2")
    stays.report(*rows(1))
    goes.report(fault=MalformedMessage("needs[0]", "is broken"))
    series = ("rollup_quarantined", "rollups_rejected_total")
    before = [world.registry.get_sample_value(f"bigfleet_shard_{name}", {"cluster": "c2"}) for name in series]
    world.shard.stop_sessions()

    assert before == [0, 1]
    for name in series:
        assert world.registry.get_sample_value(f"bigfleet_shard_{name}", {"cluster": "c2"}) is None
    assert world.registry.get_sample_value("bigfleet_shard_rollup_quarantined", {"cluster": "c1"}) == 0


@pytest.mark.rule("shard 4/4")
async def test_the_newest_roll_up_in_line_is_taken() -> None:
    """One slot per session: what was replaced there is never read."""
    world = World()
    operator = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    offers = [CountingOffer("c1", rows(count), count) for count in (1, 2, 3)]
    for offer in offers:
        world.shard.sessions.receive_rollup(operator.session, offer)
    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(operator, ECHO_ROLLUP)] == [3]

    assert [offer.reads for offer in offers] == [[], [], [1]]
    world.shard.stop_sessions()
    await lane


async def test_a_roll_up_that_breaks_the_shard_costs_itself_only() -> None:
    """The lane goes on with the next one, and the last good demand stays."""

    class Broken(Offer):
        def needs(self) -> tuple[Need, ...]:
            raise KeyError("a defect")

    world = World()
    operator = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    for offer in (Offer("c1", rows(1), 1), Broken("c1", rows(2), 2), Offer("c1", rows(3), 3)):
        world.shard.sessions.receive_rollup(operator.session, offer)
        await acks(operator, ECHO_ROLLUP)

    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(operator, ECHO_ROLLUP)] == [1, 3]
    assert len(world.shard.intake.table.in_list_order()) == 3
    world.shard.stop_sessions()
    await lane


# ---- large roll-ups ---------------------------------------------------------------------------------------------


class Apart:
    """A compute that notes what it runs, and runs it when it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.works = 0
        #: What comes after so many works waits for the gate to be opened again.
        self.closes_after: int | None = None

    async def __call__(self, work: Callable[[], Any]) -> Any:
        if self.works == self.closes_after:
            self.gate.clear()
        self.works += 1
        await self.gate.wait()
        return work()


def large(timestamp_unix_nanos: int, *, count: int = ROWS_ON_LOOP_MAX + 1, cpu: str = "4") -> CountingOffer:
    """Return a roll-up of many rows."""
    return CountingOffer("c1", rows(count, cpu=cpu), timestamp_unix_nanos)


@pytest.mark.rule("shard 4/4", "shard 4/5")
async def test_a_large_roll_up_is_read_off_the_loop_and_in_its_turn() -> None:
    """The loop goes on while it is read; what came later on this session waits, other sessions do not."""
    apart = Apart()
    world = World(compute=apart)
    slow, quick = world.connect("c1"), world.connect("c2")
    lanes = [asyncio.create_task(world.shard.serve_rollups(each.session)) for each in (slow, quick)]
    world.shard.sessions.receive_rollup(slow.session, large(1))
    assert await acks(slow, ECHO_ROLLUP) == []
    world.shard.sessions.receive_rollup(slow.session, Offer("c1", rows(200), 2))
    world.shard.sessions.receive_rollup(quick.session, Offer("c2", (need("c2", "4"),), 3))
    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(quick, ECHO_ROLLUP)] == [3]
    assert await acks(slow, ECHO_ROLLUP) == []

    apart.gate.set()
    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(slow, ECHO_ROLLUP)] == [1, 2]
    assert len(world.shard.intake.table.rows_of("c1")) == 200
    world.shard.stop_sessions()
    await asyncio.gather(*lanes)


async def test_rows_of_a_large_roll_up_are_read_into_columns_off_the_loop() -> None:
    """It is in force and acknowledged before, and the loop serves other sessions meanwhile."""
    apart = Apart()
    apart.gate.set()
    world = World(compute=apart)
    slow, quick = world.connect("c1"), world.connect("c2")
    lanes = [asyncio.create_task(world.shard.serve_rollups(each.session)) for each in (slow, quick)]
    content = tuple(
        replace(each, shapes=(DemandShape(each.min_unit, 4),)) for each in rows(demand_columns.ROWS_AT_ONCE_MAX + 1)
    )
    apart.closes_after = 2  # its digest, its rows
    world.shard.sessions.receive_rollup(slow.session, Offer("c1", content, 1))
    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(slow, ECHO_ROLLUP)] == [1]
    table = world.shard.intake.table
    assert (apart.works, len(table.rows_of("c1"))) == (3, len(content))
    assert table.unread_rows_of("c1") is not None
    world.shard.sessions.receive_rollup(quick.session, Offer("c2", (replace(content[0], cluster=ClusterId("c2")),), 3))
    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(quick, ECHO_ROLLUP)] == [3]
    assert table.unread_rows_of("c1") is not None

    apart.gate.set()
    await acks(slow, ECHO_ROLLUP)
    assert table.unread_rows_of("c1") is None
    world.shard.sessions.receive_rollup(slow.session, Offer("c1", content, 4))
    await acks(slow, ECHO_ROLLUP)
    assert apart.works == 3, "nothing is read of an unchanged one"
    world.shard.stop_sessions()
    await asyncio.gather(*lanes)


@pytest.mark.rule("shard 4/5")
async def test_a_large_roll_up_is_judged_like_any_other() -> None:
    """Unchanged ones are not read, malformed ones are refused with the place of the fault, misrouted ones dropped."""
    apart = Apart()
    apart.gate.set()
    world = World(compute=apart)
    operator = world.connect("c1", CAPABILITY_NEED_STATUS)
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    fault = MalformedMessage("needs[7].group", "is too long")
    many = ROWS_ON_LOOP_MAX + 1
    again = large(2)
    misrouted = CountingOffer("c9", rows(many), 3)
    for offer in (large(1), again, misrouted, Offer("c1", rows(many, cpu="5"), 4, fault=fault), large(5, cpu="6")):
        world.shard.sessions.receive_rollup(operator.session, offer)
        await acks(operator, ECHO_ROLLUP)

    assert [ack.rollup_timestamp_unix_nanos for ack in await acks(operator, ECHO_ROLLUP)] == [1, 2, 5]
    assert [ack.error for ack in await acks(operator, ECHO_ROLLUP_REJECTED)] == [str(fault)]
    assert (again.reads, misrouted.reads) == ([], [])
    results = ("accepted", "unchanged", "misrouted", "rejected")
    assert [world.metric("rollups_total", result=result) for result in results] == [2, 1, 1, 1]
    world.shard.stop_sessions()
    await lane


async def test_a_large_roll_up_that_is_known_already_takes_its_turn_on_the_loop() -> None:
    """Its digest is at hand, so there is nothing to do apart; one whose digest has to be made is asked for it apart."""
    apart = Apart()
    apart.gate.set()
    world = World(compute=apart)
    operator = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(operator.session))
    works = []
    for offer in (large(1), large(2), replace(large(3), has_digest=False)):
        world.shard.sessions.receive_rollup(operator.session, offer)
        await acks(operator, ECHO_ROLLUP)
        works.append(apart.works)

    assert works == [2, 2, 3]
    assert world.metric("rollups_total", result="unchanged") == 2
    world.shard.stop_sessions()
    await lane


@pytest.mark.rule("shard 10.1/4")
async def test_a_large_roll_up_of_a_session_that_has_ended_changes_nothing() -> None:
    """It was being read when the session was replaced: the newer one speaks for the cluster."""
    apart = Apart()
    world = World(compute=apart)
    former = world.connect("c1")
    lane = asyncio.create_task(world.shard.serve_rollups(former.session))
    world.shard.sessions.receive_rollup(former.session, large(1))
    await acks(former, ECHO_ROLLUP)
    world.connect("c1")
    apart.gate.set()
    await lane

    assert world.shard.intake.reported == set()
