"""What the engine over pods remembers changes nothing: after any changes it decides what it would decide without it."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from bigfleet.compositions.targets import targets_of
from bigfleet.engine.columnar.kernels import pod_credit
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Action, ActionKind, CapacityPool, Decision, Options, ParkingKey, WithheldPools
from bigfleet.engine.folding import forms_of
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.pod_engine import PodEngine
from bigfleet.engine.snapshot import Snapshot
from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.shard.sessions.demand import NeedsTable
from tests.engine.proof import in_proportion
from tests.engine.shapes.shape_fleets import TYPES, Drawn, fleet, machine, need

LIVES = 300
STEPS = 8
_ENDS = {
    ActionKind.BOOTSTRAP: MachineState.CONFIGURED,
    ActionKind.PROVISION: MachineState.CONFIGURED,
    ActionKind.RECLAIM: MachineState.IDLE,
    ActionKind.PREEMPT: MachineState.IDLE,
    ActionKind.DELETE: MachineState.SPECULATIVE,
}


class Life:
    """One store and one engine through a history, and the plain objects that they must agree with."""

    def __init__(self, first: Drawn, rng: random.Random, *, is_reported: bool) -> None:
        """With `is_reported`, rows come from a demand table, which reads them into columns."""
        self.machines = {m.id: m for m in first.machines}
        self.since: dict[MachineId, float] = {}
        self.demand: tuple[Need, ...] = first.demand
        self.options: Options = first.options
        self.rng = rng
        loops = pod_credit if rng.random() < 0.5 else None
        self.store, self.engine = ColumnStore(), PodEngine(loops=loops)
        self.table = NeedsTable() if is_reported else None
        for one in first.machines:
            self.store.insert(one)

    def put(self, one: Machine) -> None:
        """Add or replace a machine."""
        self.machines[one.id] = one
        self.since.pop(one.id, None)
        if one.state is MachineState.IDLE:
            self.since[one.id] = self.options.now_seconds
        self.store.insert(one, self.since.get(one.id))

    def rows(self) -> Sequence[Need]:
        """Return the demand as the engine gets it."""
        if self.table is None:
            return self.demand
        for cluster in sorted({row.cluster for row in self.demand} | self.table.clusters):
            self.table.replace(cluster, [row for row in self.demand if row.cluster == cluster], now_unix_nanos=1)
        return self.table.in_list_order()

    def decide(self) -> Decision:
        """Return the decision with memory, which equals the one without."""
        rows = self.rows()
        kept = self.engine.decide(self.store.snapshot(), rows, self.options)
        full = decide(Snapshot.of(self.machines.values(), self.since), tuple(rows), self.options)
        assert kept.actions == full.actions
        assert kept.rows == full.rows
        return kept

    def carry_out(self, action: Action) -> None:
        """Have the machine where the action ends."""
        one, state = self.machines[action.machine_id], _ENDS[action.kind]
        is_bound = action.profile is not None
        changed = replace(
            one,
            state=state,
            host=HostRef("p", one.id) if state is not MachineState.SPECULATIVE else HostRef(),
            cluster=action.cluster if is_bound else ClusterId(""),
            assigned_need_fingerprint=action.profile.fingerprint if action.profile is not None else Fingerprint(""),
            assigned_group=action.group,
            assigned_priority=action.profile.priority if action.profile is not None else 0,
            intended_cluster=ClusterId(""),
        )
        self.put(changed)

    def change(self) -> None:
        """Change one thing."""
        rng, machines = self.rng, self.machines
        match rng.randrange(10):
            case 0:
                self.demand = self.demand[1:] or self.demand
            case 1:
                row = need(rng.choice(["ca", "cb", "cd"]), rng, 100 + len(self.demand))
                rows = {one.key: one for one in (*self.demand, row)}
                self.demand = tuple(sorted(rows.values(), key=lambda r: (-r.profile.priority, r.arrival_unix_nanos)))
            case 2 if machines:
                gone = rng.choice(sorted(machines))
                del machines[gone]
                self.since.pop(gone, None)
                self.store.remove(gone)
            case 3:
                kind = rng.choice([*TYPES])
                self.put(machine(f"n{rng.randrange(100):03}", MachineState.SPECULATIVE, kind, rng))
            case 4 if machines:
                one = machines[rng.choice(sorted(machines))]
                self.put(replace(one, price_usd_per_hour=round(rng.random(), 3)))
            case 5:
                unjoined = frozenset(rng.sample(sorted(machines), min(1, len(machines))))
                leaving = frozenset(rng.sample(sorted(machines), min(rng.randrange(3), len(machines))))
                self.options = replace(self.options, unjoined=unjoined, leaving=leaving)
            case 6:
                pools = {CapacityPool.of(m) for m in machines.values()}
                self.options = replace(self.options, sold_out=frozenset(sorted(pools)[:1]))
                withheld = WithheldPools(
                    pools=frozenset(rng.sample(sorted(pools), min(rng.randrange(3), len(pools)))),
                    probes=frozenset(rng.sample(sorted(machines), min(rng.randrange(3), len(machines)))),
                )
                self.options = replace(self.options, withheld={rng.choice(["ca", "cb"]): withheld})
            case 7:
                gangs = [row for row in self.demand if row.profile.same_key is not None]
                ages = {ParkingKey(row.cluster, row.group, row.fingerprint): rng.choice([3, 9, 32]) for row in gangs}
                self.options = replace(self.options, parking_ages=ages)
            case 8 if machines:
                fuller = {str(rng.choice(sorted(machines))): rng.randrange(1, 6)}
                self.options = replace(self.options, fullness={**self.options.fullness, **fuller})
            case _:
                snapshot = Snapshot.of(machines.values(), self.since)
                self.options = replace(self.options, targets=targets_of(snapshot, self.demand, self.options))
        self.options = replace(self.options, now_seconds=self.options.now_seconds + rng.choice([1.0, 400.0]))


def lives(first: int, count: int) -> Iterator[Life]:
    """Return the lives of some seeds; one in four has mostly gangs."""
    for seed in range(first, first + count):
        drawn = fleet(seed, gangs=0.7 if seed % 4 == 3 else 0.15)
        yield Life(drawn, random.Random(seed), is_reported=seed % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_memory_changes_no_decision(part: int) -> None:
    kept = read = 0
    for life in lives(part * 1000, LIVES // 6):
        for step in range(STEPS):
            decision = life.decide()
            kept += len(life.engine.retained)
            read += life.table is not None and life.table.in_list_order().columns is not None
            if step % 2 == 0:
                for action in decision.actions:
                    life.carry_out(action)
            else:
                life.change()
    assert kept > LIVES // 6, "clusters were hardly ever kept: the test would show nothing"
    assert read > LIVES // 6, "hardly any rows were read into columns"


def test_a_cluster_that_nothing_touched_is_not_decided_on_again() -> None:
    complete = 0
    for life in lives(0, 10):
        for _ in range(4):
            for action in life.decide().actions:
                life.carry_out(action)
        first = life.decide()
        again = life.engine.decide(life.store.snapshot(), life.rows(), life.options)
        for place, row in enumerate(first.rows):
            if row.need.cluster in life.engine.retained:
                complete += 1
                assert again.rows[place] is row
    assert complete


def test_while_nothing_but_the_time_changes_only_releases_do() -> None:
    later = 0
    for life in lives(500, 20):
        for one in [each for each in life.machines.values() if each.state is MachineState.IDLE]:
            life.put(one)
        first = life.decide()
        life.options = replace(life.options, now_seconds=life.options.now_seconds + 10_000.0)
        again = life.decide()
        later += len(again.actions) - len(first.actions)
        assert again.rows is first.rows
    assert later


def kept_without_a_claim(life: Life, decision: Decision) -> Counter[tuple[str, ClassKey]]:
    """Return the Configured machines that stay though no row claims them, by cluster and class.

    Of clusters that have a target and have reported, without those that are stamped for a row which is short.
    """
    claimed = {machine_id for result in decision.rows for machine_id in result.claimed}
    acted = {action.machine_id for action in decision.actions}
    short = {need.key for result in decision.rows if not result.satisfied for need in forms_of(result)}
    options = life.options
    return Counter(
        (one.cluster, class_key(one))
        for one in life.machines.values()
        if one.state is MachineState.CONFIGURED and one.id not in claimed | acted | options.unjoined
        if one.cluster in options.reported and one.cluster in options.targets
        if (one.cluster, one.assigned_need_fingerprint, one.assigned_group) not in short
    )


def test_no_more_machines_are_kept_without_a_claim_than_a_target_counts_beyond_the_claimed_ones() -> None:
    """Rows go after their machines came, so that targets are of former demand and gangs have machines of their own."""
    kept = 0
    for life in lives(2000, in_proportion(120, least=40)):
        for _ in range(3):
            snapshot = Snapshot.of(life.machines.values(), life.since)
            life.options = replace(life.options, targets=targets_of(snapshot, life.demand, life.options))
            for action in life.decide().actions:
                life.carry_out(action)
            life.demand = tuple(each for each in life.demand if life.rng.random() < 0.7)
            life.change()
            decision = life.decide()
            targets = life.options.targets.items()
            room = Counter({(cluster, key): n for cluster, target in targets for key, n in target.counts.items()})
            claims = {(row.need.cluster, each) for row in decision.rows for each in row.claimed}
            room.subtract((cluster, class_key(life.machines[each])) for cluster, each in claims)
            found = kept_without_a_claim(life, decision)
            assert all(count <= room[kind] for kind, count in found.items())
            kept += found.total()
    assert kept, "no target keeps a machine: the test would show nothing"
