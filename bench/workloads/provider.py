"""A provider at full size over loopback: lists, deltas, calls, durable transitions, pushes, and a restart.

docs/spec/provider.md §24. Server and client run on the cores of this machine together. Beside each figure that waits
for the disk stands what one fsync takes there. Nothing here may report a figure of calls that were not all answered.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from grpc import aio

from bench.harness import RUNS, Measured, Measurement, Reading
from bench.provider_fleet import is_hosted, slot, write_fleet
from bench.workloads.streams import checksum, end, free_port
from bigfleet.rpc.wire.gen import provider_pb2

READY_SECONDS_MAX = 180.0
_SERVICE = "/bigfleet.v1alpha1.CapacityProvider/"
_OPTIONS = [("grpc.max_receive_message_length", -1)]
#: Calls begun a second under steady load, and for how long.
STEADY_RATE = 100
STEADY_SECONDS = 5.0
TRANSITION_WORKERS = 128
TRANSITION_SECONDS = 4.0
_GETS = 500
_PUSHES = 20
_DELTA = 1_000


class Provider:
    """A provider process and a channel to it."""

    def __init__(self, process: "subprocess.Popen[str]", channel: aio.Channel, port: int, ready_seconds: float) -> None:
        self.process = process
        self.port = port
        #: From the start of the process until it served.
        self.ready_seconds = ready_seconds
        self._channel = channel

    async def list(self, since: bytes = b"", results_max: int = 0) -> bytes:
        """Return the bytes of an answer: what a client makes of them is its own business."""
        call = self._channel.unary_unary(_SERVICE + "List", provider_pb2.ListFilter.SerializeToString, None)
        answer: bytes = await call(provider_pb2.ListFilter(since_revision=since, max_results=results_max))
        return answer

    async def call(self, method: str, request: Any) -> bytes:
        """Make a call and return the bytes of its answer."""
        made = self._channel.unary_unary(_SERVICE + method, type(request).SerializeToString, None)
        answer: bytes = await made(request)
        return answer

    async def ask(self, word: str) -> dict[str, Any]:
        """Tell the process something and return what it says."""
        return await _asked(self.process, word)


async def _asked(process: "subprocess.Popen[str]", word: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    line = await asyncio.to_thread(process.stdout.readline)
    assert line, "a process of the benchmark ended"
    said: dict[str, Any] = json.loads(line)
    return said


@contextmanager
def process(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Run a process of `bench.processes.provider` while the context lasts."""
    command = [sys.executable, "-m", "bench.processes.provider", *arguments]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        end(started)


def measured(machines: int, sync: str, watch: Callable[[Provider], Awaitable[Measured]]) -> Measured:
    """Write a fleet, start a provider over it, and watch it."""
    with TemporaryDirectory() as folder:
        state, port = Path(folder) / "state.db", free_port()
        write_fleet(state, machines)
        began = time.monotonic()
        with process("serve", str(state), str(port), sync) as started:
            return asyncio.run(_watched(started, port, began, watch))


async def _watched(
    started: "subprocess.Popen[str]", port: int, began: float, watch: Callable[[Provider], Awaitable[Measured]]
) -> Measured:
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        get = channel.unary_unary(_SERVICE + "Get", provider_pb2.MachineRef.SerializeToString, None)
        deadline = began + READY_SECONDS_MAX
        while True:
            assert time.monotonic() < deadline, "the provider does not come up"
            assert started.poll() is None, "the provider ended"
            with suppress(grpc.RpcError):
                await get(provider_pb2.MachineRef(id=slot(0).id), timeout=1.0)
                break
            await asyncio.sleep(0.1)
        return await watch(Provider(started, channel, port, time.monotonic() - began))


def fsync_ms(folder: Path) -> float:
    """Return the median time of an fsync of 4 KiB there, milliseconds."""
    times_ms = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(20):
            file.write(bytes(4096))
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            times_ms.append((time.perf_counter() - started) * 1000)
    return statistics.median(times_ms)


def _here_fsync_ms() -> float:
    with TemporaryDirectory() as folder:
        return fsync_ms(Path(folder))


def _p99(times: Sequence[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


async def _timed(flow: Awaitable[object]) -> float:
    started = time.perf_counter()
    await flow
    return (time.perf_counter() - started) * 1000


# ---- reads and calls ------------------------------------------------------------------------------------------------


async def _watch_serving(provider: Provider, machines: int) -> Measured:
    whole = provider_pb2.MachineList.FromString(await provider.list())
    assert len(whole.machines) == machines
    record_bytes = whole.ByteSize() / machines
    lists_ms = [await _timed(provider.list()) for _ in range(RUNS)]
    gets_ms = [
        await _timed(provider.call("Get", provider_pb2.MachineRef(id=slot(number % machines).id)))
        for number in range(_GETS)
    ]
    free = iter([slot(number).id for number in range(machines) if not is_hosted(number)])
    delta_ms, told = await _deltas(provider, whole.revision, free, min(_DELTA, machines // 10))
    quiet_ms = await _steady(provider, free)
    with process("list", str(provider.port)) as reader:
        busy_ms = await _steady(provider, free)
        lists_meanwhile = (await _asked(reader, "end"))["lists"]
    pushes_ms = [
        (await provider.ask(f"push {slot(number).id} {0.5 + attempt / 100}"))["push_ms"]
        for attempt, number in enumerate(range(0, 10 * _PUSHES, 10))
    ]
    figures = await provider.ask("figures")
    return Measured(
        readings=(
            Reading("full List, median", statistics.median(lists_ms), "ms", most=500.0),
            Reading("bytes a record", record_bytes, "B"),
            Reading(f"delta of {told:,}, median", statistics.median(delta_ms), "ms", most=20.0),
            Reading("Get, p99", _p99(gets_ms), "ms", most=2.0),
            Reading(f"Create at {STEADY_RATE}/s, p99", _p99(quiet_ms), "ms", most=10.0),
            Reading(f"Create at {STEADY_RATE}/s while full Lists run, p99", _p99(busy_ms), "ms", most=10.0),
            Reading("full Lists meanwhile", lists_meanwhile, ""),
            Reading("a push until it is visible, median", statistics.median(pushes_ms), "ms", most=10.0),
            Reading("fsync here, median", _here_fsync_ms(), "ms"),
            Reading("memory, peak", figures["peak_mib"], "MiB"),
        ),
        checksum=checksum((machines, told, len(quiet_ms), len(busy_ms))),
    )


async def _deltas(provider: Provider, since: bytes, free: Iterator[str], changes: int) -> tuple[list[float], int]:
    """Change so many machines and time what a reader is told of them, again and again."""
    ids = [next(free) for _ in range(changes)]
    for start in range(0, changes, TRANSITION_WORKERS):
        requests = [provider_pb2.CreateRequest(machine_id=i) for i in ids[start : start + TRANSITION_WORKERS]]
        await asyncio.gather(*(provider.call("Create", request) for request in requests))
    await asyncio.sleep(1.0)
    told = provider_pb2.MachineList.FromString(await provider.list(since))
    assert {machine.id for machine in told.machines} == set(ids)
    return [await _timed(provider.list(since)) for _ in range(RUNS)], len(ids)


async def _steady(provider: Provider, free: Iterator[str]) -> list[float]:
    """Begin calls at an even pace, whatever the ones before are doing; return their times."""
    began = time.perf_counter()
    calls = []
    for number in range(int(STEADY_RATE * STEADY_SECONDS)):
        await asyncio.sleep(max(0.0, began + number / STEADY_RATE - time.perf_counter()))
        request = provider_pb2.CreateRequest(machine_id=next(free))
        calls.append(asyncio.create_task(_timed(provider.call("Create", request))))
    return list(await asyncio.gather(*calls))


def serving(machines: int) -> Measurement:
    """Reads, calls and pushes at that size, every commit fsynced."""
    return Measurement(
        name="provider, serving",
        size=f"{machines:,} machines, synchronous=FULL",
        run=lambda: measured(machines, "full", lambda provider: _watch_serving(provider, machines)),
        is_slow=machines > 10_000,
    )


# ---- durable transitions --------------------------------------------------------------------------------------------


async def _watch_transitions(provider: Provider, machines: int, least: float) -> Measured:
    ids = [slot(number).id for number in range(machines) if not is_hosted(number)]
    share = len(ids) // TRANSITION_WORKERS
    before = await provider.ask("figures")
    began = time.perf_counter()
    deadline = began + TRANSITION_SECONDS

    async def work(mine: Sequence[str]) -> int:
        done = 0
        for machine_id in mine:
            if time.perf_counter() >= deadline:
                break
            await provider.call("Create", provider_pb2.CreateRequest(machine_id=machine_id))
            done += 1
        return done

    shares = [ids[n * share : (n + 1) * share] for n in range(TRANSITION_WORKERS)]
    accepted = sum(await asyncio.gather(*(work(mine) for mine in shares)))
    seconds = time.perf_counter() - began
    assert accepted < share * TRANSITION_WORKERS, "the slots were used up before the time was over"
    figures = await provider.ask("figures")
    cpu_seconds = figures["cpu_seconds"] - before["cpu_seconds"]
    settled = 0
    while settled < accepted:
        await asyncio.sleep(0.2)
        whole = provider_pb2.MachineList.FromString(await provider.list())
        settled = sum(machine.state == provider_pb2.MACHINE_STATE_IDLE for machine in whole.machines)
    return Measured(
        readings=(
            # An acceptance and a settlement each; what was settled after the last acceptance is not counted twice.
            Reading("durable transitions", 2 * accepted / seconds, "/s", least=least),
            Reading("the provider's processor time for one", cpu_seconds / (2 * accepted) * 1e6, "µs"),
            Reading("fsync here, median", _here_fsync_ms(), "ms"),
        ),
        checksum=checksum((machines, settled == accepted)),
    )


def transitions(machines: int, sync: str, least: float) -> Measurement:
    """Acceptances and settlements as fast as they go, from many callers at once."""
    return Measurement(
        name="provider, transitions",
        size=f"{machines:,} machines, synchronous={sync.upper()}",
        run=lambda: measured(machines, sync, lambda provider: _watch_transitions(provider, machines, least)),
        is_slow=True,
    )


# ---- a restart ------------------------------------------------------------------------------------------------------


async def _watch_restart(provider: Provider, machines: int) -> Measured:
    seen, since = 0, b""
    for _ in range(20):
        page = provider_pb2.MachineList.FromString(await provider.list(since, results_max=5_000))
        seen, since = seen + len(page.machines), page.revision
    assert seen == min(machines, 100_000)
    figures = await provider.ask("figures")
    return Measured(
        readings=(
            Reading("from the start of the process until it serves", provider.ready_seconds, "s", most=20.0),
            Reading("memory, serving pages", figures["rss_mib"], "MiB", most=1024.0),
            Reading("memory, peak", figures["peak_mib"], "MiB"),
        ),
        checksum=checksum((machines, seen)),
    )


def restart(machines: int) -> Measurement:
    """A provider that starts over a large fleet."""
    return Measurement(
        name="provider, restart",
        size=f"{machines:,} machines",
        run=lambda: measured(machines, "full", lambda provider: _watch_restart(provider, machines)),
        is_slow=machines > 10_000,
    )


PROVIDERS = (
    serving(5_000),
    serving(100_000),
    transitions(50_000, "full", least=500.0),
    transitions(50_000, "normal", least=1_200.0),
    restart(500_000),
)
