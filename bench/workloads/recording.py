"""What recording costs a shard: W9's churn through whole cycles of a shard, recorded and not, cycle by cycle in turn.

The cycle is the shard's own, on one thread: reconcile, snapshot, decision, what is told of it, rails. What was
decided last is what the provider shows next. Times are of the processor, so that a busy machine changes them little.
Nothing here may time a recording that was not read back.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from bench.engine_fleets import cluster_rows, fleet_machines
from bench.harness import Measured, Measurement, Reading
from bench.workloads.shard import CLUSTERS, ListedProvider, answer_of, new_shard
from bigfleet.cli.replay.replaying import Replayer
from bigfleet.engine.decision import Action, ActionKind, Decision
from bigfleet.model.compute import compute_inline
from bigfleet.model.frames import Hello
from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.shapes import Overhead
from bigfleet.model.states import MachineState
from bigfleet.recording.digest import digest_text
from bigfleet.recording.file import RecordingFile
from bigfleet.recording.hook import CycleInput
from bigfleet.recording.reader import RecordedCycle, read_recording
from bigfleet.recording.recorder import Recorder
from bigfleet.recording.values import FORMAT, RecordingHead
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.shard.ports import ShardSettings

#: What recording may cost, of the processor time of a cycle.
SHARE_MAX: Final = 0.02
CYCLES: Final = 30
WARM_UPS: Final = 6


@dataclass(frozen=True, slots=True)
class _Offer:
    """A roll-up as values."""

    cluster_id: str
    content: tuple[Need, ...]
    timestamp_unix_nanos: int
    has_digest: bool = True

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.content)

    @property
    def size_bytes(self) -> int:
        """Zero: it was never on a wire."""
        return 0

    @property
    def digest(self) -> bytes:
        """Of the turn in which it was made."""
        return f"{self.cluster_id} {self.timestamp_unix_nanos}".encode()

    def needs(self) -> tuple[Need, ...]:
        """Return the rows."""
        return self.content

    def overheads(self) -> tuple[Overhead, ...]:
        """Return nothing: these clusters have no DaemonSets."""
        return ()


class _Timed:
    """Takes cycles for a recorder, and says what that took the loop."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seconds = 0.0
        self.last: tuple[CycleInput, Decision | None] | None = None

    def take(self, asked: CycleInput, decision: Decision | None) -> None:
        """Hand over one cycle."""
        self.last = (asked, decision)
        started = time.thread_time()
        self.recorder.take(asked, decision)
        self.seconds = time.thread_time() - started


class _Kept:
    """Keeps what a cycle would have handed over: it is recorded after the cycle was timed without a recorder."""

    def __init__(self) -> None:
        self.last: tuple[CycleInput, Decision | None] | None = None

    def take(self, asked: CycleInput, decision: Decision | None) -> None:
        """Keep it."""
        self.last = (asked, decision)


class _World:
    """A shard of W8's fleet, and what changes before each of its cycles."""

    def __init__(self, machines: int, changed: int, *, is_incremental: bool) -> None:
        fleet = fleet_machines(machines, CLUSTERS)
        self.machines = {machine.id: machine for machine in fleet}
        self._is_incremental = is_incremental
        #: What a full List tells of each; empty where deltas are read.
        self._told: dict[MachineId, bytes] = {}
        self.provider = ListedProvider()
        # Nothing is carried out by calls: the provider shows what was.
        settings = ShardSettings(incremental_reconcile=is_incremental, actuation_paused=True)
        self.shard = new_shard(self.provider, settings)
        self.loop = asyncio.Runner()
        self._per_cluster = machines * 8 // 10 // CLUSTERS
        self._changed = range(0, CLUSTERS, CLUSTERS // changed)
        self._turn = 0
        self._show(fleet)
        self.sessions = {
            name: self.shard.sessions.open(Hello(cluster_id=name, capabilities=frozenset()))
            for name in (_name(cluster) for cluster in range(CLUSTERS))
        }
        for cluster in range(CLUSTERS):
            self._report(cluster, 105)
        self.loop.run(self.shard.make_ready())
        # What is short at first is bound at once, so that later cycles have to do with what changes.
        self.step()
        self.change()
        gc.freeze()

    def step(self) -> float:
        """Run one cycle; return its processor seconds."""

        async def timed() -> float:
            started = time.thread_time()
            report = await self.shard.step()
            assert report.decision is not None
            self._decided: Sequence[Action] = report.decision.actions
            return time.thread_time() - started

        return self.loop.run(timed())

    def change(self) -> None:
        """Carry out what was decided last, and let some clusters want ±2 %."""
        shown = []
        for action in self._decided:
            machine = self.machines[action.machine_id] = _done(self.machines[action.machine_id], action)
            shown.append(machine)
        self._turn += 1
        self._show(shown)
        for cluster in self._changed:
            self._report(cluster, 103 if self._turn % 2 else 107)

    def _show(self, machines: Sequence[Machine]) -> None:
        """Have machines told as they are now: the client of a provider reads either answer from its bytes."""
        told = dict(zip((machine.id for machine in machines), answer_of(machines), strict=True))
        if not self._is_incremental:
            self._told.update(told)
            told = self._told
        cursor = provider_pb2.MachineList(revision=b"%d" % self._turn, tombstones=self._is_incremental)
        self.provider.content = b"".join((*told.values(), cursor.SerializeToString()))

    def _report(self, cluster: int, percent: int) -> None:
        name = _name(cluster)
        rows = tuple(cluster_rows(cluster, self._per_cluster, percent=percent))
        self.shard.take_rollup(self.sessions[name], _Offer(name, rows, self._turn * CLUSTERS + cluster + 1))


def _name(cluster: int) -> ClusterId:
    return ClusterId(f"c-{cluster:03}")


def _done(machine: Machine, action: Action) -> Machine:
    """Return the machine as the action leaves it."""
    if action.kind in (ActionKind.RECLAIM, ActionKind.PREEMPT):
        return replace(machine.without_binding(), state=MachineState.IDLE)
    if action.kind is ActionKind.DELETE:
        return replace(machine.without_binding(), state=MachineState.SPECULATIVE, host=HostRef())
    profile = action.profile
    assert profile is not None, "whoever gains a machine names the row's profile"
    return replace(
        machine,
        state=MachineState.CONFIGURED,
        host=machine.host if machine.host.is_present else HostRef("bench", f"host-{machine.id}"),
        cluster=action.cluster,
        assigned_priority=profile.priority,
        assigned_interruption_penalty_dollars=bucket_upper_dollars(profile.interruption_bucket),
        assigned_reclamation_penalty_dollars=bucket_upper_dollars(profile.reclamation_bucket),
        assigned_need_fingerprint=profile.fingerprint,
        assigned_group=action.group,
    )


def recording(machines: int, per_mille: int, *, is_incremental: bool, cycles: int = CYCLES) -> Measurement:
    """W9's churn recorded: what a recorder takes of the loop, and of the processor in all."""

    def run() -> Measured:
        changed = max(1, CLUSTERS * per_mille // 1000)
        with tempfile.TemporaryDirectory() as folder:
            world = _World(machines, changed, is_incremental=is_incremental)
            return _measured(world, Path(folder) / "recording", cycles + WARM_UPS)

    return Measurement(
        name=f"W9 churn, recorded, {'deltas' if is_incremental else 'full Lists'}",
        size=f"{machines:,} machines, {per_mille / 10:g} % of clusters",
        run=run,
        is_slow=machines > 20_000,
    )


def _measured(world: _World, path: Path, count: int) -> Measured:
    file = RecordingFile(path, size_bytes_max=2**40)
    head = RecordingHead(
        format=FORMAT, bigfleet="bench", shard_id=ShardId("b"), epoch=1, verify_every_cycles=0, started_unix_nanos=1
    )
    recorder = Recorder(file, head=head, registry=CollectorRegistry(), compute=compute_inline)
    on, off = _Timed(recorder), _Kept()
    cycles: dict[bool, list[float]] = {True: [], False: []}
    taking, writing, sizes, fresh = [], [], [], 0.0
    for number in range(count):
        world.change()
        is_on = number % 2 == 1
        taker = world.shard.recorder = on if is_on else off
        seconds = world.step()
        assert taker.last is not None
        if not is_on:
            recorder.take(*taker.last)
        before_bytes = file.size_bytes
        written = _seconds(recorder.write_waiting)
        if number == 0:
            fresh, fresh_bytes = written, file.size_bytes
        if number >= WARM_UPS:
            cycles[is_on].append(seconds)
            writing.append(written)
            sizes.append(file.size_bytes - before_bytes)
            if is_on:
                taking.append(on.seconds)
    recorder.close()
    digests = _read_back(path, count)
    cycle = statistics.median(cycles[False])
    return Measured(
        (
            Reading("a cycle, not recorded", cycle * 1e3, "ms"),
            Reading("a cycle, recorded", statistics.median(cycles[True]) * 1e3, "ms"),
            Reading("on the loop, of a cycle", 100 * statistics.median(taking) / cycle, "%", most=100 * SHARE_MAX),
            Reading("off the loop", statistics.median(writing) * 1e3, "ms"),
            Reading(
                "in all, of a cycle",
                100 * (statistics.median(taking) + statistics.median(writing)) / cycle,
                "%",
                most=100 * SHARE_MAX,
            ),
            Reading("a record", statistics.median(sizes) / 1e3, "kB"),
            Reading("a fresh record", fresh_bytes / 1e6, "MB"),
            Reading("writing a fresh record", fresh * 1e3, "ms"),
        ),
        digests,
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _read_back(path: Path, count: int) -> str:
    """Replay the first and the last cycle, and return the digest of the last."""
    cycles = [one for one in read_recording(path) if isinstance(one, RecordedCycle)]
    assert len(cycles) == count, f"{len(cycles)} cycles of {count}"
    replayer = Replayer("columnar")
    for recorded in (cycles[0], cycles[-1]):
        assert replayer.replay(recorded).is_same, f"cycle {recorded.cycle} is decided otherwise"
    assert cycles[-1].outcome is not None
    return digest_text(cycles[-1].outcome)[:12]


RECORDINGS = (
    recording(100_000, 10, is_incremental=False),
    recording(500_000, 10, is_incremental=True),
    recording(500_000, 100, is_incremental=True),
)
