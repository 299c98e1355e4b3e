"""Configure and Drain through boto3 and HTTP: an error that passes and a lost answer at each of their calls."""

from pathlib import Path
from typing import Any

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.testing.cores import settled
from tests.aws.client import BUCKET, ShimClient
from tests.aws.over_http import MACHINE, PREFIX, served

pytestmark = pytest.mark.slow
FAULTS: tuple[dict[str, Any], ...] = ({"code": "InternalError", "status": 500}, {"drop": "before"}, {"drop": "after"})
ACTIONS = (
    "s3:PUT",
    "s3:GET",
    "s3:DELETE",
    "ec2:CreateTags",
    "ec2:DescribeInstances",
    "ec2:CreateReplaceRootVolumeTask",
    "ec2:DescribeReplaceRootVolumeTasks",
    "ec2:DeleteTags",
)


@pytest.mark.parametrize(
    "action", [pytest.param(each, marks=[] if each in ACTIONS[::4] else pytest.mark.long) for each in ACTIONS]
)
async def test_what_passes_at_one_call_hinders_neither_configure_nor_drain(
    action: str, shim: ShimClient, tmp_path: Path
) -> None:
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    async with served(shim, tmp_path) as core:
        await core.create(MACHINE)
        ref = (await settled(core, MACHINE)).machine.host.ref
        for number, fault in enumerate(FAULTS):
            before = shim.calls(action)
            shim.fault(action, **fault)
            await core.configure(MACHINE, f"team-{number}", b"#!/bin/sh\n", {})
            record = await settled(core, MACHINE)
            assert record.state is MachineState.CONFIGURED, record.machine.last_error
            await core.drain(MACHINE, 0)
            record = await settled(core, MACHINE)
            assert (record.state, record.machine.host.ref) == (MachineState.IDLE, ref), record.machine.last_error
            assert shim.calls(action) > before
            shim.control("disarm")
    assert [each["InstanceId"] for each in shim.live()] == [ref]
    assert not {each["Key"] for each in shim.live()[0]["Tags"]} & {"bigfleet:cluster", "bigfleet:configure"}
