"""`bigfleet shard --fake-provider N`: a shard of fake machines in one process (docs/spec/shard.md §1)."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli import main
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.shard import fake as shard_fake
from bigfleet.cli.shard import process as shard_process
from bigfleet.cli.shard.command import ShardFlags
from bigfleet.cli.shard.fake import serving_fake
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.engine.columnar.engine import warm_up
from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.states import MachineState
from bigfleet.rpc.clients.provider import GrpcProvider
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.shard.ports import FenceToken, Listing, ProviderRefusal, RefusalKind, ShardSettings
from tests.e2e.fault_world import LiveOperator, LiveShard, until
from tests.patience import PATIENCE_SECONDS
from tests.processes import serving
from tests.rpc.security.tls_world import SHARD, Certificates

CONFIGURED = "MACHINE_STATE_CONFIGURED"
FAKE = ["--fake-provider", "3"]

WRONG = {
    "both providers": ([*FAKE, "--provider-addr", ":1"], ("--provider-addr", "--fake-provider", "contradict")),
    "neither": ([], ("--provider-addr", "--fake-provider", "missing")),
    "no machines": (["--fake-provider", "0"], ("--fake-provider", "greater than or equal to 1")),
    "fewer than none": (["--fake-provider", "-1"], ("--fake-provider", "greater than or equal to 1")),
    "more than the loop takes": (
        ["--fake-provider", "10001"],
        ("--fake-provider", "less than or equal to 10000"),
    ),
    "no number": (["--fake-provider", "many"], ("--fake-provider", "valid integer")),
    "nothing said": (["--fake-provider"], ("--fake-provider", "requires an argument")),
    "a coordinator": ([*FAKE, "--coordinator-addr", "a:7790"], ("--coordinator-addr", "--fake-provider", "contradict")),
    "nobody who assigns": ([*FAKE, "--ownership", "assigned"], ("--ownership", "--coordinator-addr")),
}


@pytest.mark.rule("shard 1/6")
@pytest.mark.parametrize(("arguments", "wanted"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_ends_with_2_and_one_line(
    arguments: list[str], wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both providers or none, a number of machines that is none, and whoever would count on machines that are fake."""
    started: list[object] = []
    monkeypatch.setattr(runtime, "run_loop", lambda main, **_limits: started.append(main))
    monkeypatch.setattr(sys, "argv", ["bigfleet", "shard", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr().err

    assert (ended.value.code, started, said.count("\n"), "Traceback" in said) == (2, [], 1, False)
    assert [part for part in wanted if part not in said] == []


@pytest.mark.rule("shard 1/6")
def test_a_place_has_an_address_or_fake_slots() -> None:
    """Never both, never neither."""
    fake, real = ShardFlags(fake_provider=7).process(), ShardFlags(provider_addr="127.0.0.1:9100").process()

    assert (fake.provider_address, fake.fake_slots) == (None, 7)
    assert (real.provider_address, real.fake_slots) == (("127.0.0.1", 9100), None)


@pytest.mark.rule("shard 1/7")
def test_a_shard_with_a_real_provider_loads_nothing_of_the_kit() -> None:
    """Neither the command nor what it puts together."""
    program = (
        "import sys, bigfleet.cli.shard.command, bigfleet.cli.shard.process;"
        "print([m for m in sys.modules if m.startswith('bigfleet.provider') or m == 'bigfleet.cli.shard.fake'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )

    assert said.stdout.strip() == "[]"


@pytest.mark.rule("shard 1/7")
async def test_the_kit_answers_on_loopback_and_is_gone_with_its_context() -> None:
    """Inventory at once and fence as any provider; afterwards nobody listens on the port."""
    clock = SystemClock()
    async with serving_fake(5, clock) as (host, port):
        provider = GrpcProvider(f"{host}:{port}", clock=clock)
        states = [record.machine.state for record in (await provider.list(b"")).records]
        await provider.create(MachineId("fake-0"), FenceToken(ShardId("s"), epoch=2, sequence=1))
        with pytest.raises(ProviderRefusal) as refused:
            await provider.create(MachineId("fake-0"), FenceToken(ShardId("s"), epoch=1, sequence=9))
        await provider.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection(host, port)

    assert (host, states) == ("127.0.0.1", [MachineState.SPECULATIVE] * 5)
    assert refused.value.kind is RefusalKind.FENCED


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return the event that stops a process instead of a signal."""
    stop = asyncio.Event()
    monkeypatch.setattr(shard_process, "stop_on_signals", lambda: stop)
    return stop


@pytest.mark.rule("shard 1/7")
async def test_it_ends_after_the_shard_and_needs_no_certificate(
    tmp_path: Path, stop: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard with TLS reads its fake machines, and the last call of its stop would still be answered."""
    order: list[str] = []

    @asynccontextmanager
    async def watched(slot_count: int, clock: SystemClock) -> AsyncIterator[tuple[str, int]]:
        async with serving_fake(slot_count, clock) as address:
            yield address
            order.append("fake ends")

    class Watched(GrpcProvider):
        async def list(self, since_revision: bytes) -> Listing:
            answer = await super().list(since_revision)
            order.append(f"{len(answer.records)} machines")
            stop.set()
            return answer

        async def close(self) -> None:
            await super().close()
            order.append("channel closed")

    monkeypatch.setattr(shard_fake, "serving_fake", watched)
    monkeypatch.setattr(shard_process, "GrpcProvider", Watched)
    certificates = Certificates.make(tmp_path / "certs")
    process = ShardProcessSettings(
        shard_id=ShardId("s1"),
        data_dir=tmp_path / "data",
        provider_address=None,
        fake_slots=4,
        listen_address=("127.0.0.1", 0),
        metrics_address=None,
        tls=TlsFiles(certificates.write("shard", certificates.issue(SHARD))),
    )

    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await shard_process.serve_shard(process, ShardSettings(), _no_engine) == 0
    assert order == ["4 machines", "channel closed", "fake ends"]


def _no_engine(**_arguments: object) -> Any:
    """Return what is never asked: the process stops with its first inventory."""
    return None


@pytest.mark.rule("shard 1/7")
@pytest.mark.slow
def test_a_clusters_demand_is_served_by_fake_machines(tmp_path: Path) -> None:
    """A process of its own, from demand to bound machines to a clean stop; on disk is what any shard keeps."""
    # The process would compile the engine's kernels for itself, for a minute.
    warm_up()
    shard = LiveShard(tmp_path, "none")
    flags = ("--listen", shard.address, "--metrics-addr", "off", "--data-dir", str(tmp_path / "data"))
    pace = ("--cycle-interval", "200ms", "--wake-min-gap", "50ms")
    with serving(shard.address, shard.log, "shard", "--fake-provider", "6", *flags, *pace) as process:
        operator = LiveOperator(shard.address, "blue")
        operator.report("9")
        bound = until(lambda: shard.bound("blue"), lambda b: list(b.values()) == [CONFIGURED] * 2, "two machines")
        known = shard.machines()
        operator.close()

    assert (set(bound) < set(known), set(known)) == (True, {f"fake-{number}" for number in range(6)})
    assert [(said["slots"], said["level"], said["advice"]) for said in shard.said("shard.fake_provider_started")] == [
        (6, "warning", "the machines are fake and are discarded when the process ends")
    ]
    assert (process.returncode, len(shard.said("shard.stopped")), shard.log.read_text().count("Traceback")) == (0, 1, 0)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["shard.db", "shard.db.commits", "shard.lock"]
