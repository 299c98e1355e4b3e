"""Instances whose tags a person or a job in the account removed or changed stay the hosts of their machines."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.instance_finder import RESTORED_MAX
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import MACHINE, OFFERING, MemoryEc2, make_backend, refused
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time
OTHER = MACHINE.replace("000", "001")
RESTORED = ("Name", "bigfleet:machine", "bigfleet:provider", "bigfleet:cluster")
ORPHAN = "aws/orphan/i-0ld"
OPTIONS = CoreOptions(is_inline=True, reconcile_interval_seconds=10.0, failed_hold_seconds=100.0)


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock())


async def bound(core: CapacityCore, machine_id: str = MACHINE) -> str:
    """Bind a machine to team-a; return its instance."""
    await core.create(machine_id)
    await settled(core, machine_id)
    await core.configure(machine_id, "team-a", b"#!/bin/sh\n", {})
    return (await settled(core, machine_id)).machine.host.ref


def retag(ec2: MemoryEc2, instance_id: str, tags: dict[str, str]) -> None:
    ec2.instances[instance_id] = replace(ec2.instances[instance_id], tags=tags)


def refuse_tags(ec2: MemoryEc2) -> None:
    ec2.faults["CreateTags"] = [refused("CreateTags", "UnauthorizedOperation")] * 1000


@pytest.mark.parametrize("is_permitted", [True, False])
async def test_a_machine_whose_instance_lost_all_tags_stays_as_it_is(
    is_permitted: bool, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    hosts = {MACHINE: await bound(core)}
    await core.create(OTHER)
    hosts[OTHER] = (await settled(core, OTHER)).machine.host.ref
    before = {machine_id: ec2.instances[host].tags for machine_id, host in hosts.items()}
    if not is_permitted:
        refuse_tags(ec2)
    with capture_logs() as logs:
        for host in hosts.values():
            retag(ec2, host, {})
        await ec2.clock.sleep(1000)

    states = {MACHINE: (MachineState.CONFIGURED, "team-a"), OTHER: (MachineState.IDLE, "")}
    for machine_id, (state, cluster) in states.items():
        machine = (await core.get(machine_id)).machine
        assert (machine.state, machine.cluster, machine.host.ref) == (state, cluster, hosts[machine_id])
    assert sorted(record.id for record in (await core.list()).records if "orphan" in record.id) == []
    assert len(ec2.live()) == 2
    errors = [each for each in logs if each["event"] == "aws.instance_tags_changed"]
    assert sorted(each["instance"] for each in errors) == sorted(hosts.values())
    assert {each["log_level"] for each in errors} == {"error"}
    assert all("the provider writes the tags again" in each["advice"] for each in errors)
    for machine_id, host in hosts.items():
        written = {key: value for key, value in before[machine_id].items() if key in RESTORED}
        assert ec2.instances[host].tags == (written if is_permitted else {})


async def test_an_instance_with_the_tag_of_another_machine_stays_the_host_of_its_own(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    host = await bound(core)
    retag(ec2, host, {**ec2.instances[host].tags, "bigfleet:machine": OTHER})
    await ec2.clock.sleep(1000)
    machine = (await core.get(MACHINE)).machine
    assert (machine.state, machine.host.ref) == (MachineState.CONFIGURED, host)
    assert (await core.get(OTHER)).state is MachineState.SPECULATIVE
    assert ec2.instances[host].tags["bigfleet:machine"] == MACHINE


async def test_a_lost_machine_whose_instance_runs_without_tags_keeps_host_and_binding(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    """Nothing says that it is in no cluster, so a person has to look."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    host = await bound(core)
    refuse_tags(ec2)
    retag(ec2, host, {})
    await core.feed.report_lost(MACHINE, "said by mistake")
    await ec2.clock.sleep(5000)
    machine = (await core.get(MACHINE)).machine
    assert (machine.state, machine.cluster, machine.host.ref) == (MachineState.FAILED, "team-a", host)
    assert [each.id for each in ec2.live()] == [host]


@pytest.mark.parametrize("is_permitted", [True, False])
async def test_a_lost_unbound_machine_whose_instance_runs_without_tags_is_not_terminated(
    is_permitted: bool, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    if not is_permitted:
        refuse_tags(ec2)
    retag(ec2, host, {})
    await core.feed.report_lost(MACHINE, "said by mistake")
    await ec2.clock.sleep(5000)
    machine = (await core.get(MACHINE)).machine
    # With its tags again it is known to be in no cluster.
    state = MachineState.IDLE if is_permitted else MachineState.FAILED
    assert (machine.state, machine.host.ref) == (state, host)
    assert [each.id for each in ec2.live()] == [host]


async def test_an_instance_without_tags_is_drained_by_its_agent(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    host = await bound(core)
    refuse_tags(ec2)
    await ec2.clock.sleep(20)
    retag(ec2, host, {})
    ec2.faults["CreateTags"] = []
    accepted = await core.drain(MACHINE, 30)
    assert (await settled(core, MACHINE)).state is MachineState.IDLE
    assert ec2.drains == [f"{accepted.operation_id} 30"]


async def test_an_orphan_that_lost_its_tags_is_not_forgotten(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    host = await bound(core)
    ec2.instances["i-0ld"] = replace(ec2.instances[host], id="i-0ld", launched_unix_seconds=-1.0)
    await ec2.clock.sleep(100)
    assert (await core.get(ORPHAN)).machine.host.ref == "i-0ld"
    refuse_tags(ec2)
    retag(ec2, "i-0ld", {})
    await ec2.clock.sleep(1000)
    assert (await core.get(ORPHAN)).machine.host.ref == "i-0ld"
    assert (await core.get(MACHINE)).machine.host.ref == host


async def test_a_restart_finds_instances_without_tags_by_the_state(tmp_path: Path, ec2: MemoryEc2) -> None:
    """The first inventory of a process has seen no instance before."""
    core = await started(make_core(make_backend(tmp_path, ec2), options=OPTIONS))
    host = await bound(core)
    retag(ec2, host, {})
    later = make_backend(tmp_path, ec2)
    later.consult(core.known)
    later.consult_hosts(core.hosts)
    found = [each for each in (await later.inventory()).facts if getattr(each, "host_ref", "") == host]
    assert [each.id for each in found] == [MACHINE]


async def test_tags_of_many_instances_are_written_again_some_at_a_time(tmp_path: Path, ec2: MemoryEc2) -> None:
    count = RESTORED_MAX + 5
    backend = make_backend(tmp_path, ec2, {**OFFERING, "count": count}, launches_per_second=100.0, launches_burst=100)
    core = await started(make_core(backend, options=OPTIONS))
    for number in range(count):
        await core.create(MACHINE.replace("000", f"{number:03d}"))
    await ec2.clock.sleep(100)
    for instance in ec2.live():
        retag(ec2, instance.id, {})
    await backend.inventory()
    assert len([each for each in ec2.live() if each.tags]) == RESTORED_MAX
    await backend.inventory()
    assert len([each for each in ec2.live() if each.tags]) == count
