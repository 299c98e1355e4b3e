"""Tests that a shard carries exchanges out, and that one that is abandoned costs no pod its place."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.engine.targets import Target
from bigfleet.exchange.course import ACQUIRING_SECONDS_MAX, ExchangeEnd, ExchangePhase
from bigfleet.exchange.values import (
    BlockReason,
    ClusterExchanges,
    ExchangeMode,
    ExchangeQuestion,
    ExclusionReason,
    WaitReason,
)
from bigfleet.model.frames import DrainOutcome
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.cluster_policy import ClusterPolicies, ClusterPolicy
from bigfleet.shard.exchange.exchange_records import ExchangeRecord, MemoryExchanges
from bigfleet.shard.ownership.ownership_file import OwnershipNotWritten
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from tests.shard.cycle.test_composition_plans import Workers as PlanWorkers
from tests.shard.cycle.test_pods import pods
from tests.shard.exchange.test_proposals import Fleet, Workers, dear, spot

S = MachineState

pytestmark = pytest.mark.virtual_time


class Exchanging(Fleet):
    """A shard that carries exchanges out; pods of half a cpu are demanded, twelve unless the test says otherwise."""

    def __init__(self, *more: Machine, reclaim_after_seconds: float = 600.0, **fields: Any) -> None:
        fields = {"mode": ExchangeMode.ON, "reclaim_after_seconds": reclaim_after_seconds, **fields}
        super().__init__(*more, **fields)

    @property
    def phase(self) -> ExchangePhase | None:
        """The phase of the exchange under way."""
        course = self.world.shard.exchanges.course_of("c1")
        return None if course is None else course.phase

    async def until(self, phase: ExchangePhase) -> None:
        """Let time pass until the exchange is in the phase."""
        for _ in range(60):
            if self.phase is phase:
                return
            await self.minutes(1)
        raise AssertionError(f"the exchange never was {phase.value}, it is {self.phase}")

    def records_of(self) -> list[ExchangeRecord]:
        """Return what is recorded of exchanges."""
        return self.world.shard.exchanges.records

    def end(self) -> str:
        """Return how the only exchange ended."""
        (record,) = self.records_of()
        return record.end

    def holds(self) -> list[str]:
        """Return the machines that serve the cluster."""
        found = [each for each in self.provider.records.values() if each.cluster == "c1"]
        return sorted(each.id for each in found if each.state is S.CONFIGURED)

    def drained(self) -> list[str]:
        """Return the machines that the provider drained, in order."""
        return [machine_id for method, machine_id, _ in self.provider.calls if method == "drain"]

    def events(self) -> list[tuple[str, str, float]]:
        """Return (kind, outcome, saving) of the audit records of exchanges that were carried out."""
        found = [json.loads(line) for line in self.log.lines]
        kinds = ("BeginExchange", "EndExchange")
        return [(r["kind"], r["outcome"], r["saving_usd_per_hour"]) for r in found if r["kind"] in kinds]


# ---- carried out ---------------------------------------------------------------------------------------------------


async def test_what_comes_is_acquired_first_and_what_goes_drains_after_its_delay() -> None:
    """Two machines at $3.00 make way for one at $0.30, one after the other; then nothing happens."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(1)
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]
    await fleet.until(ExchangePhase.DRAINING)
    await fleet.minutes(9)
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]

    await fleet.minutes(1)
    assert fleet.holds() == ["c1-dear1", "spot0"]
    await fleet.minutes(2)
    assert fleet.holds() == ["spot0"]
    assert fleet.drained() == ["c1-dear0", "c1-dear1"]
    assert fleet.end() == "done"

    count = len(fleet.provider.calls)
    await fleet.minutes(120)
    # The two Deletes of what went.
    assert [method for method, _, _ in fleet.provider.calls[count:]] == ["delete", "delete"]
    assert fleet.holds() == ["spot0"]
    assert len(fleet.records_of()) == 1


async def test_an_exchange_is_shown_audited_and_counted() -> None:
    """What was promised, and what came of it."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    assert fleet.world.metric("exchanges_under_way") == 1
    assert fleet.only().blocked is BlockReason.EXCHANGE_UNDER_WAY
    assert fleet.events() == [("BeginExchange", "begun", 5.7)]
    await fleet.minutes(20)

    assert fleet.events() == [("BeginExchange", "begun", 5.7), ("EndExchange", "done", 5.7)]
    assert fleet.world.metric("exchanges_under_way") == 0
    assert fleet.world.metric("exchanges_ended_total", end="done") == 1
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="ended") == pytest.approx(5.7)
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="realised") == pytest.approx(5.7)
    await asyncio.sleep(24 * 3600)
    await fleet.minutes(1)
    assert fleet.world.metric("exchange_saving_usd_per_hour", saving="ended") == 0


async def test_an_asynchronous_machine_is_bound_when_it_is_there() -> None:
    """Create ends with an Idle machine, which the next decision binds for the cluster."""
    fleet = Exchanging(synchronous=False)
    for _ in range(40):
        await fleet.minutes(1)
        fleet.provider.settle()

    assert fleet.end() == "done"
    assert fleet.holds() == ["spot0"]


async def test_demand_that_changes_little_does_not_disturb_an_exchange() -> None:
    """A pod more or less, of the same kinds, is what clusters always have."""
    fleet = Exchanging(*(dear(number) for number in range(2, 10)), *(spot(number) for number in range(4, 8)))
    fleet.operator.report(pods("c1", ("500m", 80)))
    for minute in range(45):
        await fleet.minutes(1)
        fleet.operator.report(pods("c1", ("500m", 80 - minute % 2)))

    assert fleet.records_of()[0].end == "done"
    assert len(fleet.drained()) >= 2


async def test_no_more_than_the_budget_drains_at_a_time() -> None:
    """One of ten machines; the next one when it has left."""
    more = (*(dear(number) for number in range(2, 10)), *(spot(number) for number in range(4, 8)))
    fleet = Exchanging(*more, synchronous=False)
    fleet.operator.report(pods("c1", ("500m", 80)))
    draining = 0
    for minute in range(90):
        await fleet.minutes(1)
        found = [each.id for each in fleet.provider.records.values() if each.state is S.DRAINING]
        draining = max(draining, len(found))
        fleet.provider.settle(*(each for each in fleet.provider.records if each not in found or minute % 4 == 0))
    assert draining == 1
    assert len(fleet.drained()) > 1


# ---- abandoned -----------------------------------------------------------------------------------------------------


async def test_a_machine_that_fails_to_boot_ends_it() -> None:
    """What should have gone stays, and is not exchanged again for six hours, failed or not."""
    fleet = Exchanging(synchronous=False)
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(1)
    fleet.provider.fail("spot0", "it does not boot")
    await fleet.minutes(30)

    assert fleet.end() == "arrival-failed"
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]
    assert fleet.drained() == []
    assert dict(fleet.only().excluded) == {ExclusionReason.COOLING: 2}
    await fleet.minutes(330)
    fleet.provider.settle()
    await fleet.minutes(5)
    assert len(fleet.records_of()) == 2


async def test_a_machine_that_never_comes_ends_it_after_half_an_hour() -> None:
    """Double running is bounded in time."""
    fleet = Exchanging(synchronous=False, settings=ShardSettings(stuck_creating_seconds=2 * ACQUIRING_SECONDS_MAX))
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(int(ACQUIRING_SECONDS_MAX / 60))
    assert fleet.phase is ExchangePhase.ACQUIRING
    await fleet.minutes(2)

    assert fleet.end() == "acquired-too-late"
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]


async def test_a_machine_that_is_stuck_ends_it() -> None:
    """It is driven again after 20 minutes; nothing else is acquired in its place, and everything serves on."""
    fleet = Exchanging(synchronous=False)
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(18)
    assert fleet.phase is ExchangePhase.ACQUIRING
    await fleet.minutes(7)

    assert fleet.end() == "arrival-failed"
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]
    assert len({name for method, name, _sequence in fleet.provider.calls if method == "create"}) == 1


async def test_a_drain_that_takes_too_long_ends_it() -> None:
    """Ten minutes of delay and twenty for each of two waves; what drains by then goes on draining."""
    fleet = Exchanging()
    fleet.operator.drain = None
    for machine_id in ("c1-dear0", "c1-dear1"):
        fleet.provider.lost_answers.add(("drain", machine_id))
    await fleet.until(ExchangePhase.DRAINING)
    fleet.world.shard.fit_holds.hold(MachineId("other"), "")
    fleet.world.shard.fit_holds.awaited_sessions = lambda: frozenset({"c1"})
    await fleet.minutes(49)
    assert fleet.phase is ExchangePhase.DRAINING
    await fleet.minutes(3)
    assert fleet.end() == "drained-too-late"
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]


@pytest.mark.parametrize("phase", [ExchangePhase.ACQUIRING, ExchangePhase.DRAINING])
async def test_a_price_that_moves_back_ends_it(phase: ExchangePhase) -> None:
    """The dear machines stay, and the one that came is excess."""
    fleet = Exchanging()
    await fleet.until(phase)
    await fleet.minutes(1)
    for number in range(4):
        known = fleet.provider.records[f"spot{number}"]
        fleet.provider.records[f"spot{number}"] = replace(known, price_usd_per_hour=7.0)
    await fleet.minutes(1)
    assert fleet.end() == "price-moved"
    await fleet.minutes(30)

    assert fleet.holds() == ["c1-dear0", "c1-dear1"]
    assert fleet.drained() == ["spot0"]


async def test_demand_that_grows_uses_what_was_to_leave() -> None:
    """No pod waits for another machine while one that should leave is there."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    calls = len(fleet.provider.calls)
    fleet.operator.report(pods("c1", ("500m", 30)))
    await fleet.minutes(2)

    assert fleet.end() == "demand-changed"
    assert fleet.provider.calls[calls:] == []
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]


async def test_a_node_whose_pods_fit_nowhere_else_ends_it() -> None:
    """The operator's preflight has the last word."""
    fleet = Exchanging()
    fleet.operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
    await fleet.until(ExchangePhase.DRAINING)
    await fleet.minutes(13)

    assert fleet.end() == "would-not-fit"
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0"]
    assert fleet.drained() == []


async def test_what_came_leaves_again_when_what_goes_cannot_leave() -> None:
    """Both sets are paid for until then; without that the cluster would ask for the dear machine again and again."""
    fleet = Exchanging()
    fleet.operator.report(pods("c1", ("500m", 8)))
    await fleet.minutes(15)
    (stays,) = fleet.holds()
    fleet.operator.refuses = {stays}
    await fleet.until(ExchangePhase.DRAINING)
    await fleet.minutes(13)
    assert fleet.end() == "would-not-fit"
    assert fleet.holds() == [stays, "spot0"]

    await fleet.minutes(30)
    assert fleet.holds() == [stays]
    assert fleet.world.outcomes().count(("Reclaim", stays, "would_not_fit")) == 1


async def test_an_operator_that_goes_away_ends_it() -> None:
    """Nobody would evict the pods under their budgets."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    fleet.world.shard.sessions.close(fleet.operator.session, CloseReason.GONE)
    await fleet.minutes(1)

    assert fleet.end() == "operator-away"


async def test_a_held_roll_up_ends_it() -> None:
    """What the cluster needs is not known then."""
    fleet = Exchanging(*(dear(number) for number in range(2, 10)), *(spot(number) for number in range(4, 8)))
    fleet.operator.report(pods("c1", ("500m", 80)))
    await fleet.until(ExchangePhase.DRAINING)
    fleet.operator.report(pods("c1", ("500m", 1)))
    await fleet.minutes(1)

    assert fleet.end() == "quarantined"


async def test_a_policy_that_says_off_ends_it() -> None:
    """Also for an exchange under way."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    policy = ClusterPolicy(exchange=ExchangeMode.PROPOSE)
    fleet.world.shard.policies = ClusterPolicies(by_cluster={"c1": policy})
    await fleet.minutes(1)

    assert fleet.end() == "switched-off"


@pytest.mark.parametrize("machine_id", ["c1-dear1", "spot0"])
async def test_a_machine_that_is_handed_over_ends_it(machine_id: str) -> None:
    """It is no longer this shard's to exchange, nor to count on."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    del fleet.provider.records[machine_id]
    await fleet.minutes(1)

    assert fleet.end() == ("arrival-failed" if machine_id == "spot0" else "left-early")


@pytest.mark.parametrize("workers", [None, PlanWorkers(1.0)], ids=["in the cycle", "by workers"])
async def test_an_abandoned_exchange_leaves_no_wish_for_what_was_to_come(workers: PlanWorkers | None) -> None:
    """A composition that counts on a machine that is still being created drops one that serves, for nothing."""
    fleet = Exchanging(synchronous=False, plan_workers=workers)
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(int(ACQUIRING_SECONDS_MAX / 60) + 5)
    assert fleet.end() == "arrival-failed"
    fleet.provider.fail("spot0", "it does not boot")
    calls = len(fleet.provider.calls)
    await fleet.minutes(300)

    assert [call for call in fleet.provider.calls[calls:] if call[0] in ("create", "drain")] == []
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]


async def test_a_pool_whose_machines_cannot_be_configured_ends_it() -> None:
    """The third failure in a row withholds the pool; an exchange does not wait for its probes."""
    fleet = Exchanging()
    for number in range(4):
        fleet.provider.refusals["configure", f"spot{number}"] = [RefusalKind.REFUSED] * 99
    await fleet.until(ExchangePhase.ACQUIRING)
    await fleet.minutes(10)
    assert fleet.end() == "arrival-failed"
    assert sum(call[0] == "create" for call in fleet.provider.calls) <= 3

    await fleet.minutes(300)
    assert sum(call[0] == "create" for call in fleet.provider.calls) <= 3
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]


async def test_what_left_before_is_not_bought_back() -> None:
    """An exchange that is abandoned half-way leaves a fleet that serves, and no wish for what left."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    while "c1-dear0" in fleet.holds():
        await fleet.minutes(1)
    fleet.world.shard.exchanges.abandon("c1", ExchangeEnd.PRICE_MOVED)
    calls = len(fleet.provider.calls)
    await fleet.minutes(60)

    made = [(method, machine_id) for method, machine_id, _ in fleet.provider.calls[calls:]]
    assert [call for call in made if call[0] in ("create", "configure")] == []
    assert fleet.holds() == ["spot0"]


async def test_a_machine_that_never_serves_delays_reclaims_for_half_an_hour_at_most() -> None:
    """A bootstrap that hangs, or machines that are bound all day, would leave what came in the cluster for ever."""
    fleet = Exchanging(settings=ShardSettings(stuck_configuring_seconds=7200.0))
    await fleet.until(ExchangePhase.DRAINING)
    for number in range(4):
        known = fleet.provider.records[f"spot{number}"]
        fleet.provider.records[f"spot{number}"] = replace(known, price_usd_per_hour=7.0)
    await fleet.minutes(1)
    assert fleet.end() == "price-moved"
    # It has room for no pod, so that nothing counts on it.
    fleet.provider.add(replace(dear(9), state=S.CONFIGURING, allocatable={"cpu": "100m", "memory": "1Gi"}))
    await fleet.minutes(25)
    assert fleet.world.shard.exchanges.is_busy("c1")
    assert fleet.drained() == []

    await fleet.minutes(20)
    assert not fleet.world.shard.exchanges.is_busy("c1")
    assert fleet.drained() == ["spot0"]


async def test_machines_of_a_cluster_whose_operator_is_gone_are_not_retained_for_ever() -> None:
    """Without a session no machine counts as joined."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    fleet.world.shard.sessions.close(fleet.operator.session, CloseReason.GONE)
    await fleet.minutes(40)

    assert fleet.end() == "operator-away"
    assert not fleet.world.shard.exchanges.is_busy("c1")
    assert fleet.world.shard.exchanges.retained == frozenset()


async def test_an_exchange_that_is_abandoned_while_another_is_planned_fails_no_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looks and answers of operators run between the steps of a cycle."""
    fleet = Exchanging(dear(0, "c2"), dear(1, "c2"))
    fleet.world.connect("c2").report(pods("c2", ("500m", 12)))
    await fleet.until(ExchangePhase.ACQUIRING)
    exchanges, plans = fleet.world.shard.exchanges, fleet.world.shard.plans
    assert exchanges.clusters == ["c1", "c2"]
    asked_without = plans.asked_without

    async def meanwhile(*given: Any) -> Any:
        for other in {"c1", "c2"} - {given[3]}:
            exchanges.abandon(other, ExchangeEnd.SWITCHED_OFF)
        return await asked_without(*given)

    monkeypatch.setattr(plans, "asked_without", meanwhile)
    await fleet.minutes(5)

    assert fleet.world.metric("cycle_failures_total") == 0
    assert [record.end for record in fleet.records_of()] == ["", "switched-off"]


async def test_a_price_that_no_machine_has_disturbs_no_exchange() -> None:
    """The largest float, for a price that the provider does not know: the record is rejected."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    for machine_id in ("c1-dear0", "c1-dear1"):
        known = fleet.provider.records[machine_id]
        fleet.provider.records[machine_id] = replace(known, price_usd_per_hour=1.7e308)
    await fleet.minutes(3)

    assert fleet.phase is ExchangePhase.DRAINING
    assert fleet.world.metric("cycle_failures_total") == 0
    assert fleet.world.metric("machines_rejected_total", reason="price") >= 2


# ---- not begun -----------------------------------------------------------------------------------------------------


class Unwritable(MemoryExchanges):
    """A store on a disk that takes nothing."""

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Refuse."""
        raise OwnershipNotWritten("the disk is full")


async def test_an_exchange_that_cannot_be_recorded_is_not_begun() -> None:
    """Its machines would not cool after a restart."""
    fleet = Exchanging(exchange_store=Unwritable())
    await fleet.minutes(20)

    assert fleet.only().proposals[0].waits_for is None
    assert (fleet.phase, fleet.holds()) == (None, ["c1-dear0", "c1-dear1"])


async def test_an_exchange_waits_for_machines_that_the_composition_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next decision acquires them, which would end it."""
    fleet = Exchanging()
    plans = fleet.world.shard.plans
    known = plans.target_of

    def lacking(cluster: str) -> Target | None:
        target = known(cluster)
        return None if target is None else replace(target, counts={key: n + 1 for key, n in target.counts.items()})

    with monkeypatch.context() as patch:
        patch.setattr(plans, "target_of", lacking)
        await fleet.minutes(20)
        assert fleet.records_of() == []
        assert [each.waits_for for each in fleet.only().proposals] == [None]
    await fleet.minutes(1)

    assert len(fleet.records_of()) == 1


async def test_an_exchange_begins_although_a_price_changed_since_the_plan() -> None:
    """The composition names what the cluster holds at its former price, and the decision acquires nothing for that."""
    fleet = Exchanging()
    await fleet.minutes(5)
    for name, known in list(fleet.provider.records.items()):
        if known.cluster == "c1":
            fleet.provider.records[name] = replace(known, price_usd_per_hour=3.5)
    await fleet.minutes(16)

    assert [record.cluster for record in fleet.records_of()] == ["c1"]


def two_clusters_and_one_offer(**fields: Any) -> Exchanging:
    """Return two clusters, each of which could exchange two machines for the only one on offer."""
    fleet = Exchanging(dear(0, "c2"), dear(1, "c2"), **fields)
    for number in (1, 2, 3):
        del fleet.provider.records[f"spot{number}"]
    fleet.world.connect("c2").report(pods("c2", ("500m", 12)))
    return fleet


def reasons(fleet: Exchanging, cluster: str) -> list[WaitReason | None]:
    """Return what the proposals of a cluster wait for."""
    (found,) = fleet.exchanges.found(cluster)
    return [each.waits_for for each in found.exchanges.proposals]


class SlowWorkers(Workers):
    """Let cycles go on while they search for the second cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet: Exchanging | None = None

    async def find_exchanges(self, question: ExchangeQuestion) -> ClusterExchanges:
        """Return what can be exchanged, by then of machines that are no longer on offer."""
        if question.cluster == "c2" and self.fleet is not None and self.fleet.phase is not None:
            await self.fleet.minutes(3, looks=False)
        return await super().find_exchanges(question)


async def test_two_clusters_do_not_begin_for_the_same_last_machine() -> None:
    """Both are asked about the one machine on offer in the same minute; only one begins."""
    fleet = two_clusters_and_one_offer()
    await fleet.until(ExchangePhase.ACQUIRING)
    assert reasons(fleet, "c2") == [WaitReason.NO_STOCK]
    assert fleet.world.metric("exchange_proposals", waits_for="no-stock") == 1

    await fleet.minutes(40)
    assert [(record.cluster, record.end) for record in fleet.records_of()] == [("c1", "done")]


async def test_a_machine_that_the_same_cycle_gave_to_pods_is_not_promised() -> None:
    """The cycle that is looked at saw it on offer, and gave it away: nothing would come for half an hour."""
    fleet = Exchanging()
    for number in (1, 2, 3):
        del fleet.provider.records[f"spot{number}"]
    other = fleet.world.connect("c2")
    await fleet.minutes(15)
    other.report(pods("c2", ("500m", 12)))
    await fleet.minutes(1)
    assert fleet.provider.records["spot0"].cluster == "c2"
    assert reasons(fleet, "c1") == [WaitReason.NO_STOCK]

    await fleet.minutes(5)
    assert fleet.records_of() == []


async def test_a_machine_that_is_no_longer_taken_is_free_for_the_other_cluster() -> None:
    """The exchange that was to take it ended before it was acquired; nothing else changed."""
    fleet = two_clusters_and_one_offer()
    await fleet.until(ExchangePhase.ACQUIRING)
    assert reasons(fleet, "c2") == [WaitReason.NO_STOCK]
    fleet.world.shard.exchanges.abandon("c1", ExchangeEnd.PRICE_MOVED)
    await fleet.minutes(1)
    assert [record.cluster for record in fleet.records_of()] == ["c1", "c2"]


async def test_a_machine_that_comes_during_a_search_is_not_promised_twice() -> None:
    """The other cluster was asked while it was still on offer."""
    workers = SlowWorkers()
    fleet = workers.fleet = two_clusters_and_one_offer(workers=workers)
    await fleet.minutes(60)
    assert fleet.provider.records["spot0"].cluster == "c1"
    assert [record.cluster for record in fleet.records_of()] == ["c1"]


async def test_a_machine_of_the_same_class_that_is_held_does_not_count_as_one_that_comes() -> None:
    """The cluster has one beyond its composition: it is excess, and its pods fit nowhere else."""
    fleet = Exchanging()
    await fleet.minutes(2, looks=False)
    fleet.provider.add(replace(spot(9), state=S.CONFIGURED, cluster=ClusterId("c1"), host=dear(9).host))
    fleet.operator.drain = (DrainOutcome.WOULD_NOT_FIT, 1.0)
    await fleet.until(ExchangePhase.ACQUIRING)
    assert dict(fleet.only().excluded) == {ExclusionReason.WOULD_NOT_FIT: 1}
    fleet.operator.drain = (DrainOutcome.DRAINED, 1.0)
    await fleet.minutes(1)
    assert fleet.holds() == ["c1-dear0", "c1-dear1", "spot0", "spot9"]

    await fleet.minutes(40)
    assert fleet.end() == "done"
