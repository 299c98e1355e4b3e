"""The command `bigfleet shard`: its flags and defaults, exit codes, the order of a stop (docs/spec/shard.md §1)."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli import main
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.shard import process as shard_process
from bigfleet.cli.shard.command import ShardFlags
from bigfleet.cli.shard.process import STREAM_GRACE_SECONDS, compute_in_thread, serve_shard
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.model.ids import ShardId
from bigfleet.shard.actuation.action_queue import STOP_GRACE_SECONDS
from bigfleet.shard.ownership.state_file import FILE_NAME, StateFile
from bigfleet.shard.ports import ShardSettings
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "shard.md"
#: Defaults that the page tells in words.
IN_WORDS = {"--advertise-addr": ""}
#: Defaults that the page writes in its own way.
WRITTEN = {"none": None, "–": "", "true": True, "false": False, "./data": Path("data")}
#: Facts about this process that belong to its start and not to a shard.
OF_THE_COMMAND = {"--log-level"}


def specified() -> dict[str, str]:
    """Return flag → default as the table of §1 writes them."""
    table = SPEC.read_text(encoding="utf-8").partition("## 1. Process")[2].partition("**Health.**")[0]
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (--[^|]+?) \| ([^|]+?) \|", table, re.MULTILINE):
        # `--stuck-creating, -configuring` is short for two flags.
        stem = names.partition(",")[0].rpartition("-")[0]
        flags = [name if name.startswith("--") else stem + name for name in names.replace(" ", "").split(",")]
        values = [value.strip() for value in defaults.split(",")]
        found |= dict(zip(flags, values * len(flags) if len(values) == 1 else values, strict=False))
    return found


def flag_of(field: str) -> str:
    """Return the flag of a field."""
    return "--" + field.replace("_", "-")


@pytest.mark.rule("shard 1/1")
def test_the_flags_and_defaults_are_those_of_the_page() -> None:
    """All and only: what the page does not name (weights, holds, guard, parking) is no setting."""
    wanted = specified() | IN_WORDS
    defaults = {flag_of(name): value for name, value in vars_of(ShardFlags()).items()}

    assert set(defaults) - OF_THE_COMMAND == set(wanted)
    for flag, text in wanted.items():
        value = defaults[flag]
        assert value in (WRITTEN.get(text, text), *([type(value)(text)] if isinstance(value, int | float) else [])), (
            flag
        )


def vars_of(flags: ShardFlags) -> dict[str, object]:
    """Return the fields of the flags."""
    return {name: getattr(flags, name) for name in ShardFlags.__dataclass_fields__}


@pytest.mark.rule("shard 1/1")
def test_the_defaults_of_the_flags_are_those_of_a_shard() -> None:
    """Tests and simulation decide under the same settings as a process that was told nothing."""
    assert ShardFlags(provider_addr="127.0.0.1:1").settings() == ShardSettings()


@pytest.mark.rule("shard 1/2")
def test_off_closes_an_endpoint_or_leaves_the_timer_alone() -> None:
    """`--metrics-addr off` and `--wake-min-gap off`."""
    flags = ShardFlags(provider_addr=":1", metrics_addr="off", wake_min_gap="off")

    assert (flags.process().metrics_address, flags.settings().wake_gap_seconds) == (None, None)


WRONG = {
    "no provider": [],
    "an unknown flag": ["--provider-addr", ":1", "--shiny"],
    "no address": ["--provider-addr", "nowhere"],
    "no duration": ["--provider-addr", ":1", "--cycle-interval", "soon"],
    "an interval of nothing": ["--provider-addr", ":1", "--cycle-interval", "0s"],
    "no number": ["--provider-addr", ":1", "--execute-concurrency", "many"],
    "no slots": ["--provider-addr", ":1", "--execute-concurrency", "0"],
    "a share above one": ["--provider-addr", ":1", "--reclaim-cap-fraction", "1.5"],
    "a share that is no number": ["--provider-addr", ":1", "--reclaim-cap-fraction", "nan"],
    "an id with a blank": ["--provider-addr", ":1", "--id", "two words"],
    "an unknown gate": ["--provider-addr", ":1", "--join-gate", "sometimes"],
    "no size": ["--provider-addr", ":1", "--audit-log-max-bytes", "large"],
    "a coordinator without a host": ["--provider-addr", ":1", "--coordinator-addr", ":7790"],
    "a coordinator by its URL": ["--provider-addr", ":1", "--coordinator-addr", "http://a:7790"],
    "a coordinator at port 0": ["--provider-addr", ":1", "--coordinator-addr", "a:0"],
    "a list of coordinators with a hole": ["--provider-addr", ":1", "--coordinator-addr", "a:1,,b:2"],
    "an unknown ownership": ["--provider-addr", ":1", "--ownership", "some"],
    "nobody who assigns": ["--provider-addr", ":1", "--ownership", "assigned"],
    "an heir of nobody": ["--provider-addr", ":1", "--inherits", "old,"],
    "no pace": ["--provider-addr", ":1", "--report-interval", "0s"],
    "nowhere to be reached": ["--provider-addr", ":1", "--advertise-addr", "here"],
    "everywhere to be reached": ["--provider-addr", ":1", "--advertise-addr", ":7780"],
    "half of TLS": ["--provider-addr", ":1", "--tls-cert", "x.crt"],
}


@pytest.mark.rule("shard 1/3", "shard 1/19")
@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_a_wrong_call_ends_with_2_and_one_line_that_names_the_flag(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    started: list[object] = []
    monkeypatch.setattr(runtime, "run_loop", lambda main, **_limits: started.append(main))
    monkeypatch.setattr(sys, "argv", ["bigfleet", "shard", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr().err

    named = next((word for word in reversed(arguments) if word.startswith("--")), "--provider-addr")
    assert (ended.value.code, started, said.count("\n"), "Traceback" in said) == (2, [], 1, False)
    assert (named if named != "--tls-cert" else "--tls-key") in said


def process_in(tmp_path: Path, **changes: Any) -> ShardProcessSettings:
    """Return a place on loopback."""
    facts: dict[str, Any] = {
        "shard_id": ShardId("s"),
        "data_dir": tmp_path,
        "provider_address": ("127.0.0.1", 1),
        "listen_address": ("127.0.0.1", 0),
        "metrics_address": None,
    }
    return ShardProcessSettings(**(facts | changes))


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return the event that stops a process instead of a signal."""
    stop = asyncio.Event()
    monkeypatch.setattr(shard_process, "stop_on_signals", lambda: stop)
    return stop


@pytest.mark.rule("shard 1/5", "shard 15/3")
@pytest.mark.usefixtures("no_signals")
async def test_a_start_that_fails_names_what_was_in_the_way(tmp_path: Path) -> None:
    """A state file that another process holds, one that is damaged, a port that is taken, a log that is none."""
    with StateFile.open(tmp_path / "held", shard_id="s", clock=LoopClock()), pytest.raises(RunFault, match="held by"):
        await serve_shard(process_in(tmp_path / "held"), ShardSettings())

    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE_NAME).write_bytes(b"no database at all, and long enough to be read as one" * 40)
    with pytest.raises(RunFault, match="not a database"):
        await serve_shard(process_in(tmp_path / "damaged"), ShardSettings())

    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    with pytest.raises(RunFault, match=r"--audit-log .*hosts"):
        await serve_shard(process_in(tmp_path / "a", audit_log=tmp_path / "hosts"), ShardSettings())

    listening = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    with pytest.raises(RunFault, match="--listen"):
        await serve_shard(process_in(tmp_path / "b", listen_address=("127.0.0.1", port)), ShardSettings())
    with pytest.raises(RunFault, match="--metrics-addr"):
        await serve_shard(process_in(tmp_path / "c", metrics_address=("127.0.0.1", port)), ShardSettings())
    listening.close()


@pytest.mark.usefixtures("no_signals")
async def test_a_provider_at_an_ipv6_address_is_dialled_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its brackets the port would be taken for a part of the address."""

    class Dialled(Exception):
        pass

    def dial(address: str, **_facts: object) -> None:
        raise Dialled(address)

    monkeypatch.setattr(shard_process, "GrpcProvider", dial)
    process = ShardFlags(
        provider_addr="[::1]:9100", data_dir=tmp_path, listen="127.0.0.1:0", metrics_addr="off"
    ).process()
    with pytest.raises(Dialled, match=r"^\[::1\]:9100$"):
        await serve_shard(process, ShardSettings())


@pytest.mark.rule("shard 1/5")
def test_a_start_or_run_that_fails_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error, no traceback; a clean stop ends with 0."""
    monkeypatch.setattr(runtime, "configure_logging", lambda *_arguments: None)
    monkeypatch.setattr(sys, "argv", ["bigfleet", "shard", "--provider-addr", "127.0.0.1:1"])
    codes = []
    for end in (RunFault("the shard stopped by itself: no compiler"), 0):

        def run(_main: object, end: RunFault | int = end, **_limits: float) -> int:
            if isinstance(end, RunFault):
                raise end
            return end

        monkeypatch.setattr(runtime, "run_loop", run)
        with pytest.raises(SystemExit) as ended:
            main.main()
        codes.append(ended.value.code)

    assert codes == [1, 0]
    assert capsys.readouterr().err == "bigfleet: the shard stopped by itself: no compiler\n"


@pytest.mark.rule("shard 1/5")
@pytest.mark.usefixtures("no_signals")
async def test_an_engine_that_cannot_be_made_ends_the_process(tmp_path: Path) -> None:
    """A failure while running, told with its cause."""

    def broken(**_arguments: object) -> Any:
        raise OSError("no compiler")

    with pytest.raises(RunFault, match="stopped by itself"):
        await serve_shard(process_in(tmp_path), ShardSettings(), broken)


@pytest.mark.rule("shard 2/1")
def test_the_engine_runs_in_another_thread_than_the_loop() -> None:
    """So that streams are served while it decides."""
    assert asyncio.run(compute_in_thread(threading.get_ident)) != threading.get_ident()


@pytest.mark.rule("shard 1/16", "shard 1/22")
async def test_streams_close_before_actions_end_and_the_server_stops_last() -> None:
    """A graceful gRPC stop would wait for open streams for ever."""
    order: list[str] = []

    class FakeShard:
        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                order.append("actions ended")

        def stop_sessions(self) -> None:
            order.append("streams closed")

    class FakeServer:
        async def stop(self, grace_seconds: float) -> None:
            order.append(f"server stopped within {grace_seconds:g} s")

    class FakeReporter:
        async def run(self) -> None:
            await asyncio.Event().wait()

    async def stopped(reporter: Any) -> list[str]:
        order.clear()
        stop = asyncio.Event()
        asyncio.get_running_loop().call_soon(stop.set)
        shard: Any = FakeShard()
        server: Any = FakeServer()
        exchanges: Any = FakeReporter()
        await shard_process._run_until(stop, shard, exchanges, server, runtime.SystemClock(), reporter)
        return list(order)

    wanted = ["streams closed", "actions ended", f"server stopped within {STREAM_GRACE_SECONDS:g} s"]
    assert await stopped(None) == await stopped(FakeReporter()) == wanted
    assert {task.get_name() for task in asyncio.all_tasks()} & {"link", "shard", "exchanges", "stop"} == set()


@pytest.mark.rule("shard 1/18")
def test_a_stop_is_over_within_20_seconds() -> None:
    """Running calls and streams are the two things that are waited for, one after the other."""
    assert STOP_GRACE_SECONDS == 10
    assert STOP_GRACE_SECONDS + STREAM_GRACE_SECONDS < 20


@pytest.mark.rule("shard 1/18")
@pytest.mark.slow
async def test_a_stopped_process_has_let_go_of_its_files(tmp_path: Path, no_signals: asyncio.Event) -> None:
    """State file and audit log can be had by the next one at once; it gets the next epoch."""
    no_signals.set()
    audit_log = tmp_path / "audit.log"
    for _ in range(2):
        assert await serve_shard(process_in(tmp_path, audit_log=audit_log), ShardSettings()) == 0

    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as reader:
        (epochs,) = reader.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
    with StateFile.open(tmp_path, shard_id="s", clock=LoopClock()) as state_file:
        assert state_file.epoch == int(epochs) + 1
    assert audit_log.exists()


@pytest.mark.rule("shard 13/7")
async def test_a_hang_up_opens_the_audit_log_anew(tmp_path: Path, no_signals: asyncio.Event) -> None:
    """SIGHUP after the file was moved away: a new one is there (docs/spec/shard.md §13)."""
    audit_log, port = tmp_path / "audit.log", free_port()
    process = process_in(tmp_path, audit_log=audit_log, listen_address=("127.0.0.1", port))
    serving = asyncio.create_task(serve_shard(process, ShardSettings()))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not audit_log.exists():  # noqa: ASYNC110 - a file wakes nobody
            await asyncio.sleep(0.01)
        connected = False
        while not connected:
            with contextlib.suppress(OSError):
                _reader, writer = await asyncio.open_connection("127.0.0.1", port)
                connected = True
                writer.close()
            await asyncio.sleep(0.01)
        audit_log.rename(tmp_path / "audit.log.1")
        os.kill(os.getpid(), signal.SIGHUP)
        while not audit_log.exists():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)
    no_signals.set()

    assert await serving == 0


@pytest.mark.rule("shard 2/6")
def test_a_state_file_is_written_through(tmp_path: Path) -> None:
    """WAL and synchronous=FULL (docs/spec/shard.md §2)."""
    with StateFile.open(tmp_path, shard_id="s", clock=_Wall()) as state_file:
        pragmas = [
            state_file._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
        ]

    assert pragmas == ["wal", 2]


class _Wall:
    def monotonic_seconds(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return 10**18

    async def sleep(self, _seconds: float) -> None:
        raise AssertionError("a state file never waits")
