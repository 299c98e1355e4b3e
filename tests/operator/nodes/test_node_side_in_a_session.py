"""The node side behind a real session: instructions and frames of a shard in, acks, statuses and results out."""

import asyncio
import random
from collections.abc import Iterable

import pytest

from bigfleet.model import frames
from bigfleet.model.frames import DrainOutcome, DrainResult, NodeStateUpdate, NodeStatus, ReclaimAck, ReclaimInstruction
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.resources import UPCOMING_NODES
from bigfleet.operator.ports import SessionEnded
from bigfleet.operator.session import SessionClient
from tests.operator.fake_shard import FakeShard
from tests.operator.nodes.node_world import NodeWorld, Operator

pytestmark = pytest.mark.virtual_time


class NodeAgent:
    """Implements of ClusterAgent what concerns nodes, over the parts of an `Operator`."""

    def __init__(self, parts: Operator, shard: FakeShard) -> None:
        self.parts = parts
        self.client = SessionClient(
            cluster=ClusterId("c"), agent=self, dialer=shard, clock=parts.clock, rng=random.Random(2)
        )
        parts.on_result = self.client.drain_finished
        parts.on_status = self.client.node_changed
        for drain in parts.resumed:
            self.client.resume_drain(drain)
        self.task = asyncio.create_task(self.client.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.parts.stop()

    def roll_up(self) -> None:
        return None

    async def bootstrap(self, request: frames.BootstrapRequest) -> frames.BootstrapResponse:
        return frames.BootstrapResponse(request_id=request.request_id)

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        self.parts.hints.session_opened()

    def session_closed(self, ended: SessionEnded) -> None:
        self.parts.hints.session_closed()

    def acknowledged(self, ack: frames.Acknowledgement) -> None:
        pass

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        pass

    def node_state(self, update: NodeStateUpdate) -> None:
        for part in (self.parts.matcher, self.parts.drains, self.parts.upcoming):
            part.node_state(update)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        for part in (self.parts.matcher, self.parts.drains, self.parts.upcoming):
            part.resynced(machine_ids)

    def node_statuses(self) -> Iterable[NodeStatus]:
        return self.parts.statuses.all()

    def available(self, hint: frames.AvailableCapacity) -> None:
        self.parts.hints.available(hint)

    def drain_forecast(self, request: frames.DrainForecastRequest) -> None:
        pass

    def drain_started(self, drain: DrainRecord) -> None:
        self.parts.upcoming.drain_started(drain)
        self.parts.drains.start(drain)

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        self.parts.drains.end(drain, withdrawn=withdrawn)


def frame(machine: str, state: MachineState, provider_id: str = "") -> NodeStateUpdate:
    return NodeStateUpdate(machine_id=machine, cluster_id="c", state=state, provider_id=provider_id)


RECLAIM = ReclaimInstruction(
    instruction_id="i", nodes=("n", "o"), machine_ids=("m", "lost"), provider_ids=("p://x/m", ""), grace_seconds=60,
    preemptor_priority=5, reason="preempt",
)  # fmt: skip


async def test_a_machine_from_its_first_frame_to_its_drain(world: NodeWorld) -> None:
    shard = FakeShard()
    agent = NodeAgent(world.operator(), shard)
    stream = await shard.stream()
    stream.say(frame("m", MachineState.CONFIGURED, "p://x/m"))
    stream.say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
    world.node("n", provider_id="p://x/m")
    await asyncio.sleep(1)
    statuses = [(s.node_name, s.ready) for s in stream.of(NodeStatus) if isinstance(s, NodeStatus)]
    assert statuses == [("", False), ("n", True)]
    world.pod("p", "n")
    stream.say(RECLAIM)
    stream.say(frame("m", MachineState.DRAINING, "p://x/m"))
    assert await stream.wait_for(ReclaimAck) == ReclaimAck(instruction_id="i", nodes_started=1)
    await stream.wait_for(DrainResult, 2)
    results = {r.machine_id: r.outcome for r in stream.of(DrainResult) if isinstance(r, DrainResult)}
    assert results == {"m": DrainOutcome.DRAINED, "lost": DrainOutcome.NODE_NOT_FOUND}
    stream.say(frame("m", MachineState.IDLE, "p://x/m"))
    await asyncio.sleep(1)
    await agent.stop()

    assert world.server.read_all(UPCOMING_NODES) == []


async def test_a_new_leader_reports_the_drain_of_the_old_in_its_first_session(world: NodeWorld) -> None:
    world.node("n", "m")
    world.pod("p", "n")
    world.kubelet.stubborn.add("p")
    shard = FakeShard()
    first = NodeAgent(world.operator(), shard)
    stream = await shard.stream()
    stream.say(RECLAIM)
    await asyncio.sleep(5)
    await first.stop()
    await asyncio.sleep(100)
    shard.up = False
    second = NodeAgent(world.operator(), shard)
    await asyncio.sleep(30)
    shard.up = True
    stream = await shard.stream(2)
    result = await stream.wait_for(DrainResult)
    assert isinstance(result, DrainResult)
    assert (result.instruction_id, result.machine_id, result.outcome) == ("i", "m", DrainOutcome.GRACE_EXPIRED)
    stream.say(frame("m", MachineState.CONFIGURED))
    await asyncio.sleep(5)
    await second.stop()

    assert not world.read_node("n").spec.unschedulable
