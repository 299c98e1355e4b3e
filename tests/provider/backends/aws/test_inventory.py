"""What the inventory says: slots by number, hosts by tag, orphans, and nothing about what has no price."""

from dataclasses import replace
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import ExistingHost
from bigfleet.provider.backends.aws.launch import TAG_OPERATION
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import (
    MACHINE,
    OFFERING,
    SPOT_MACHINE,
    SPOT_OFFERING,
    TYPE,
    MemoryEc2,
    make_backend,
    refused,
)
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time
OTHER = MACHINE.replace("000", "001")
ORPHAN = "aws/orphan/i-0ld"
PASSES = CoreOptions(is_inline=True, reconcile_interval_seconds=10.0, failed_hold_seconds=0.0)
RECOVERS = replace(PASSES, failed_hold_seconds=100.0)


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock())


async def test_each_unit_of_an_offering_is_a_slot_with_aws_price(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2)))
    machines = [record.machine for record in (await core.list()).records]
    assert [machine.id for machine in machines] == [MACHINE.replace("000", f"00{number}") for number in range(4)]
    assert {machine.price_usd_per_hour for machine in machines} == {0.096}
    assert machines[0].labels["bigfleet.dev/reset"] == "reimage"
    assert machines[0].interruption_probability == 0.0


async def test_a_type_without_a_price_is_not_offered_until_it_has_one(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.prices[TYPE] = 0.0
    priced = {**OFFERING, "instance_type": "c6i.xlarge", "price_per_hour": 0.2}
    core = await started(make_core(make_backend(tmp_path, ec2, OFFERING, priced), options=PASSES))
    assert {record.machine.instance_type for record in (await core.list()).records} == {"c6i.xlarge"}
    ec2.prices[TYPE] = 0.1
    await ec2.clock.sleep(4000)
    assert (await core.get(MACHINE)).machine.price_usd_per_hour == 0.1


@pytest.mark.parametrize("offering", [OFFERING, SPOT_OFFERING, {**OFFERING, "capacity_type": "reserved"}])
async def test_no_price_is_asked_for_when_the_file_has_them_all(
    offering: dict[str, object], tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2, {**offering, "price_per_hour": 0.07}), options=PASSES))
    machine_id = str((await core.list()).records[0].id)
    await core.create(machine_id)
    host = (await settled(core, machine_id)).machine.host.ref
    # An instance of the same kind that is no machine's host has the price of the file as well.
    tags = {**ec2.instances[host].tags, TAG_OPERATION: "op-before"}
    ec2.instances["i-0ld"] = replace(ec2.instances[host], id="i-0ld", launched_unix_seconds=-1.0, tags=tags)
    await ec2.clock.sleep(100)
    assert (await core.get("aws/orphan/i-0ld")).machine.price_usd_per_hour == 0.07
    assert (ec2.calls["GetProducts"], ec2.calls["DescribeSpotPriceHistory"]) == ([], [])


async def test_an_outage_of_the_price_list_removes_nothing(tmp_path: Path, ec2: MemoryEc2) -> None:
    backend = make_backend(tmp_path, ec2, SPOT_OFFERING)
    ec2.faults["DescribeSpotPriceHistory"] = [refused("DescribeSpotPriceHistory", "InternalError", status=500)] * 100
    found = await backend.inventory()
    assert (found.facts, found.unread_prefixes) == ((), (SPOT_MACHINE.removesuffix("000"),))


async def test_a_count_that_shrinks_keeps_machines_in_use(tmp_path: Path, ec2: MemoryEc2) -> None:
    backend = make_backend(tmp_path, ec2)
    core = await started(make_core(backend, options=PASSES))
    last = MACHINE.replace("000", "003")
    await core.create(last)
    assert (await settled(core, last)).state is MachineState.IDLE
    make_backend(tmp_path, ec2, {**OFFERING, "count": 2})
    smaller = make_backend(tmp_path, ec2, {**OFFERING, "count": 2})
    backend.set_offerings(smaller._offerings)
    await ec2.clock.sleep(100)
    assert sorted(record.id for record in (await core.list()).records) == [MACHINE, last]
    await core.delete(last)
    await settled(core, last)
    await ec2.clock.sleep(100)
    assert sorted(record.id for record in (await core.list()).records) == [MACHINE, OTHER]


async def test_of_two_instances_the_one_that_the_state_knows_is_the_host(tmp_path: Path, ec2: MemoryEc2) -> None:
    """The other, although it is older, is listed as an orphan and goes on running."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=PASSES))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    older = replace(
        ec2.instances[host],
        id="i-0ld",
        launched_unix_seconds=-1.0,
        tags={**ec2.instances[host].tags, TAG_OPERATION: "op-before"},
    )
    ec2.instances["i-0ld"] = older
    await ec2.clock.sleep(100)

    assert (await core.get(MACHINE)).machine.host.ref == host
    orphan = (await core.get("aws/orphan/i-0ld")).machine
    assert (orphan.state, orphan.host.ref, orphan.price_usd_per_hour) == (MachineState.IDLE, "i-0ld", 0.096)
    assert len(ec2.live()) == 2
    await core.delete("aws/orphan/i-0ld")
    await ec2.clock.sleep(100)
    assert [each.id for each in ec2.live()] == [host]


async def with_orphan(core: CapacityCore, ec2: MemoryEc2, *, is_bound: bool = True) -> str:
    """Create a machine that has a second instance, and bind that one as an orphan; return the machine's own."""
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    tags = {**ec2.instances[host].tags, TAG_OPERATION: "op-before"}
    ec2.instances["i-0ld"] = replace(ec2.instances[host], id="i-0ld", launched_unix_seconds=-1.0, tags=tags)
    await ec2.clock.sleep(100)
    if is_bound:
        await core.configure(ORPHAN, "team-a", b"#!/bin/sh\n", {})
        assert (await settled(core, ORPHAN)).state is MachineState.CONFIGURED
    return host


async def test_an_orphan_that_serves_stays_what_it_is_when_the_machine_of_its_tag_is_deleted(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=PASSES))
    await with_orphan(core, ec2)
    await core.delete(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.SPECULATIVE
    await ec2.clock.sleep(300)
    orphan = await core.get(ORPHAN)
    assert (orphan.state, orphan.machine.host.ref) == (MachineState.CONFIGURED, "i-0ld")
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE
    assert [each.id for each in ec2.live()] == ["i-0ld"]


async def test_an_orphan_that_serves_is_not_given_back_in_the_place_of_a_host_that_was_lost(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=RECOVERS))
    host = await with_orphan(core, ec2)
    ec2.instances[host] = replace(ec2.instances[host], state="terminated")
    await core.feed.report_lost(MACHINE, "reclaimed")
    await ec2.clock.sleep(700)
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE
    assert (await core.get(ORPHAN)).state is MachineState.CONFIGURED
    assert [each.id for each in ec2.live()] == ["i-0ld"]


async def test_an_orphan_whose_drain_failed_stays_failed_and_bound(tmp_path: Path, ec2: MemoryEc2) -> None:
    """It may run pods, as any other machine may."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=RECOVERS))
    await with_orphan(core, ec2)
    ec2.root_state = "failed"
    await core.drain(ORPHAN, 0)
    assert (await settled(core, ORPHAN)).state is MachineState.FAILED
    await ec2.clock.sleep(1000)
    record = await core.get(ORPHAN)
    assert (record.state, record.machine.cluster, record.machine.host.ref) == (MachineState.FAILED, "team-a", "i-0ld")


@pytest.mark.parametrize(
    ("tags", "state"), [({}, MachineState.IDLE), ({"bigfleet:cluster": "team-b"}, MachineState.FAILED)]
)
async def test_an_orphan_that_could_not_be_deleted_is_idle_again_if_it_is_in_no_cluster(
    tags: dict[str, str], state: MachineState, tmp_path: Path, ec2: MemoryEc2
) -> None:
    """In doubt it is never terminated unasked."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=RECOVERS))
    await with_orphan(core, ec2, is_bound=False)
    ec2.instances["i-0ld"] = replace(ec2.instances["i-0ld"], tags={**ec2.instances["i-0ld"].tags, **tags})
    ec2.faults["TerminateInstances"] = [refused("TerminateInstances", "OperationNotPermitted", "protected")]
    await core.delete(ORPHAN)
    assert (await settled(core, ORPHAN)).state is MachineState.FAILED
    await ec2.clock.sleep(1000)
    record = await core.get(ORPHAN)
    assert (record.state, record.machine.host.ref, len(ec2.live())) == (state, "i-0ld", 2)


async def test_while_a_create_runs_its_own_instance_counts_and_not_an_older_one(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.pending_looks = 30
    core = await started(make_core(make_backend(tmp_path, ec2), options=PASSES))
    await core.create(MACHINE)
    await ec2.clock.sleep(3)
    (own,) = ec2.live()
    ec2.instances["i-0ld"] = replace(
        own, id="i-0ld", state="running", launched_unix_seconds=-1.0, tags={**own.tags, TAG_OPERATION: "op-before"}
    )
    await ec2.clock.sleep(50)
    assert (await core.get(MACHINE)).state is MachineState.CREATING
    ids = [record.id for record in (await core.list()).records if "orphan" in record.id]
    assert ids == ["aws/orphan/i-0ld"]
    assert (await settled(core, MACHINE)).machine.host.ref == own.id


async def test_instances_of_another_provider_and_ended_ones_are_not_shown(tmp_path: Path, ec2: MemoryEc2) -> None:
    backend = make_backend(tmp_path, ec2)
    core = await started(make_core(backend))
    await core.create(MACHINE)
    await settled(core, MACHINE)
    (instance,) = ec2.live()
    ec2.instances["i-1"] = replace(instance, id="i-1", tags={**instance.tags, "bigfleet:provider": "other"})
    ec2.instances["i-2"] = replace(instance, id="i-2", state="terminated")
    hosts = [each for each in (await backend.inventory()).facts if isinstance(each, ExistingHost)]
    assert [each.host_ref for each in hosts] == [instance.id]


async def test_an_inventory_that_cannot_be_read_is_none(tmp_path: Path, ec2: MemoryEc2) -> None:
    backend = make_backend(tmp_path, ec2)
    ec2.faults["DescribeInstances"] = [refused("DescribeInstances", "UnauthorizedOperation")]
    with pytest.raises(Exception, match="UnauthorizedOperation"):
        await backend.inventory()


async def test_a_host_that_is_terminated_from_outside_is_lost_and_its_slot_comes_back(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    options = CoreOptions(is_inline=True, reconcile_interval_seconds=10.0, failed_hold_seconds=100.0)
    core = await started(make_core(make_backend(tmp_path, ec2), options=options))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    ec2.instances[host] = replace(ec2.instances[host], state="terminated")
    await ec2.clock.sleep(60)
    assert (await core.get(MACHINE)).machine.last_error.startswith("HOST_LOST")
    await ec2.clock.sleep(400)
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE


@pytest.mark.parametrize("is_bound", [True, False])
async def test_an_instance_that_a_person_stops_is_lost(is_bound: bool, tmp_path: Path, ec2: MemoryEc2) -> None:
    """A bound one is left to a person; an idle one is given back as after any other loss."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=RECOVERS))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    if is_bound:
        await core.configure(MACHINE, "team-a", b"#!/bin/sh\n", {})
        await settled(core, MACHINE)
    # A stop that ends before the third pass is none.
    ec2.instances[host] = replace(ec2.instances[host], state="stopping")
    await ec2.clock.sleep(12)
    ec2.instances[host] = replace(ec2.instances[host], state="running")
    await ec2.clock.sleep(100)
    assert (await core.get(MACHINE)).state is (MachineState.CONFIGURED if is_bound else MachineState.IDLE)

    ec2.instances[host] = replace(ec2.instances[host], state="stopped")
    await ec2.clock.sleep(60)
    record = await core.get(MACHINE)
    assert (record.state, record.machine.last_error[:9]) == (MachineState.FAILED, "HOST_LOST")
    assert [each.id for each in ec2.live()] == [host]
    await ec2.clock.sleep(5000)
    machine = (await core.get(MACHINE)).machine
    if is_bound:
        assert (machine.state, machine.cluster, machine.host.ref) == (MachineState.FAILED, "team-a", host)
        assert [each.id for each in ec2.live()] == [host]
    else:
        assert (machine.state, ec2.live()) == (MachineState.SPECULATIVE, [])


async def test_a_stopped_instance_does_not_become_the_host_of_its_machine(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=PASSES))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    stopped = replace(ec2.instances[host], id="i-0ld", state="stopped", launched_unix_seconds=-1.0)
    await core.delete(MACHINE)
    await settled(core, MACHINE)
    ec2.instances["i-0ld"] = stopped
    await ec2.clock.sleep(300)
    assert {record.state for record in (await core.list()).records} == {MachineState.SPECULATIVE}
    assert [each.id for each in ec2.live()] == ["i-0ld"]
