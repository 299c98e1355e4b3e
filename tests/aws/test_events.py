"""An interruption all the way: EC2's event, EventBridge's rule, the queue, List."""

import json
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.reclaim_queue import STATE_CHANGE, WARNING
from bigfleet.provider.testing.cores import settled
from tests.aws.client import ShimClient
from tests.aws.over_http import served
from tests.patience import wait_until_async

pytestmark = pytest.mark.slow
MACHINE = "aws/spot/m6i.large/us-east-1a/000"


def queue_of_events(shim: ShimClient) -> str:
    """Make a queue and the rule that sends it events of EC2; return its URL."""
    sqs, events = shim.client("sqs"), shim.client("events")
    url: str = sqs.create_queue(QueueName="bigfleet")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name="bigfleet", EventPattern=json.dumps({"source": ["aws.ec2"]}))
    events.put_targets(Rule="bigfleet", Targets=[{"Id": "queue", "Arn": arn}])
    return url


def say(shim: ShimClient, kind: str, **detail: str) -> None:
    """Put an event as EC2 does; AWS takes the source from EC2 only, moto from anyone."""
    named = {key.replace("_", "-"): value for key, value in detail.items()}
    entry = {"Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps(named)}
    assert shim.client("events").put_events(Entries=[entry])["FailedEntryCount"] == 0


async def test_a_warning_reaches_list_and_the_end_of_the_instance_fails_the_machine(
    shim: ShimClient, tmp_path: Path
) -> None:
    url = queue_of_events(shim)
    offering = shim.offering(capacity_type="spot")
    async with served(shim, tmp_path, offering, queue_url=url) as core:
        assert (await core.get(MACHINE)).machine.price_usd_per_hour == 0.0352
        await core.create(MACHINE)
        ref = (await settled(core, MACHINE)).machine.host.ref
        say(shim, WARNING, instance_id=ref, instance_action="terminate")

        async def is_warned() -> bool:
            return (await core.get(MACHINE)).machine.interruption_probability == 0.99

        await wait_until_async(is_warned)
        listed = {record.id: record.machine for record in (await core.list()).records}
        assert listed[MACHINE].interruption_probability == 0.99
        shim.client("ec2").terminate_instances(InstanceIds=[ref])
        say(shim, STATE_CHANGE, instance_id=ref, state="terminated")

        async def is_lost() -> bool:
            return (await core.get(MACHINE)).state is MachineState.FAILED

        await wait_until_async(is_lost)
        assert (await core.get(MACHINE)).machine.last_error == f"INTERRUPTED: {ref} is terminated"
