"""Tests that what serves is not reclaimed for machines that are not there yet (docs/spec/shard.md §6, limit 6)."""

from collections import Counter
from dataclasses import replace

import pytest

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Basis, Decision, Options, Placement, RowResult
from bigfleet.engine.targets import Target, class_key
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.shard.cycle.replacements import serving_for_replacements
from tests.shard.cycle.test_pods import pods
from tests.shard.exchange.test_proposals import Fleet
from tests.shard.world import at, machine

S = MachineState
ROW = pods("c1", ("1", 8))
ON_DISK = pods(
    "c1", ("1", 8), profile=Profile(priority=100, requirements=(Requirement("disk", Operator.IN, ("local",)),))
)
LARGE = pods("c1", ("6", 1), priority=50)


def of(cluster: str, machine_id: str, state: MachineState, cpu: str = "4", **labels: str) -> Machine:
    """Return a machine that is a cluster's."""
    facts = {"intended_cluster": cluster} if state is S.CREATING else {"cluster": cluster}
    return machine(machine_id, state, allocatable={"cpu": cpu, "memory": "16Gi"}, labels=labels, **facts)


def serving_on(fleet: list[Machine], *rows: tuple[Need, list[str]], has_target: bool = True) -> list[str]:
    """Return which machines of c1 that no row has serve on; they are due in the order of their ids."""
    store = ColumnStore()
    for each in fleet:
        store.insert(each)
    view = store.snapshot()
    results = [
        RowResult(
            need=need,
            members=(need,),
            claimed=[MachineId(each) for each in claimed],
            placements=[Placement(MachineId(each), 0, 1) for each in claimed],
        )
        for need, claimed in rows
    ]
    targets = {"c1": Target(counts=Counter(map(class_key, fleet)))} if has_target else {}
    options = Options(now_seconds=0.0, reported=frozenset({"c1"}), targets=targets)
    basis = Basis(demand=[need for need, _ in rows], options=options, snapshot=lambda: snapshot_of(view))
    claimed = {machine_id for _, ids in rows for machine_id in ids}
    due = sorted(each.id for each in fleet if each.state is S.CONFIGURED and each.id not in claimed)
    return sorted(serving_for_replacements(view, due, Decision(actions=(), rows=results, basis=basis)))


SERVING = [of("c1", f"m{number}", S.CONFIGURED) for number in range(4)]


@pytest.mark.rule("shard 6/22")
@pytest.mark.parametrize("state", [S.CREATING, S.CONFIGURING])
def test_as_many_serve_on_as_make_up_for_what_comes(state: MachineState) -> None:
    """One that comes has the size of two: the two that would be reclaimed last."""
    assert serving_on([*SERVING, of("c1", "new", state, cpu="8")], (ROW, ["new"])) == ["m2", "m3"]


@pytest.mark.rule("shard 6/22")
@pytest.mark.parametrize(
    ("new", "row", "has_target"),
    [
        pytest.param(of("c1", "new", S.CONFIGURED, cpu="8"), ROW, True, id="it serves"),
        pytest.param(of("c1", "new", S.CREATING, cpu="8", disk="local"), ON_DISK, True, id="none has the disk"),
        pytest.param(of("c1", "new", S.CREATING, cpu="8"), LARGE, True, id="none is large enough for a pod"),
        pytest.param(of("c1", "new", S.CREATING, cpu="8"), ROW, False, id="what serves was claimed first"),
        pytest.param(
            of("c1", "new", S.CREATING, cpu="8"), replace(ROW, shapes=(), waiting=ROW.shapes), True, id="pods wait"
        ),
    ],
)
def test_machines_that_make_up_for_nothing_do_not_serve_on(new: Machine, row: Need, has_target: bool) -> None:
    """Either there is nothing to make up for, or they could not."""
    assert serving_on([*SERVING, new], (row, ["new"]), has_target=has_target) == []


@pytest.mark.rule("shard 6/22")
def test_what_no_row_has_is_made_up_for_by_none() -> None:
    """A machine on its way that the decision does not count on."""
    assert serving_on([*SERVING, of("c1", "new", S.CREATING)], (ROW, ["m0"])) == []


@pytest.mark.rule("shard 6/22")
def test_a_machine_that_rows_share_is_made_up_for_once() -> None:
    """By machines that host pods of one of them."""
    new = of("c1", "new", S.CREATING, disk="local")
    assert serving_on([*SERVING, new], (ON_DISK, ["new"]), (ROW, ["new"])) == ["m3"]


@pytest.mark.rule("shard 6/22")
def test_other_clusters_make_up_for_nothing() -> None:
    """Each has machines of its own."""
    new = of("c2", "new", S.CREATING)
    assert serving_on([*SERVING, new], (replace(ROW, cluster=ClusterId("c2")), ["new"]), (ROW, ["m0"])) == []


# ---- in a shard ------------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
@pytest.mark.rule("shard 6/22")
async def test_machines_serve_until_what_a_composition_prefers_does() -> None:
    """Demand grows, and the new composition has a cheap machine in place of a dear one. The cheap one does not boot."""
    fleet = Fleet(synchronous=False)
    await fleet.minutes(2)
    fleet.operator.report(pods("c1", ("500m", 20)))
    await fleet.minutes(18)
    assert serving(fleet) == ["c1-dear0", "c1-dear1"]
    assert fleet.world.metric("reclaim_waiting_for_replacement_machines") == 1
    until_unix_nanos, reason = fleet.world.shard.guardrails.delay_of(at(fleet.world, "c1-dear1"))
    assert (until_unix_nanos > 0, reason) == (True, "replacement_not_ready")

    for _ in range(30):
        fleet.provider.settle()
        await fleet.minutes(1)
    assert serving(fleet) == ["c1-dear0", "spot0"]
    assert fleet.world.metric("reclaim_waiting_for_replacement_machines") == 0


def serving(fleet: Fleet) -> list[str]:
    """Return the machines that serve."""
    return sorted(each.id for each in fleet.provider.records.values() if each.state is S.CONFIGURED)
