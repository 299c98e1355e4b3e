"""How an operator holds its session: greeting, roll-ups, answers, drains, and what it does when the session ends."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterable

import pytest
import structlog

from bigfleet.model import frames
from bigfleet.model.frames import (
    Acknowledgement,
    BootstrapRequest,
    BootstrapResponse,
    DrainOutcome,
    DrainResult,
    Hello,
    NodeStateUpdate,
    NodeStatus,
    ReclaimAck,
    ReclaimInstruction,
    RollUp,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.operator.session import BOOTSTRAPS_AT_ONCE_MAX, SessionClient, SessionSettings, backoff_ceiling_seconds
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.operator.fake_shard import EVERYTHING, FakeShard

pytestmark = pytest.mark.virtual_time

RECLAIM = ReclaimInstruction(
    instruction_id="i", nodes=("n",), machine_ids=("m",), provider_ids=("",), grace_seconds=600
)


class RecordingAgent:
    """A cluster that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.view_is_complete = True
        self.statuses: list[NodeStatus] = []
        self.bootstrap_gate = asyncio.Event()
        self.bootstrap_gate.set()
        self.bootstraps_running = 0
        self.bootstraps_running_max = 0
        self.stamp = 0

    def roll_up(self) -> RollUp | None:
        if not self.view_is_complete:
            return None
        self.stamp += 1
        return RollUp(cluster_id="c", timestamp_unix_nanos=self.stamp, needs=())

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        self.bootstraps_running += 1
        self.bootstraps_running_max = max(self.bootstraps_running_max, self.bootstraps_running)
        try:
            await self.bootstrap_gate.wait()
        finally:
            self.bootstraps_running -= 1
        return BootstrapResponse(request_id=request.request_id, user_data=b"x")

    def session_opened(self, shard_capabilities: frozenset[str]) -> None:
        self.heard.append(("opened", shard_capabilities))

    def session_closed(self, ended: SessionEnded) -> None:
        self.heard.append(("closed", ended.kind))

    def acknowledged(self, ack: Acknowledgement) -> None:
        self.heard.append(ack)

    def node_state(self, update: NodeStateUpdate) -> None:
        self.heard.append(update)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        self.heard.append(("resynced", machine_ids))

    def node_statuses(self) -> Iterable[NodeStatus]:
        return self.statuses

    def available(self, hint: frames.AvailableCapacity) -> None:
        self.heard.append(hint)

    def need_status(self, update: frames.NeedStatusUpdate) -> None:
        self.heard.append(update)

    def drain_forecast(self, request: frames.DrainForecastRequest) -> None:
        self.heard.append(request)

    def drain_started(self, drain: DrainRecord) -> None:
        self.heard.append(("drain", drain.machine_id))

    def drain_ended(self, drain: DrainRecord, *, withdrawn: bool) -> None:
        self.heard.append(("ended", drain.machine_id, withdrawn))


class Bench:
    """A client, its cluster and its shard."""

    def __init__(self, shard: FakeShard, seed: int = 1) -> None:
        self.shard = shard
        self.agent = RecordingAgent()
        self.client = SessionClient(
            cluster=ClusterId("c"),
            agent=self.agent,
            dialer=shard,
            clock=LoopClock(),
            rng=random.Random(seed),
            settings=SessionSettings(rollup_interval_seconds=10.0, rollup_gap_seconds=1.0),
        )
        self.task = asyncio.create_task(self.client.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(FakeShard())
    yield bench
    await bench.stop()


async def settle() -> None:
    """Let every ready task run; no time passes."""
    for _ in range(20):
        await asyncio.sleep(0)


def state(machine: str, state: MachineState) -> NodeStateUpdate:
    return NodeStateUpdate(machine_id=machine, cluster_id="c", state=state)


async def test_the_first_frame_is_hello_with_what_the_operator_can_do(bench: Bench) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)

    assert stream.received[0] == Hello(cluster_id="c", capabilities=EVERYTHING)
    assert bench.agent.heard[0] == ("opened", EVERYTHING)
    assert bench.client.is_connected


async def test_a_shard_that_does_not_greet_is_left_after_ten_seconds() -> None:
    bench = Bench(FakeShard(greets=False))
    await bench.shard.stream(2)
    await bench.stop()

    first, second = bench.shard.dialled_at_seconds[:2]
    assert 10.0 <= second - first <= 20.0
    assert bench.shard.streams[0].of(RollUp) == []


async def test_demand_is_told_at_once_and_then_on_the_interval(bench: Bench) -> None:
    stream = await bench.shard.stream()
    loop = asyncio.get_running_loop()
    times = []
    for count in (1, 2, 3):
        await stream.wait_for(RollUp, count)
        times.append(loop.time())

    assert times[0] == 0.0
    assert all(9.0 <= later - earlier <= 11.0 for earlier, later in itertools.pairwise(times))


async def test_changed_demand_is_told_soon_but_not_more_often_than_the_gap(bench: Bench) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)
    for _ in range(50):
        bench.client.demand_changed()
        await asyncio.sleep(0.1)

    assert 5 <= len(stream.of(RollUp)) <= 7


async def test_a_view_that_may_be_partial_is_never_told() -> None:
    bench = Bench(FakeShard())
    bench.agent.view_is_complete = False
    stream = await bench.shard.stream()
    await asyncio.sleep(60)
    assert stream.of(RollUp) == []
    bench.agent.view_is_complete = True
    await stream.wait_for(RollUp)
    await bench.stop()

    assert len(bench.shard.streams) == 1


async def test_bootstrap_requests_are_answered_side_by_side_up_to_a_bound(bench: Bench) -> None:
    bench.agent.bootstrap_gate.clear()
    stream = await bench.shard.stream()
    for number in range(40):
        stream.say(BootstrapRequest(request_id=f"r{number}", cluster_id="c"))
    await settle()
    assert bench.agent.bootstraps_running_max == BOOTSTRAPS_AT_ONCE_MAX
    bench.agent.bootstrap_gate.set()
    await stream.wait_for(BootstrapResponse, 40)

    assert {frame.request_id for frame in stream.of(BootstrapResponse)} == {f"r{n}" for n in range(40)}  # type: ignore[union-attr]


async def test_a_bootstrap_that_takes_too_long_is_answered_with_an_error(bench: Bench) -> None:
    bench.agent.bootstrap_gate.clear()
    stream = await bench.shard.stream()
    stream.say(BootstrapRequest(request_id="r", cluster_id="c"))
    answer = await stream.wait_for(BootstrapResponse)

    assert isinstance(answer, BootstrapResponse)
    assert "25 s" in answer.error


async def test_a_bootstrap_that_breaks_the_code_is_answered_with_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_request: BootstrapRequest) -> BootstrapResponse:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(bench.agent, "bootstrap", fail)
    stream = await bench.shard.stream()
    stream.say(BootstrapRequest(request_id="r", cluster_id="c"))
    answer = await stream.wait_for(BootstrapResponse)

    assert answer == BootstrapResponse(request_id="r", error="the operator failed: ZeroDivisionError; see its log")
    assert bench.client.is_connected


async def test_reading_goes_on_while_nothing_can_be_written(bench: Bench) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)
    stream.takes.clear()
    bench.agent.bootstrap_gate.clear()
    for number in range(2000):
        stream.say(BootstrapRequest(request_id=f"r{number}", cluster_id="c"))
    stream.say(state("m", MachineState.CONFIGURED))
    await settle()

    assert state("m", MachineState.CONFIGURED) in bench.agent.heard


async def test_a_frame_of_an_unknown_kind_is_skipped(bench: Bench) -> None:
    stream = await bench.shard.stream()
    stream.say(None)
    stream.say(state("m", MachineState.CONFIGURED))
    await settle()

    assert state("m", MachineState.CONFIGURED) in bench.agent.heard
    assert len(bench.shard.streams) == 1


async def test_a_roll_up_that_waits_at_the_shard_is_logged_once(bench: Bench) -> None:
    """Its demand is neither acknowledged nor rejected: the shard reads the newest roll-up later."""
    stream = await bench.shard.stream()
    deferred = Acknowledgement(echo=frames.ECHO_ROLLUP_DEFERRED, error="over the limit")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            stream.say(deferred)
        await settle()

    (line,) = [line for line in logs if line["event"] == "session.rollup_deferred"]
    assert (line["log_level"], line["reason"]) == ("warning", "over the limit")
    assert deferred not in bench.agent.heard


async def test_node_statuses_follow_every_resync(bench: Bench) -> None:
    status = NodeStatus(machine_id="m", node_name="n", ready=True, observed_unix_nanos=1)
    bench.agent.statuses = [status]
    stream = await bench.shard.stream()
    stream.say(state("m", MachineState.CONFIGURED))
    stream.say(Acknowledgement(echo=frames.ECHO_RESYNC))

    assert await stream.wait_for(NodeStatus) == status
    assert ("resynced", frozenset({"m"})) in bench.agent.heard


async def test_an_older_shard_gets_no_frame_that_it_did_not_ask_for() -> None:
    bench = Bench(FakeShard(capabilities=frozenset()))
    bench.agent.statuses = [NodeStatus(machine_id="m", node_name="n", ready=True, observed_unix_nanos=1)]
    stream = await bench.shard.stream()
    stream.say(Acknowledgement(echo=frames.ECHO_RESYNC))
    stream.say(RECLAIM)
    await stream.wait_for(ReclaimAck)
    bench.client.drain_finished(DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.DRAINED))
    await asyncio.sleep(60)
    await bench.stop()

    assert {type(frame) for frame in stream.received} == {Hello, RollUp, ReclaimAck}


async def test_a_drain_is_acked_as_begun_and_its_result_is_told(bench: Bench) -> None:
    result = DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.DRAINED)
    stream = await bench.shard.stream()
    stream.say(RECLAIM)
    assert await stream.wait_for(ReclaimAck) == ReclaimAck(instruction_id="i", nodes_started=1)
    bench.client.drain_finished(result)

    assert await stream.wait_for(DrainResult) == result


async def test_results_of_unfinished_drains_are_told_again_in_the_next_session(bench: Bench) -> None:
    result = DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.DRAINED)
    stream = await bench.shard.stream()
    stream.say(RECLAIM)
    await stream.wait_for(ReclaimAck)
    bench.client.drain_finished(result)
    await stream.wait_for(DrainResult)
    stream.end()
    second = await bench.shard.stream(2)
    assert await second.wait_for(DrainResult) == result
    second.say(state("m", MachineState.IDLE))
    await settle()
    second.end()
    third = await bench.shard.stream(3)
    await third.wait_for(RollUp)

    assert third.of(DrainResult) == []


async def test_a_drain_outlives_its_session(bench: Bench) -> None:
    stream = await bench.shard.stream()
    stream.say(RECLAIM)
    await settle()
    stream.end()
    await bench.shard.stream(2)

    assert not [heard for heard in bench.agent.heard if isinstance(heard, tuple) and heard[0] == "ended"]
    assert bench.client.drains_running == 1


@pytest.mark.parametrize(("seen", "withdrawn"), [(MachineState.CONFIGURED, True), (MachineState.IDLE, False)])
async def test_a_machine_that_is_configured_again_takes_its_drain_back(
    bench: Bench, seen: MachineState, withdrawn: bool
) -> None:
    stream = await bench.shard.stream()
    stream.say(state("m", MachineState.CONFIGURED))
    stream.say(RECLAIM)
    stream.say(state("m", MachineState.DRAINING))
    await settle()
    assert ("drain", "m") in bench.agent.heard
    stream.say(state("m", seen))
    await settle()

    assert ("ended", "m", withdrawn) in bench.agent.heard


async def test_dials_back_off_with_full_jitter_up_to_half_a_minute() -> None:
    """No wait is longer than the shard has been away, but for half a second at first."""
    shard = FakeShard()
    shard.up = False
    bench = Bench(shard)
    await asyncio.sleep(600)
    await bench.stop()

    times = shard.dialled_at_seconds
    waits = [(earlier, later - earlier) for earlier, later in itertools.pairwise(times)]
    assert all(wait <= min(30.0, max(0.5, away)) for away, wait in waits)
    assert max(wait for _away, wait in waits) > 15.0


@pytest.mark.parametrize(
    ("away_seconds", "ceiling_seconds"), [(0, 0.5), (0.4, 0.5), (0.6, 0.6), (7, 7), (30, 30), (1e6, 30)]
)
def test_the_ceiling_is_the_time_without_a_session(away_seconds: float, ceiling_seconds: float) -> None:
    assert backoff_ceiling_seconds(away_seconds) == ceiling_seconds


@pytest.mark.parametrize("outage_seconds", [0.2, 3.0, 12.0])
async def test_every_operator_is_back_when_the_outage_has_lasted_twice(outage_seconds: float) -> None:
    """Of two hundred, those with bad luck too; they do not come back at one moment either."""
    shards, benches = [], []
    for seed in range(200):
        shards.append(FakeShard())
        benches.append(Bench(shards[-1], seed))
    await asyncio.gather(*(shard.stream() for shard in shards))
    await asyncio.sleep(100)
    lost_at_seconds = asyncio.get_running_loop().time()
    for shard in shards:
        shard.up = False
        shard.streams[-1].end()
    await asyncio.sleep(outage_seconds)
    for shard in shards:
        shard.up = True
    await asyncio.gather(*(shard.stream(2) for shard in shards))
    returned = sorted(shard.dialled_at_seconds[-1] - lost_at_seconds for shard in shards)
    await asyncio.gather(*(bench.stop() for bench in benches))

    assert outage_seconds <= returned[0]
    assert returned[-1] <= 2 * outage_seconds + 0.5
    assert returned[len(returned) // 2] - returned[0] > outage_seconds / 20


async def test_time_with_a_session_does_not_count_as_away() -> None:
    """A shard that ends sessions soon is dialled less and less often, by the waits before, not by the sessions."""
    shard = FakeShard()
    bench = Bench(shard)
    ended: list[float] = []
    waits: list[tuple[float, float]] = []
    away_seconds = 0.0
    for number in range(1, 40):
        stream = await shard.stream(number)
        if ended:
            waits.append((away_seconds, shard.dialled_at_seconds[-1] - ended[-1]))
            away_seconds += waits[-1][1]
        await asyncio.sleep(20)
        stream.end()
        ended.append(asyncio.get_running_loop().time())
    await bench.stop()

    assert all(wait <= backoff_ceiling_seconds(away) for away, wait in waits)
    assert max(wait for _away, wait in waits[:3]) <= 1.5
    assert max(wait for _away, wait in waits) > 15.0


async def test_after_a_session_that_was_healthy_for_a_minute_waits_are_short_again() -> None:
    shard = FakeShard()
    shard.up = False
    bench = Bench(shard)
    await asyncio.sleep(300)
    shard.up = True
    stream = await shard.stream()
    await asyncio.sleep(61)
    stream.end()
    ended_at_seconds = asyncio.get_running_loop().time()
    await shard.stream(2)
    await bench.stop()

    assert shard.dialled_at_seconds[-1] - ended_at_seconds <= 0.5


@pytest.mark.parametrize("kind", [EndKind.REPLACED, EndKind.DENIED])
async def test_an_operator_that_was_replaced_or_refused_waits_half_a_minute(bench: Bench, kind: EndKind) -> None:
    stream = await bench.shard.stream()
    await stream.wait_for(RollUp)
    stream.end(kind)
    await bench.shard.stream(2)

    assert bench.shard.dialled_at_seconds[1] == 30.0
    assert bench.client.replaced_total == (kind is EndKind.REPLACED)


async def test_the_beginning_and_the_end_of_each_session_are_logged() -> None:
    shard = FakeShard()
    shard.up = False
    with structlog.testing.capture_logs() as logs:
        bench = Bench(shard)
        await asyncio.sleep(0.1)
        shard.up = True
        stream = await shard.stream()
        await asyncio.sleep(30)
        stream.end()
        await shard.stream(2)
        await asyncio.sleep(7)
        await bench.stop()
    said = [(each["event"], each.get("kind"), each.get("lasted_seconds"), each["log_level"]) for each in logs]
    opened = next(each for each in logs if each["event"] == "session.opened")

    assert said[0] == ("session.not_opened", "lost", None, "info")
    assert said[-4:] == [
        ("session.opened", None, None, "info"),
        ("session.ended", "lost", 30.0, "info"),
        ("session.opened", None, None, "info"),
        ("session.ended", "stopped", 7.0, "info"),
    ]
    assert (opened["cluster"], opened["shard_capabilities"]) == ("c", sorted(EVERYTHING))


async def test_hints_and_verdicts_reach_the_cluster(bench: Bench) -> None:
    """In the order of their arrival; what follows is the cluster's business."""
    stream = await bench.shard.stream()
    hint = frames.AvailableCapacity(
        fingerprint="p", requirements=(), resources={}, available_count=3, confidence=frames.Confidence.HIGH,
        price_usd_per_hour=0.5,
    )  # fmt: skip
    verdict = frames.NeedStatusUpdate(cycle=7, computed_at_unix_nanos=1, rows=(), rollup_timestamp_unix_nanos=1)
    stream.say(hint)
    stream.say(verdict)
    await asyncio.sleep(1)

    assert [heard for heard in bench.agent.heard if heard in (hint, verdict)] == [hint, verdict]


async def test_a_question_about_drains_reaches_the_cluster_and_its_answer_the_shard(bench: Bench) -> None:
    stream = await bench.shard.stream()
    question = frames.DrainForecastRequest(request_id="r", machine_ids=("m",))
    stream.say(question)
    await settle()
    answer = frames.DrainForecast(request_id="r", outcome=frames.ForecastOutcome.FITS)
    bench.client.forecast_made(answer)

    assert question in bench.agent.heard
    assert await stream.wait_for(frames.DrainForecast) == answer


async def test_an_operator_stops_also_when_its_session_ends_in_that_moment(bench: Bench) -> None:
    """A stream that fails and a stop that arrive together are still a stop: nothing is dialled again."""
    await bench.shard.stream()
    await asyncio.sleep(1)
    bench.shard.streams[0].end()
    bench.task.cancel()

    await asyncio.wait({bench.task}, timeout=100)

    assert bench.task.cancelled()
    assert len(bench.shard.streams) == 1


async def test_the_result_of_a_resumed_drain_is_reported_and_its_machine_ends_it(bench: Bench) -> None:
    drain = DrainRecord(
        instruction_id="i", machine_id="m", node="n", provider_id="", deadline_seconds=60.0, preemptor_priority=0,
        reason="reclaim",
    )  # fmt: skip
    result = DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.DRAINED)
    assert bench.client.resume_drain(drain)
    bench.client.drain_finished(result)
    stream = await bench.shard.stream()
    assert await stream.wait_for(DrainResult) == result
    stream.say(state("m", MachineState.CONFIGURED))
    await settle()

    assert ("ended", "m", True) in bench.agent.heard
