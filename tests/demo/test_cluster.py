"""A simulated cluster as its shard sees it."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from bigfleet.demo.cluster import DRAIN_DWELL_SECONDS, RollUpRejected, SimulatedCluster
from bigfleet.model import frames
from bigfleet.model.frames import (
    Acknowledgement,
    BootstrapRequest,
    BootstrapResponse,
    DrainOutcome,
    DrainResult,
    NodeStateUpdate,
    NodeStatus,
    ReclaimInstruction,
    RollUp,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.requests import CapacityRequest
from bigfleet.operator.session import SessionSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.fake_shard import FakeShard, FakeStream

pytestmark = pytest.mark.virtual_time


class Bench:
    """A cluster and its shard."""

    def __init__(self) -> None:
        self.shard = FakeShard()
        self.cluster = SimulatedCluster(
            cluster=ClusterId("c"),
            dialer=self.shard,
            clock=LoopClock(),
            rng=random.Random(1),
            settings=SessionSettings(rollup_interval_seconds=10.0, rollup_gap_seconds=0.1),
        )
        self.task = asyncio.create_task(self.cluster.run())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)


def pod(id: str, cpu: str = "1") -> CapacityRequest:
    return CapacityRequest(id=id, resources={"cpu": cpu})


def say_state(stream: FakeStream, machine: str, state: MachineState) -> None:
    stream.say(NodeStateUpdate(machine_id=machine, cluster_id="c", state=state))


def reclaim(machine: str, grace_seconds: int = 600) -> ReclaimInstruction:
    return ReclaimInstruction(
        instruction_id=f"drain-{machine}",
        nodes=(machine,),
        machine_ids=(machine,),
        provider_ids=("",),
        grace_seconds=grace_seconds,
    )


def ack(roll_up: object, *, held: bool = False) -> Acknowledgement:
    assert isinstance(roll_up, RollUp)
    return Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=roll_up.timestamp_unix_nanos, held=held)


async def test_pods_become_demand_and_go_again(bench: Bench) -> None:
    stream = await bench.shard.stream()
    bench.cluster.apply(add=[pod("a"), pod("b", "2")])
    roll_up = await stream.wait_for(RollUp, 2)
    bench.cluster.apply(remove=["b"])
    later = await stream.wait_for(RollUp, 3)

    assert isinstance(roll_up, RollUp)
    assert isinstance(later, RollUp)
    assert [need.aggregate for need in roll_up.needs] == [{"cpu": 3000}]
    assert [need.aggregate for need in later.needs] == [{"cpu": 1000}]
    assert later.timestamp_unix_nanos > roll_up.timestamp_unix_nanos


async def test_a_report_returns_when_exactly_this_demand_is_in_force(bench: Bench) -> None:
    stream = await bench.shard.stream()
    first = await stream.wait_for(RollUp)
    bench.cluster.apply(add=[pod("a")])
    report = asyncio.create_task(bench.cluster.report())
    second = await stream.wait_for(RollUp, 2)
    stream.say(ack(first))
    await asyncio.sleep(0)
    assert not report.done()
    stream.say(ack(second))

    await report


async def test_a_report_outlives_quarantine_and_a_lost_session(bench: Bench) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)
    report = asyncio.create_task(bench.cluster.report())
    stream.say(ack(await stream.wait_for(RollUp, 2), held=True))
    stream.say(ack(await stream.wait_for(RollUp, 3), held=True))
    await stream.wait_for(RollUp, 4)
    stream.end()
    again = await bench.shard.stream(2)
    again.say(ack(await again.wait_for(RollUp)))

    await report
    assert bench.cluster.statistics().rollups_held_total == 2
    assert bench.cluster.statistics().sessions_lost_total == 1


async def test_a_report_that_is_refused_says_why(bench: Bench) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)
    report = asyncio.create_task(bench.cluster.report())
    await stream.wait_for(RollUp, 2)
    stream.say(Acknowledgement(echo=frames.ECHO_ROLLUP_REJECTED, error="row 3: no key"))

    with pytest.raises(RollUpRejected, match="row 3: no key"):
        await report


async def test_a_bootstrap_request_is_answered_with_data_for_that_machine(bench: Bench) -> None:
    stream = await bench.shard.stream()
    stream.say(BootstrapRequest(request_id="r", cluster_id="c", machine_id="sim/spot/x/000"))
    answer = await stream.wait_for(BootstrapResponse)

    assert isinstance(answer, BootstrapResponse)
    assert answer.user_data.startswith(b"#cloud-config\n")
    assert b"sim-spot-x-000" in answer.user_data
    assert answer.error == ""


async def test_a_configured_machine_gets_a_ready_node_once(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURING)
    say_state(stream, "m", MachineState.CONFIGURED)
    say_state(stream, "m", MachineState.CONFIGURED)
    status = await stream.wait_for(NodeStatus)
    await asyncio.sleep(1)

    assert isinstance(status, NodeStatus)
    assert (status.machine_id, status.ready) == ("m", True)
    assert len(stream.of(NodeStatus)) == 1
    assert bench.cluster.statistics().machines == {MachineState.CONFIGURED: 1}


async def test_a_drain_ends_after_its_dwell(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURED)
    stream.say(reclaim("m"))
    say_state(stream, "m", MachineState.DRAINING)
    result = await stream.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert result.outcome is DrainOutcome.DRAINED
    assert DRAIN_DWELL_SECONDS * 0.5 <= asyncio.get_running_loop().time() <= DRAIN_DWELL_SECONDS * 1.5


async def test_a_grace_shorter_than_the_dwell_expires(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURED)
    stream.say(reclaim("m", grace_seconds=2))
    result = await stream.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert result.outcome is DrainOutcome.GRACE_EXPIRED
    assert asyncio.get_running_loop().time() == 2.0


async def test_a_machine_that_the_cluster_does_not_know_is_told_as_not_found(bench: Bench) -> None:
    stream = await bench.shard.stream()
    stream.say(reclaim("stranger"))
    result = await stream.wait_for(DrainResult)

    assert isinstance(result, DrainResult)
    assert result.outcome is DrainOutcome.NODE_NOT_FOUND
    assert asyncio.get_running_loop().time() == 0.0


async def test_a_drain_that_is_given_up_ends_without_a_result(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURED)
    stream.say(reclaim("m"))
    say_state(stream, "m", MachineState.DRAINING)
    say_state(stream, "m", MachineState.CONFIGURED)
    await asyncio.sleep(60)

    assert stream.of(DrainResult) == []
    assert bench.cluster.statistics().drains_withdrawn_total == 1
    assert bench.cluster.statistics().drains_running == 0


async def test_machines_that_a_resync_does_not_name_are_forgotten(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURED)
    say_state(stream, "n", MachineState.CONFIGURED)
    await stream.wait_for(NodeStatus, 2)
    stream.end()
    again = await bench.shard.stream(2)
    say_state(again, "m", MachineState.CONFIGURED)
    again.say(Acknowledgement(echo=frames.ECHO_RESYNC))
    await again.wait_for(NodeStatus)

    assert bench.cluster.statistics().machines == {MachineState.CONFIGURED: 1}


async def test_a_machine_that_is_free_again_leaves_the_cluster(bench: Bench) -> None:
    stream = await bench.shard.stream()
    say_state(stream, "m", MachineState.CONFIGURED)
    say_state(stream, "m", MachineState.IDLE)
    await asyncio.sleep(1)

    assert bench.cluster.statistics().machines == {}


async def test_hints_and_verdicts_are_counted(bench: Bench) -> None:
    """The last verdict stands until the next one."""
    stream = await bench.shard.stream()
    starved = frames.NeedStatus(
        fingerprint="p", group="", residual={"cpu": "1"}, reason=frames.UnmetReason.PRIORITY_STARVED
    )
    for rows in ((starved, starved, starved), (starved, starved)):
        stream.say(frames.NeedStatusUpdate(cycle=1, computed_at_unix_nanos=1, rows=rows, rollup_timestamp_unix_nanos=1))
    stream.say(
        frames.AvailableCapacity(
            fingerprint="p",
            requirements=(),
            resources={},
            available_count=0,
            confidence=frames.Confidence.NONE,
            price_usd_per_hour=0.0,
        )
    )
    await asyncio.sleep(1)
    statistics = bench.cluster.statistics()

    assert (statistics.hints_total, statistics.unmet) == (1, {frames.UnmetReason.PRIORITY_STARVED: 2})
