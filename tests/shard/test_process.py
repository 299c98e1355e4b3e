"""A shard's process while it starts: health answers, kernels are loaded apart, and the flags reach what they set."""

import asyncio
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.runtime.plan_workers import ProcessPlanWorkers
from bigfleet.cli.shard import process as shard_process
from bigfleet.cli.shard.process import serve_shard
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.model.ids import ShardId
from bigfleet.model.need import Need
from bigfleet.planner.composition import Composition
from bigfleet.planner.problem import Problem
from bigfleet.planner.search import Effort
from bigfleet.rpc.wire.convert_need import needs_to_wire
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shard_pb2, shard_pb2_grpc
from bigfleet.shard.cycle.engine_runner import DecisionEngine, EngineDivergence, fleet_engine
from bigfleet.shard.ports import ShardSettings
from tests.exchange.building import need, pods
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port


@asynccontextmanager
async def empty_provider() -> AsyncIterator[int]:
    """Serve a provider without machines; yield its port."""

    async def list_nothing(_request: bytes, _context: Any) -> bytes:
        return provider_pb2.MachineList().SerializeToString()

    name = provider_pb2.DESCRIPTOR.services_by_name["CapacityProvider"].full_name
    handlers = {"List": grpc.unary_unary_rpc_method_handler(list_nothing)}
    server = aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def status_of(port: int, path: str) -> int:
    """Return the HTTP status of a path, 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


def text_of(port: int, path: str) -> str:
    """Return the text of a path that answers with an error."""
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS)
    return refusal.value.read().decode().strip()


def until_status(port: int, path: str, wanted: int) -> None:
    """Return once a path answers with the status. Raises AssertionError when it never does."""
    wait_until(lambda: status_of(port, path) == wanted, f"{path} never answered {wanted}", poll_seconds=0.02)


@pytest.mark.rule("shard 1/5", "shard 1/10", "shard 1/14")
async def test_health_answers_while_the_engine_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP and gRPC; the process is not ready before its kernels are warm and its machines are known."""
    stop, may_end = asyncio.Event(), threading.Event()
    monkeypatch.setattr(shard_process, "stop_on_signals", lambda: stop)

    def slow(*, verify_every_cycles: int, on_divergence: Callable[[EngineDivergence], None]) -> DecisionEngine:
        assert may_end.wait(PATIENCE_SECONDS)
        return fleet_engine(verify_every_cycles=verify_every_cycles, on_divergence=on_divergence)

    http, rpc = free_port(), free_port()
    async with empty_provider() as provider:
        process = ShardProcessSettings(
            shard_id=ShardId("s"),
            data_dir=tmp_path,
            provider_address=("127.0.0.1", provider),
            listen_address=("127.0.0.1", rpc),
            metrics_address=("127.0.0.1", http),
        )
        serving = asyncio.create_task(serve_shard(process, ShardSettings(cycle_interval_seconds=0.05), slow))
        try:
            await asyncio.to_thread(until_status, http, "/healthz", 200)
            async with aio.insecure_channel(f"127.0.0.1:{rpc}") as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert (await asyncio.to_thread(status_of, http, "/readyz"), serving.done()) == (503, False)

            assert await asyncio.to_thread(text_of, http, "/readyz") in (
                "making the engine",
                "waiting for the provider's first list of machines; see reconcile.failed in the log",
            )

            may_end.set()
            await asyncio.to_thread(until_status, http, "/readyz", 200)
        finally:
            may_end.set()
            stop.set()
            assert await serving == 0


class Planners(ProcessPlanWorkers):
    """Counts how often workers are started, and never plans."""

    started = 0

    def start(self) -> None:
        type(self).started += 1

    async def plan(self, problem: Problem, effort: Effort) -> Composition:
        return await asyncio.Future()


def rollup(number: int, *rows: Need) -> shard_pb2.OperatorMessage:
    """Return a roll-up of cluster c."""
    needs = capacity_pb2.ClusterCapacityNeeds(
        cluster_id="c", timestamp_unix_nanos=time.time_ns() + number, needs=needs_to_wire(rows)
    )
    return shard_pb2.OperatorMessage(rollup=needs)


@pytest.mark.rule("shard 4.1/1")
async def test_a_planner_starts_with_the_first_demand_over_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without such demand nothing is planned, and a worker takes more than a second of processor time to start."""
    stop, over_pods = asyncio.Event(), need(pods(500, 1, 3))
    monkeypatch.setattr(shard_process, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(shard_process, "ProcessPlanWorkers", Planners)
    rpc, started = free_port(), Planners.started
    async with empty_provider() as provider:
        process = ShardProcessSettings(
            shard_id=ShardId("s"),
            data_dir=tmp_path,
            provider_address=("127.0.0.1", provider),
            listen_address=("127.0.0.1", rpc),
            metrics_address=None,
        )
        serving = asyncio.create_task(serve_shard(process, ShardSettings(cycle_interval_seconds=0.05), fleet_engine))
        try:
            async with aio.insecure_channel(f"127.0.0.1:{rpc}") as channel:
                stub: Any = shard_pb2_grpc.ShardStub(channel)
                session = stub.Session(wait_for_ready=True)
                await session.write(shard_pb2.OperatorMessage(hello=shard_pb2.Hello(cluster_id="c")))
                await session.read()
                for number, row in enumerate((replace(over_pods, shapes=()), over_pods)):
                    await session.write(rollup(number, row))
                    while (await session.read()).ack.echo != "rollup":
                        pass
                    assert Planners.started - started == number
        finally:
            stop.set()
            assert await serving == 0


@pytest.mark.rule("shard 1/14")
def test_a_process_loads_no_kernels_before_it_says_where_they_are_kept() -> None:
    """Neither the command nor what it puts together imports them, so that the loop runs when they are loaded."""
    program = (
        "import sys, bigfleet.cli.shard.process; print([m for m in sys.modules if 'numba' in m or 'kernels' in m])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )

    assert said.stdout.strip() == "[]"


@pytest.mark.rule("shard 1/8")
@pytest.mark.parametrize(("flags", "cycles"), [((), 100), (("--engine-verify-every", "0"), 0)])
def test_how_often_a_decision_is_checked_is_a_flag(
    flags: tuple[str, ...], cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 100 decisions unless told otherwise; 0 is off."""
    given: list[ShardSettings] = []

    async def serve(_process: ShardProcessSettings, settings: ShardSettings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr(shard_process, "serve_shard", serve)
    monkeypatch.setattr(runtime, "configure_logging", lambda *_arguments: None)
    result = CliRunner().invoke(app, ["shard", "--provider-addr", "127.0.0.1:1", *flags])

    assert (result.exit_code, [settings.engine_verify_every_cycles for settings in given]) == (0, [cycles])


def test_a_negative_number_of_cycles_is_refused() -> None:
    """Before anything is started."""
    result = CliRunner().invoke(app, ["shard", "--provider-addr", "127.0.0.1:1", "--engine-verify-every", "-1"])

    assert (result.exit_code, "--engine-verify-every" in result.output) == (2, True)
