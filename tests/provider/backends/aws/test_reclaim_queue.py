"""Events of EC2 from a queue: what each does to a machine, and when its message is deleted."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.api import Ec2Instance, Message
from bigfleet.provider.backends.aws.reclaim_queue import REBALANCE, STATE_CHANGE, WARNING
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import (
    SPOT_MACHINE,
    SPOT_OFFERING,
    MemoryEc2,
    MemoryQueue,
    make_backend,
    refused,
)
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time


def event(kind: str, instance_id: str, *, source: str = "aws.ec2", **detail: Any) -> str:
    """Return an event as EventBridge sends it."""
    body = {
        "version": "0",
        "id": "1-2-3-4",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "time": "2026-01-31T12:00:00Z",
        "region": "us-east-1",
        "resources": [f"arn:aws:ec2:us-east-1:123456789012:instance/{instance_id}"],
        "detail": {"instance-id": instance_id, **detail},
    }
    return json.dumps(body)


class World:
    """A provider with a spot machine and a queue."""

    def __init__(self, folder: Path) -> None:
        self.ec2 = MemoryEc2(LoopClock())
        self.queue = MemoryQueue(self.ec2.clock)
        offering = {**SPOT_OFFERING, "price_per_hour": 0.03}
        self.backend = make_backend(folder, self.ec2, offering, queue=self.queue)

    async def machine(self) -> tuple[CapacityCore, str]:
        """Serve, and return the core and the id of the machine's instance."""
        options = CoreOptions(is_inline=True, failed_hold_seconds=0.0)
        core = await started(make_core(self.backend, options=options))
        await core.create(SPOT_MACHINE)
        return core, (await settled(core, SPOT_MACHINE)).machine.host.ref

    async def say(self, kind: str, instance_id: str, *, source: str = "aws.ec2", **detail: Any) -> None:
        """Send an event as EventBridge does, and let it be read."""
        await self.send(event(kind, instance_id, source=source, **detail))

    async def send(self, body: str) -> None:
        """Send any text."""
        self.queue.messages.append(Message(body=body, receipt=str(len(body)), receipts=0))
        await self.ec2.clock.sleep(2.5)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_recommendation_and_a_warning_raise_the_probability(world: World) -> None:
    core, ref = await world.machine()
    assert (await core.get(SPOT_MACHINE)).machine.interruption_probability == 0.001
    await world.say(REBALANCE, ref)
    assert (await core.get(SPOT_MACHINE)).machine.interruption_probability == 0.5
    await world.say(WARNING, ref, **{"instance-action": "terminate"})
    record = await core.get(SPOT_MACHINE)
    assert (record.state, record.machine.interruption_probability) == (MachineState.IDLE, 0.99)
    assert (world.queue.messages, world.backend.event_counts) == ([], {"pushed": 2})


@pytest.mark.parametrize("state", ["stopped", "shutting-down", "terminated"])
async def test_a_machine_whose_instance_ended_is_lost(state: str, world: World) -> None:
    core, ref = await world.machine()
    await world.say(STATE_CHANGE, ref, state="running")
    assert (await core.get(SPOT_MACHINE)).state is MachineState.IDLE
    await world.say(WARNING, ref, **{"instance-action": "terminate"})
    await world.say(STATE_CHANGE, ref, state=state)
    record = await core.get(SPOT_MACHINE)
    assert record.machine.last_error == f"INTERRUPTED: {ref} is {state}"
    assert world.backend.event_counts == {"no news": 1, "pushed": 2}


async def test_the_end_of_an_instance_that_delete_ended_is_no_loss(world: World) -> None:
    core, ref = await world.machine()
    await core.delete(SPOT_MACHINE)
    await world.say(STATE_CHANGE, ref, state="shutting-down")
    await settled(core, SPOT_MACHINE)
    await world.say(STATE_CHANGE, ref, state="terminated")
    assert (await core.get(SPOT_MACHINE)).state is MachineState.SPECULATIVE
    assert world.backend.event_counts == {"unknown": 2}


async def test_after_a_delete_that_was_refused_events_about_the_instance_count_again(world: World) -> None:
    core, ref = await world.machine()
    world.ec2.faults["TerminateInstances"] = [refused("TerminateInstances", "OperationNotPermitted", "protected")]
    await core.delete(SPOT_MACHINE)
    assert (await settled(core, SPOT_MACHINE)).state is MachineState.FAILED
    await world.say(WARNING, ref)
    assert world.backend.event_counts == {"pushed": 1}


async def test_a_warning_about_an_instance_that_no_inventory_has_shown_yet_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inventory that was under way while the instance was made must not make it unknown."""
    core, _ref = await world.machine()
    other = SPOT_MACHINE.replace("000", "001")
    describe, shown = world.ec2.describe, list(world.ec2.instances)

    async def slow(filters: Mapping[str, Sequence[str]]) -> Sequence[Ec2Instance]:
        found = await describe(filters)
        if "tag:bigfleet:provider" in filters:
            await world.ec2.clock.sleep(20)
            found = [each for each in found if each.id in shown]
        return found

    monkeypatch.setattr(world.ec2, "describe", slow)
    reading = asyncio.ensure_future(world.backend.inventory())
    await core.create(other)
    ref = (await settled(core, other)).machine.host.ref
    await reading
    await world.say(WARNING, ref)
    assert (await core.get(other)).machine.interruption_probability == 0.99


@pytest.mark.parametrize(
    ("kind", "state", "reached", "probability"),
    [(WARNING, "running", MachineState.IDLE, 0.99), (STATE_CHANGE, "terminated", MachineState.FAILED, 0.001)],
)
async def test_events_that_waited_for_a_start_are_read_after_its_first_inventory(
    kind: str,
    state: str,
    reached: MachineState,
    probability: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it every instance is unknown; a loaded store lets the feed begin at once."""
    ec2 = MemoryEc2(LoopClock())
    offering = {**SPOT_OFFERING, "price_per_hour": 0.03}
    options = CoreOptions(is_inline=True, failed_hold_seconds=0.0)
    path = tmp_path / "s.db"
    store = SqliteProviderStore(path, is_power_safe=False)
    before = await started(make_core(make_backend(tmp_path, ec2, offering), store=store, options=options))
    await before.create(SPOT_MACHINE)
    ref = (await settled(before, SPOT_MACHINE)).machine.host.ref
    await before.stop()
    ec2.instances[ref] = replace(ec2.instances[ref], state=state)
    body = event(kind, ref, state=state)
    queue = MemoryQueue(ec2.clock, [Message(body=body, receipt="r-1", receipts=0)])
    describe = ec2.describe

    async def slow(filters: Mapping[str, Sequence[str]]) -> Sequence[Ec2Instance]:
        await ec2.clock.sleep(5)
        return await describe(filters)

    monkeypatch.setattr(ec2, "describe", slow)
    backend = make_backend(tmp_path, ec2, offering, queue=queue)
    store = SqliteProviderStore(path, is_power_safe=False)
    core = await started(make_core(backend, store=store, options=options))
    await ec2.clock.sleep(30)
    record = await core.get(SPOT_MACHINE)
    assert (record.state, record.machine.interruption_probability) == (reached, probability)
    assert (queue.messages, backend.event_counts) == ([], {"pushed": 1})
    await core.stop()


async def test_other_events_and_instances_are_deleted_and_counted(world: World) -> None:
    await world.machine()
    await world.say(WARNING, "i-other")
    await world.say(WARNING, "i-other", source="my.app")
    await world.say("EC2 Fleet Error", "i-other")
    assert (world.queue.messages, world.backend.event_counts) == ([], {"unknown": 1, "foreign": 2})


@pytest.mark.parametrize("body", ["", "no JSON", "[]", "{}", '{"source": "aws.ec2"}'])
async def test_a_message_that_is_not_understood_is_given_up_after_five_receipts(body: str, world: World) -> None:
    await world.machine()
    await world.send(body)
    assert len(world.queue.messages) == 1
    await world.ec2.clock.sleep(10)
    assert (world.queue.messages, world.backend.event_counts) == ([], {"poison": 1})


async def test_a_message_is_deleted_after_its_commit_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    core, ref = await world.machine()
    report = core.feed.report_interruption

    async def fails(*_arguments: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(core.feed, "report_interruption", fails)
    await world.say(WARNING, ref)
    assert len(world.queue.messages) == 1
    monkeypatch.setattr(core.feed, "report_interruption", report)
    await world.ec2.clock.sleep(2)
    assert world.queue.messages == []
    assert (await core.get(SPOT_MACHINE)).machine.interruption_probability == 0.99
