"""A shard decides while its kernels are compiled, and decides the same with them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bigfleet.cli.runtime.kernel_build import KernelBuildFault, build_kernels
from bigfleet.cli.runtime.kernel_cache import keep_kernels
from bigfleet.cli.runtime.kernel_set import KERNELS
from bigfleet.cli.shard import engines
from bigfleet.cli.shard.engines import ShardEngines, UncompiledEngine
from bigfleet.engine.columns.store import ColumnStore
from bigfleet.engine.decision import Options, unheard
from bigfleet.engine.fleet_engine import FleetEngine
from bigfleet.model.need import Need
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import MachineState as S
from bigfleet.model.vector import parse_vector
from bigfleet.shard.cycle.engine_runner import DecisionEngine, EngineDivergence
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, World, machine, need

CYCLES = 8


class FakeBuild:
    """A build that ends when the test says so."""

    def __init__(self, *, is_built: bool = True) -> None:
        self.end = threading.Event()
        self._is_built = is_built

    @property
    def is_over(self) -> bool:
        """Return whether the test has ended it."""
        return self.end.is_set()

    def wait(self) -> bool:
        """Wait for the test."""
        assert self.end.wait(PATIENCE_SECONDS)
        return self._is_built


async def chain_of(switch_after: int, *, pods: bool) -> list[bytes]:
    """Return the audit log of a shard whose kernels are there after that many cycles; its demand changes."""
    provider, log, build = ScriptedProvider(), MemoryAuditLog(), FakeBuild()
    for number in range(12):
        provider.add(machine(f"m{number:02}", S.IDLE if number % 3 else S.SPECULATIVE, price_usd_per_hour=1.0 + number))

    def make(*, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> DecisionEngine:
        return UncompiledEngine(
            build, lambda: FleetEngine(verify_every_cycles=verify_every_cycles, on_divergence=on_divergence)
        )

    world = World(provider, make_engine=make, audit_log=log)
    operators = {name: world.connect(name) for name in ("c1", "c2")}
    for cycle in range(CYCLES):
        if cycle == switch_after:
            build.end.set()
        high = need("c1", str(4 * (cycle % 5 + 1)), priority=1000)
        low = need("c2", str(4 * (6 - cycle % 4)), priority=10)
        operators["c1"].report(*([with_pods(high, 4 * (cycle % 5 + 1))] if pods else [high]))
        operators["c2"].report(low)
        await world.cycle()
        provider.settle()
    return log.lines


@cache
def chain_from_the_start(*, pods: bool) -> list[bytes]:
    """Return the audit log of a shard that has kernels from the start."""
    return run_virtual(lambda: chain_of(0, pods=pods))


def with_pods(row: Need, cpu: int) -> Need:
    """Return the row with that many pods of one cpu."""
    return replace(row, shapes=(DemandShape(parse_vector({"cpu": "1"}), cpu),))


@pytest.mark.parametrize("pods", [False, True], ids=["aggregates", "pods"])
@pytest.mark.parametrize("switch_after", range(1, CYCLES))
def test_the_compiled_engine_takes_over_between_any_two_cycles(switch_after: int, pods: bool) -> None:
    """No action or reason changes: the audit log is, to the byte, that of a shard that had kernels from the start."""
    chain = run_virtual(lambda: chain_of(switch_after, pods=pods))

    assert len(chain) > CYCLES
    assert chain == chain_from_the_start(pods=pods)


def decided(engine: UncompiledEngine) -> None:
    """Decide once on one machine and one row."""
    store = ColumnStore()
    store.insert(machine("m1", S.IDLE), None)
    options = Options(now_seconds=0.0, reported=frozenset({"c1"}))
    decision = engine.decide(store.snapshot(), [need("c1", "4")], options, on_phase=unheard)
    assert [action.machine_id for action in decision.actions] == ["m1"]


async def test_a_large_fleet_waits_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain engine would hold up every cycle for longer than the build takes."""
    monkeypatch.setattr(engines, "PLAIN_MACHINES_MAX", 0)
    build = FakeBuild()
    engine = UncompiledEngine(build, FleetEngine)
    deciding = asyncio.create_task(asyncio.to_thread(decided, engine))
    await asyncio.to_thread(wait_until, lambda: engine.is_waiting, "nothing waits")
    build.end.set()
    await deciding

    assert not engine.is_waiting


async def test_a_shard_that_stops_compiles_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PLAIN_MACHINES_MAX", 0)
    build = FakeBuild(is_built=False)
    engine = UncompiledEngine(build, FleetEngine)
    deciding = asyncio.create_task(asyncio.to_thread(decided, engine))
    await asyncio.to_thread(wait_until, lambda: engine.is_waiting, "nothing waits")
    engine.is_closed = True
    build.end.set()

    with pytest.raises(KernelBuildFault, match="the shard has stopped"):
        await deciding


def test_a_build_that_fails_is_told_and_the_shard_compiles_for_itself() -> None:
    build = FakeBuild(is_built=False)
    build.end.set()
    engine = UncompiledEngine(build, FleetEngine)
    with capture_logs() as logs:
        decided(engine)
        decided(engine)

    assert [entry["event"] for entry in logs] == ["kernels.build_failed"]


def test_kernels_that_are_at_hand_are_used_at_once() -> None:
    """Nothing is built, and the gauge says that everything is there."""
    cache = keep_kernels()
    assert cache is not None
    build_kernels(cache.directory)
    registry = CollectorRegistry()
    made = ShardEngines(registry)
    engine = made.make(verify_every_cycles=0, on_divergence=lambda _divergence: None)

    assert isinstance(engine, FleetEngine)
    assert (made.why_waiting, registry.get_sample_value("bigfleet_shard_kernels_compiled_ratio")) == ("", 1.0)


def get(port: int, path: str) -> str:
    """Return what a path answers, "" while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())
    except urllib.error.URLError:
        return ""


def sample(metrics: str, name: str) -> float:
    """Return the value of a metric without labels."""
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} ")), 0.0)


@pytest.mark.slow
def test_a_shard_without_kernels_decides_while_they_are_compiled(tmp_path: Path) -> None:
    """A real process with an empty cache is ready and has decided before its kernels are there; it stops when told to,
    and what compiles for it ends with it."""
    http = free_port()
    command = [sys.executable, "-m", "bigfleet", "shard", "--id", "s", "--data-dir", str(tmp_path / "data")]
    command += ["--fake-provider", "8", "--listen", "127.0.0.1:0", "--metrics-addr", f"127.0.0.1:{http}"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("BIGFLEET_KERNELS", None)
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: get(http, "/readyz") == "ready\n", "never ready")
            wait_until(
                lambda: sample(get(http, "/metrics"), "bigfleet_shard_cycle_last_success_timestamp_seconds") > 0,
                "never decided",
            )
            ratio = sample(get(http, "/metrics"), "bigfleet_shard_kernels_compiled_ratio")
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        finally:
            process.send_signal(signal.SIGTERM)
            _out, said = process.communicate(timeout=PATIENCE_SECONDS)

    assert ratio < 1
    assert "kernels.build_started" in said
    assert "Traceback" not in said
    assert process.returncode == 0
    assert children.stdout.split()
    wait_until(
        lambda: not any(Path(f"/proc/{child}").exists() for child in children.stdout.split()), "a child lives on"
    )
    assert len(list((tmp_path / "cache").rglob("*.nbi"))) < KERNELS
