"""Machines in creation are followed at a cost that grows with those that change, and off the event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.engine.class_changes import with_classes_changed
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore
from bigfleet.engine.decision import Decision, RowResult
from bigfleet.engine.targets import ClassKey, Target, class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.planner.composition import Composition
from bigfleet.planner.problem import Problem
from bigfleet.planner.search import Effort
from bigfleet.shard.cycle.composition_plans import CompositionPlans
from bigfleet.shard.cycle.created_machines import ACQUIRED_SECONDS, ClassChange, CreatedMachines, SnapshotClasses
from bigfleet.shard.ports import ShardSettings
from tests.shard.cycle.test_composition_plans import Workers
from tests.shard.cycle.test_pods import pods
from tests.shard.cycle.test_refined_machines import RefiningProvider
from tests.shard.world import World, machine

S = MachineState
T = TypeVar("T")
MACHINES = 30


def slots(provider: RefiningProvider, count: int) -> None:
    """Offer machines of one class, each of which hosts one pod of 3 cpu."""
    kind = CapacityType.ON_DEMAND
    provider.add(*(machine(f"s{n:03}", S.SPECULATIVE, capacity_type=kind) for n in range(count)))


# ---- cost --------------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_machines_that_stay_in_creation_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = RefiningProvider()
    slots(provider, MACHINES)
    world = World(provider)
    world.connect("c1").report(pods("c1", ("3", MACHINES)))
    for _ in range(3):
        await world.cycle()
    assert Counter(each.state for each in provider.records.values()) == {S.CREATING: MACHINES}
    looked_at: list[int] = []
    at = SnapshotClasses.at

    def counted(classes: SnapshotClasses, row: int) -> ClassKey:
        looked_at.append(row)
        return at(classes, row)

    monkeypatch.setattr(SnapshotClasses, "at", counted)
    for _ in range(5):
        await world.cycle()
    assert looked_at == []

    provider.settle("s003")
    await world.cycle()
    assert 1 <= len(looked_at) <= 2


@pytest.mark.virtual_time
async def test_machines_refined_in_one_cycle_change_their_composition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    replaced: list[set[str]] = []
    set_targets = CompositionPlans._set_targets

    def counted(target: Target, changes: list[tuple[ClassKey, ClassKey]]) -> Target:
        applied.append(len(changes))
        return with_classes_changed(target, changes)

    def counted_set(plans: CompositionPlans, targets: Mapping[str, Target | None]) -> None:
        replaced.append(set(targets))
        set_targets(plans, targets)

    monkeypatch.setattr("bigfleet.shard.cycle.composition_plans.with_classes_changed", counted)
    monkeypatch.setattr(CompositionPlans, "_set_targets", counted_set)
    provider = RefiningProvider(refined={"allocatable": {"cpu": "3500m", "memory": "15Gi"}})
    slots(provider, 2 * MACHINES)
    world = World(provider)
    for cluster in ("c1", "c2"):
        world.connect(cluster).report(pods(cluster, ("3", MACHINES)))
    for _ in range(3):
        await world.cycle()
    provider.settle()
    replaced.clear()
    await world.cycle()

    assert [number for number in applied if number] == [MACHINES, MACHINES]
    assert replaced == [{"c1", "c2"}]


@pytest.mark.virtual_time
async def test_machines_are_followed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    is_off_loop, seen, follow = False, [], CreatedMachines.follow

    async def compute(work: Callable[[], T]) -> T:
        nonlocal is_off_loop
        is_off_loop = True
        try:
            return work()
        finally:
            is_off_loop = False

    def followed(created: CreatedMachines, view: ColumnSnapshot, now_seconds: float) -> list[ClassChange]:
        seen.append(is_off_loop)
        return follow(created, view, now_seconds)

    monkeypatch.setattr(CreatedMachines, "follow", followed)
    provider = RefiningProvider()
    slots(provider, 4)
    world = World(provider, compute=compute)
    world.connect("c1").report(pods("c1", ("3", 2)))
    await world.settle(3)

    assert seen
    assert all(seen)


# ---- what is remembered ------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_what_a_pause_suppressed_is_forgotten_once_no_decision_acquires_it() -> None:
    provider = RefiningProvider()
    slots(provider, MACHINES)
    provider.add(machine("m0", S.CONFIGURED, cluster=ClusterId("c2")))
    world = World(provider, settings=ShardSettings(actuation_paused=True))
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", MACHINES)))
    world.connect("c2").report(pods("c2", ("3", 1)))
    for _ in range(2):
        await world.cycle()
    created = world.shard.plans._created
    assert len(created) == MACHINES

    # A sudden fall of demand is held until it has been reported a few times.
    for number in range(2, 5):
        operator.report(pods("c1", ("1", 1)), at_unix_nanos=number)
        await world.cycle()
    assert len(created) == MACHINES

    await asyncio.sleep(ACQUIRED_SECONDS + 1)
    await world.cycle()
    assert len(created) == 1


def result(cluster: str, *machine_ids: str) -> Decision:
    """Return a decision that creates machines for a cluster."""
    row = pods(cluster, ("3", 1))
    made = RowResult(need=row, members=(row,), provisions=tuple(MachineId(each) for each in machine_ids))
    return Decision(actions=(), rows=(made,))


def as_stored(*machines: Machine) -> ColumnStore:
    """Return a store of machines."""
    store = ColumnStore()
    for each in machines:
        store.insert(each)
    return store


def test_a_machine_whose_action_waits_is_followed_when_no_decision_acquires_it_any_more() -> None:
    """Its action is in the queue: it becomes Idle between two views, as another class."""
    slot = machine("s0", S.SPECULATIVE)
    store, created = as_stored(slot), CreatedMachines()
    created.follow(store.snapshot(), 0.0)
    created.decided(result("c1", "s0"))
    for second in range(10, 600, 10):
        assert created.follow(store.snapshot(), float(second)) == []
        created.decided(result("c1"))
    idle = machine("s0", S.IDLE, price_usd_per_hour=0.9)
    store.update(idle)

    assert created.follow(store.snapshot(), 600.0) == [ClassChange("c1", class_key(slot), class_key(idle))]
    assert created.follow(store.snapshot(), 601.0) == []
    assert len(created) == 0


def test_a_machine_in_creation_that_names_no_cluster_changes_once() -> None:
    slot = machine("s0", S.SPECULATIVE)
    refined = machine("s0", S.CREATING, price_usd_per_hour=0.9)
    store, created = as_stored(slot, machine("s1", S.SPECULATIVE)), CreatedMachines()
    created.follow(store.snapshot(), 0.0)
    created.decided(result("c1", "s0"))
    store.update(refined)
    changes = created.follow(store.snapshot(), 1.0)
    for number in range(3):
        store.insert(machine(f"new-{number}", S.SPECULATIVE))
        changes += created.follow(store.snapshot(), 2.0)

    assert changes == [ClassChange("c1", class_key(slot), class_key(refined))]


IDS = tuple(f"m{number}" for number in range(4))
#: A machine that becomes another one, that goes, or that a decision creates; a machine more; seconds that pass.
events = st.one_of(
    st.tuples(
        st.sampled_from(IDS),
        st.sampled_from([S.SPECULATIVE, S.CREATING, S.IDLE, S.CONFIGURING, S.FAILED]),
        st.sampled_from([1.0, 0.9]),
        st.sampled_from(["c1", "c2"]),
    ),
    st.tuples(st.just("remove"), st.sampled_from(IDS)),
    st.tuples(st.just("create"), st.sampled_from(IDS), st.sampled_from(["c1", "c2"])),
    st.tuples(st.just("new"), st.integers(0, 99)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 400.0])),
)


@given(st.lists(st.lists(events, max_size=3), max_size=8))
def test_to_look_at_changed_machines_finds_what_to_look_at_all_finds(cycles: list[list[tuple[object, ...]]]) -> None:
    store = as_stored(*(machine(each, S.SPECULATIVE) for each in IDS))
    changed, all_of_them = CreatedMachines(), CreatedMachines()
    now_seconds = 0.0
    for cycle in cycles:
        view = store.snapshot()
        # Views of other lists of ids do not say what changed between them.
        unknown = replace(view, ids=list(view.ids))
        assert Counter(changed.follow(view, now_seconds)) == Counter(all_of_them.follow(unknown, now_seconds))
        assert changed._creations == all_of_them._creations
        now_seconds += 10.0
        for event in cycle:
            match event:
                case ("wait", float(seconds)):
                    now_seconds += seconds
                case ("new", int(number)):
                    store.insert(machine(f"n{number}", S.SPECULATIVE))
                case ("remove", str(name)):
                    if MachineId(name) in {each for each in IDS if has(store, each)}:
                        store.remove(MachineId(name))
                case ("create", str(name), str(cluster)):
                    row = view.rows.get(MachineId(name))
                    if row is not None and view.columns.state[row] == S.SPECULATIVE:
                        for each in (changed, all_of_them):
                            each.decided(result(cluster, name))
                case (str(name), MachineState() as state, float(price), str(cluster)):
                    store.insert(became(name, state, price, cluster))


def has(store: ColumnStore, machine_id: str) -> bool:
    """Return whether the store has a machine."""
    view = store.snapshot()
    row = view.rows.get(MachineId(machine_id))
    return row is not None and view.columns.state[row] != 0


def became(machine_id: str, state: MachineState, price_usd_per_hour: float, cluster: str) -> Machine:
    """Return a machine in a state, of a cluster as far as the state has one."""
    facts: dict[str, object] = {"price_usd_per_hour": price_usd_per_hour}
    if state is S.CREATING:
        facts["intended_cluster"] = ClusterId(cluster)
    if state is S.CONFIGURING:
        facts["cluster"] = ClusterId(cluster)
    return machine(machine_id, state, **facts)


# ---- plans that arrive meanwhile ---------------------------------------------------------------------------------


class HeldWorkers(Workers):
    """Plan at once, and return the plan when the test allows it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.may_answer = asyncio.Event()

    async def plan(self, problem: Problem, effort: Effort) -> Composition:
        """Return the composition once it may be seen."""
        made = await super().plan(problem, effort)
        await self.may_answer.wait()
        return made


@pytest.mark.virtual_time
async def test_a_plan_that_arrives_while_changes_are_worked_out_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, follow = HeldWorkers(), CreatedMachines.follow
    workers.may_answer.set()
    changes: list[ClassChange] = []

    def followed(created: CreatedMachines, view: ColumnSnapshot, now_seconds: float) -> list[ClassChange]:
        found = follow(created, view, now_seconds)
        changes.extend(found)
        return found

    async def compute(work: Callable[[], T]) -> T:
        if changes and not workers.may_answer.is_set():
            workers.may_answer.set()
            await asyncio.sleep(1.0)
        return work()

    monkeypatch.setattr(CreatedMachines, "follow", followed)
    provider = RefiningProvider()
    slots(provider, 10)
    settings = ShardSettings(plan_wait_seconds=3600.0)
    world = World(provider, plan_workers=workers, settings=settings, compute=compute)
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 1)))
    for _ in range(3):
        await world.cycle()
        await asyncio.sleep(10)
    assert provider.state("s000") is S.CREATING
    workers.may_answer.clear()
    operator.report(pods("c1", ("3", 2)), at_unix_nanos=2)
    await world.cycle()
    await asyncio.sleep(10)
    provider.settle()
    assert changes == []
    await world.cycle()

    target = world.shard.plans.target_of("c1")
    assert target is not None
    assert target.counts == {change.after: 1 for change in changes} | {class_key(provider.records["s001"]): 1}
    await world.shard.plans.close()


@pytest.mark.virtual_time
async def test_a_machine_that_changes_while_a_plan_takes_up_changes_is_in_the_plan() -> None:
    """The second machine is refined in a cycle that runs while the change of the first one is applied."""
    workers = HeldWorkers()
    workers.may_answer.set()
    is_slow, slowed = False, 0

    async def compute(work: Callable[[], T]) -> T:
        nonlocal slowed
        if is_slow and isinstance(work, partial):
            slowed += 1
            await asyncio.sleep(30.0)
        return work()

    provider = RefiningProvider()
    slots(provider, 10)
    world = World(provider, plan_workers=workers, settings=ShardSettings(plan_wait_seconds=3600.0), compute=compute)
    operator = world.connect("c1")
    operator.report(pods("c1", ("3", 2)))
    for _ in range(3):
        await world.cycle()
        await asyncio.sleep(10)
    workers.may_answer.clear()
    operator.report(pods("c1", ("3", 3)), at_unix_nanos=2)
    await world.cycle()
    is_slow = True
    for name in ("s000", "s001"):
        provider.settle(name)
        await world.cycle()
        workers.may_answer.set()
        await asyncio.sleep(1)
    assert slowed == 1
    await asyncio.sleep(120)

    target = world.shard.plans.target_of("c1")
    assert target is not None
    expected = [class_key(provider.records[name]) for name in ("s000", "s001", "s002")]
    assert (slowed, target.counts) == (2, dict.fromkeys(expected, 1))
    await world.shard.plans.close()
