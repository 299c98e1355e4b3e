"""What is kept of a machine says all of it, whatever it shares with others."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.columns.store import ColumnStore
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine, PreemptedFor
from bigfleet.model.states import MachineState
from bigfleet.shard.inventory import machine_record
from bigfleet.shard.inventory.machine_record import InventoryRecord, Keeper, binding_of
from tests.engine.proof import in_proportion
from tests.shard.world import World, machine
from tests.strategies import machines

S = MachineState

any_machine = st.builds(
    lambda drawn, ref, node, error: replace(
        drawn, host=HostRef(drawn.host.provider, ref), node_name=node, last_error=error
    ),
    machines(),
    st.sampled_from(["", "h1", "h2"]),
    st.sampled_from(["", "n1"]),
    st.sampled_from(["", "broken"]),
)


def keep(keeper: Keeper, store: ColumnStore, shown: Machine) -> InventoryRecord:
    """Keep a machine and put it into the columns."""
    kept, numbers = keeper.keep(shown, binding_of(shown), float("nan"), store.vocabulary)
    store.put(shown.id, numbers)
    return kept


@given(st.lists(any_machine, min_size=1, max_size=12), st.sampled_from([1, 2, 262_144]))
@settings(max_examples=in_proportion(200), deadline=None)
def test_a_kept_machine_is_the_one_that_was_put(fleet: list[Machine], shared_max: int) -> None:
    """Every field, and the same numbers as a machine that goes into the columns as a whole; however much is shared."""
    keeper, store, whole = Keeper(ColumnStore().vocabulary), ColumnStore(), ColumnStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_record, "SHARED_MAX", shared_max)
        for number, drawn in enumerate(fleet):
            shown = replace(drawn, id=MachineId(f"m{number:02}"))
            kept = keep(keeper, store, shown)
            whole.insert(shown)

            assert kept.machine(shown.id) == shown
            assert (kept.state, kept.cluster) == (shown.state, shown.cluster)
            assert kept.machine(shown.id).supply == shown.supply
    views = store.snapshot(), whole.snapshot()
    for name in ("state", "cluster", "shape", "offer", "stamp"):
        assert getattr(views[0].columns, name).tolist() == getattr(views[1].columns, name).tolist()
    assert views[0].vocabulary.shapes == views[1].vocabulary.shapes


@given(any_machine, any_machine)
@settings(max_examples=in_proportion(200), deadline=None)
def test_facts_and_frames_are_compared_without_making_the_machine(ours: Machine, declared: Machine) -> None:
    """With the same outcome as if it were made."""
    kept = keep(Keeper(ColumnStore().vocabulary), ColumnStore(), ours)
    state, cluster, stamp = kept.binding
    as_ours = replace(declared, state=state, cluster=cluster, **stamp._asdict(), last_error=ours.last_error)
    world = World()

    assert kept.declares(declared) == (as_ours == ours)
    frames = [world.shard.ingest.node_state(each, ClusterId("c")) for each in (ours, declared)]
    # Hosts and node names may differ without a trace in the frame; then one more frame is compared, and none is sent.
    assert not kept.is_framed_like(declared) or frames[0] == frames[1]
    assert kept.is_framed_like(replace(declared, **{name: getattr(ours, name) for name in FRAMED}))


FRAMED = ("state", "host", "node_name", "last_error", "labels", "instance_type", "zone", "allocatable", "resources")


def test_machines_that_are_alike_share_what_is_kept() -> None:
    """That is what it is for: one reference in place of nine fields."""
    keeper, store = Keeper(ColumnStore().vocabulary), ColumnStore()
    first = machine("m1", S.IDLE)
    kept = [keep(keeper, store, each) for each in (first, replace(first, id=MachineId("m2"), host=HostRef("p", "h")))]
    same = replace(first, id=MachineId("m3"), host=HostRef(first.host.provider, "other"))

    assert kept[0].binding is kept[1].binding
    assert kept[0].facts is keep(keeper, store, same).facts
    assert kept[0].facts is not kept[1].facts


@pytest.mark.parametrize("state", [S.CONFIGURED, S.DRAINING, S.FAILED])
def test_a_preemption_only_stays_with_a_machine_that_drains(state: MachineState) -> None:
    stamped = machine("m", S.DRAINING, cluster=ClusterId("c1"), preempted_for=PreemptedFor("c2", "f", "g"))
    binding = binding_of(stamped)

    moved = binding.moved(state, ClusterId("c1"))

    assert moved.state is state
    assert moved.stamp == binding.stamp._replace(preempted_for=stamped.preempted_for if state is S.DRAINING else None)
    assert (moved is binding) == (state is S.DRAINING)
