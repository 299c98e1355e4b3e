"""The machines that a shard knows: the index by cluster and snapshots (docs/spec/engine.md §1.3).

Insert, apply, remove and idle stamps are the cases of tests/cases/engine/machine_state.yaml.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.shard.inventory import Inventory
from tests.shard.world import machine

S = MachineState
CLUSTERS = ("", "c1", "c2")

changes = st.tuples(st.sampled_from("abcd"), st.sampled_from((*CLUSTERS, "gone")))


@given(st.lists(changes, max_size=30))
@settings(max_examples=100, deadline=None)
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
    assert set(inventory._by_cluster) == {each.cluster for each in inventory if each.cluster}


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
    assert [snapshot.of_state(S.IDLE)[0].price_usd_per_hour for snapshot in (first, second)] == [1.0, 2.0]
    assert set(second.idle_since_seconds.values()) == {5.0}
