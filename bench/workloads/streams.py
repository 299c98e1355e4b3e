"""W11, InspectNeeds and W12: whole processes over loopback, measured once for a while instead of timed again and again.

docs/spec/benchmarks.md. The processes are those of `bench.processes.streams`; of W12 the shard is the real command,
with flags that anybody may set. Everything runs on the cores of this machine together, the clients too. Nothing here
may report a figure of a run in which not everything arrived.
"""

import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from urllib.request import urlopen

import grpc

from bench.harness import Measured, Measurement, Reading
from bigfleet.rpc.wire.gen import shardread_pb2

#: How long a shard, its streams or a provider may take to be there.
READY_SECONDS_MAX = 180.0
#: What is not measured, after every stream stands: each has reported once by then, and the first decisions are made.
WARM_UP_SECONDS = 30.0
MEASURED_SECONDS = 30.0
CLIENT_PROCESSES = 2
CLUSTERS_OF_W12 = 50
#: W12's shard: a limit of actions lets it wake itself while some are left over, and its queue has room for that many.
W12_FLAGS = (
    *("--execute-concurrency", "512"),
    *("--max-actions-per-cycle", "1000"),
    *("--wake-min-gap", "100ms"),
    *("--cycle-interval", "2s"),
    "--incremental-reconcile",
)
W12_SECONDS_MAX = 300.0
_INSPECT_METHOD = "/bigfleet.v1alpha1.ShardRead/InspectNeeds"


class Child:
    """A process of this run: words go in, JSON objects come out."""

    def __init__(self, *arguments: str, log: Path, module: str = "bench.processes.streams") -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def send(self, word: str) -> None:
        """Write a word."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """Return the next object. Raises AssertionError with the log when the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a process of the benchmark ended:\n{self._log.read_text(encoding='utf-8')}"
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, word: str) -> dict[str, Any]:
        """Write a word and return the answer."""
        self.send(word)
        return self.heard()

    def close(self) -> None:
        """End the process."""
        end(self.process)


def end(process: "subprocess.Popen[Any]") -> None:
    """End a process in order, by force when that takes long."""
    pipe: IO[Any] | None = process.stdin
    if pipe is not None:
        pipe.close()
    else:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def child(*arguments: str, log: Path) -> Iterator[Child]:
    """Run a process of `bench.processes.streams` while the context lasts."""
    started = Child(*arguments, log=log)
    try:
        yield started
    finally:
        started.close()


def checksum(what: Sequence[object]) -> str:
    """Return the hash of what was counted, none of which depends on time."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


# ---- W11 ------------------------------------------------------------------------------------------------------------


def measure_sessions(streams: int, seconds: float) -> Measured:
    """Open the streams, wait until all have reported, and let the shard watch itself for some seconds."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder) / "log"
        shard = stack.enter_context(child("shard", str(streams), log=log))
        port = str(shard.heard()["port"])
        share = streams // CLIENT_PROCESSES
        clients = [
            stack.enter_context(child("streams", port, str(c * share), str(share), log=log))
            for c in range(CLIENT_PROCESSES)
        ]
        assert sum(client.heard()["streams"] for client in clients) == streams
        time.sleep(WARM_UP_SECONDS)
        for process in (shard, *clients):
            process.send("begin")
        time.sleep(seconds)
        figures = shard.ask("end")
        served = [client.ask("end") for client in clients]
    assert figures["sessions"] == figures["clusters"] == streams, figures
    assert figures["rows"] == figures["machines"] == 10 * streams, figures
    assert not any(client["ended"] for client in served), served
    # A stream that comes late makes up for it, so only a lack says that something did not arrive.
    assert figures["roll_ups"] >= streams * seconds / 10 * 0.8, figures
    assert set(figures["outcomes"]) == {"accepted", "unchanged"}, figures
    return Measured(
        readings=(
            Reading("frame to table, p99", figures["latency_p99_ms"], "ms", most=100.0),
            Reading("frame to table, median", figures["latency_p50_ms"], "ms"),
            Reading("frame to table, longest", figures["latency_max_ms"], "ms"),
            Reading("the shard's share of a core", figures["cores"], "cores", most=1.0),
            Reading("the shard's memory, at the end", figures["rss_mib"], "MiB"),
            Reading("the shard's memory, peak", figures["rss_peak_mib"], "MiB", most=1024.0),
            Reading("the loop is late by the shard's own work, longest", figures["own_lag_max_ms"], "ms", most=20.0),
            Reading("the loop is late, longest", figures["lag_max_ms"], "ms"),
            Reading("the loop is late, p99", figures["lag_p99_ms"], "ms"),
            Reading("roll-ups a second", figures["roll_ups"] / figures["seconds"], "/s"),
            Reading("decisions in the time", figures["cycles"], ""),
            Reading("the clients' cores", sum(c["cpu_seconds"] for c in served) / figures["seconds"], "cores"),
        ),
        checksum=checksum((figures["sessions"], figures["clusters"], figures["rows"], figures["machines"])),
    )


def sessions(streams: int = 5_000, seconds: float = MEASURED_SECONDS) -> Measurement:
    """W11: each stream on a connection of its own, which takes one open file at each end."""
    return Measurement(
        name="W11 sessions",
        size=f"{streams:,} streams, {seconds:.0f} s, 10 rows each, 5 % changed",
        run=lambda: measure_sessions(streams, seconds),
        is_slow=streams > 100,
    )


# ---- InspectNeeds -------------------------------------------------------------------------------------------------


def measure_inspection(rows: int) -> Measured:
    """Ask for every row of a cycle, first when nobody has asked for it before, then again."""
    with TemporaryDirectory() as folder, child("reader", str(rows // 10), log=Path(folder) / "log") as shard:
        ready = shard.heard()
        with grpc.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            ask = channel.unary_stream(_INSPECT_METHOD, shardread_pb2.InspectNeedsRequest.SerializeToString, None)
            before, taken_seconds, counted = shard.ask("count"), [], []
            for _ in range(2):
                started = time.monotonic()
                # Bytes: what a reader does with them is its own business.
                counted.append(sum(1 for _content in ask(shardread_pb2.InspectNeedsRequest())))
                taken_seconds.append(time.monotonic() - started)
            after = shard.ask("count")
    # A header comes first.
    assert counted == [rows + 1, rows + 1], counted
    assert ready["short"] == rows // 20, ready
    return Measured(
        readings=(
            Reading("the first answer, for which its rows are made", taken_seconds[0], "s", most=5.0),
            Reading("the same again", taken_seconds[1], "s", most=5.0),
            Reading("the shard's processor time for both", after["cpu_seconds"] - before["cpu_seconds"], "s"),
        ),
        checksum=checksum((counted, ready["short"])),
    )


def inspection(rows: int = 20_000) -> Measurement:
    """docs/spec/shard.md §12: rows of one cycle to one reader, a twentieth of them short."""
    return Measurement(
        name="InspectNeeds",
        size=f"{rows:,} rows",
        run=lambda: measure_inspection(rows),
        is_slow=rows > 1_000,
    )


# ---- W12 ------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(port: int, log: Path) -> None:
    """Return when /readyz there says ready. Raises AssertionError with the log when it never does."""
    deadline = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2.0) as answer:
                if answer.status == HTTPStatus.OK:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"nobody is ready on port {port}:\n{log.read_text(encoding='utf-8')}")


@contextmanager
def shard_command(
    port: int,
    metrics_port: int,
    provider_port: int,
    folder: Path,
    flags: Sequence[str],
    module: str = "bigfleet.cli.main",
) -> "Iterator[subprocess.Popen[Any]]":
    """Run the real `bigfleet shard` while the context lasts; `module` may be one that breaks it on purpose."""
    arguments = [
        *("--provider-addr", f"127.0.0.1:{provider_port}"),
        *("--listen", f"127.0.0.1:{port}"),
        *("--metrics-addr", f"127.0.0.1:{metrics_port}"),
        *("--data-dir", str(folder / "shard")),
        *("--log-level", "warning"),
        *flags,
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", module, "shard", *arguments], stdout=log, stderr=log)
    try:
        yield process
    finally:
        end(process)


def measure_actuation(machines: int, flags: Sequence[str]) -> Measured:
    """Let operators want every machine at once, and count until the last one has been reported to each."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        log, port, shard_port, provider_port = folder / "log", free_port(), free_port(), free_port()
        provider = stack.enter_context(child("provider", str(provider_port), str(machines), log=log))
        shard = stack.enter_context(shard_command(shard_port, port, provider_port, folder, flags))
        # It is ready when it has read the provider's first List and its kernels are loaded.
        wait_until_ready(port, log)
        operators = stack.enter_context(
            child("operators", str(shard_port), str(CLUSTERS_OF_W12), str(machines), log=log)
        )
        operators.heard()
        before, cpu_before = provider.ask("count"), cpu_seconds(shard.pid)
        operators_before = operators.ask("count")
        assert before["bound"] == operators_before["configured"] == 0, (before, operators_before)
        operators.send("begin")
        deadline = time.monotonic() + W12_SECONDS_MAX
        counted = operators_before
        while counted["configured"] < machines and time.monotonic() < deadline:
            time.sleep(0.5)
            counted = operators.ask("count")
        after = provider.ask("count")
        shard_seconds = cpu_seconds(shard.pid) - cpu_before
        faults = log.read_text(encoding="utf-8")
    assert counted["configured"] == after["bound"] == machines, (counted, after, faults[-2000:])
    assert after["clusters"] == CLUSTERS_OF_W12
    return Measured(
        readings=(
            Reading(
                "bindings a second, until the operator knows", machines / counted["last_seconds"], "/s", least=500.0
            ),
            Reading("until the operators know of all", counted["last_seconds"], "s"),
            Reading("the shard's processor time a binding", shard_seconds / machines * 1000, "ms"),
            Reading("the provider's", (after["cpu_seconds"] - before["cpu_seconds"]) / machines * 1000, "ms"),
            Reading(
                "the operators'", (counted["cpu_seconds"] - operators_before["cpu_seconds"]) / machines * 1000, "ms"
            ),
        ),
        checksum=checksum((after["bound"], after["clusters"], counted["configured"])),
    )


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def actuation(machines: int = 10_000, flags: Sequence[str] = W12_FLAGS) -> Measurement:
    """W12: through the real provider library, gRPC and operator sessions."""
    return Measurement(
        name="W12 actuation",
        size=f"{machines:,} machines, {CLUSTERS_OF_W12} clusters; {' '.join(flags) or 'flags as shipped'}",
        run=lambda: measure_actuation(machines, flags),
        is_slow=machines > 500,
    )


STREAMS = (sessions(), inspection(), actuation())
