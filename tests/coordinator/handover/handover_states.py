"""Every state that handover can reach between two shards, within budgets of what may go wrong.

A breadth-first walk over the real leader, inbox and rows. Two states are one when nobody who takes part could tell
them apart: clocks stand still, and report numbers count only by how they compare.
"""

import copyreg
import pickle
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from bigfleet.coordinator.ephemeral_state import ReceivedReport
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.ownership import Owned
from tests.coordinator.handover.handover_world import World


def _frozen(mapping: dict[str, str]) -> MappingProxyType[str, str]:
    return MappingProxyType(mapping)


# Frozen mappings of records: copied by value like the rest of a state.
copyreg.pickle(MappingProxyType, lambda mapping: (_frozen, (dict(mapping),)))


class Move(NamedTuple):
    machine: MachineId
    donor: ShardId
    to: ShardId


@dataclass
class Budget:
    """How often each fault may happen on one path."""

    moves: list[Move]
    lost_answers: int = 0
    crashes: int = 0
    delayed_reports: int = 0
    elections: int = 0
    lost_disks: int = 0


@dataclass
class State:
    """A world, what may still happen to it, and the reports that are still on their way: leader's term, report."""

    world: World
    budget: Budget
    delayed: list[tuple[int, ReceivedReport]] = field(default_factory=list)

    def copy(self) -> "State":
        fresh: State = pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))
        return fresh


def first_state(budget: Budget) -> State:
    """Two shards, three machines, two zones, everything settled."""
    world = World(random.Random(0), shards=2, machines=3, zones=2)
    for _ in range(4):
        for name in world.shards:
            world.exchange(name, world.leader)
    world.late, world.told = [], []
    return State(world, budget)


def _owned_key(owned: Owned) -> Hashable:
    rows = sorted((machine_id, row.kind.value, tuple(row.version), row.other) for machine_id, row in owned.rows.items())
    return (owned.base.value, tuple(sorted(owned.domains)), tuple(sorted(owned.leaving)), tuple(rows))


def key_of(state: State) -> Hashable:
    """Return what tells this state from others."""
    world, budget = state.world, state.budget
    shards = tuple(
        (
            _owned_key(shard.disk.owned),
            shard.disk.accepted_term,
            shard.inbox.accepted_term,
            tuple(shard.inbox.waiting()),
            tuple(sorted(shard.inbox._answered)),
        )
        for shard in world.shards.values()
    )
    leaders = []
    for leader in world.leaders:
        known = tuple(
            (
                name,
                None if seen.reported is None else _owned_key(seen.reported),
                seen.reported_echo,
                seen.reported_epoch == seen.report.epoch,
                tuple((each.instruction_id, tuple(each.version)) for each in seen.answered),
                _compare(seen.report.order, (world.shards[name].disk.epoch, world.shards[name].cycle)),
            )
            for name, seen in sorted(leader.ephemeral.known.items())
        )
        live = tuple(
            (entry.to, entry.instruction.instruction_id, tuple(entry.instruction.version), entry.state.value)
            for entry in leader.ephemeral.ledger.live()
        )
        leaders.append((leader.term, known, live, tuple(sorted(leader.ephemeral.refused))))
    delayed = tuple(
        sorted(
            (
                term,
                report.shard_id,
                repr(_owned_key(report.owned)) if report.owned is not None else "",
                report.echoed_term,
                tuple(report.acks),
                _places(state, term, report),
            )
            for term, report in state.delayed
        )
    )
    domains = tuple(
        sorted((domain, row.shard_id, row.state.value) for domain, row in world.backend.tables.domains.items())
    )
    left = (
        len(budget.moves),
        budget.lost_answers,
        budget.crashes,
        budget.delayed_reports,
        budget.elections,
        budget.lost_disks,
    )
    return (shards, tuple(leaders), delayed, domains, left)


def _compare(left: tuple[int, int], right: tuple[int, int]) -> int:
    return (left > right) - (left < right)


def _places(state: State, term: int, report: ReceivedReport) -> int:
    """Return how a delayed report compares with the last one that its leader took."""
    for leader in state.world.leaders:
        if leader.term == term and report.shard_id in leader.ephemeral.known:
            return _compare(report.order, leader.ephemeral.known[report.shard_id].report.order)
    return 2


def followers(state: State) -> Iterator[tuple[str, State]]:
    """Yield every state that one step leads to."""
    for name in state.world.shards:
        for index in range(len(state.world.leaders)):
            yield from _reports(state, name, index)
        if state.budget.lost_disks:
            after = state.copy()
            after.budget.lost_disks -= 1
            after.world.shards[name].lose_disk()
            yield f"{name} loses its disk", after
    for index in range(len(state.delayed)):
        after = state.copy()
        term, report = after.delayed[index]
        for leader in list(after.world.leaders):
            if leader.term == term:
                after.world.ask(leader, report)
        yield f"the delayed report of {report.shard_id} arrives", after
        gone = state.copy()
        gone.delayed.pop(index)
        yield "a delayed report never arrives again", gone
    if state.budget.elections:
        after = state.copy()
        after.budget.elections -= 1
        after.world.elect()
        yield "another replica leads", after
    if state.budget.moves:
        after = state.copy()
        machine, donor, to = after.budget.moves.pop(0)
        after.world.move(after.world.leader, machine, donor, to)
        yield f"{machine} is to move from {donor} to {to}", after


def _reports(state: State, name: ShardId, index: int) -> Iterator[tuple[str, State]]:
    after = state.copy()
    after.world.exchange(name, after.world.leaders[index])
    yield f"{name} reports", after
    if state.budget.lost_answers:
        after = state.copy()
        after.budget.lost_answers -= 1
        after.world.exchange(name, after.world.leaders[index], is_lost=True)
        yield f"{name} reports, the answer is lost", after
    if state.budget.crashes:
        for handlings in range(5):
            after = state.copy()
            after.budget.crashes -= 1
            epoch = after.world.shards[name].disk.epoch
            after.world.exchange(name, after.world.leaders[index], dies_after=handlings)
            if after.world.shards[name].disk.epoch == epoch:
                break
            yield f"{name} reports and dies after {handlings} steps", after
    if state.budget.delayed_reports:
        after = state.copy()
        after.budget.delayed_reports -= 1
        after.delayed.append((after.world.leaders[index].term, after.world.shards[name].report()))
        yield f"the report of {name} is delayed", after


def explore(first: State, states_max: int) -> tuple[int, int]:
    """Walk every state; return how many there are and how many steps were tried.

    Raises AssertionError with the path when a machine has two owners, or when a state does not heal.
    """
    seen: dict[Hashable, tuple[Hashable | None, str]] = {key_of(first): (None, "")}
    frontier, steps = [first], 0
    while frontier:
        following: list[State] = []
        for state in frontier:
            here = key_of(state)
            for told, after in followers(state):
                steps += 1
                after.world.late, after.world.told = [], []
                key = key_of(after)
                if key in seen:
                    continue
                seen[key] = (here, told)
                assert len(seen) <= states_max, f"more than {states_max} states"
                _check(after, seen, key)
                following.append(after)
        frontier = following
    return len(seen), steps


def _check(state: State, seen: dict[Hashable, tuple[Hashable | None, str]], key: Hashable) -> None:
    try:
        state.world.check()
        state.copy().world.heal()
    except AssertionError as error:
        path: list[str] = []
        at: Hashable | None = key
        while at is not None:
            at, told = seen[at]
            path.append(told)
        raise AssertionError(f"{error}\nafter: " + "; ".join(reversed(path))) from error
