"""W14 in whole processes: 200 shards that report to a real coordinator, what it keeps of each, and changes of leader.

docs/spec/benchmarks.md. The coordinator is the real command, on a file and, where there is one on the PATH, on etcd;
shards are played here, over gRPC, each report on a channel of its own as the link does it. Nothing here may report a
figure of a run in which a report was not acknowledged.
"""

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from bench.harness import Measured, Measurement, Reading
from bench.workloads.coordinator import GIVING_EVERY, SHARDS, SHORTFALLS, registered, report_of
from bench.workloads.streams import checksum, cpu_seconds, end, free_port, wait_until_ready
from bigfleet.link.client import NotAnswered
from bigfleet.model.ids import ShardId
from bigfleet.rpc.clients.shard_reports import GrpcCoordinator
from bigfleet.rpc.wire.convert_coordinator import report_from_wire, report_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2

INTERVAL_SECONDS = 10.0
#: One pass of the leader falls into it.
MEASURED_SECONDS = 50.0
LEASE_SECONDS = 5
KILLS = 3
_KIB = 1024
#: Every type and requirement of the workload is in as many reports.
_SHARING = 6


class Coordinator:
    """One replica's process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.log = folder / f"coordinator-{self.port}.log"
        arguments = [
            *("--listen", f"127.0.0.1:{self.port}"),
            *("--metrics-addr", f"127.0.0.1:{self.metrics_port}"),
            *("--advertise-addr", f"127.0.0.1:{self.port}"),
            *("--id", f"r-{self.port}"),
            *("--log-level", "warning"),
            *flags,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bigfleet.cli.main", "coordinator", *arguments], stdout=log, stderr=log
            )

    @property
    def address(self) -> str:
        """Where it is dialled."""
        return f"127.0.0.1:{self.port}"

    def resident_mib(self) -> float:
        """Return its memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / _KIB

    def leads(self) -> bool:
        """Return whether it says of itself that it leads."""
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=1.0) as answer:
                return b"\nbigfleet_coordinator_leader 1.0" in answer.read()
        except OSError:
            return False


@contextmanager
def coordinator(folder: Path, *flags: str) -> Iterator[Coordinator]:
    """Run a replica while the context lasts, once it leads or knows who does."""
    one = Coordinator(folder, *flags)
    try:
        wait_until_ready(one.metrics_port, one.log)
        yield one
    finally:
        if one.process.poll() is None:
            end(one.process)


@contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """Run one member while the context lasts; yield where it listens."""
    port, peer = free_port(), free_port()
    command = ["etcd", "--name", "m0", "--data-dir", str(folder / "etcd"), "--logger", "zap", "--log-level", "error"]
    command += ["--listen-client-urls", f"http://127.0.0.1:{port}"]
    command += ["--advertise-client-urls", f"http://127.0.0.1:{port}"]
    command += ["--listen-peer-urls", f"http://127.0.0.1:{peer}"]
    command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
    command += ["--initial-cluster", f"m0=http://127.0.0.1:{peer}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


# ---- reports -----------------------------------------------------------------------------------------------------


async def report_for(seconds: float, address: str) -> list[float]:
    """Let every shard report at its pace; return how long each report took, seconds. Raises when one is not taken."""
    link = GrpcCoordinator()
    taken: list[float] = []
    until = time.monotonic() + seconds

    async def live(shard: int) -> None:
        cycle, term, is_wanted = 0, 0, True
        await asyncio.sleep(INTERVAL_SECONDS * shard / SHARDS)
        while time.monotonic() < until:
            cycle += 1
            report = report_of(shard, giving_every=GIVING_EVERY, cycle=cycle, term=term)
            began = time.monotonic()
            answer = await link.report(address, report if is_wanted else replace(report, holding=None))
            taken.append(time.monotonic() - began)
            assert answer.acknowledged
            term, is_wanted = answer.term, answer.want_ownership
            await asyncio.sleep(max(0.0, began + INTERVAL_SECONDS - time.monotonic()))

    await asyncio.gather(*(live(shard) for shard in range(SHARDS)))
    return taken


def measure_reports(store: str, seconds: float) -> Measured:
    """Warm up for an interval, in which all register, and watch the process while the next ones come in."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        url = f"sqlite://{folder}/c.db" if store == "sqlite" else f"etcd://{stack.enter_context(etcd(folder))}/bench"
        flags = ["--store", url, "--report-interval", f"{INTERVAL_SECONDS:g}s"]
        # Passes run as they do and tell nobody: there is nobody here who would carry instructions out.
        flags += ["--rebalance-cooldown", "0", "--rebalance-dry-run"]
        one = stack.enter_context(coordinator(folder, *flags))
        asyncio.run(report_for(INTERVAL_SECONDS, one.address))
        # Each begins with its first report once more, which is taken with the same effect.
        before, began = cpu_seconds(one.process.pid), time.monotonic()
        taken = asyncio.run(report_for(seconds, one.address))
        cores = (cpu_seconds(one.process.pid) - before) / (time.monotonic() - began)
        resident_mib = one.resident_mib()
    expected = SHARDS * int(seconds / INTERVAL_SECONDS)
    assert abs(len(taken) - expected) <= SHARDS, f"{len(taken)} reports came, not {expected}"
    ordered = sorted(taken)
    return Measured(
        readings=(
            Reading("the coordinator's share of a core", cores, "cores", most=0.2),
            Reading("a report, median", statistics.median(ordered) * 1000, "ms"),
            Reading("a report, p99", ordered[len(ordered) * 99 // 100] * 1000, "ms"),
            Reading("the coordinator's memory", resident_mib, "MiB"),
        ),
        checksum=checksum((SHARDS, SHORTFALLS, store)),
    )


def reports(store: str, seconds: float = MEASURED_SECONDS) -> Measurement:
    """W14: every shard reports every ten seconds."""
    return Measurement(
        name=f"W14 reports over gRPC, {store}",
        size=f"{SHARDS} shards every {INTERVAL_SECONDS:g} s, {SHORTFALLS} shortfalls each",
        run=lambda: measure_reports(store, seconds),
        is_slow=True,
    )


# ---- memory ------------------------------------------------------------------------------------------------------


def measure_memory() -> Measured:
    """Return what a leader keeps of one shard, on top of what it keeps of none."""
    contents = [report_to_wire(report_of(shard, giving_every=1)).SerializeToString() for shard in range(SHARDS)]
    kib = json.loads(
        subprocess.run(
            [sys.executable, "-m", "bench.processes.coordinators"],
            input=b"".join(len(each).to_bytes(4, "big") + each for each in contents),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    )
    assert kib["shards"] == SHARDS
    return Measured(
        readings=(
            Reading("a shard's summary, kept", kib["kept"], "KiB"),
            Reading("at the most while reports come in", kib["most"], "KiB"),
            Reading("on the wire", statistics.mean(map(len, contents)) / _KIB, "KiB"),
        ),
        checksum=checksum((SHARDS, SHORTFALLS, sum(map(len, contents)))),
    )


def keep_all(contents: Sequence[bytes]) -> dict[str, float]:
    """Take reports as a leader does and return what each takes of memory, KiB, as Python counts it.

    The first few are not counted: what all shards share is made with them.
    """

    async def take() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            term = await registered(Path(folder))
            for number, content in enumerate(contents):
                if number == _SHARING:
                    tracemalloc.start()
                answer = await term.report(report_from_wire(coordinator_pb2.ShardReport.FromString(content)))
                assert answer.acknowledged
            after, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        counted = (len(contents) - _SHARING) * _KIB
        return {"shards": len(term.heard), "kept": after / counted, "most": most / counted}

    return asyncio.run(take())


def memory() -> Measurement:
    """W14: what a leader keeps of each shard."""
    return Measurement(
        name="W14 memory of a shard's summary",
        size=f"{SHARDS} shards, {SHORTFALLS} shortfalls and 78 rows of capacity each",
        run=measure_memory,
    )


# ---- changes of leader -------------------------------------------------------------------------------------------


def seconds_until_answered(one: Coordinator, cycle: int, term: int) -> tuple[float, int]:
    """Return how long until a replica takes a shard's report as the leader, and under which term."""
    link, began = GrpcCoordinator(), time.monotonic()
    report = replace(report_of(0, giving_every=0, cycle=cycle, term=term), shard_id=ShardId("s"))

    async def ask() -> int:
        while time.monotonic() - began < 60.0:
            try:
                answer = await link.report(one.address, report)
            except NotAnswered:
                await asyncio.sleep(0.01)
                continue
            assert answer.acknowledged
            return answer.term
        raise AssertionError(f"nobody leads:\n{one.log.read_text(encoding='utf-8')}")

    answered = asyncio.run(ask())
    return time.monotonic() - began, answered


def measure_failover() -> Measured:
    """Kill the leader several times, then stop one in order; a report is answered by the next one each time."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        flags = ["--store", f"etcd://{stack.enter_context(etcd(folder))}/bench", "--lease-ttl", f"{LEASE_SECONDS}s"]
        leader = stack.enter_context(coordinator(folder, *flags))
        _, term = seconds_until_answered(leader, 1, 0)
        killed: list[float] = []
        for cycle in range(2, 2 + KILLS):
            follower = stack.enter_context(coordinator(folder, *flags))
            leader.process.kill()
            leader.process.wait()
            seconds, next_term = seconds_until_answered(follower, cycle, term)
            assert next_term > term, "terms rise"
            killed.append(seconds)
            leader, term = follower, next_term
        follower = stack.enter_context(coordinator(folder, *flags))
        leader.process.terminate()
        stopped, last_term = seconds_until_answered(follower, 2 + KILLS, term)
        assert last_term > term, "terms rise"
    return Measured(
        readings=(
            Reading("the leader is killed, until the next one answers, longest", max(killed), "s", LEASE_SECONDS + 1),
            Reading("median", statistics.median(killed), "s"),
            Reading("the leader is stopped in order", stopped, "s"),
        ),
        checksum=checksum((KILLS, LEASE_SECONDS)),
    )


def failover() -> Measurement:
    """W14: how long nobody answers."""
    return Measurement(
        name="W14 change of leader, etcd",
        size=f"lease of {LEASE_SECONDS} s, {KILLS} kills",
        run=measure_failover,
        is_slow=True,
    )


COORDINATORS: tuple[Measurement, ...] = (
    reports("sqlite"),
    memory(),
    *((reports("etcd"), failover()) if shutil.which("etcd") else ()),
)


def main() -> None:
    """Read reports from standard input, each behind its size, and print what a leader keeps of them."""
    contents: list[bytes] = []
    read: Any = sys.stdin.buffer.read
    while size := read(4):
        contents.append(read(int.from_bytes(size, "big")))
    print(json.dumps(keep_all(contents)))


if __name__ == "__main__":
    main()
