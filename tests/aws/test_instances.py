"""Create and Delete through boto3 and HTTP: each error at each call, and one instance after any lost answer.

Retries wait for random times from a seeded generator. No test here asserts a duration.
"""

from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.testing.cores import settled
from tests.aws.client import ShimClient
from tests.aws.over_http import MACHINE, served
from tests.provider.backends.aws.test_errors import FINAL, STOCKOUTS

pytestmark = pytest.mark.slow

ERRORS_STATUS = {"RequestLimitExceeded": 503, "ServiceUnavailable": 503, "InternalError": 500}


async def test_create_and_delete_of_every_slot(shim: ShimClient, tmp_path: Path) -> None:
    async with served(shim, tmp_path) as core:
        ids = [MACHINE.replace("000", f"00{number}") for number in range(4)]
        for each in ids:
            await core.create(each)
        refs = {(await settled(core, each)).machine.host.ref for each in ids}
        assert {each["InstanceId"] for each in shim.live()} == refs
        first = (await core.get(ids[0])).machine
        # From the Price List, as the offering has none.
        assert (first.state, first.price_usd_per_hour) == (MachineState.IDLE, 0.096)

        for each in ids:
            await core.delete(each)
        for each in ids:
            assert (await settled(core, each)).state is MachineState.SPECULATIVE
        assert shim.live() == []
        # Four ids that come within 250 ms are one call.
        assert shim.calls("ec2:TerminateInstances") == 1


@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("action", ["ec2:RunInstances", "ec2:DescribeInstances", "ec2:TerminateInstances"])
async def test_a_dropped_connection_at_each_call_leaves_exactly_one_instance(
    action: str, drop: str, shim: ShimClient, tmp_path: Path
) -> None:
    shim.control("invisible", looks=2)
    async with served(shim, tmp_path) as core:
        shim.fault(action, drop=drop, times=2)
        await core.create(MACHINE)
        record = await settled(core, MACHINE)
        assert record.state is MachineState.IDLE, record.machine.last_error
        assert [each["InstanceId"] for each in shim.live()] == [record.machine.host.ref]

        await core.delete(MACHINE)
        assert (await settled(core, MACHINE)).state is MachineState.SPECULATIVE
        assert shim.live() == []


@pytest.mark.long
@pytest.mark.parametrize("code", ERRORS_STATUS)
@pytest.mark.parametrize("action", ["ec2:RunInstances", "ec2:DescribeInstances", "ec2:TerminateInstances"])
async def test_an_error_that_passes_is_retried_at_each_call(
    action: str, code: str, shim: ShimClient, tmp_path: Path
) -> None:
    async with served(shim, tmp_path) as core:
        shim.fault(action, code, status=ERRORS_STATUS[code])
        await core.create(MACHINE)
        assert (await settled(core, MACHINE)).state is MachineState.IDLE
        await core.delete(MACHINE)
        assert (await settled(core, MACHINE)).state is MachineState.SPECULATIVE
        assert shim.live() == []
        assert shim.calls("ec2:RunInstances") == (2 if action == "ec2:RunInstances" else 1)


@pytest.mark.parametrize("code", STOCKOUTS)
async def test_want_of_capacity_is_a_stockout(code: str, shim: ShimClient, tmp_path: Path) -> None:
    async with served(shim, tmp_path) as core:
        shim.fault("ec2:RunInstances", code)
        await core.create(MACHINE)
        error = (await settled(core, MACHINE)).machine.last_error
        assert error.startswith("STOCKOUT: ")
        assert code in error
        other = MACHINE.replace("000", "001")
        await core.create(other)
        assert (await settled(core, other)).machine.last_error.startswith("STOCKOUT: not asked again for")
        assert shim.calls("ec2:RunInstances") == 1


@pytest.mark.parametrize("code", FINAL)
async def test_another_refusal_is_final_with_its_code_and_request(code: str, shim: ShimClient, tmp_path: Path) -> None:
    async with served(shim, tmp_path) as core:
        shim.fault("ec2:RunInstances", code)
        await core.create(MACHINE)
        error = (await settled(core, MACHINE)).machine.last_error
        assert error == f"BACKEND: AwsRefused: ec2:RunInstances: {code}: an armed fault (request shim)"
        shim.fault("ec2:TerminateInstances", code)
        other = MACHINE.replace("000", "001")
        await core.create(other)
        await settled(core, other)
        await core.delete(other)
        assert (await settled(core, other)).machine.last_error.startswith("BACKEND: AwsRefused: ec2:TerminateInst")


async def test_one_instance_that_is_gone_does_not_hold_up_the_end_of_others(shim: ShimClient, tmp_path: Path) -> None:
    async with served(shim, tmp_path) as core:
        ids = [MACHINE.replace("000", f"00{number}") for number in range(4)]
        for each in ids:
            await core.create(each)
        for each in ids:
            await settled(core, each)
        shim.fault("ec2:TerminateInstances", "InvalidInstanceID.NotFound")
        for each in ids:
            await core.delete(each)
        for each in ids:
            assert (await settled(core, each)).state is MachineState.SPECULATIVE
        assert shim.live() == []
