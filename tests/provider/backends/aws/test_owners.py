"""Two providers of one name in one account: the owner id of each state file separates their instances."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.identity import Place
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.refusal import StartRefused
from bigfleet.provider.storage.sqlite import SqliteProviderStore, back_up_provider
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import MACHINE, MemoryEc2, make_backend
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time
OPTIONS = CoreOptions(is_inline=True, reconcile_interval_seconds=10.0, failed_hold_seconds=100.0)


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock())


def made(folder: Path, ec2: MemoryEc2, state: str, **settings: str) -> CapacityCore:
    """Return a provider whose new state file gets the owner id `owner-of-STATE`."""
    place = Place(**{"new_owner": f"owner-of-{state}", **settings})
    backend = make_backend(folder, ec2, place=place)
    return make_core(backend, store=SqliteProviderStore(folder / state, is_power_safe=False), options=OPTIONS)


async def created(core: CapacityCore, machine_id: str = MACHINE) -> str:
    await core.create(machine_id)
    record = await settled(core, machine_id)
    assert record.state is MachineState.IDLE, record.machine.last_error
    return record.machine.host.ref


async def test_a_provider_neither_uses_nor_ends_the_instances_of_another_one_of_its_name(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    first = await started(made(tmp_path, ec2, "a"))
    with capture_logs() as logs:
        second = await started(made(tmp_path, ec2, "b"))
        host = await created(first)
        await ec2.clock.sleep(100)
    assert {record.state for record in (await second.list()).records} == {MachineState.SPECULATIVE}
    (error,) = [each for each in logs if each["event"] == "aws.instances_of_another_provider"]
    assert (error["log_level"], error["owner"], error["instances"]) == ("error", "owner-of-a", [host])
    assert "another provider of the name aws runs in this account and region; give each its own" in error["advice"]

    other = await created(second)
    assert other != host
    await second.delete(MACHINE)
    await settled(second, MACHINE)
    await ec2.clock.sleep(300)
    assert [each.id for each in ec2.live()] == [host]
    assert (await first.get(MACHINE)).machine.host.ref == host
    for core in (first, second):
        await core.stop()


async def test_a_failed_create_does_not_take_the_instance_of_another_provider(tmp_path: Path, ec2: MemoryEc2) -> None:
    first, second = await started(made(tmp_path, ec2, "a")), await started(made(tmp_path, ec2, "b"))
    host = await created(first)
    ec2.ends_as = ("terminated", "Client.InternalError")
    await second.create(MACHINE)
    assert (await settled(second, MACHINE)).state is MachineState.FAILED
    await ec2.clock.sleep(1000)
    assert (await second.get(MACHINE)).state is MachineState.SPECULATIVE
    assert [each.id for each in ec2.live()] == [host]
    for core in (first, second):
        await core.stop()


async def test_a_host_whose_tag_names_another_owner_stays_and_is_not_ended(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(made(tmp_path, ec2, "a"))
    host = await created(core)
    ec2.instances[host] = replace(ec2.instances[host], tags={**ec2.instances[host].tags, "bigfleet:owner": "other"})
    await ec2.clock.sleep(100)
    assert (await core.get(MACHINE)).machine.host.ref == host
    await core.delete(MACHINE)
    assert "belongs to the provider of another state file" in (await settled(core, MACHINE)).machine.last_error
    await ec2.clock.sleep(3000)
    assert (await core.get(MACHINE)).state is MachineState.FAILED
    assert [each.id for each in ec2.live()] == [host]
    await core.stop()


async def test_an_instance_without_an_owner_is_taken(tmp_path: Path, ec2: MemoryEc2) -> None:
    """Former versions did not write the tag."""
    former = await started(made(tmp_path, ec2, "a", new_owner=""))
    host = await created(former)
    await former.stop()
    assert "bigfleet:owner" not in ec2.instances[host].tags
    core = await started(made(tmp_path, ec2, "b"))
    await ec2.clock.sleep(100)
    assert (await core.get(MACHINE)).machine.host.ref == host
    await core.stop()


async def test_a_restart_and_a_restored_backup_have_the_same_owner(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(made(tmp_path, ec2, "a"))
    back_up_provider(tmp_path / "a", tmp_path / "copy")
    host = await created(core)
    assert ec2.instances[host].tags["bigfleet:owner"] == "owner-of-a"
    await core.stop()
    for state in ("a", "copy"):
        core = await started(made(tmp_path, ec2, state, new_owner="another"))
        await ec2.clock.sleep(100)
        assert (await core.get(MACHINE)).machine.host.ref == host
        await core.stop()


async def test_a_new_state_file_takes_over_the_instances_of_the_owner_that_it_is_given(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    lost = await started(made(tmp_path, ec2, "lost"))
    host = await created(lost)
    await lost.stop()
    core = await started(made(tmp_path, ec2, "new", owner="owner-of-lost"))
    await ec2.clock.sleep(100)
    assert (await core.get(MACHINE)).machine.host.ref == host
    await core.stop()
    # The flag may stay; another owner than the file's is a mistake.
    await (await started(made(tmp_path, ec2, "new", owner="owner-of-lost"))).stop()
    refused = made(tmp_path, ec2, "new", owner="other")
    with pytest.raises(StartRefused, match="--owner: the instances of this state file have the owner owner-of-lost"):
        await refused.start()
    await refused.stop()
