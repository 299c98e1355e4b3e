"""A provider killed 200 times under load loses nothing that it had shown (docs/spec/provider.md §3, §4, §10, §11)."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import aio

from bigfleet.model.states import MachineState
from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc
from tests.e2e.killed_provider import MACHINES
from tests.patience import PATIENCE_SECONDS, wait_until

Stub: TypeAlias = "provider_pb2_grpc.CapacityProviderAsyncStub"
KILLS = 200
KILLS_QUICK = 20
S = MachineState
#: The life of a machine as its worker drives it. Even places are at rest; place 8 is place 0 of the next round.
LIFE = (S.SPECULATIVE, S.CREATING, S.IDLE, S.CONFIGURING, S.CONFIGURED, S.DRAINING, S.IDLE, S.DELETING)
SHARD = "kills"


@dataclass
class Driven:
    """One machine and all that was shown of it; places count on over the rounds."""

    id: str
    #: The furthest place that an answer has shown.
    shown: int = 0
    #: The furthest place that it may have come to: what was called without an answer counts.
    possible: int = 0
    sequence: int = 0
    #: The newest token that an answer came to.
    answered: int = 0
    operation: str = ""
    #: By place of acceptance.
    cluster: dict[int, str] = field(default_factory=dict)

    def see(self, machine: provider_pb2.Machine) -> None:
        """Take in a record that the provider showed: it may have gone on, never back."""
        state = MachineState(machine.state)
        place = self.shown
        while LIFE[place % len(LIFE)] is not state:
            place += 1
            assert place <= self.possible, f"{self.id} is {state.name}, and {self._story()}"
        self.shown = place
        in_round = place % len(LIFE)
        is_bound = 3 <= in_round <= 5
        expected = self.cluster.get(place - in_round + 3, "") if is_bound else ""
        assert machine.cluster == expected, f"{self.id} is bound to {machine.cluster!r}, and {self._story()}"
        assert dict(machine.shard_metadata) == ({"for": expected} if is_bound else {})
        assert bool(machine.host.ref) == (2 <= in_round <= 7)

    def _story(self) -> str:
        return f"it was shown at {LIFE[self.shown % 8].name} ({self.shown}), may be at {self.possible}"


class Driver:
    """Drives every machine through life after life, and notes what it is shown."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machines = {f"fake-{number}": Driven(f"fake-{number}") for number in range(MACHINES)}
        self.cursor = b""
        self.states: dict[str, int] = {}
        self.counts = {"acks": 0, "repeats": 0, "fenced": 0, "listings": 0}
        #: Released once for each transition that is answered.
        self.one_more = asyncio.Semaphore(0)

    async def check(self, stub: Stub) -> None:
        """Hold what is there after a kill against all that was shown before it."""
        await self.read_on(stub)
        everything = await stub.List(provider_pb2.ListFilter(), timeout=PATIENCE_SECONDS)
        assert {machine.id: machine.state for machine in everything.machines}.keys() == self.states.keys()
        for machine in everything.machines:
            self.machines[machine.id].see(machine)
        for driven in self.machines.values():
            if driven.answered:
                await self._replay(stub, driven)

    async def _replay(self, stub: Stub, driven: Driven) -> None:
        token: dict[str, Any] = {"shard_id": SHARD, "shard_epoch": 1, "sequence_number": driven.answered}
        with pytest.raises(aio.AioRpcError) as stale:
            await stub.Create(provider_pb2.CreateRequest(machine_id=driven.id, **token), timeout=PATIENCE_SECONDS)
        assert stale.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "a mark that was shown is gone"
        self.counts["fenced"] += 1

    async def read_on(self, stub: Stub) -> None:
        """Thread the cursor on, and hold the deltas together against Get."""
        listing = await stub.List(provider_pb2.ListFilter(since_revision=self.cursor), timeout=PATIENCE_SECONDS)
        assert listing.tombstones or not self.cursor, "a cursor from before a kill was not taken"
        self.cursor = listing.revision
        self.states.update({machine.id: machine.state for machine in listing.machines})
        for machine in listing.machines:
            self.machines[machine.id].see(machine)
        self.counts["listings"] += 1

    async def load(self, stub: Stub) -> None:
        """Call until the provider is gone."""
        async with asyncio.TaskGroup() as group:
            for driven in self.machines.values():
                group.create_task(self._drive(stub, driven))
            group.create_task(self._watch(stub))

    async def _watch(self, stub: Stub) -> None:
        with suppress(aio.AioRpcError):
            while True:
                await self.read_on(stub)

    async def _drive(self, stub: Stub, driven: Driven) -> None:
        try:
            while True:
                machine = await stub.Get(provider_pb2.MachineRef(id=driven.id), timeout=PATIENCE_SECONDS)
                driven.see(machine)
                if driven.shown and self.rng.random() < 0.3:
                    await self._repeat(stub, driven)
                elif driven.shown % 2 == 0:
                    await self._advance(stub, driven)
        except aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise

    async def _advance(self, stub: Stub, driven: Driven) -> None:
        place = driven.shown + 1
        # From here on it may have happened, whatever is heard of it.
        driven.possible = place + 1
        if place % len(LIFE) == 3:
            driven.cluster[place] = f"c-{place}"
        before, driven.operation = driven.operation, ""
        ack = await self._call(stub, driven, place)
        assert ack.operation_id != before, "an operation id came twice"
        driven.operation = ack.operation_id
        driven.see(ack.machine)
        assert driven.shown >= place, f"{driven.id} was accepted at {place} and shows {driven.shown}"
        self.counts["acks"] += 1

    async def _repeat(self, stub: Stub, driven: Driven) -> None:
        # At rest it is the operation that led there; the machine stays where it is.
        ack = await self._call(stub, driven, driven.shown - (driven.shown + 1) % 2)
        assert driven.operation in ("", ack.operation_id), "a repeat was a new operation"
        driven.see(ack.machine)
        self.counts["repeats"] += 1

    async def _call(self, stub: Stub, driven: Driven, place: int) -> provider_pb2.TransitionAck:
        driven.sequence += 1
        sequence = driven.sequence
        named: dict[str, Any] = {
            "machine_id": driven.id,
            "shard_id": SHARD,
            "shard_epoch": 1,
            "sequence_number": sequence,
        }
        ack: provider_pb2.TransitionAck
        match LIFE[place % len(LIFE)]:
            case S.CREATING:
                ack = await stub.Create(provider_pb2.CreateRequest(**named), timeout=PATIENCE_SECONDS)
            case S.CONFIGURING:
                cluster = driven.cluster[place]
                request = provider_pb2.ConfigureRequest(
                    **named, cluster_id=cluster, bootstrap_blob=b"blob", shard_metadata={"for": cluster}
                )
                ack = await stub.Configure(request, timeout=PATIENCE_SECONDS)
            case S.DRAINING:
                ack = await stub.Drain(provider_pb2.DrainRequest(**named), timeout=PATIENCE_SECONDS)
            case _:
                ack = await stub.Delete(provider_pb2.DeleteRequest(**named), timeout=PATIENCE_SECONDS)
        driven.answered = sequence
        self.one_more.release()
        return ack

    async def until_answered(self, transitions: int) -> None:
        """Wait until so many more transitions are answered."""
        for _ in range(transitions):
            await self.one_more.acquire()

    def forget_operations(self) -> None:
        """Forget, after a kill, by which operation a machine at rest came there."""
        for driven in self.machines.values():
            if driven.shown % 2 == 0:
                driven.operation = ""


class Lives:
    """Starts lives of a provider, and ends them."""

    def __init__(self, process: "subprocess.Popen[str]", address: Path) -> None:
        self._process = process
        self._address = address

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the process that forks has ended"
        return line

    def begin(self) -> int:
        """Return the process id of a new life; the socket of the one before is gone."""
        self._address.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write("live\n")
        self._process.stdin.flush()
        return int(self._heard())

    def end(self, child: int) -> None:
        """Kill a life."""
        os.kill(child, signal.SIGKILL)
        assert self._heard() == str(int(signal.SIGKILL)), "the provider ended by itself"


@contextmanager
def lives(state: Path, address: str) -> Iterator[Lives]:
    """Run the process that forks while the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.killed_provider", str(state), address],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Lives(process, Path(address))
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


def _until_there(path: Path) -> None:
    wait_until(path.exists, "the provider does not come up", poll_seconds=0.005)


async def one_life(driver: Driver, provider: Lives, address: str, answers: int, seconds: float) -> None:
    """Let a provider start, check it, load it until it has given so many answers, and kill it so long after."""
    child = provider.begin()
    is_alive = True
    try:
        async with aio.insecure_channel(f"unix:{address}") as channel:
            # Before it listens there is nothing to connect to, and gRPC would wait a second to try again.
            await asyncio.to_thread(_until_there, Path(address))
            await asyncio.wait_for(channel.channel_ready(), PATIENCE_SECONDS)
            stub = provider_pb2_grpc.CapacityProviderStub(channel)
            await driver.check(stub)
            load = asyncio.create_task(driver.load(stub))
            answered = asyncio.create_task(driver.until_answered(answers))
            # A load that has failed gives no more answers; awaiting it below says why.
            await asyncio.wait({load, answered}, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
            await asyncio.sleep(seconds)
            is_alive = False
            await asyncio.to_thread(provider.end, child)
            await load
    finally:
        if is_alive:
            provider.end(child)


async def survives(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Kill a provider so many times, one time in ten while it starts; return what was seen of it.

    Goes on until each thing that can be seen was seen as often: how much a life gets done depends on the machine.
    """
    driver = Driver(seed)
    number = 0
    # Short, for an address of a Unix socket.
    with TemporaryDirectory() as short:
        address = str(Path(short) / "p")
        with lives(folder / "s.db", address) as provider:
            while number < kills or min(driver.counts.values()) < kills:
                if number % 10 == 9:
                    child = provider.begin()
                    await asyncio.sleep(driver.rng.uniform(0, 0.05))
                    provider.end(child)
                else:
                    answers, seconds = driver.rng.randint(0, 12), driver.rng.uniform(0, 0.05)
                    await one_life(driver, provider, address, answers, seconds)
                driver.forget_operations()
                number += 1
            await one_life(driver, provider, address, 0, 0)
    print(number, driver.counts)
    return driver.counts


async def test_20_kills_under_load_take_nothing_back_that_was_shown(tmp_path: Path) -> None:
    """The quick form of the proof below."""
    assert min((await survives(KILLS_QUICK, 2, tmp_path)).values()) >= KILLS_QUICK


@pytest.mark.slow
async def test_200_kills_under_load_take_nothing_back_that_was_shown(tmp_path: Path) -> None:
    """A kill comes at any moment: between calls, in them, and one in ten while the provider starts."""
    assert min((await survives(KILLS, 1, tmp_path)).values()) >= KILLS
