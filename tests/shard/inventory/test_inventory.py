"""The machines that a shard knows: the index by cluster and snapshots (docs/spec/model.md §3).

Insert, apply, remove and idle stamps are the cases of tests/cases/engine/machine_state.yaml.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.columns.objects import snapshot_of
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState, is_legal_transition
from bigfleet.shard.inventory.inventory import Inventory
from tests.engine.proof import in_proportion
from tests.shard.world import machine

S = MachineState
CLUSTERS = ("", "c1", "c2")

changes = st.tuples(st.sampled_from("abcd"), st.sampled_from((*CLUSTERS, "gone")))


@given(st.lists(changes, max_size=30))
@settings(max_examples=in_proportion(100), deadline=None)
def test_the_index_by_cluster_holds_all_and_only_its_machines(story: list[tuple[str, str]]) -> None:
    """However machines are bound, move and go; ids ascending."""
    inventory = Inventory()
    for name, cluster in story:
        known = inventory.get(name)
        shown = machine(name, S.CONFIGURED if cluster else S.IDLE, cluster=ClusterId(cluster))
        if cluster == "gone":
            if known is not None:
                inventory.remove(name)
        elif known is None:
            inventory.insert(shown, now_seconds=0.0)
        else:
            inventory.observe(shown, now_seconds=0.0)
        for wanted in CLUSTERS[1:]:
            assert inventory.bound_to(wanted) == sorted(each.id for each in inventory if each.cluster == wanted)
    assert inventory.bound_to("") == []
    assert set(inventory.clusters) == {each.cluster for each in inventory if each.cluster}


@pytest.mark.rule("shard 2/1", "shard 3/8")
def test_a_snapshot_is_of_its_moment() -> None:
    """The same object while nothing changes; the newest one stays readable when something did."""
    inventory = Inventory()
    inventory.insert(machine("a", S.IDLE), now_seconds=5.0)
    first = inventory.snapshot()
    assert first is inventory.snapshot()
    inventory.observe(replace(machine("a", S.IDLE), price_usd_per_hour=2.0), now_seconds=9.0)

    assert inventory.latest_snapshot is first
    second = inventory.snapshot()
    assert (inventory.latest_snapshot is second, second is first) == (True, False)
    shown = [snapshot_of(snapshot) for snapshot in (first, second)]
    assert [snapshot.of_state(S.IDLE)[0].price_usd_per_hour for snapshot in shown] == [1.0, 2.0]
    assert set(shown[1].idle_since_seconds.values()) == {5.0}


STATES = (S.IDLE, S.CONFIGURED, S.SPECULATIVE, S.DELETING)
steps = st.tuples(st.sampled_from("abcd"), st.sampled_from((*STATES, None)), st.booleans())


@pytest.mark.rule("shard 2/1")
@given(st.lists(steps, max_size=40))
@settings(max_examples=in_proportion(150), deadline=None)
def test_the_columns_hold_what_the_inventory_holds(story: list[tuple[str, MachineState | None, bool]]) -> None:
    """After any inserts, driven and observed changes and removals, with snapshots taken at any time."""
    inventory = Inventory()
    kept = []
    for moment, (name, state, looks) in enumerate(story):
        known = inventory.get(name)
        if state is None:
            if known is not None:
                inventory.remove(name)
        else:
            cluster = ClusterId("c1" if state is S.CONFIGURED else "")
            shown = machine(name, state, cluster=cluster, price_usd_per_hour=float(moment))
            if known is None:
                inventory.insert(shown, now_seconds=float(moment))
            elif is_legal_transition(known.state, state):
                inventory.apply(shown, now_seconds=float(moment))
            else:
                inventory.observe(shown, now_seconds=float(moment))
        if looks:
            kept.append((inventory.snapshot(), _account(inventory)))
            assert not inventory.changed_since_snapshot
        else:
            latest = {machine_id for machine_id, *_rest in kept[-1][1]} if kept else set()
            assert {each.id for each in inventory} ^ latest <= set(inventory.changed_since_snapshot)
    for snapshot, account in kept[-4:]:
        machines = snapshot_of(snapshot)
        told = [
            (each.id, each.state, each.cluster, each.price_usd_per_hour, machines.idle_since_seconds.get(each.id))
            for each in machines.machines.values()
        ]
        assert told == account


def _account(inventory: Inventory) -> list[tuple[object, ...]]:
    return sorted(
        (each.id, each.state, each.cluster, each.price_usd_per_hour, inventory.idle_since_seconds(each.id))
        for each in inventory
    )
