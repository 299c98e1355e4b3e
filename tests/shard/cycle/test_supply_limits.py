"""What clusters beyond their limits would get is found with one look at the fleet for all of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore
from bigfleet.engine.decision import Action, ActionKind, Basis, Decision, Options
from bigfleet.engine.targets import Target, class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import PreemptedFor, Stamp
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.cluster_policy import ClusterLimits
from bigfleet.shard.cycle.supply_limits import RefusedSupply, allowed_targets, refused_supply, releases_of_refused
from tests.shard.world import machine, need

S = MachineState
CLUSTERS = 40


class CountedStamps(list[Stamp]):
    """Counts the stamps that are read."""

    reads = 0

    def __iter__(self) -> Iterator[Stamp]:
        self.reads += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def gain(machine_id: str, cluster: str, group: str = "") -> Action:
    """Return an action that gives an Idle machine to a cluster."""
    return Action(
        kind=ActionKind.BOOTSTRAP,
        machine_id=MachineId(machine_id),
        cluster=ClusterId(cluster),
        reason="phase1.idle",
        profile=need(cluster, "4").profile,
        group=group,
    )


def refused(view: ColumnSnapshot, *actions: Action, pending: dict[str, str] | None = None, **limits: float) -> Any:
    """Return the refused machines and the limits that are exceeded."""
    found: RefusedSupply = refused_supply(
        actions,
        view,
        lambda _cluster: ClusterLimits(**limits),
        {MachineId(each): cluster for each, cluster in (pending or {}).items()},
    )
    return sorted(found.machines), dict(found.exceeded)


def test_stamps_are_read_once_however_many_clusters_gain_machines() -> None:
    """40 clusters with two machines each of their limit of three; those that gain two are refused one."""
    store, actions = ColumnStore(), []
    for number in range(CLUSTERS):
        cluster = f"c{number:02d}"
        for place in range(2):
            store.insert(machine(f"m{number:02d}-{place}", S.CONFIGURED, cluster=cluster, assigned_group=cluster), None)
        for place in range(1 + number % 2):
            store.insert(machine(f"s{number:02d}-{place}", S.IDLE), 0.0)
            actions.append(gain(f"s{number:02d}-{place}", cluster))
    store.insert(machine("made", S.CREATING, intended_cluster="c00"), None)
    view = store.snapshot()
    stamps = view.vocabulary.stamps = CountedStamps(view.vocabulary.stamps)

    machines, exceeded = refused(view, *actions, machines_max=3)

    with_two = [number for number in range(CLUSTERS) if number % 2]
    assert machines == ["s00-0", *(f"s{number:02d}-1" for number in with_two)]
    assert exceeded == {"c00": "machines", **{f"c{number:02d}": "machines" for number in with_two}}
    assert stamps.reads == 1


def promised() -> list[Any]:
    """Return machines that c1 has or will have: four, of which two are in several ways its own."""
    for_c1 = PreemptedFor("c1", "p", "")
    return [
        machine("bound", S.CONFIGURED, cluster="c1"),
        machine("made", S.CREATING, intended_cluster="c1"),
        machine("taken", S.DRAINING, cluster="c2", preempted_for=for_c1),
        machine("own", S.DRAINING, cluster="c1", preempted_for=for_c1),
        machine("free", S.IDLE),
        machine("other", S.IDLE),
    ]


@pytest.mark.parametrize("pending", [{}, {"made": "c1", "bound": "c1", "other": "c2"}], ids=["none", "pending too"])
def test_each_machine_counts_once_for_the_cluster_that_will_have_it(pending: dict[str, str]) -> None:
    """Four are held at $1 each, so a fifth is refused at four, in machines and in dollars, and allowed at five."""
    store = ColumnStore()
    for each in promised():
        store.insert(each, None)
    view = store.snapshot()

    assert refused(view, gain("free", "c1"), pending=pending, machines_max=4) == (["free"], {"c1": "machines"})
    assert refused(view, gain("free", "c1"), pending=pending, dollars_per_hour_max=4.5) == (["free"], {"c1": "dollars"})
    assert refused(view, gain("free", "c1"), pending=pending, machines_max=5) == ([], {})


def test_a_machine_that_a_cluster_will_have_already_spends_nothing() -> None:
    """The action of a pending machine is no gain; a gang is refused whole."""
    store = ColumnStore()
    for each in promised():
        store.insert(each, None)
    view = store.snapshot()

    assert refused(view, gain("free", "c1"), pending={"free": "c1"}, machines_max=5) == ([], {})
    gang = (gain("free", "c1", "g"), gain("other", "c1", "g"))
    assert refused(view, *gang, machines_max=5) == (["free", "other"], {"c1": "machines"})


def test_a_machine_in_creation_without_a_known_cluster_counts_for_every_limited_cluster() -> None:
    """After a restart the shard does not know for which cluster a machine is created."""
    store = ColumnStore()
    for each in (machine("made", S.CREATING), machine("free", S.IDLE), machine("other", S.IDLE)):
        store.insert(each, None)
    view = store.snapshot()
    actions = (gain("free", "c1"), gain("other", "c2"))

    assert refused(view, *actions, machines_max=1) == (["free", "other"], {"c1": "machines", "c2": "machines"})
    assert refused(view, *actions, dollars_per_hour_max=1.5) == (["free", "other"], {"c1": "dollars", "c2": "dollars"})
    assert refused(view, *actions, machines_max=2) == ([], {})


def test_a_target_is_cut_to_what_its_cluster_has_and_may_acquire() -> None:
    """Of five it has two, and may acquire one of the two that it would; a cluster within its limit keeps its target."""
    machines = [
        machine("bound", S.CONFIGURED, cluster="c1"),
        machine("made", S.CREATING, intended_cluster="c1"),
        machine("unknown", S.CREATING),
        machine("theirs", S.CONFIGURED, cluster="c2"),
        machine("free", S.IDLE),
        machine("other", S.IDLE),
    ]
    store = ColumnStore()
    for each in machines:
        store.insert(each, None)
    common, rare = class_key(machines[0]), class_key(replace(machines[0], zone="zb"))
    target = Target(counts={common: 5, rare: 1})
    decision = Decision(actions=(gain("free", "c1"), gain("other", "c1")), rows=())
    beyond = RefusedSupply(machines=frozenset({MachineId("other")}), exceeded={"c1": "machines"})

    cut = allowed_targets(decision, store.snapshot(), beyond, {"c1": target, "c2": target})

    assert cut == {"c1": Target(counts={common: 3, rare: 0})}
    assert allowed_targets(decision, store.snapshot(), beyond, {"c1": cut["c1"]}) == {}


def test_an_idle_machine_that_stays_refused_is_released_after_its_hold() -> None:
    """Bare metal is never released, and one without a stamp of the time is held."""
    store = ColumnStore()
    for name, capacity_type, since in (
        ("due", CapacityType.ON_DEMAND, 400.0),
        ("held", CapacityType.ON_DEMAND, 401.0),
        ("unknown", CapacityType.ON_DEMAND, None),
        ("owned", CapacityType.BARE_METAL, 0.0),
    ):
        store.insert(machine(name, S.IDLE, capacity_type=capacity_type), since)
    store.insert(machine("spare", S.SPECULATIVE, capacity_type=CapacityType.ON_DEMAND), None)
    view = store.snapshot()
    basis = Basis(
        demand=(), options=Options(now_seconds=1000.0, reported=frozenset()), snapshot=lambda: snapshot_of(view)
    )
    names = ("due", "held", "unknown", "owned", "spare")
    decision = Decision(actions=tuple(gain(each, "c1") for each in names), rows=(), basis=basis)

    found = releases_of_refused(decision, view, RefusedSupply(machines=frozenset(map(MachineId, names))))

    assert [(each.kind, each.machine_id, each.reason) for each in found.values()] == [
        (ActionKind.DELETE, "due", "phase3.release")
    ]
