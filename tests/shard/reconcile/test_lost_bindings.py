"""A machine that loses its binding without a drain of the shard is neither bound elsewhere nor deleted."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.inventory.lost_bindings import UNREPORTED_SECONDS
from bigfleet.shard.ports import ListedMachine, Listing, ShardSettings
from tests.shard.reconcile.test_unchanged_records import digest_of
from tests.shard.world import FakeOperator, RevisionedProvider, ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
BOUND = 30


def bound(number: int, cluster: str = "a") -> Machine:
    """Return a machine in service of a cluster."""
    return machine(f"m{number:03d}", S.CONFIGURED, cluster=cluster)


def idle(number: int) -> Machine:
    """Return the same machine as a restored provider shows it."""
    return machine(f"m{number:03d}", S.IDLE)


class DigestingProvider(ScriptedProvider):
    """Answers with digests, so that what is known is not read."""

    def view(self, since_revision: bytes) -> Listing:
        records = [ListedMachine(m, encode_metadata(m) if m.cluster else {}) for m in self.records.values()]
        return Listing(records=records, digests=b"".join(map(digest_of, records)))


async def serving(provider: ScriptedProvider, machines: int, *, is_delta: bool = False) -> tuple[World, FakeOperator]:
    """Return a world with machines in service of cluster a, and its operator, which reports their nodes."""
    provider.add(*map(bound, range(machines)))
    world = World(provider, settings=ShardSettings(incremental_reconcile=is_delta))
    operator = world.connect("a")
    operator.report(need("a", str(4 * machines)))
    await world.cycle()
    for number in range(machines):
        assert operator.saw(f"m{number:03d}")
    await world.cycle()
    return world, operator


def demand_of_b(world: World, machines: int) -> None:
    """Connect an operator of cluster b that wants machines, before those of cluster a."""
    world.connect("b").report(need("b", str(4 * machines), priority=900))


async def pass_time(world: World, seconds: float) -> None:
    """Cycle every ten seconds."""
    for _ in range(int(seconds / 10)):
        await asyncio.sleep(10)
        await world.cycle()
        world.provider.settle()
    await world.cycle()


def calls(world: World) -> Sequence[str]:
    """Return the methods that the shard has called."""
    return [method for method, _machine, _sequence in world.provider.calls]


def shows_idle(world: World) -> None:
    """Show the machine as Idle."""
    world.provider.add(idle(0))


def shows_idle_after_failure(world: World) -> None:
    """Show the machine, which the shard has set to Failed, as Idle."""
    world.shard.ingest.fail(world.machine("m000"), "three refusals")
    world.provider.add(idle(0))


@pytest.mark.rule("shard 5.4/1", "shard 15/30")
@pytest.mark.parametrize("shows", [shows_idle, shows_idle_after_failure])
async def test_a_machine_is_bound_elsewhere_only_after_its_node_is_gone(shows: Callable[[World], None]) -> None:
    """A provider that lost what it knew shows one machine as Idle whose node still serves."""
    world, operator = await serving(ScriptedProvider(), 1)
    demand_of_b(world, 1)
    shows(world)
    with capture_logs() as logs:
        await world.cycle()
    await pass_time(world, 3 * UNREPORTED_SECONDS)

    assert (world.state("m000"), calls(world), world.metric("bindings_lost")) == (S.IDLE, [], 1)
    assert [(each["log_level"], each["sample"]) for each in logs if each["event"] == "inventory.bindings_lost"] == [
        ("warning", ["m000"])
    ]
    assert operator.lost("m000")
    await pass_time(world, 60)
    assert (world.machine("m000").cluster, world.metric("bindings_lost")) == ("b", 0)


@pytest.mark.rule("shard 5.4/1")
async def test_a_report_of_another_cluster_ends_no_hold() -> None:
    """Only the operator of the former cluster knows its nodes."""
    world, _operator = await serving(ScriptedProvider(), 1)
    world.provider.add(idle(0))
    await world.cycle()

    assert not world.connect("c").lost("m000")
    assert world.shard.ingest.lost_bindings.held == {"m000"}


@pytest.mark.rule("shard 5.4/1")
async def test_a_machine_that_lost_its_binding_is_not_deleted() -> None:
    """An OnDemand machine is released when it has been Idle for a while; this one may be in use."""
    world, operator = await serving(ScriptedProvider(), 1)
    operator.report(need("a", "0.001"))
    world.provider.add(machine("m000", S.IDLE, capacity_type=CapacityType.ON_DEMAND))
    await pass_time(world, 7200)
    assert calls(world) == []

    operator.report()
    operator.lost("m000")
    await pass_time(world, 7200)
    assert calls(world) == ["delete"]


@pytest.mark.rule("shard 5.4/1")
async def test_a_bound_machine_that_is_gone_and_comes_back_idle_is_held() -> None:
    """The restored state lacks it, and the provider's inventory finds its host later."""
    world, _operator = await serving(ScriptedProvider(), 1)
    demand_of_b(world, 1)
    del world.provider.records["m000"]
    await world.cycle()
    assert ("m000" in world.shard.inventory, world.metric("bindings_lost")) == (False, 0)
    world.provider.add(idle(0))
    await pass_time(world, 3 * UNREPORTED_SECONDS)

    assert (world.state("m000"), calls(world)) == (S.IDLE, [])


@pytest.mark.rule("shard 5.4/1")
async def test_a_machine_that_another_cluster_is_shown_for_stays_held_for_the_first() -> None:
    """The provider wins, and after the second cluster has given it back the node of the first one counts still."""
    world, _operator = await serving(ScriptedProvider(), 1)
    world.provider.add(bound(0, "z"))
    await world.cycle()
    assert world.machine("m000").cluster == "z"
    demand_of_b(world, 1)
    await pass_time(world, 3 * UNREPORTED_SECONDS)

    assert (world.state("m000"), calls(world)) == (S.IDLE, ["drain"])


@pytest.mark.rule("shard 5.4/1")
async def test_a_drain_that_the_operator_has_not_ended_is_a_loss() -> None:
    """The provider shows the machine as Idle while its pods leave."""
    world, operator = await serving(ScriptedProvider(), 1)
    operator.drain = None
    operator.report(need("a", "0.001"))
    demand_of_b(world, 1)
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.step()
    await asyncio.sleep(1)
    assert world.state("m000") is S.DRAINING
    world.provider.add(idle(0))
    await world.step()

    assert world.shard.ingest.lost_bindings.held == {"m000"}
    workers.cancel()


@pytest.mark.rule("shard 5.4/1")
async def test_what_the_shard_drained_is_not_held() -> None:
    """A drain of its own ends with an Idle machine, which the next cluster gets."""
    world, _operator = await serving(ScriptedProvider(), 1)
    demand_of_b(world, 1)
    await pass_time(world, 120)

    assert (world.machine("m000").cluster, world.shard.ingest.lost_bindings.held) == ("b", frozenset())


@pytest.mark.rule("shard 5.4/2")
@pytest.mark.parametrize("state", [S.IDLE, S.SPECULATIVE])
async def test_a_hold_without_a_reported_node_or_a_host_ends(state: MachineState) -> None:
    """After ten minutes the machine is one like any other."""
    provider = ScriptedProvider()
    provider.add(bound(0))
    world = World(provider)
    await world.cycle()
    if state is S.SPECULATIVE:
        assert world.connect("a").saw("m000")
    demand_of_b(world, 1)
    provider.add(machine("m000", state))
    await pass_time(world, UNREPORTED_SECONDS - 20)
    assert calls(world) == []
    await pass_time(world, 120)

    assert calls(world)[-1] == "configure"
    assert world.machine("m000").cluster == "b"


@pytest.mark.rule("shard 5.4/2")
async def test_nothing_is_held_whose_node_was_gone_before() -> None:
    """A Spot machine whose host was taken: its cluster has said so, and the slot is bought again."""
    world, operator = await serving(ScriptedProvider(), 1)
    operator.lost("m000")
    world.provider.add(machine("m000", S.SPECULATIVE))
    await world.cycle()

    assert world.shard.ingest.lost_bindings.held == frozenset()


@pytest.mark.rule("shard 5.4/2")
async def test_a_binding_that_is_shown_again_ends_the_hold() -> None:
    """An administrator had the provider adopt the machine."""
    world, _operator = await serving(ScriptedProvider(), 1)
    world.provider.add(idle(0))
    await world.cycle()
    assert world.metric("bindings_lost") == 1
    world.provider.add(bound(0))
    await world.cycle()

    assert (world.metric("bindings_lost"), world.state("m000")) == (0, S.CONFIGURED)


# ---- many at once -----------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 6/25", "shard 15/30")
@pytest.mark.parametrize(
    ("provider", "is_delta"),
    [(ScriptedProvider(), False), (DigestingProvider(), False), (RevisionedProvider(), True)],
    ids=["full", "digests", "delta"],
)
async def test_many_lost_bindings_are_held_back_twice(provider: ScriptedProvider, is_delta: bool) -> None:
    """The last good records stay for two passes; what the third one applies is held."""
    world, _operator = await serving(provider, BOUND, is_delta=is_delta)
    demand_of_b(world, BOUND)
    # The demand of cluster b preempts nothing meanwhile: only the records are looked at.
    provider.add(*map(idle, range(12)), machine("new", S.IDLE))
    seen = []
    with capture_logs() as logs:
        for _ in range(3):
            await world.shard.reconciler.run()
            states = [world.state(f"m{number:03d}") for number in range(12)]
            seen.append((set(states), world.metric("removals_braked"), world.metric("bindings_lost")))

    assert seen == [({S.CONFIGURED}, 12, 0), ({S.CONFIGURED}, 12, 0), ({S.IDLE}, 0, 12)]
    assert "new" in world.shard.inventory
    assert sum(world.metric("reconcile_total", mode=mode, outcome="braked") for mode in ("full", "delta")) == 2
    events = [(each["event"], each["log_level"]) for each in logs if each["event"].startswith("inventory.bindings")]
    assert events == [
        ("inventory.bindings_braked", "error"),
        ("inventory.bindings_braked", "error"),
        ("inventory.bindings_accepted", "error"),
        ("inventory.bindings_lost", "warning"),
    ]
    assert world.shard.ingest.lost_bindings.held == {MachineId(f"m{number:03d}") for number in range(12)}


@pytest.mark.rule("shard 6/25")
@pytest.mark.parametrize("shown", [idle, lambda number: bound(number, "z")], ids=["idle", "another cluster"])
@pytest.mark.parametrize(
    ("machines", "lost", "is_braked"), [(20, 10, False), (20, 11, True), (119, 11, False), (119, 12, True)]
)
async def test_more_than_ten_and_a_tenth_of_the_bound_machines_are_many(
    shown: Callable[[int], Machine], machines: int, lost: int, is_braked: bool
) -> None:
    """Machines that are not bound do not count."""
    provider = ScriptedProvider()
    provider.add(*(machine(f"free{number:03d}", S.IDLE) for number in range(200)))
    world, _operator = await serving(provider, machines)
    provider.add(*map(shown, range(lost)))
    await world.shard.reconciler.run()

    assert world.metric("removals_braked") == (lost if is_braked else 0)


@pytest.mark.rule("shard 6/25")
async def test_a_provider_that_shows_the_bindings_again_loses_nothing() -> None:
    """It was wrong for one List."""
    world, _operator = await serving(RevisionedProvider(), BOUND, is_delta=True)
    world.provider.add(*map(idle, range(BOUND)))
    await world.shard.reconciler.run()
    world.provider.add(*map(bound, range(BOUND)))
    for _ in range(3):
        await world.shard.reconciler.run()

    assert world.shard.inventory.count_bound_to("a") == BOUND
    assert (world.metric("removals_braked"), world.metric("bindings_lost")) == (0, 0)


@pytest.mark.rule("shard 6/25")
async def test_lost_bindings_are_held_also_without_the_brake() -> None:
    """`--no-removal-brake` accepts them at once."""
    provider = ScriptedProvider()
    provider.add(*map(bound, range(BOUND)))
    world = World(provider, settings=ShardSettings(removal_brake=False))
    await world.cycle()
    provider.add(*map(idle, range(BOUND)))
    await world.cycle()

    assert (world.metric("removals_braked"), world.metric("bindings_lost")) == (0, BOUND)
