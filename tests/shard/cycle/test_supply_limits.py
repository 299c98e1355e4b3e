"""What clusters beyond their limits would get is found with one look at the fleet for all of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore
from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import PreemptedFor, Stamp
from bigfleet.model.states import MachineState
from bigfleet.shard.cluster_policy import ClusterLimits
from bigfleet.shard.cycle.supply_limits import RefusedSupply, refused_supply
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
