"""Reports with more elements than any shard sends: refused unparsed, and others are served meanwhile."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from bigfleet.rpc.servers import coordinator as coordinator_server
from bigfleet.rpc.wire import message_limits
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.rpc.wire.gen import provider_pb2
from tests.coordinator.replica_world import refused, report, serving, sqlite_store
from tests.patience import PATIENCE_SECONDS

MANY = message_limits.SCANNED_BYTES_MIN
#: More bytes than are parsed without a scan, and what is wrong with them.
REPORTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "shortfalls": (lambda: b"\x32\0" * MANY, "shortfalls: has more than 100 rows"),
    "acks": (lambda: b"\x3a\0" * MANY, "instruction_acks: has more than 1,000 rows"),
    "clusters": (lambda: b"\xa2\x06\0" * MANY, "clusters: has more than 10,000 ids"),
    "zones": (lambda: b"\x2a\x80\x80\x80\x04" + b"\x22\0" * (2 * MANY), "summary.per_zone_counts: has more than 256"),
    "requirements": (
        lambda: b"\x32\x80\x80\x80\x04" + b"\x0a\0" * (2 * MANY),
        "shortfalls.requirements: has more than 64 requirements",
    ),
    "summaries": (lambda: b"\x2a\0" * (4 * MANY), "report: has more than 4,194,304 rows"),
    "numbers": (lambda: b"\x10\0" * (8 * MANY), "report: has more than 8,388,608 fields"),
    "zeros": (lambda: b"\0" * (2 * MANY), "report: the message is cut short, or is none"),
    "cut short": (lambda: b"\x32\x80\x80\x80\x04" + b"\x22\0" * MANY, "report: the message is cut short"),
}


def raw(port: int) -> tuple[aio.Channel, Any]:
    """Return a channel and a call of ReportShard with bytes."""
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
    return channel, channel.unary_unary(
        "/bigfleet.v1alpha1.Coordinator/ReportShard", request_serializer=bytes, response_deserializer=bytes
    )


@pytest.mark.parametrize("kind", REPORTS)
async def test_a_report_with_too_many_elements_is_not_parsed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status names the limit, the refusal is counted."""
    make, fault = REPORTS[kind]
    parsed: list[int] = []
    parse = coordinator_server._parse_report

    def spied(content: bytes) -> pb.ShardReport:
        parsed.append(len(content))
        return parse(content)

    monkeypatch.setattr(coordinator_server, "_parse_report", spied)
    async with serving(sqlite_store(tmp_path / "db")) as replica:
        await replica.led()
        channel, call = raw(replica.port)
        code, text = await refused(call(report().SerializeToString() + make()))
        await channel.close(None)

        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(fault)
        assert parsed == []
        assert (await replica.stub.ReportShard(report())).acknowledged
        assert (await refused(replica.stub.ReportShard(pb.ShardReport())))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_others_are_answered_while_a_report_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard's report and a list."""
    may_begin, has_come = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def scan(content: bytes) -> object:
        loop.call_soon_threadsafe(has_come.set)
        assert may_begin.wait(PATIENCE_SECONDS)
        return message_limits.report_elements_fault(content)

    monkeypatch.setattr(coordinator_server, "report_elements_fault", scan)
    async with serving(sqlite_store(tmp_path / "db")) as replica:
        await replica.led()
        channel, call = raw(replica.port)
        greedy = asyncio.ensure_future(refused(call(report().SerializeToString() + REPORTS["shortfalls"][0]())))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await has_come.wait()
        assert (await replica.stub.ReportShard(report("east-1"))).acknowledged
        assert [each.shard_id for each in (await replica.stub.ListShards(pb.ListShardsRequest())).shards] == ["east-1"]
        assert not greedy.done()
        may_begin.set()
        assert (await greedy)[1] == "shortfalls: has more than 100 rows"
        await channel.close(None)


async def test_a_large_sound_report_is_taken(tmp_path: Path) -> None:
    """It is scanned, parsed and converted off the loop."""
    machine = provider_pb2.Machine(id="m1", instance_type="t", labels={f"label{n}": "x" * 200 for n in range(9)})
    acks = [
        pb.InstructAck(instruction_id=f"1-{number}", outcome=pb.InstructAck.OUTCOME_ACCEPTED, machines=[machine] * 100)
        for number in range(20)
    ]
    large = report(instruction_acks=acks)
    assert large.ByteSize() > message_limits.SCANNED_BYTES_MIN
    async with serving(sqlite_store(tmp_path / "db")) as replica:
        await replica.led()
        assert (await replica.stub.ReportShard(large)).acknowledged


async def test_an_ack_has_no_more_machines_than_an_instruction(tmp_path: Path) -> None:
    """An instruction moves at most 100."""
    ack = pb.InstructAck(instruction_id="1-1", machines=[provider_pb2.Machine(id="m")] * 101)
    async with serving(sqlite_store(tmp_path / "db")) as replica:
        await replica.led()
        code, text = await refused(replica.stub.ReportShard(report(instruction_acks=[ack])))

        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text == "instruction_acks[0].machines: has 101 records, at most 100 are allowed"
