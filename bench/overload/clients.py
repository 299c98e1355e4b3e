"""Floods a shard with calls over raw HTTP/2, thousands of them on one loop.

`bench.overload.run` starts it, says on standard input what begins and ends, and reads one JSON object a line. A shard's
answer to what it sheds is recorded: code and message of each stream that ended, and each `rollup_rejected`.
"""

import asyncio
import gc
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from bench.engine_fleets import one_type
from bench.overload.http2 import DATA, PREFACE, STREAM, Call, frame, message, open_call
from bench.overload.scenario import ALLOWED_SECONDS, Flood
from bench.processes.streams import next_command, raise_file_limit, say
from bigfleet.cli.runtime.system import configure_logging, run_loop
from bigfleet.model.frames import CAPABILITY_NEED_STATUS, Hello
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.vector import families, parse_vector, scale
from bigfleet.rpc.wire.convert_need import need_to_wire
from bigfleet.rpc.wire.convert_session import operator_frame_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2, shardread_pb2

_HOST: Final = "127.0.0.1"
_INSPECT_PATH: Final = b"/bigfleet.v1alpha1.ShardRead/InspectNeeds"
#: So that no honest cluster loses a machine or an order to the flood: what they ask for is not on offer.
_ABSENT_TYPE: Final = "absent-{}"
_ROWS_PER_TYPE: Final = 1_000
_SHAPE: Final = {"cpu": "1", "memory": "1Gi"}
#: Variants of a roll-up that differ in one row: the one that follows is always new.
_VARIANTS: Final = 4
#: A session's roll-up is sent again after this long, as operators do.
_REPORT_SECONDS: Final = 10.0
_REOPEN_SECONDS: Final = 1.0
#: What slow writers say that their frame has.
_SLOW_HELLO_BYTES: Final = 60_000
_SLOW_ROLLUP_BYTES: Final = 8_000_000
_CODES: Final = {
    "": "cut",
    "1": "CANCELLED",
    "3": "INVALID_ARGUMENT",
    "4": "DEADLINE_EXCEEDED",
    "8": "RESOURCE_EXHAUSTED",
    "10": "ABORTED",
    "13": "INTERNAL",
    "14": "UNAVAILABLE",
}


def hello_of(cluster: str) -> bytes:
    """Return the gRPC message of a Hello."""
    hello = Hello(cluster_id=cluster, capabilities=frozenset({CAPABILITY_NEED_STATUS}))
    return message(operator_frame_to_wire(hello).SerializeToString())


def rollup_of(cluster: str, rows: int, variant: int = 0) -> bytes:
    """Return the gRPC message of a roll-up whose rows ask for machines that are not on offer."""
    needs = _first_rows(rows)
    if variant:
        needs = (*needs[:-1], need_to_wire(_row(rows - 1, machines=variant + 1)))
    rollup = capacity_pb2.ClusterCapacityNeeds(cluster_id=cluster, timestamp_unix_nanos=1, needs=needs)
    return message(shard_pb2.OperatorMessage(rollup=rollup).SerializeToString(deterministic=True))


@lru_cache(maxsize=2)
def _first_rows(rows: int) -> tuple[capacity_pb2.CapacityNeed, ...]:
    """Return the messages of so many rows; they name no cluster, so that all clusters and variants share them."""
    return tuple(need_to_wire(_row(number)) for number in range(rows))


def _row(number: int, machines: int = 1) -> Need:
    unit = parse_vector(_SHAPE)
    priority = number % _ROWS_PER_TYPE
    return Need(
        cluster=ClusterId(""),
        profile=one_type(_ABSENT_TYPE.format(number // _ROWS_PER_TYPE), priority=priority, bucket=0),
        aggregate=scale(unit, machines),
        min_unit=unit,
        families=families(_SHAPE),
    )


class Tally:
    """What happened to the calls of one kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        #: What the shard said to those that it ended or refused something of.
        self.reasons: Counter[str] = Counter()

    def ended(self, call: Call) -> None:
        """Note how a call ended."""
        self.counts["ended"] += 1
        self.reasons[f"{_CODES.get(call.status, call.status)}: {unquote(call.details)[:200]}"] += 1


class Crowd(ABC):
    """Calls of one kind: `run` keeps them going until it is cancelled, and `close` cuts what is left."""

    def __init__(self, port: int, flood: Flood) -> None:
        self.port = port
        self.flood = flood
        self.tally = Tally()
        self._calls: set[Call] = set()

    @abstractmethod
    async def run(self) -> None:
        """Do what this kind does."""

    @property
    def is_finished(self) -> bool:
        """Return whether the crowd has finished; one without an end has at any time."""
        return True

    def figures(self) -> dict[str, Any]:
        """Return what happened so far."""
        open_now = sum(call.is_open for call in self._calls)
        return {
            "finished": self.is_finished,
            "open": open_now,
            "counts": dict(self.tally.counts),
            "reasons": dict(self.tally.reasons.most_common(8)),
        }

    def close(self) -> None:
        """Cut every connection."""
        for call in list(self._calls):
            call.close()

    async def open(self, first: bytes = b"", **settings: Any) -> Call:
        """Open a call that is counted."""
        call = Call(first, on_end=self._ended, **settings)
        self._calls.add(call)
        self.tally.counts["attempted"] += 1
        if not await open_call(_HOST, self.port, call):
            self._ended(call)
        return call

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        self.tally.ended(call)


class Sessions(Crowd):
    """Sessions of clusters that the shard does not know: they report and stay."""

    @property
    def is_finished(self) -> bool:
        """Return whether each was opened once."""
        return self.tally.counts["attempted"] >= self.flood.sessions

    async def run(self) -> None:
        """Open them at their rate, and open those again that ended."""
        held: dict[int, Call] = {}
        rollups: dict[int, bytes] = {}
        due_seconds = time.monotonic()
        while True:
            for number in range(self.flood.sessions):
                call = held.get(number)
                if call is not None and call.is_open:
                    call.send(rollups[number])
                else:
                    name = f"unknown-{number:05}"
                    rollups[number] = rollup_of(name, self.flood.session_rows)
                    held[number] = await self.open(hello_of(name) + rollups[number])
                due_seconds = max(due_seconds + 1 / self.flood.sessions_per_second, time.monotonic() - 1)
                await asyncio.sleep(max(0.0, due_seconds - time.monotonic()))
            due_seconds = max(due_seconds, time.monotonic() + _REPORT_SECONDS)


class Greedy(Crowd):
    """Clusters with the largest roll-ups, each of which is new; the flood makes them ten times as frequent."""

    def __init__(self, port: int, flood: Flood) -> None:
        super().__init__(port, flood)
        self.is_flooding = False
        self._rollups: dict[str, list[bytes]] = {}

    async def run(self) -> None:
        """Report for every greedy cluster."""
        names = [f"greedy-{number}" for number in range(self.flood.greedy)]
        for name in names:
            self._rollups[name] = [rollup_of(name, self.flood.greedy_rows, variant) for variant in range(_VARIANTS)]
        gc.collect()
        gc.freeze()
        await asyncio.gather(*(self._report(name) for name in names))

    async def _report(self, name: str) -> None:
        number = 0
        while True:
            call = await self.open(hello_of(name), on_message=self._heard)
            while call.is_open:
                if call.waiting_bytes:
                    # The shard takes no more of the stream for now.
                    self.tally.counts["held back"] += 1
                else:
                    number += 1
                    self.tally.counts["sent"] += 1
                    call.send(self._rollups[name][number % _VARIANTS])
                await asyncio.sleep(ALLOWED_SECONDS / (self.flood.greedy_times if self.is_flooding else 1.0))
            await asyncio.sleep(_REOPEN_SECONDS)

    def _heard(self, _call: Call, content: bytes) -> None:
        said = shard_pb2.ShardMessage.FromString(content)
        if said.WhichOneof("payload") == "ack":
            self.tally.counts[said.ack.echo] += 1
            if said.ack.error:
                self.tally.reasons[f"{said.ack.echo}: {said.ack.error[:200]}"] += 1


class SilentReaders(Crowd):
    """Streams that take nothing: a session with much to hear, and a reader of the whole demand."""

    async def run(self) -> None:
        """Open them, and those again that ended; a session asks for an acknowledgement again and again."""
        held: dict[int, Call] = {}
        inspect = message(shardread_pb2.InspectNeedsRequest().SerializeToString())
        while True:
            for number in range(self.flood.silent_readers):
                call = held.get(number)
                name = f"silent-{number:04}"
                if call is None or not call.is_open:
                    if number % 2:
                        held[number] = await self.open(inspect, path=_INSPECT_PATH, reads=False)
                    else:
                        held[number] = await self.open(hello_of(name), reads=False)
                elif not number % 2:
                    call.send(rollup_of(name, 1))
                await asyncio.sleep(_REPORT_SECONDS / 10 / max(1, self.flood.silent_readers))


class SlowWriters(Crowd):
    """Connections on which a byte a second is written: of the preface, of a Hello, of a roll-up."""

    async def run(self) -> None:
        """Write for every one of them, and open those again that ended."""
        numbers = range(self.flood.slow_writers)
        calls = {number: await self._begin(number) for number in numbers}
        written = dict.fromkeys(numbers, 1)
        while True:
            await asyncio.sleep(1.0)
            for number in numbers:
                if not calls[number].is_open:
                    calls[number], written[number] = await self._begin(number), 1
                elif number % 3:
                    calls[number].send_unasked(frame(DATA, 0, STREAM, b"x"))
                else:
                    place = written[number]
                    calls[number].send_unasked(PREFACE[place : place + 1])
                    written[number] += 1

    async def _begin(self, number: int) -> Call:
        match number % 3:
            case 0:
                return await self.open(preface=PREFACE[:1])
            case 1:
                return await self.open(b"\0" + _SLOW_HELLO_BYTES.to_bytes(4, "big"))
            case _:
                begin = b"\0" + _SLOW_ROLLUP_BYTES.to_bytes(4, "big")
                return await self.open(hello_of(f"slow-{number:04}") + begin)


class Reconnects(Crowd):
    """Sessions that are opened and cut at once, of clusters that the shard gets to know."""

    async def run(self) -> None:
        """Open and cut as many as there are to be."""
        todo = iter(range(self.flood.reconnects))
        await asyncio.gather(*(self._again(lane, todo) for lane in range(self.flood.reconnects_at_once)))

    @property
    def is_finished(self) -> bool:
        """Return whether all are over."""
        return self.tally.counts["ended"] >= self.flood.reconnects

    async def _again(self, lane: int, todo: Iterator[int]) -> None:
        hello = hello_of(f"restless-{lane:03}")
        for _number in todo:
            call = await self.open(hello, on_message=self._answered)
            await call.ended.wait()

    def _answered(self, call: Call, _content: bytes) -> None:
        if call.is_open:
            self.tally.counts["opened"] += 1
            call.close()


class Frames(Crowd):
    """Frames that are no message: alternately the first of a session and a later one."""

    async def run(self) -> None:
        """Send as many as there are to be."""
        todo = iter(range(self.flood.frames))
        content = message(b"\xff" * self.flood.frame_bytes)
        await asyncio.gather(*(self._again(lane, todo, content) for lane in range(self.flood.frames_at_once)))

    @property
    def is_finished(self) -> bool:
        """Return whether all are over."""
        return self.tally.counts["ended"] >= self.flood.frames

    async def _again(self, lane: int, todo: Iterator[int], content: bytes) -> None:
        for number in todo:
            call = await self.open(hello_of(f"broken-{lane}") if number % 2 else b"")
            call.send(content)
            await call.ended.wait()


KINDS: Final[dict[str, tuple[type[Crowd], str]]] = {
    "sessions": (Sessions, "sessions"),
    "greedy": (Greedy, "greedy"),
    "silent readers": (SilentReaders, "silent_readers"),
    "slow writers": (SlowWriters, "slow_writers"),
    "reconnects": (Reconnects, "reconnects"),
    "frames": (Frames, "frames"),
}


async def run_crowds(port: int, flood: Flood, kinds: tuple[str, ...]) -> int:
    """Let crowds do what they do, as the words on standard input say."""
    raise_file_limit()
    # The shard's own work is to be measured, on cores that both share.
    os.nice(19)
    crowds = {kind: KINDS[kind][0](port, flood) for kind in kinds if getattr(flood, KINDS[kind][1])}
    greedy = crowds.get("greedy")
    tasks: list[asyncio.Task[None]] = []
    say(kinds=list(crowds))
    while word := await next_command():
        match word:
            case "begin":
                tasks = [asyncio.create_task(crowd.run()) for crowd in crowds.values()]
            case "flood" | "rest":
                assert isinstance(greedy, Greedy)
                greedy.is_flooding = word == "flood"
            case "count":
                say(**_figures(crowds, tasks))
            case "end":
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                figures = _figures(crowds, tasks)
                for crowd in crowds.values():
                    crowd.close()
                say(**figures)
    os._exit(0)


def _figures(crowds: dict[str, Crowd], tasks: list[asyncio.Task[None]]) -> dict[str, Any]:
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            raise AssertionError("a crowd has failed") from task.exception()
    return {kind: crowd.figures() for kind, crowd in crowds.items()}


def main() -> None:
    """Run what the arguments say: port, the flood as JSON, kinds of crowds."""
    port, flood, *kinds = sys.argv[1:]
    configure_logging("bench-flood", "error")
    sys.exit(run_loop(lambda: run_crowds(int(port), Flood(**json.loads(flood)), tuple(kinds))))


if __name__ == "__main__":
    main()
