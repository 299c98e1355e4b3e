"""What a run asks its coordinator: the zones before it begins, and the moves while it lasts."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode, aio

from bigfleet.cli.get.moves import MoveState
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.up.moves import CoordinatorWatch
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import coordinator_pb2_grpc

ZONE = "topology.kubernetes.io/zone"


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator whose answers a test sets."""

    def __init__(self) -> None:
        #: Told to whoever assigns, one after the other.
        self.refusals: list[tuple[StatusCode, str]] = []
        self.assigned: list[tuple[str, str, str]] = []
        self.instructions: list[pb.InstructionStatus] = []

    async def AssignDomain(self, request: Any, context: Any) -> pb.AssignDomainResponse:
        if self.refusals:
            await context.abort(*self.refusals.pop(0))
        self.assigned.append((request.topology_key, request.topology_value, request.shard_id))
        return pb.AssignDomainResponse()

    async def ListInstructions(self, request: Any, context: Any) -> pb.ListInstructionsResponse:
        assert request.include_finished
        return pb.ListInstructionsResponse(instructions=self.instructions)


class Bench:
    """A served coordinator and its watch."""

    def __init__(self) -> None:
        self.coordinator = FakeCoordinator()  # type: ignore[abstract]  # what a run does not ask
        self.server = aio.server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.coordinator, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.watch = CoordinatorWatch(f"127.0.0.1:{port}", SystemClock(), moved_before=3)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.server.start()
    yield bench
    await bench.watch.close()
    await bench.server.stop(None)


async def test_zones_wait_for_a_leader_and_for_shards_that_have_not_registered(bench: Bench) -> None:
    bench.coordinator.refusals = [
        (StatusCode.FAILED_PRECONDITION, "no leader"),
        (StatusCode.NOT_FOUND, "shard-0 is not registered"),
    ]
    having = await bench.watch.assign_zones({"shard-0": "sim-1a", "shard-1": "sim-1b"})

    assert having == {"shard-0", "shard-1"}
    assert bench.coordinator.assigned == [(ZONE, "sim-1a", "shard-0"), (ZONE, "sim-1b", "shard-1")]


async def test_a_zone_that_somebody_has_given_to_another_shard_stays_there(bench: Bench) -> None:
    bench.coordinator.refusals = [(StatusCode.ALREADY_EXISTS, "it is shard-1's")]

    assert await bench.watch.assign_zones({"shard-0": "sim-1a", "shard-1": "sim-1b"}) == {"shard-1"}


async def test_a_zone_that_is_refused_ends_the_run_with_the_coordinator_s_words(bench: Bench) -> None:
    bench.coordinator.refusals = [(StatusCode.PERMISSION_DENIED, "admin is wanted")]
    with pytest.raises(RunFault, match="zone sim-1a cannot be given to shard-0: admin is wanted"):
        await bench.watch.assign_zones({"shard-0": "sim-1a"})


async def test_moves_are_news_once_and_stay_when_the_coordinator_goes(bench: Bench) -> None:
    adoption = pb.InstructionStatus(shard_id="shard-0", state=pb.InstructionStatus.STATE_DONE)
    adoption.instruction.instruction_id = "7-1/adopt"
    payload = adoption.instruction.transfer_ownership
    payload.from_shard_id, payload.to_shard_id = "shard-1", "shard-0"
    payload.machine_ids.extend(("a", "b"))
    bench.coordinator.instructions = [adoption]
    await bench.watch.look()
    news = [[move.state for move in bench.watch.take_news()] for _ in range(2)]
    answered = bench.watch.answers
    await bench.server.stop(None)
    await bench.watch.look()

    assert news == [[MoveState.ARRIVED], []]
    assert (answered, bench.watch.answers) == (True, False)
    assert [move.move_id for move in bench.watch.tally.moves] == ["7-1"]
    assert bench.watch.tally.machines_moved_total == 3 + 2
