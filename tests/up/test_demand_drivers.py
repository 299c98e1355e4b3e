"""How demand moves: samples of exactly their trace second, and a clock that resumes where it stood."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.up.demand_drivers import SAMPLES, DemoDriver, ReplayDriver
from bigfleet.cli.up.observer import ClusterFigures, FleetFigures
from bigfleet.cli.up.settings import RunIdentity, UpSettings
from bigfleet.cli.up.state_dir import StateDir
from bigfleet.demo.cluster import RollUpRejected
from bigfleet.demo.fleet import default_fleet
from bigfleet.demo.trace import TracePod, TraceReplay
from bigfleet.demo.workload import WorkloadReplay
from bigfleet.model.vector import Vector, add
from bigfleet.operator.requests import CapacityRequest, map_request
from bigfleet.sim.kernel.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

REPORT_SECONDS = 0.05


class FakeCluster:
    """Takes demand, and reports it after a moment."""

    def __init__(self) -> None:
        self.alive: dict[str, CapacityRequest] = {}
        self.reported: Vector = {}
        self.sessions_lost = 0
        #: Reports that the shard forgets because it is restarted after them.
        self.restarts_after_reports = 0
        self.rejection = ""

    def apply(self, *, add: Iterable[CapacityRequest] = (), remove: Iterable[str] = ()) -> None:
        for request_id in remove:
            del self.alive[request_id]
        self.alive.update({request.id: request for request in add})

    async def report(self) -> None:
        await asyncio.sleep(REPORT_SECONDS)
        if self.rejection:
            raise RollUpRejected(self.rejection)
        total: Vector = {}
        for request in self.alive.values():
            total = add(total, map_request(request).vector)
        self.reported = total
        if self.restarts_after_reports:
            self.restarts_after_reports -= 1
            self.reported = {}
            self.sessions_lost += 1

    def statistics(self) -> Any:
        return SimpleNamespace(sessions_lost_total=self.sessions_lost, connected=True)


class FakeObserver:
    """A shard that knows what was reported."""

    answers = True

    def __init__(self, clusters: dict[str, FakeCluster]) -> None:
        self._clusters = clusters

    @property
    def figures(self) -> FleetFigures:
        return FleetFigures(
            cycle=1,
            clusters={name: ClusterFigures(demand=cluster.reported) for name, cluster in self._clusters.items()},
        )

    async def look_after(self, unix_nanos: int) -> FleetFigures:
        await asyncio.sleep(REPORT_SECONDS)
        return self.figures


def pods() -> list[TracePod]:
    return [
        TracePod(
            name=f"p{number}",
            cpu_milli=1000,
            memory_mib=1,
            gpus=0,
            gpu_milli=0,
            gpu_models=(),
            qos="LS",
            creation_second=number * 10,
            deletion_second=number * 10 + 50,
        )
        for number in range(60)
    ]


def settings(*, for_seconds: float | None, speed: float | None) -> UpSettings:
    return UpSettings(
        for_seconds=for_seconds,
        speed=speed,
        clusters=2,
        machines=40,
        seed=1,
        state_dir=Path("unused"),
        fresh=False,
        report=None,
        trace=None,
    )


class Bench:
    """A replay over two fake clusters."""

    def __init__(self, state: StateDir, *, for_seconds: float | None = 30.0, speed: float | None = None) -> None:
        self.clusters = {"a": FakeCluster(), "b": FakeCluster()}
        self.driver = ReplayDriver(
            replay=TraceReplay(pods(), ["a", "b"]),
            clusters=self.clusters,  # type: ignore[arg-type]
            observer=FakeObserver(self.clusters),  # type: ignore[arg-type]
            settings=settings(for_seconds=for_seconds, speed=speed),
            state=state,
            clock=LoopClock(),
        )


def open_state(path: Path) -> StateDir:
    return StateDir.open(path, identity=RunIdentity(2, 40, 1, "x"), fresh=False)


def expected_cores(second: float) -> float:
    return sum(pod.creation_second <= second < (pod.deletion_second or 0) for pod in pods())


async def test_each_sample_is_the_demand_of_its_second(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        bench = Bench(state)
        await bench.driver.run()

    points = bench.driver.timeline
    assert len(points) == SAMPLES + 1
    assert (points[0].seconds, points[-1].seconds) == (0, 640)
    assert [point.demand.get("cpu", 0) for point in points] == [expected_cores(point.seconds) for point in points]
    assert bench.driver.finished


async def test_a_replay_fits_the_time_that_it_is_given(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with open_state(tmp_path) as state:
        await Bench(state, for_seconds=30.0).driver.run()

    assert loop.time() == pytest.approx(30.0, rel=0.1)


async def test_a_replay_with_a_speed_takes_the_trace_s_time_and_its_samples_on_top(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with open_state(tmp_path) as state:
        await Bench(state, for_seconds=None, speed=10.0).driver.run()

    assert loop.time() == pytest.approx(640 / 10 + (SAMPLES + 1) * 2 * REPORT_SECONDS, rel=0.05)


async def test_a_sample_is_taken_again_when_the_shard_forgot_it(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        bench = Bench(state)
        bench.clusters["b"].restarts_after_reports = 3
        await bench.driver.run()

    points = bench.driver.timeline
    assert [point.demand.get("cpu", 0) for point in points] == [expected_cores(point.seconds) for point in points]


async def test_a_stopped_replay_takes_the_samples_that_are_left(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        first = Bench(state)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.driver.run(), 11.3)
        first.driver.save()
        taken = len(first.driver.timeline)
        second = Bench(state)
        await second.driver.run()

    points = second.driver.timeline
    assert 10 < taken < SAMPLES
    assert [point.seconds for point in points] == second.driver.sample_seconds()
    assert [point.demand.get("cpu", 0) for point in points] == [expected_cores(point.seconds) for point in points]


async def test_a_roll_up_that_is_refused_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        bench = Bench(state)
        bench.clusters["a"].rejection = "row 3: no key"
        with pytest.raises(RunFault, match="row 3: no key"):
            await bench.driver.run()


async def test_a_shard_that_never_answers_ends_the_run(tmp_path: Path) -> None:
    async def never(self: FakeCluster) -> None:
        await asyncio.sleep(10**6)

    with open_state(tmp_path) as state:
        bench = Bench(state)
        bench.clusters["a"].report = never.__get__(bench.clusters["a"])  # type: ignore[method-assign]
        with pytest.raises(RunFault, match=r"at trace second 0 the shard has not answered for 120 s; .*shard\.log"):
            await bench.driver.run()


def demo(state: StateDir, for_seconds: float) -> tuple[DemoDriver, dict[str, FakeCluster]]:
    clusters = {"cluster-0": FakeCluster(), "cluster-1": FakeCluster()}
    fleet = default_fleet(40)
    driver = DemoDriver(
        demand=WorkloadReplay(
            seed=1, clusters=tuple(clusters), cpu_machines=fleet.cpu_machines, gpu_machines=fleet.gpu_machines
        ),
        clusters=clusters,  # type: ignore[arg-type]
        observer=FakeObserver(clusters),  # type: ignore[arg-type]
        settings=settings(for_seconds=for_seconds, speed=60.0),
        state=state,
        clock=LoopClock(),
    )
    return driver, clusters


async def test_a_demonstration_ends_with_its_time_and_stands_still_before(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        driver, clusters = demo(state, 100.0)
        running = asyncio.create_task(driver.run())
        await asyncio.sleep(85.0)
        before, position = dict(clusters["cluster-0"].alive), driver.position_seconds
        await running

    assert before
    assert clusters["cluster-0"].alive == before
    assert driver.position_seconds == position == pytest.approx(80.0 * 60.0, rel=0.01)
    assert driver.done_share == 1.0


async def test_a_demonstration_resumes_its_virtual_time(tmp_path: Path) -> None:
    with open_state(tmp_path) as state:
        first, clusters = demo(state, 20.0)
        await first.run()
        first.save()
        second, resumed = demo(state, 20.0)
        running = asyncio.create_task(second.run())
        await asyncio.sleep(0)
        seen = {name: set(cluster.alive) for name, cluster in resumed.items()}
        await running

    assert seen == {name: set(cluster.alive) for name, cluster in clusters.items()}
    assert second.position_seconds > first.position_seconds
