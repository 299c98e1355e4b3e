"""A Create: one instance for each operation with any loss of answers, and few calls for many machines."""

from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.launch import TAG_MACHINE, TAG_OPERATION, TAG_PROVIDER
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.refusal import Refused
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import (
    MACHINE,
    OFFERING,
    SPOT_MACHINE,
    SPOT_OFFERING,
    MemoryEc2,
    dropped,
    make_backend,
    refused,
)
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock())


async def test_a_create_launches_one_instance_and_is_idle_once_it_runs(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    record = await settled(core, MACHINE)

    (instance,) = ec2.live()
    assert record.state is MachineState.IDLE
    assert (record.machine.host.ref, record.machine.node_name) == (instance.id, instance.private_dns)
    (request,) = ec2.requests
    assert record.operation is not None
    assert request["ClientToken"] == instance.tags[TAG_OPERATION] == record.operation.id
    assert (instance.tags[TAG_MACHINE], instance.tags[TAG_PROVIDER], instance.tags["Name"]) == (MACHINE, "aws", MACHINE)
    assert (request["MinCount"], request["MaxCount"], request["ImageId"], request["SubnetId"]) == (
        1,
        1,
        "ami-1",
        "subnet-1",
    )
    assert request["MetadataOptions"]["HttpTokens"] == "required"
    assert {each["ResourceType"] for each in request["TagSpecifications"]} == {
        "instance",
        "volume",
        "network-interface",
    }
    # Nothing can be found before the first launch.
    assert len(ec2.calls["DescribeInstances"]) == 1 + 2


async def test_a_spot_instance_is_asked_for_once_and_ends_when_it_is_reclaimed(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = await started(make_core(make_backend(tmp_path, ec2, {**SPOT_OFFERING, "price_per_hour": 0.03})))
    await core.create(SPOT_MACHINE)
    assert (await settled(core, SPOT_MACHINE)).state is MachineState.IDLE
    assert ec2.requests[0]["InstanceMarketOptions"]["SpotOptions"] == {
        "SpotInstanceType": "one-time",
        "InstanceInterruptionBehavior": "terminate",
    }


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_lost_answer_leaves_exactly_one_instance(is_after: bool, tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.faults["RunInstances"] = [dropped("RunInstances", is_after=is_after)] * 3
    # What was launched is not visible at once, so the tag finds nothing and the token has to.
    ec2.invisible_looks = 2
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.IDLE
    assert len(ec2.instances) == 1


async def test_after_a_restart_the_operations_instance_is_found_by_its_tag(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.pending_looks = 1000
    store = SqliteProviderStore(tmp_path / "s.db", is_power_safe=False)
    core = await started(make_core(make_backend(tmp_path, ec2), store=store))
    await core.create(MACHINE)
    await ec2.clock.sleep(60)
    assert len(ec2.live()) == 1
    await core.stop()

    # The image of the offering is another one now: a second launch with this token would be refused.
    ec2.pending_looks = 0
    backend = make_backend(tmp_path, ec2, {**OFFERING, "ami": "ami-2"})
    store = SqliteProviderStore(tmp_path / "s.db", is_power_safe=False)
    again = await started(make_core(backend, store=store))
    record = await settled(again, MACHINE)
    assert (record.state, len(ec2.instances), len(ec2.calls["RunInstances"])) == (MachineState.IDLE, 1, 1)


async def test_an_instance_that_ends_while_it_starts_for_want_of_capacity_is_a_stockout(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    ec2.ends_as = ("terminated", "Server.InsufficientInstanceCapacity")
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    record = await settled(core, MACHINE)
    assert record.machine.last_error.startswith("STOCKOUT: i-")
    assert "Server.InsufficientInstanceCapacity" in record.machine.last_error


async def test_an_instance_that_ends_while_it_starts_for_another_reason_is_final(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    ec2.ends_as = ("terminated", "Client.InvalidSnapshot.NotFound")
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    assert (await settled(core, MACHINE)).machine.last_error.startswith("BACKEND: AwsRefused: i-")


async def test_further_creates_of_what_is_out_of_stock_fail_without_a_call(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.faults["RunInstances"] = [refused("RunInstances", "InsufficientInstanceCapacity", "no capacity in us-east-1a")]
    core = await started(make_core(make_backend(tmp_path, ec2)))
    for number in range(4):
        await core.create(MACHINE.replace("000", f"00{number}"))
        record = await settled(core, MACHINE.replace("000", f"00{number}"))
        assert record.machine.last_error.startswith("STOCKOUT: ")
        assert "no capacity in us-east-1a" in record.machine.last_error
    assert len(ec2.calls["RunInstances"]) == 1

    await ec2.clock.sleep(400)
    # The hold that the stockout asked for is over as well: the slot is offered again.
    assert (await core.get(MACHINE)).state is MachineState.SPECULATIVE
    await core.create(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.IDLE


async def test_a_lost_answer_is_asked_for_again_although_the_type_is_out_of_stock_now(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    """The instance may be there already: the same token returns it, also if other launches failed."""
    ec2.faults["RunInstances"] = [
        dropped("RunInstances", is_after=True),
        refused("RunInstances", "InsufficientInstanceCapacity"),
    ]
    ec2.invisible_looks = 3
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    await ec2.clock.sleep(0.05)
    other = MACHINE.replace("000", "001")
    await core.create(other)
    assert (await settled(core, other)).machine.last_error.startswith("STOCKOUT: ")
    record = await settled(core, MACHINE)
    assert (record.state, record.machine.last_error) == (MachineState.IDLE, "")
    assert [each.id for each in ec2.live()] == [record.machine.host.ref]


async def test_without_valid_credentials_slots_are_saved_and_machines_recover_once_there_are_some(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    options = CoreOptions(is_inline=True, failed_hold_seconds=100.0)
    core = await started(make_core(make_backend(tmp_path, ec2, {**OFFERING, "count": 20}), options=options))
    expired = 100_000
    for action in ("RunInstances", "DescribeInstances"):
        ec2.faults[action] = [refused(action, "ExpiredToken", status=403)] * expired
    for number in range(12):
        await core.create(MACHINE.replace("000", f"{number:03d}"))
    await ec2.clock.sleep(300)
    with pytest.raises(Refused, match="the slot stays for later"):
        await core.create(MACHINE.replace("000", "019"))
    # Longer than three looks at a failed machine take.
    await ec2.clock.sleep(20_000)
    assert (await core.get(MACHINE)).state is MachineState.FAILED
    ec2.faults.clear()
    await ec2.clock.sleep(4_000)
    assert {record.state for record in (await core.list()).records} == {MachineState.SPECULATIVE}


async def test_what_is_not_visible_yet_is_waited_for_and_then_given_up(tmp_path: Path, ec2: MemoryEc2) -> None:
    ec2.invisible_looks = 5
    core = await started(make_core(make_backend(tmp_path, ec2)))
    await core.create(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.IDLE

    ec2.invisible_looks = 1000
    other = MACHINE.replace("000", "001")
    await core.create(other)
    assert "EC2 does not show i-" in (await settled(core, other)).machine.last_error


async def test_user_data_beyond_ec2s_limit_is_refused_before_a_call(tmp_path: Path, ec2: MemoryEc2) -> None:
    backend = make_backend(tmp_path, ec2)
    object.__setattr__(backend.settings, "user_data", "é" * 8193)
    core = await started(make_core(backend))
    await core.create(MACHINE)
    assert "user data has 16,386 bytes" in (await settled(core, MACHINE)).machine.last_error
    assert ec2.calls["RunInstances"] == []


async def test_a_thousand_creates_stay_within_the_rates(tmp_path: Path, ec2: MemoryEc2) -> None:
    """RunInstances 2 a second after a burst of 5, one look for all that wait, at most one call of it a second."""
    ec2.pending_looks = 4
    backend = make_backend(tmp_path, ec2, {**OFFERING, "count": 1000})
    options = CoreOptions(is_inline=True, transition_timeout_seconds=3600.0, reconcile_interval_seconds=1e6)
    core = await started(make_core(backend, options=options))
    before = len(ec2.calls["DescribeInstances"])
    ids = [MACHINE.replace("000", f"{number:03d}") for number in range(1000)]
    for each in ids:
        await core.create(each)
    for each in ids:
        assert (await settled(core, each)).state is MachineState.IDLE

    launches, looks = ec2.calls["RunInstances"], ec2.calls["DescribeInstances"][before:]
    assert len(launches) == 1000
    assert len(ec2.instances) == 1000
    for begin in range(len(launches) - 25):
        # 25 launches in less than ten seconds are the burst and more than two a second.
        assert launches[begin + 25] - launches[begin] >= 9.9
    assert len(looks) <= 1 + (looks[-1] - looks[0])
