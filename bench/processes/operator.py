"""Runs one operator against `bench.processes.api_server`, with a shard that acknowledges everything that it is sent.

Everything but the shard is what `bigfleet operator` runs; the parts of a session over gRPC are W11's. The process
watches itself: processor time, memory, and how late its event loop is. Words come in, JSON objects go out. Nothing here
may do work of the operator's in its place.
"""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

# Also for what the process of the command has in memory: gRPC, the metrics server.
from bigfleet.cli.operator import process as command  # isort: skip

from bench.cluster_objects import machine_id
from bench.harness import resident_mib
from bench.processes.streams import next_command, say, until
from bigfleet.cli.runtime import interpreter
from bigfleet.cli.runtime.system import SystemClock, configure_logging, run_loop, system_rng
from bigfleet.model import frames
from bigfleet.model.frames import NodeStateUpdate, OperatorFrame, RollUp, ShardFrame
from bigfleet.model.ids import ClusterId
from bigfleet.model.states import MachineState
from bigfleet.operator.agent import AgentSettings, KubernetesAgent
from bigfleet.operator.bootstrap.service import StubBootstrapService
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.events import EventRecorder
from bigfleet.operator.kubernetes.http import HttpKubernetesApi
from bigfleet.operator.kubernetes.objects import KubernetesObject
from bigfleet.operator.metrics import OperatorMetrics
from bigfleet.operator.ports import EndKind, SessionEnded
from bigfleet.operator.session import SessionSettings
from bigfleet.operator.views import OperatorViews

#: The modules of the real process are loaded, for its memory and start.
_SERVE: Final = command.serve_operator
CLUSTER: Final = ClusterId("bench")
#: Requests a second to the API server; the default would make a backlog of thousands take minutes.
QPS: Final = 500.0
LAG_SAMPLE_SECONDS: Final = 0.005
_CAPABILITIES: Final = frozenset(
    {frames.CAPABILITY_NODE_STATUS, frames.CAPABILITY_DRAIN_RESULT, frames.CAPABILITY_NEED_STATUS}
)


class AgreeingShard:
    """A dialer whose shard names the machines, acknowledges each roll-up, and calls every need met."""

    def __init__(self, machines: int) -> None:
        self._machines = machines
        self._frames: asyncio.Queue[ShardFrame | SessionEnded] = asyncio.Queue()
        self.roll_ups = 0
        self.rows = 0
        self.sessions = 0
        #: Processor time of the process, and time since its start, when the first roll-up was sent.
        self.first_cpu_seconds = 0.0
        self.first_seconds = 0.0

    @asynccontextmanager
    async def dial(self) -> AsyncIterator["AgreeingShard"]:
        """Open a session: Hello's answer, the machines, and that these are all."""
        self._frames = asyncio.Queue()
        self.sessions += 1
        self._say(frames.Acknowledgement(echo=frames.ECHO_HELLO, capabilities=_CAPABILITIES))
        for index in range(self._machines):
            self._say(
                NodeStateUpdate(
                    machine_id=machine_id(index),
                    cluster_id=CLUSTER,
                    state=MachineState.CONFIGURED,
                    provider_id=f"bench:///{machine_id(index)}",
                )
            )
        self._say(frames.Acknowledgement(echo=frames.ECHO_RESYNC))
        yield self

    def _say(self, frame: ShardFrame | SessionEnded) -> None:
        self._frames.put_nowait(frame)

    def has_sent(self, roll_ups: int) -> bool:
        """Return whether so many roll-ups have come."""
        return self.roll_ups >= roll_ups

    def end(self) -> None:
        """Lose the session."""
        self._say(SessionEnded(EndKind.LOST, "the benchmark ends it"))

    async def send(self, frame: OperatorFrame) -> None:
        """Acknowledge roll-ups."""
        if not isinstance(frame, RollUp):
            return
        self.roll_ups += 1
        self.rows = len(frame.needs)
        if not self.first_cpu_seconds:
            self.first_cpu_seconds, self.first_seconds = time.process_time(), time.monotonic()
        stamp = frame.timestamp_unix_nanos
        self._say(frames.Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=stamp))
        self._say(
            frames.NeedStatusUpdate(
                cycle=self.roll_ups, computed_at_unix_nanos=stamp, rows=(), rollup_timestamp_unix_nanos=stamp
            )
        )

    async def receive(self) -> ShardFrame | None:
        """Return the next frame."""
        frame = await self._frames.get()
        if isinstance(frame, SessionEnded):
            raise frame
        return frame


class Counting:
    """Counts the changes of a view; a listener that comes last."""

    def __init__(self) -> None:
        self.puts = 0

    def put(self, stored: KubernetesObject, former: KubernetesObject | None) -> None:
        """Count one."""
        self.puts += 1

    def has_heard(self, puts: int) -> bool:
        """Return whether there were so many."""
        return self.puts >= puts

    def remove(self, former: KubernetesObject) -> None:
        """Nothing is deleted here."""


class Watch:
    """How late the loop is, and what the process has taken since the last look."""

    def __init__(self) -> None:
        self._lags_ms = [0.0]
        self._own_lags_ms = [0.0]
        self._cpu_seconds = 0.0

    async def sample(self) -> None:
        """Ask the loop without end how late it is."""
        while True:
            asked_seconds, cpu_seconds = time.monotonic(), time.process_time()
            await asyncio.sleep(LAG_SAMPLE_SECONDS)
            lag_ms = (time.monotonic() - asked_seconds - LAG_SAMPLE_SECONDS) * 1000
            self._lags_ms.append(lag_ms)
            self._own_lags_ms.append(min(lag_ms, (time.process_time() - cpu_seconds) * 1000))

    def figures(self) -> dict[str, float]:
        """Return what there was since the last call."""
        cpu_seconds = time.process_time()
        found = {
            "cpu_seconds": cpu_seconds - self._cpu_seconds,
            "lag_max_ms": max(self._lags_ms),
            "own_lag_max_ms": max(self._own_lags_ms),
            "rss_mib": resident_mib(),
            "rss_peak_mib": resident_mib("VmHWM"),
        }
        self._cpu_seconds, self._lags_ms, self._own_lags_ms = cpu_seconds, [0.0], [0.0]
        return found


async def run(port: int, machines: int) -> int:
    """Represent the cluster until standard input ends."""
    started_seconds = time.monotonic()
    import_cpu_seconds = time.process_time()
    interpreter.settle()
    clock, rng = SystemClock(), system_rng()
    shard, watch = AgreeingShard(machines), Watch()
    sampling = asyncio.create_task(watch.sample())
    endpoint = ApiEndpoint(server=f"http://127.0.0.1:{port}", source="the benchmark")
    async with HttpKubernetesApi(endpoint, clock=clock, user_agent="bench", qps=QPS, burst=int(QPS)) as api:
        views = OperatorViews(api, clock=clock, rng=rng)
        following = asyncio.create_task(views.run())
        await views.wait_synced()
        agent = KubernetesAgent(
            cluster=CLUSTER,
            api=api,
            views=views,
            bootstrap=StubBootstrapService(),
            events=EventRecorder(api, component="bench", instance="bench", clock=clock),
            dialer=shard,
            metrics=OperatorMetrics(CollectorRegistry()),
            clock=clock,
            rng=rng,
            settings=AgentSettings(session=SessionSettings()),
        )
        leading = asyncio.create_task(agent.run())
        counts = {"capacityrequests": Counting(), "pods": Counting()}
        views.capacity_requests.add_listener(counts["capacityrequests"])
        views.pods.add_listener(counts["pods"])
        await until(lambda: bool(shard.roll_ups))
        seen = {plural: each.puts for plural, each in counts.items()}
        say(
            requests=agent.figures().requests,
            rows=shard.rows,
            import_cpu_seconds=import_cpu_seconds,
            first_cpu_seconds=shard.first_cpu_seconds,
            first_seconds=shard.first_seconds - started_seconds,
        )
        while line := await next_command():
            word, *arguments = line.split()
            if word == "wait":
                counted = counts[arguments[0]]
                awaited = seen[arguments[0]] = seen[arguments[0]] + int(arguments[1])
                await until(partial(counted.has_heard, awaited))
            elif word == "rest":
                gc.collect()
            elif word == "reconnect":
                shard.end()
                await until(partial(shard.has_sent, shard.roll_ups + 1))
            figures: dict[str, Any] = watch.figures()
            say(**figures, acknowledged=agent.figures().acknowledged, roll_ups=shard.roll_ups, rows=shard.rows)
        for task in (leading, following, sampling):
            task.cancel()
        await asyncio.gather(leading, following, sampling, return_exceptions=True)
    return 0


def main() -> None:
    """Run it at the port of an API server, with so many machines."""
    port, machines = (int(number) for number in sys.argv[1:])
    configure_logging("bench-operator", "error")
    sys.exit(run_loop(lambda: run(port, machines)))


if __name__ == "__main__":
    main()
