"""`Shard.Session` over real gRPC: frames both ways, and each status that ends a stream (docs/spec/wire.md §4, §8).

The provider behind the shard is scripted; nothing else is.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from grpc import aio
from structlog.testing import capture_logs

from bigfleet.model.frames import Hello, NodeStateUpdate, ReclaimInstruction
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import HostRef
from bigfleet.model.states import MachineState
from bigfleet.rpc.servers import session as session_server
from bigfleet.rpc.wire.convert_need import needs_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shard_pb2, shardread_pb2
from bigfleet.shard.ports import ShardSettings
from bigfleet.shard.sessions import known_clusters
from bigfleet.shard.sessions.outbox import CloseReason
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import CROSSED, LiveShard, Peer, live_shard
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState
Code = grpc.StatusCode


@pytest.fixture
async def live() -> AsyncIterator[LiveShard]:
    """A shard with two Idle machines behind a synchronous provider."""
    provider = ScriptedProvider(synchronous=True)
    provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE, price_usd_per_hour=2.0))
    async with live_shard(World(provider)) as shard:
        yield shard


def rollup(cluster: str, cpu: str = "4", *, timestamp: int = 1, rows: int = 1) -> capacity_pb2.ClusterCapacityNeeds:
    """Return a roll-up of some rows that want that much cpu each."""
    needs = needs_to_wire(need(cluster, cpu, priority=100 + number) for number in range(rows))
    return capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, timestamp_unix_nanos=timestamp, needs=needs)


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds: what the far end of a socket does wakes nobody here."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)


# ---- how a session cannot begin ---------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/1")
async def test_the_first_frame_must_be_hello(live: LiveShard) -> None:
    """A roll-up, a frame of a kind from the future and an early end are none."""
    peers = [live.dial() for _ in range(3)]
    await peers[0].say(rollup=rollup("c1"))
    await peers[1].say_bytes(b"\xfa\x3f\x03abc")
    await peers[2].stop_talking()

    for peer in peers:
        assert await peer.end() == (Code.INVALID_ARGUMENT, "the first frame of a session must be hello")
    assert len(live.shard.sessions) == 0


@pytest.mark.rule("shard 10.1/1")
@pytest.mark.parametrize("cluster", ["", "two words", "line\nbreak", "x" * 254, "x" * 2000, "é" * 127])
async def test_a_malformed_cluster_id_is_named(live: LiveShard, cluster: str) -> None:
    """Empty, blank, unprintable or longer than 253 bytes."""
    peer = live.dial()
    await peer.say(hello=shard_pb2.Hello(cluster_id=cluster))
    code, details = await peer.end()

    assert (code, "hello.cluster_id" in details) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.rule("shard 10.1/1")
@pytest.mark.parametrize(
    ("capabilities", "fault"),
    [
        (["x"] * 65, "hello.capabilities: has 65 names, at most 64 are allowed"),
        (["x" * 65], "hello.capabilities[0]: has 65 bytes, at most 64 are allowed"),
    ],
)
async def test_a_hello_names_a_bounded_number_of_capabilities(
    live: LiveShard, capabilities: list[str], fault: str
) -> None:
    """One with 240,000 was accepted, and logged in a line of 228 MB while other clusters waited."""
    peer = live.dial()
    await peer.say(hello=shard_pb2.Hello(cluster_id="c1", capabilities=capabilities))
    code, details = await peer.end()

    assert (code, details) == (Code.INVALID_ARGUMENT, f"the first frame could not be read: {fault}")
    assert len(live.shard.sessions) == 0


async def test_only_known_capabilities_are_logged(live: LiveShard) -> None:
    """Of the others, how many there are."""
    with capture_logs() as logs:
        await live.connect("c1", "node-status", *(f"from-the-future-{number}" for number in range(63)))

    (line,) = [line for line in logs if line["event"] == "session.opened"]
    assert (line["capabilities"], line["unknown_capabilities"]) == (["node-status"], 63)


ESCAPE = "x\x1b[2J\n"


@pytest.mark.parametrize(
    "row",
    [
        {"aggregate_resources": {ESCAPE: "1"}},
        {"min_unit": {ESCAPE: "1"}},
        {"requirements": [{"key": ESCAPE, "operator": "OPERATOR_EXISTS"}]},
        {"requirements": [{"key": "zone", "operator": "OPERATOR_IN", "values": [ESCAPE]}]},
        {"shapes": [{"resources": {ESCAPE: "1"}, "count": 1}]},
    ],
    ids=["aggregate", "min_unit", "key", "value", "shape"],
)
async def test_a_roll_up_with_a_control_character_in_a_name_is_rejected(live: LiveShard, row: dict[str, Any]) -> None:
    """Nothing of it is listed, and its session stays."""
    peer = await live.connect("c1", "need-status")
    wanted = {"aggregate_resources": {"cpu": "1"}, "min_unit": {"cpu": "1"}} | row
    demand = ParseDict(
        {"cluster_id": "c1", "timestamp_unix_nanos": 1, "needs": [wanted]}, capacity_pb2.ClusterCapacityNeeds()
    )
    await peer.say(rollup=demand)
    ack = await peer.hear_ack("rollup_rejected")

    assert "control character '\\x1b'" in ack.error
    assert live.shard.intake.table.clusters == set()


@pytest.mark.rule("shard 10.1/1")
async def test_a_peer_that_says_nothing_is_not_waited_for(live: LiveShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds in production."""
    assert session_server.HELLO_TIMEOUT_SECONDS == 10
    monkeypatch.setattr(session_server, "HELLO_TIMEOUT_SECONDS", 0.05)
    peer = live.dial()

    assert await peer.end() == (Code.DEADLINE_EXCEEDED, "no Hello within 10 s")


@pytest.mark.rule("shard 1/16")
async def test_a_stopping_shard_takes_no_session(live: LiveShard) -> None:
    """Neither a new one nor one that had not said who it is."""
    early = live.dial()
    live.shard.stop_sessions()
    late = live.dial()
    await early.try_to_say(hello=shard_pb2.Hello(cluster_id="c1"))

    # The late one is refused before it has said anything.
    refused = (Code.UNAVAILABLE, "the shard is shutting down")
    assert await early.end() in (refused, CROSSED)
    assert await late.end() == refused
    assert len(live.shard.sessions) == 0


# ---- how a session ends -----------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.1/4", "shard 15/18")
async def test_a_replaced_session_is_aborted(live: LiveShard) -> None:
    """The newest operator speaks for the cluster."""
    old = await live.connect("c1")
    new = await live.connect("c1")
    assert await old.end() == (Code.ABORTED, "replaced by a newer session of this cluster")

    await new.say(rollup=rollup("c1"))
    assert (await new.hear_ack("rollup")).rollup_timestamp_unix_nanos == 1
    assert live.world.metric("session_lifecycle_total", event="replaced") == 1


@pytest.mark.rule("shard 10.2/1")
async def test_hello_again_is_acked_and_another_name_ends_the_session(live: LiveShard) -> None:
    """A session speaks for one cluster."""
    peer = await live.connect("c1")
    await peer.say(hello=shard_pb2.Hello(cluster_id="c1"))
    await peer.hear_ack("hello")
    await peer.say(hello=shard_pb2.Hello(cluster_id="c2"))

    assert await peer.end() == (Code.INVALID_ARGUMENT, "a later Hello named another cluster_id")
    assert len(live.shard.sessions) == 0


@pytest.mark.rule("shard 10.4/4")
async def test_an_outbox_without_room_for_an_instruction_ends_the_session() -> None:
    """What must be delivered is not dropped: the operator comes back and is told again."""
    async with live_shard(World(settings=ShardSettings(outbox_frames_max=4))) as live:
        peer = await live.connect("c1")
        session = live.shard.sessions.of("c1")
        assert session is not None
        for number in range(6):
            session.outbox.put(_instruction(number))

        expected = (Code.RESOURCE_EXHAUSTED, "a frame that must be delivered found no room")
        assert await peer.end() == expected
        assert live.world.metric("session_lifecycle_total", event="overflowed") == 1


def _instruction(number: int) -> ReclaimInstruction:
    return ReclaimInstruction(
        instruction_id=f"i{number}", nodes=("n",), machine_ids=("m",), provider_ids=("",), grace_seconds=1
    )


@pytest.mark.rule("shard 10.4/6", "shard 15/16")
async def test_a_stream_that_takes_nothing_is_given_up(live: LiveShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute, in production; the others are served meanwhile."""
    assert session_server.WRITE_TIMEOUT_SECONDS == 60
    monkeypatch.setattr(session_server, "WRITE_TIMEOUT_SECONDS", 0.2)
    deaf, other = await live.connect("c1"), await live.connect("c2")
    session = live.shard.sessions.of("c1")
    assert session is not None
    for number in range(100):
        frame = NodeStateUpdate(
            machine_id=f"m{number}", cluster_id=ClusterId("c1"), state=S.CONFIGURED, labels={"big": "x" * 200_000}
        )
        session.outbox.put(frame)
    await other.say(rollup=rollup("c2"))
    await other.hear_ack("rollup")
    await until(lambda: live.shard.sessions.of("c1") is None)

    assert live.world.metric("session_lifecycle_total", event="unresponsive") == 1
    assert (await deaf.end())[0] is Code.RESOURCE_EXHAUSTED
    assert live.shard.sessions.of("c2") is not None


async def test_a_stream_that_has_nothing_to_take_stays(live: LiveShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is since it took a frame, and also when one comes again."""
    monkeypatch.setattr(session_server, "WRITE_TIMEOUT_SECONDS", 0.1)
    peer = await live.connect("c1")
    for _ in range(2):
        await peer.say(rollup=rollup("c1"))
        await peer.hear_ack("rollup")
        await asyncio.sleep(0.3)

    assert live.shard.sessions.of("c1") is not None


@pytest.mark.rule("shard 1/16")
async def test_a_graceful_stop_ends_streams_as_unavailable(live: LiveShard) -> None:
    """Streams close first, so that the server's own stop waits for none of them."""
    peers = [await live.connect(f"c{number}") for number in range(3)]
    live.shard.stop_sessions()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await live.server.stop(PATIENCE_SECONDS)

    for peer in peers:
        assert await peer.end() == (Code.UNAVAILABLE, "the shard is shutting down")


async def test_an_operator_that_vanishes_takes_its_session_with_it(live: LiveShard) -> None:
    """Cancelled or closed; its demand stands."""
    gone, closed = await live.connect("c1"), await live.connect("c2")
    await gone.say(rollup=rollup("c1"))
    await gone.hear_ack("rollup")
    gone.vanish()
    await closed.stop_talking()

    assert (await closed.end())[0] is Code.CANCELLED
    await until(lambda: len(live.shard.sessions) == 0)
    assert live.shard.intake.table.clusters == {"c1"}
    assert live.world.metric("session_lifecycle_total", event="removed") == 2


# ---- what no frame can do ---------------------------------------------------------------------------------------


@pytest.mark.rule("shard 10.2/5")
async def test_random_bytes_end_their_own_stream_only(live: LiveShard) -> None:
    """Whether as the first frame or later, each ends in a status or is skipped; another peer notices nothing."""
    rng = random.Random(7)
    bystander = await live.connect("bystander")
    codes = set()
    for number in range(60):
        content = rng.randbytes(rng.choice((1, 2, 3, 9, 200)))
        peer = live.dial()
        if number % 2:
            await peer.say(hello=shard_pb2.Hello(cluster_id=f"c{number}"))
        await peer.say_bytes(content)
        await peer.stop_talking()
        codes.add((await peer.end())[0])
    await bystander.say(rollup=rollup("bystander"))

    assert (await bystander.hear_ack("rollup")).rollup_timestamp_unix_nanos == 1
    # A peer whose bytes happened to be a frame has ended its stream itself.
    assert codes <= {Code.INVALID_ARGUMENT, Code.CANCELLED}
    assert Code.INVALID_ARGUMENT in codes


@pytest.mark.rule("shard 10.2/5")
async def test_bytes_that_are_no_frame_end_the_session(live: LiveShard) -> None:
    """With a word on what was wrong."""
    peer = await live.connect("c1")
    await peer.say_bytes(b"\xff\xff\xff")
    code, details = await peer.end()

    assert (code, details.startswith("a frame could not be read: ")) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.rule("shard 10.2/5")
async def test_a_name_that_is_too_long_ends_the_session_by_its_field(live: LiveShard) -> None:
    """Half a name would be another one."""
    peer = await live.connect("c1")
    await peer.say(drain_result=shard_pb2.DrainResult(instruction_id="i", machine_id="m" * 1025))
    code, details = await peer.end()

    assert (code, "drain_result.machine_id" in details) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.rule("shard 10.2/4")
async def test_a_frame_of_an_unknown_kind_is_skipped(live: LiveShard) -> None:
    """It is counted, and the stream lives."""
    peer = await live.connect("c1")
    for _ in range(3):
        await peer.say_bytes(b"\xfa\x3f\x03abc")
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")

    assert live.world.metric("session_frames_dropped_total", kind="unknown") == 3


@pytest.mark.rule("shard 10.2/4")
async def test_frames_about_other_clusters_machines_concern_nobody(live: LiveShard) -> None:
    """They are counted; late blobs and acks are just dropped."""
    live.world.provider.add(machine("other", S.CONFIGURED, cluster="c2"))
    await live.world.cycle()
    peer = await live.connect("c1")
    await peer.say(node_status=shard_pb2.NodeStatus(machine_id="other", node_name="mine", ready=True))
    await peer.say(drain_result=shard_pb2.DrainResult(instruction_id="i", machine_id="other"))
    await peer.say(drain_forecast=shard_pb2.DrainForecast(request_id="late", machine_id="other"))
    await peer.say(bootstrap_response=shard_pb2.BootstrapBlobResponse(request_id="late"))
    await peer.say(reclaim_ack=shard_pb2.ReclaimAck(instruction_id="i", nodes_started=1))
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")

    kinds = ("node_status", "drain_result", "drain_forecast")
    counted = [live.world.metric("session_frames_dropped_total", kind=kind) for kind in kinds]
    assert counted == [1, 1, 1]
    assert live.shard.ingest.node_name(live.world.machine("other")) == ""


# ---- roll-ups ---------------------------------------------------------------------------------------------------


async def test_each_roll_up_is_answered_by_its_timestamp(live: LiveShard) -> None:
    """Taken, unchanged or held."""
    peer = await live.connect("c1")
    answers = []
    for timestamp, rows in ((1, 20), (2, 20), (3, 0), (4, 1), (5, 20)):
        await peer.say(rollup=rollup("c1", timestamp=timestamp, rows=rows))
        ack = await peer.hear_ack("rollup")
        answers.append((ack.rollup_timestamp_unix_nanos, ack.held))

    assert answers == [(1, False), (2, False), (3, True), (4, True), (5, False)]
    results = {name: live.world.metric("rollups_total", result=name) for name in ("accepted", "unchanged", "held")}
    assert results == {"accepted": 1, "unchanged": 2, "held": 2}


async def test_a_repeat_that_is_cut_short_is_no_repeat(live: LiveShard) -> None:
    """The head of a frame that was in force vouches for nothing behind it."""
    peer = await live.connect("c1")
    content = shard_pb2.OperatorMessage(rollup=rollup("c1", timestamp=1, rows=3)).SerializeToString(deterministic=True)
    for _ in range(2):
        await peer.say_bytes(content)
        await peer.hear_ack("rollup")
    await peer.say_bytes(content[:-3])
    code, details = await peer.end()

    assert (code, details.startswith("a frame could not be read: ")) == (Code.INVALID_ARGUMENT, True)
    assert live.world.metric("rollups_total", result="unchanged") == 1


@pytest.mark.rule("shard 4/6", "shard 15/20")
async def test_a_malformed_roll_up_is_refused_and_the_session_stays(live: LiveShard) -> None:
    """The last good demand stays; only an operator that understands it is told, by row and field."""
    plain, told = await live.connect("c1"), await live.connect("c2", "need-status")
    for cluster, peer in (("c1", plain), ("c2", told)):
        await peer.say(rollup=rollup(cluster, timestamp=1))
        await peer.hear_ack("rollup")
        bad = rollup(cluster, timestamp=2, rows=2)
        bad.needs[1].aggregate_resources["cpu"] = "four"
        await peer.say(rollup=bad)
        await peer.say(hello=shard_pb2.Hello(cluster_id=cluster))
        await peer.hear_ack("hello")
    await until(lambda: live.world.metric("rollups_total", result="rejected") == 2)

    while not _rejections(told):
        await told.hear()
    (refused,) = _rejections(told)
    assert (refused.rollup_timestamp_unix_nanos, refused.error.startswith("needs[1].aggregate_resources")) == (2, True)
    assert _rejections(plain) == []
    assert len(live.shard.intake.table.in_list_order()) == 2


def _rejections(peer: Peer) -> list[shard_pb2.Acknowledgement]:
    return [message.ack for message in peer.heard if message.ack.echo == "rollup_rejected"]


@pytest.mark.rule("shard 4/1", "shard 15/20")
async def test_a_roll_up_for_another_cluster_is_dropped(live: LiveShard) -> None:
    """Counted, and the session stays."""
    peer = await live.connect("c1")
    await peer.say(rollup=rollup("c2"))
    await until(lambda: live.world.metric("rollups_total", result="misrouted") == 1)
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")

    assert live.shard.intake.table.clusters == {"c1"}


# ---- machines ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.2/10")
async def test_a_machine_is_bootstrapped_over_the_wire(live: LiveShard) -> None:
    """The request names the machine, the answer's bytes go to Configure untouched, and each state is shown."""
    labels = {"rack": "r1", "bigfleet.lucy.sh/taints": "dedicated=ml:NoSchedule"}
    live.world.provider.add(machine("m1", S.IDLE, labels=labels, host=HostRef("metal", "h-1")))
    peer = await live.connect("c1")
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")
    cycle = asyncio.create_task(live.world.cycle())
    request = await peer.hear_kind("bootstrap_request")
    blob = bytes(range(256))
    answer = shard_pb2.BootstrapBlobResponse(request_id=request.request_id, user_data=blob)
    await peer.say(bootstrap_response=answer)
    await cycle
    await peer.hear_until(lambda message: message.node_state_update.state == provider_pb2.MACHINE_STATE_CONFIGURED)

    assert (request.cluster_id, request.machine_id, request.instance_type, request.zone) == ("c1", "m1", "t4", "za")
    assert request.provider_id == "metal://h-1"
    assert dict(request.labels) == {
        "rack": "r1",
        "node.kubernetes.io/instance-type": "t4",
        "topology.kubernetes.io/zone": "za",
    }
    assert [(taint.key, taint.value, taint.effect) for taint in request.taints] == [("dedicated", "ml", "NoSchedule")]
    assert [requirement.values[0] for requirement in request.requirements] == ["t4"]
    assert live.world.provider.blobs == {"m1": blob}
    updates = [m.node_state_update for m in peer.heard if m.WhichOneof("payload") == "node_state_update"]
    assert [MachineState(update.state) for update in updates] == [S.CONFIGURING, S.CONFIGURED]
    last = updates[-1]
    assert (last.supersedes_key, last.machine_id, last.cluster_id) == ("node:m1", "m1", "c1")
    assert dict(last.resources.resources) == {"cpu": "4", "memory": "16Gi"}


@pytest.mark.rule("shard 9.2/8")
async def test_an_error_answer_puts_the_machine_back(live: LiveShard) -> None:
    """Its text is kept with the action."""
    peer = await live.connect("c1")
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")
    cycle = asyncio.create_task(live.world.cycle())
    request = await peer.hear_kind("bootstrap_request")
    answer = shard_pb2.BootstrapBlobResponse(request_id=request.request_id, error="no template for arm64")
    await peer.say(bootstrap_response=answer)
    await cycle

    record = live.shard.ledger.history[0]
    assert (record.outcome_label, record.message) == ("blob_error", "no template for arm64")
    assert live.world.state("m1") is S.IDLE


@pytest.mark.rule("shard 9.3/2")
async def test_a_machine_is_reclaimed_over_the_wire(live: LiveShard) -> None:
    """The instruction, the state, the result, and Idle at the end; the node's name is the one that was reported."""
    live.world.provider.add(machine("m9", S.CONFIGURED, cluster="c1"))
    await live.world.cycle()
    peer = await live.connect("c1", "drain-result", "node-status")
    status = shard_pb2.NodeStatus(machine_id="m9", node_name="node-9", ready=True, observed_unix_nanos=1)
    await peer.say(node_status=status)
    await peer.say(rollup=rollup("c1", rows=0))
    await peer.hear_ack("rollup")
    cycle = asyncio.create_task(live.world.cycle())
    instruction = await peer.hear_kind("reclaim_instruction")
    await peer.hear_until(lambda message: message.node_state_update.state == provider_pb2.MACHINE_STATE_DRAINING)
    await peer.say(reclaim_ack=shard_pb2.ReclaimAck(instruction_id=instruction.instruction_id, nodes_started=1))
    result = shard_pb2.DrainResult(
        instruction_id=instruction.instruction_id,
        machine_id="m9",
        outcome=shard_pb2.DrainResult.OUTCOME_DRAINED,
    )
    await peer.say(drain_result=result)
    await cycle
    await peer.hear_until(lambda message: message.node_state_update.state == provider_pb2.MACHINE_STATE_IDLE)

    assert (list(instruction.nodes), list(instruction.machine_ids)) == (["node-9"], ["m9"])
    assert list(instruction.provider_ids) == ["test://host-m9"]
    assert (instruction.grace_period_seconds, instruction.preemptor_priority) == (600, 0)
    assert instruction.reason == "reclaim"
    assert 590 <= live.world.provider.grace_seconds["m9"] <= 600
    assert live.world.metric("drain_results_total", outcome="drained") == 1


async def test_an_operator_without_capabilities_gets_nothing_that_it_does_not_know(live: LiveShard) -> None:
    """Acks, bootstrap, reclaim and node frames; it is not waited for when a node drains."""
    peer = await live.connect("c1")
    await peer.say(rollup=rollup("c1"))
    await peer.hear_ack("rollup")
    cycle = asyncio.create_task(live.world.cycle())
    request = await peer.hear_kind("bootstrap_request")
    await peer.say(bootstrap_response=shard_pb2.BootstrapBlobResponse(request_id=request.request_id, user_data=b"#"))
    await cycle
    bad = rollup("c1", timestamp=2)
    bad.needs[0].min_unit["cpu"] = "-1"
    await peer.say(rollup=bad)
    await until(lambda: live.world.metric("rollups_total", result="rejected") == 1)
    await peer.say(rollup=rollup("c1", timestamp=3, rows=0))
    await peer.hear_ack("rollup")
    await live.world.cycle()
    await peer.hear_until(lambda message: message.node_state_update.state == provider_pb2.MACHINE_STATE_IDLE)

    kinds = {message.WhichOneof("payload") for message in peer.heard}
    assert kinds == {"ack", "available_capacity", "bootstrap_request", "node_state_update", "reclaim_instruction"}
    assert {message.ack.echo for message in peer.heard} == {"", "hello", "resync", "rollup"}
    assert live.world.provider.grace_seconds == {"m1": 600}


@pytest.mark.rule("shard 10.1/3")
async def test_a_new_session_is_shown_what_is_the_clusters(live: LiveShard) -> None:
    """Every bound machine, ids ascending, between the acks; the hello's names epoch and capabilities."""
    for name in ("z", "y", "x"):
        live.world.provider.add(machine(name, S.CONFIGURED, cluster="c1"))
    await live.world.cycle()
    peer = await live.connect("c1")

    hello, *updates, _resync = peer.heard
    assert [update.node_state_update.machine_id for update in updates] == ["x", "y", "z"]
    known = ["drain-forecast", "drain-result", "need-status", "node-status"]
    assert (hello.ack.shard_epoch, list(hello.ack.capabilities)) == (1, known)


async def test_an_operator_that_reads_verdicts_gets_them(live: LiveShard) -> None:
    """Of the roll-up that it sent, row by row as it sent them."""
    peer = await live.connect("c1", "need-status")
    asked = rollup("c1", timestamp=7)
    asked.needs[0].aggregate_resources["cpu"] = "4000"
    await peer.say(rollup=asked)
    await peer.hear_ack("rollup")
    # What it decided is not carried out: nobody here would answer for the machine.
    await live.world.step()
    update = await peer.hear_kind("need_status")

    assert (update.supersedes_key, update.rollup_timestamp_unix_nanos, update.cycle) == ("needs", 7, 1)
    (row,) = update.rows
    assert (row.unmet_reason, row.age_cycles_unmet) == (shardread_pb2.UNMET_REASON_PRIORITY_STARVED, 1)
    assert row.residual_deficit.resources
    assert row.message


async def test_clusters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in plain text that reported a row under ever new names filled the shard: silent clusters are kept."""
    monkeypatch.setattr(known_clusters, "CLUSTERS_MAX", 5)
    async with live_shard() as live:
        for number in range(5):
            peer = await live.connect(f"x{number}")
            await peer.say(rollup=rollup(f"x{number}"))
            await peer.hear_ack("rollup")
            await peer.stop_talking()
            await peer.end()
        peer = live.dial()
        await peer.say(hello=shard_pb2.Hello(cluster_id="one-more"))
        code, text = await peer.end()
        assert (code, "retire those that are gone" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert len(live.shard.intake.table.clusters) == 5
        await live.connect("x0")


class ConnectionCut(aio.InternalError):
    """As gRPC's own, which it does not export."""


class CutStream:
    """A stream whose connection is cut while a frame is written."""

    async def write(self, _frame: object) -> None:
        """Raise what gRPC raises then."""
        raise ConnectionCut


async def test_a_peer_that_is_gone_during_a_write_is_no_error() -> None:
    """The session ends as any other; a storm of reconnects would log thousands of tracebacks."""
    world = World()
    session = world.shard.sessions.open(Hello(cluster_id="c1"))
    stream: Any = CutStream()
    with capture_logs() as logs:
        await session_server._Stream(world.shard, session, stream).write()

    assert session.outbox.closed is CloseReason.GONE
    assert [line["event"] for line in logs] == ["session.closed"]
