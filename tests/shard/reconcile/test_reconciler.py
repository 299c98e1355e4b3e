"""What a full List means for the inventory (docs/spec/shard.md §5.1, §5.3, §6 rail 4); deltas: test_reconcile_delta."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from bigfleet.model import labels
from bigfleet.model.frames import NodeStateUpdate, NodeStatus
from bigfleet.model.machine import NO_HOST, Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.inventory.ingest import BOUND_ELSEWHERE, NO_LONGER_REPORTED, NodeLoad
from bigfleet.shard.ports import ListedMachine, Listing, RefusalKind, ShardSettings
from bigfleet.shard.reconcile.reconciler import RECORDS_PER_TURN_MAX
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
STAMPS = {
    labels.ASSIGNED_PRIORITY: "700",
    labels.ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: "+Inf",
    labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS: "0.5",
    labels.ASSIGNED_NEED_FINGERPRINT: "p=700",
    labels.ASSIGNED_GROUP: "gang",
}
RESTORED = (700, math.inf, 0.5, "p=700", "gang")
CLEARED = (0, 0.0, 0.0, "", "")


def stamps(known: Machine) -> tuple[int, float, float, str, str]:
    """Return a machine's stamps in the order of the metadata keys."""
    return (
        known.assigned_priority,
        known.assigned_interruption_penalty_dollars,
        known.assigned_reclamation_penalty_dollars,
        known.assigned_need_fingerprint,
        known.assigned_group,
    )


def provider_of(*machines: Machine) -> ScriptedProvider:
    """Return a provider that has these machines, bound ones with full metadata."""
    provider = ScriptedProvider()
    provider.add(*machines)
    provider.metadata = {each.id: dict(STAMPS) for each in machines if each.cluster}
    return provider


def fleet(count: int) -> list[Machine]:
    """Return that many Idle machines."""
    return [machine(f"m{number:03d}", S.IDLE) for number in range(count)]


# ---- what a record changes --------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.3/3")
async def test_a_pass_that_shows_nothing_new_changes_nothing() -> None:
    """Equal records allocate nothing: the snapshot stays the same object."""
    world = World(provider_of(machine("m1", S.IDLE), machine("m2", S.CONFIGURED, cluster="c1")))
    await world.cycle()
    before = world.shard.inventory.snapshot()
    await world.cycle()

    assert before is world.shard.inventory.snapshot()
    assert world.metric("reconcile_total", mode="full", outcome="ok") == 2


@pytest.mark.rule("shard 5.3/4")
async def test_new_facts_are_taken_without_a_transition() -> None:
    """A price may change while a machine rests; how long it has been Idle does not."""
    provider = provider_of(machine("m1", S.IDLE))
    world = World(provider)
    await world.cycle()
    await world.shard._clock.sleep(60)
    provider.add(machine("m1", S.IDLE, price_usd_per_hour=3.0, interruption_probability=0.25, node_name="n1"))
    await world.cycle()

    known = world.machine("m1")
    assert (known.price_usd_per_hour, known.interruption_probability, known.node_name) == (3.0, 0.25, "n1")
    assert world.shard.inventory.idle_since_seconds(known.id) == 0.0


@pytest.mark.rule("shard 5.3/11")
async def test_new_facts_of_a_bound_machine_keep_its_stamps_and_reach_its_cluster() -> None:
    """The cluster hears of what its frame shows, and of nothing else."""
    provider = provider_of(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1", allocatable={"cpu": "3"}))
    await world.cycle()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1", allocatable={"cpu": "3"}, price_usd_per_hour=9.0))
    shown = len(operator.frames)
    await world.cycle()

    assert stamps(world.machine("m1")) == RESTORED
    last = operator.frames[shown - 1]
    assert isinstance(last, NodeStateUpdate)
    assert last.resources == {"cpu": "3"}
    assert (len(operator.frames), world.machine("m1").price_usd_per_hour) == (shown, 9.0)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a negative price": ({"price_usd_per_hour": -0.01}, "price"),
    "a price that is no number": ({"price_usd_per_hour": math.nan}, "price"),
    "a negative probability": ({"interruption_probability": -0.1}, "interruption_probability"),
    "a probability above one": ({"interruption_probability": 1.1}, "interruption_probability"),
    "a probability that is no number": ({"interruption_probability": math.nan}, "interruption_probability"),
    "an Idle machine without a host": ({"host": NO_HOST}, "structural"),
    "a Configured machine without a cluster": ({"state": S.CONFIGURED}, "structural"),
    "a Failed machine without a cause": ({"state": S.FAILED}, "structural"),
    "a Speculative machine with a host": ({"state": S.SPECULATIVE}, "structural"),
    "no state": ({"state": S.UNSPECIFIED}, "structural"),
}


@pytest.mark.rule("shard 5.3/5", "shard 15/7")
@pytest.mark.parametrize("state", [S.IDLE, S.SPECULATIVE])
async def test_a_machine_whose_newest_record_was_refused_is_no_candidate(state: MachineState) -> None:
    """It is one again when its record is sound, also when that equals the last good one."""
    provider = provider_of(machine("m1", state), machine("m2", state, price_usd_per_hour=2.0))
    world = World(provider)
    await world.cycle()
    good = provider.records["m1"]
    provider.records["m1"] = replace(good, price_usd_per_hour=math.nan)
    world.connect("c1").report(need("c1", "8"))
    await world.settle()
    assert (world.state("m1"), world.state("m2")) == (state, S.CONFIGURED)

    provider.records["m1"] = good
    await world.settle()
    assert (world.state("m1"), world.state("m2")) == (S.CONFIGURED, S.CONFIGURED)


@pytest.mark.rule("shard 5.1/2", "shard 5.3/5", "shard 15/7")
@pytest.mark.parametrize(("changes", "reason"), BROKEN.values(), ids=BROKEN)
async def test_a_refused_record_leaves_the_last_good_one(changes: dict[str, Any], reason: str) -> None:
    """It is counted by reason, costs nobody else anything, never reads as a removal, and a sound one is taken again."""
    provider = provider_of(machine("m1", S.IDLE), machine("m2", S.IDLE))
    world = World(provider)
    await world.cycle()
    good = world.machine("m1")
    provider.records["m1"] = replace(good, **changes)
    provider.add(machine("m2", S.IDLE, price_usd_per_hour=2.0))
    await world.cycle()
    await world.cycle()

    assert good == world.machine("m1")
    assert world.machine("m2").price_usd_per_hour == 2.0
    assert world.metric("machines_rejected_total", reason=reason) == 2

    provider.add(machine("m1", S.IDLE, price_usd_per_hour=4.0))
    await world.cycle()
    assert world.machine("m1").price_usd_per_hour == 4.0


@pytest.mark.rule("shard 5.3/5")
async def test_a_refused_record_of_an_unknown_machine_is_left_out() -> None:
    """The others of the same List are known all the same."""
    world = World(provider_of(machine("bad", S.IDLE, price_usd_per_hour=math.nan), machine("good", S.IDLE)))
    await world.cycle()

    assert [each.id for each in world.shard.inventory] == ["good"]


@pytest.mark.rule("shard 5.3/7", "shard 9.6/9")
@pytest.mark.parametrize(
    ("source", "target", "is_jump"),
    [
        (S.IDLE, S.CONFIGURED, True),
        (S.SPECULATIVE, S.IDLE, True),
        (S.FAILED, S.IDLE, True),
        (S.CONFIGURED, S.SPECULATIVE, True),
        (S.CONFIGURED, S.DRAINING, False),
        (S.CREATING, S.IDLE, False),
        (S.DRAINING, S.FAILED, False),
    ],
)
async def test_the_observed_state_is_taken_whatever_the_table_says(
    source: MachineState, target: MachineState, is_jump: bool
) -> None:
    """The table binds what is driven; a jump is counted by its two ends."""
    world = World(provider_of(_in_state(source)))
    await world.cycle()
    world.provider.add(_in_state(target))
    await world.cycle()

    assert target is world.state("m1")
    counted = world.metric("observed_jumps_total", **{"from": source.label, "to": target.label})
    assert counted == int(is_jump)


def _in_state(state: MachineState) -> Machine:
    bound = {"cluster": "c1"} if state in (S.CONFIGURING, S.CONFIGURED, S.DRAINING) else {}
    cause = {"last_error": "broken"} if state is S.FAILED else {}
    return machine("m1", state, **bound, **cause)


@pytest.mark.rule("shard 5.3/8")
@pytest.mark.parametrize("target", [S.CREATING, S.CONFIGURING, S.CONFIGURED, S.DRAINING, S.FAILED])
async def test_stamps_stay_while_a_machine_is_on_its_way_or_bound(target: MachineState) -> None:
    """They are the shard's own: what the provider echoes later does not touch them."""
    provider = provider_of(_in_state(S.CONFIGURED))
    world = World(provider)
    await world.cycle()
    provider.metadata["m1"] = {labels.ASSIGNED_PRIORITY: "1"}
    provider.add(_in_state(target))
    await world.cycle()

    assert stamps(world.machine("m1")) == RESTORED


@pytest.mark.rule("shard 5.3/8", "shard 5.3/11")
@pytest.mark.parametrize("target", [S.IDLE, S.SPECULATIVE, S.DELETING])
async def test_stamps_end_together_with_the_cluster(target: MachineState) -> None:
    """ADR-0059: so an asynchronous drain ends here; a cluster that the provider still names is not believed."""
    provider = provider_of(_in_state(S.CONFIGURED))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    provider.add(machine("m1", target, cluster="" if target is S.SPECULATIVE else "c1"))
    await world.cycle()

    assert (world.machine("m1").cluster, stamps(world.machine("m1"))) == ("", CLEARED)
    assert target is operator.states("m1")[-1]


async def test_idle_time_starts_when_idle_is_observed() -> None:
    """The hold of a machine that was drained counts from the end of its drain."""
    provider = provider_of(_in_state(S.DRAINING))
    world = World(provider)
    await world.cycle()
    await world.shard._clock.sleep(90)
    provider.add(machine("m1", S.IDLE))
    await world.cycle()

    assert world.shard.inventory.idle_since_seconds(world.machine("m1").id) == 90.0


async def test_reaching_speculative_counts_as_a_release() -> None:
    """An asynchronous Delete ends with the observed slot."""
    world = World(provider_of(machine("m1", S.DELETING, capacity_type=CapacityType.SPOT)))
    await world.cycle()
    world.provider.settle()
    await world.cycle()

    assert world.metric("idle_releases_total") == 1


# ---- what comes back after a restart ----------------------------------------------------------------------------


@pytest.mark.rule("shard 2/2", "shard 5.3/6")
async def test_a_restarted_shard_reads_the_stamps_from_the_echo() -> None:
    """Inventory, bindings and attribution come from one List."""
    world = World(provider_of(_in_state(S.CONFIGURED)), epoch=2)
    await world.cycle()

    assert (world.machine("m1").cluster, stamps(world.machine("m1"))) == ("c1", RESTORED)


@pytest.mark.rule("shard 5.3/6")
async def test_a_stamp_that_cannot_be_read_is_left_at_zero() -> None:
    """It is counted and spoils no other."""
    provider = provider_of(_in_state(S.CONFIGURED))
    provider.metadata["m1"][labels.ASSIGNED_PRIORITY] = "urgent"
    provider.metadata["m1"][labels.ASSIGNED_RECLAMATION_PENALTY_DOLLARS] = "-1"
    provider.metadata["m1"]["example.org/unknown"] = "ignored"
    world = World(provider)
    await world.cycle()

    assert (0, math.inf, 0.0, "p=700", "gang") == stamps(world.machine("m1"))
    assert world.metric("metadata_decode_errors_total") == 2


@pytest.mark.rule("shard 5.3/9", "shard 10.3/1")
async def test_the_provider_wins_a_binding_conflict() -> None:
    """Stamps come from the echo then; the former cluster hears that it lost the machine, the new one that it has it."""
    provider = provider_of(_in_state(S.CONFIGURED))
    world = World(provider)
    one, two = world.connect("c1"), world.connect("c2")
    await world.cycle()
    provider.add(machine("m1", S.CONFIGURED, cluster="c2"))
    provider.metadata["m1"] = {labels.ASSIGNED_PRIORITY: "5"}
    await world.cycle()
    await world.cycle()

    assert (world.machine("m1").cluster, world.machine("m1").assigned_priority) == ("c2", 5)
    assert world.metric("binding_conflicts_total") == 1
    lost = one.frames[-1]
    assert isinstance(lost, NodeStateUpdate)
    assert (lost.state, lost.last_error, lost.cluster_id) == (S.FAILED, BOUND_ELSEWHERE, "")
    assert two.states("m1") == [S.CONFIGURED]


@pytest.mark.rule("shard 5.3/9")
async def test_a_binding_that_this_process_did_not_make_is_no_conflict() -> None:
    """An Idle machine that turns up bound is taken with its echo."""
    provider = provider_of(machine("m1", S.IDLE))
    world = World(provider)
    await world.cycle()
    provider.add(_in_state(S.CONFIGURED))
    provider.metadata["m1"] = dict(STAMPS)
    await world.cycle()

    assert (world.machine("m1").cluster, stamps(world.machine("m1"))) == ("c1", RESTORED)
    assert world.metric("binding_conflicts_total") == 0


@pytest.mark.rule("shard 5.3/10")
async def test_a_configuring_machine_whose_cluster_is_not_told_keeps_ours() -> None:
    """Absent is not said: otherwise every cycle would buy the row another machine."""
    provider = provider_of(*fleet(3))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()
    provider.records["m000"] = replace(provider.records["m000"], cluster="")  # type: ignore[arg-type]
    await world.cycle()
    await world.cycle()

    assert world.outcomes() == [("Bootstrap", "m000", "success")]
    assert world.machine("m000").cluster == "c1"


# ---- removals ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.1/1", "shard 5.3/11")
async def test_a_removed_bound_machine_is_shown_as_failed_to_its_cluster() -> None:
    """With the node name that the operator knows it by."""
    provider = provider_of(_in_state(S.CONFIGURED))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    status = NodeStatus(machine_id="m1", node_name="node-1", ready=True, observed_unix_nanos=5)
    assert world.shard.sessions.on_node_status(operator.session, status)
    del provider.records["m1"]
    await world.cycle()

    assert "m1" not in world.shard.inventory
    gone = operator.frames[-1]
    assert isinstance(gone, NodeStateUpdate)
    assert (gone.state, gone.last_error, gone.node_name) == (S.FAILED, NO_LONGER_REPORTED, "node-1")
    assert gone.cluster_id == "", "the operator may forget the machine"


@pytest.mark.rule("shard 10.3/2")
async def test_a_node_status_is_kept_only_in_the_order_of_its_observation() -> None:
    """An older one changes nothing; one about a machine of another cluster concerns nobody."""
    world = World(provider_of(_in_state(S.CONFIGURED)))
    one, two = world.connect("c1"), world.connect("c2")
    await world.cycle()
    notes = [("node-new", 9), ("node-old", 8)]
    for name, at in notes:
        status = NodeStatus(machine_id="m1", node_name=name, ready=True, observed_unix_nanos=at)
        assert world.shard.sessions.on_node_status(one.session, status)
        assert not world.shard.sessions.on_node_status(two.session, status)

    assert world.shard.ingest.node_name(world.machine("m1")) == "node-new"
    gone = NodeStatus(machine_id="m1", node_name="", ready=False, observed_unix_nanos=10)
    world.shard.sessions.on_node_status(one.session, gone)
    assert world.shard.ingest.node_name(world.machine("m1")) == ""


async def test_the_load_of_a_node_is_kept_until_the_machine_leaves_its_cluster() -> None:
    """What cannot be read of it is left out."""
    provider = provider_of(_in_state(S.CONFIGURED))
    world = World(provider)
    operator = world.connect("c1")
    await world.cycle()
    machine_id = world.machine("m1").id
    assert world.shard.ingest.node_load(machine_id) is None
    requested = {"cpu": "3500m", "memory": "lots", "gpu": "-1"}
    status = NodeStatus(machine_id="m1", node_name="n", ready=True, observed_unix_nanos=5, requested=requested, pods=12)
    assert world.shard.sessions.on_node_status(operator.session, status)

    assert world.shard.ingest.node_load(machine_id) == NodeLoad(5, "n", {"cpu": 3500}, 12)
    del provider.records["m1"]
    await world.cycle()
    assert world.shard.ingest.node_load(machine_id) is None


@pytest.mark.rule("shard 5.1/3", "shard 6/10", "shard 16/2")
@pytest.mark.parametrize(
    ("known", "removed", "is_believed"),
    [(20, 10, True), (20, 11, False), (109, 11, False), (110, 11, True), (110, 12, False), (119, 12, False)],
)
async def test_a_sudden_loss_is_believed_up_to_ten_machines_or_a_tenth(
    known: int, removed: int, is_believed: bool
) -> None:
    """Rail 4 holds back more than max(10, 10 %), all of it; what else the List says is applied."""
    provider = provider_of(*fleet(known))
    world = World(provider)
    await world.cycle()
    for number in range(removed):
        del provider.records[f"m{number:03d}"]
    provider.add(machine(f"m{known - 1:03d}", S.IDLE, price_usd_per_hour=8.0), machine("new", S.IDLE))
    await world.cycle()

    left = known + 1 - (removed if is_believed else 0)
    assert left == len(world.shard.inventory)
    assert world.machine(f"m{known - 1:03d}").price_usd_per_hour == 8.0
    assert world.metric("removals_braked") == (0 if is_believed else removed)
    assert world.metric("reconcile_total", mode="full", outcome="braked") == (0 if is_believed else 1)


@pytest.mark.rule("shard 6/11", "shard 15/6")
async def test_the_third_empty_list_in_a_row_is_believed() -> None:
    """Two passes remove nothing, the third everything."""
    provider = provider_of(*fleet(30))
    world = World(provider)
    await world.cycle()
    provider.records.clear()
    left = []
    for _ in range(3):
        await world.cycle()
        left.append(len(world.shard.inventory))

    assert left == [30, 30, 0]
    assert world.metric("removals_braked") == 0


@pytest.mark.rule("shard 6/11")
async def test_a_sound_list_ends_the_streak() -> None:
    """A provider that shows nothing every other time loses no machine."""
    provider = provider_of(*fleet(30))
    world = World(provider)
    await world.cycle()
    for _ in range(4):
        provider.listings = [Listing(records=[]), Listing(records=[])]
        for _ in range(3):
            await world.cycle()

    assert len(world.shard.inventory) == 30


@pytest.mark.rule("shard 6/11")
async def test_the_brake_can_be_switched_off() -> None:
    """Then the first empty List is believed."""
    provider = provider_of(*fleet(30))
    world = World(provider, settings=ShardSettings(removal_brake=False))
    await world.cycle()
    provider.records.clear()
    await world.cycle()

    assert len(world.shard.inventory) == 0


@pytest.mark.rule("shard 1/11", "shard 3/7", "shard 15/5")
async def test_a_provider_that_is_down_removes_nothing() -> None:
    """The last view stays, cycles go on, and readiness is not taken back."""
    provider = provider_of(*fleet(12))
    world = World(provider)
    await world.cycle()
    provider.list_fails = True
    for _ in range(5):
        assert (await world.cycle()).decision is not None

    assert (len(world.shard.inventory), world.shard.is_ready) == (12, True)
    assert world.metric("reconcile_total", mode="full", outcome="error") == 5


@pytest.mark.rule("shard 5.1/5")
async def test_a_list_that_does_not_come_is_given_up() -> None:
    """A hanging List costs its deadline and no more."""
    provider = provider_of(*fleet(1))
    world = World(provider, settings=ShardSettings(list_timeout_seconds=120.0))
    provider.during_list = lambda: world.shard._clock.sleep(1e6)
    await world.cycle()

    assert (world.shard._clock.monotonic_seconds(), world.shard.is_ready) == (120.0, False)


async def test_a_long_list_is_applied_in_turns() -> None:
    """Whoever else wants the loop gets it in between: streams, workers, health."""
    world = World(provider_of(*fleet(3 * RECORDS_PER_TURN_MAX + 1)))
    turns = []

    async def other() -> None:
        while not world.shard.is_ready:
            turns.append(len(world.shard.inventory))
            await world.shard._clock.sleep(0)

    task = asyncio.create_task(other())
    await world.cycle()
    await task

    assert {RECORDS_PER_TURN_MAX, 2 * RECORDS_PER_TURN_MAX, 3 * RECORDS_PER_TURN_MAX} <= set(turns)


async def test_the_first_inventory_is_told_once() -> None:
    """Whoever keeps the process tidy hears when the machines are there; a List that fails is none."""
    world = World(provider_of(*fleet(3)))
    told = []
    world.shard._on_inventory = lambda: told.append(len(world.shard.inventory))
    world.provider.list_fails = True
    await world.cycle()
    world.provider.list_fails = False
    await world.cycle()
    await world.cycle()

    assert told == [3]


# ---- in flight --------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 5.1/2", "shard 5.3/1", "shard 15/9", "shard 16/3")
async def test_a_list_answered_before_a_call_and_applied_after_it_is_skipped() -> None:
    """The machine was pending when the List was sent: the view may predate the call."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.step()
    provider.during_list = world.shard.actuator.run_inline
    await world.step()

    assert (world.state("m1"), world.machine("m1").cluster) == (S.CONFIGURED, "c1")
    assert world.metric("observed_jumps_total", **{"from": "Configured", "to": "Idle"}) == 0


@pytest.mark.rule("shard 5.3/1", "shard 16/3")
async def test_a_list_answered_after_a_call_and_applied_before_its_ack_is_skipped() -> None:
    """The machine is pending when the List is applied: its worker will know better."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE))
    provider.lost_answers.add(("configure", "m1"))
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "4", priority=7))
    await world.step()
    listing = Listing(records=[ListedMachine(machine("m1", S.FAILED, last_error="half applied"), {})])
    provider.listings = [listing]
    await world.step()
    assert S.IDLE is world.state("m1")

    await world.shard.actuator.run_inline()
    provider.during_list = None
    await world.settle()
    assert (world.state("m1"), world.machine("m1").assigned_priority) == (S.CONFIGURED, 7)


@pytest.mark.rule("shard 5.1/1")
async def test_a_pending_machine_that_is_not_listed_is_not_removed() -> None:
    """Its action ends first; a later List may remove it."""
    provider = provider_of(machine("m1", S.IDLE))
    world = World(provider)
    world.connect("c1").report(need("c1", "4"))
    await world.step()
    del provider.records["m1"]
    await world.step()
    assert "m1" in world.shard.inventory

    await world.shard.actuator.run_inline()
    assert world.outcomes() == [("Bootstrap", "m1", "not_found")]
    assert "m1" not in world.shard.inventory


@pytest.mark.rule("shard 5.3/12", "shard 9.6/8")
async def test_a_machine_held_by_this_shard_stays_failed_until_the_provider_moves() -> None:
    """The state recorded at the start of the hold is left aside, any other one is followed."""
    provider = provider_of(machine("m1", S.IDLE))
    provider.refusals["configure", "m1"] = [RefusalKind.NOT_SUPPORTED]
    world = World(provider)
    operator = world.connect("c1")
    operator.report(need("c1", "4"))
    for _ in range(3):
        await world.cycle()
    assert (world.state("m1"), world.metric("machines_held")) == (S.FAILED, 1)

    operator.report()
    provider.add(machine("m1", S.DELETING))
    await world.cycle()
    assert (world.state("m1"), world.metric("machines_held")) == (S.DELETING, 0)
