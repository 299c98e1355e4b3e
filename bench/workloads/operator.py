"""W17: the operator and the pod controller in a cluster of 50,000 pods, each as a process of its own.

docs/spec/benchmarks.md. The API server is `bench.processes.api_server`, so that neither its rules nor its disk are
measured; the shard acknowledges everything that it gets. What a roll-up and a recount cost is measured in this process,
on the view of the operator alone. Nothing here may report a figure of a run in which not everything arrived.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import msgspec

from bench.cluster_objects import WORKLOADS, request
from bench.harness import Measured, Measurement, Reading
from bench.workloads.streams import Child, checksum, cpu_seconds, end, free_port, wait_until_ready
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.ids import ClusterId
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.kubernetes.objects import CapacityRequestObject

#: How long the writes that follow from changes may take.
WRITES_SECONDS_MAX = 120.0
#: After a session has opened: its recount is over by then.
SETTLE_SECONDS = 6.0
ROLL_UPS = 100
PODS_PER_SECOND = 50.0
_NODES_PER_REQUEST = 50
_PREFIX = "bigfleet_unschedulable_pod_controller"
_WRITES = "PATCH capacityrequests/status"


@contextmanager
def _child(module: str, *numbers: int, log: Path) -> Iterator[Child]:
    started = Child(*(str(number) for number in numbers), log=log, module=module)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def _api_server(requests: int, log: Path) -> Iterator[tuple[Child, dict[str, Any]]]:
    """Serve a cluster at rest: as many pods as requests, 50 a node."""
    nodes = max(1, requests // _NODES_PER_REQUEST)
    with _child("bench.processes.api_server", requests, requests, nodes, log=log) as server:
        ready = server.heard()
        assert ready["capacityrequests"] == ready["pods"] == requests, ready
        yield server, ready


# ---- the operator ---------------------------------------------------------------------------------------------------


def measure_operator(requests: int, events: int) -> Measured:
    """Start an operator, let it rest, send it events, and lose its session."""
    with (
        TemporaryDirectory() as folder,
        _api_server(requests, Path(folder) / "log") as (server, ready),
        _child("bench.processes.operator", ready["port"], ready["nodes"], log=Path(folder) / "log") as operator,
    ):
        started = operator.heard()
        time.sleep(SETTLE_SECONDS)
        start = operator.ask("look")
        writes_at_start = server.ask("count").get(_WRITES, 0)
        # UpcomingNodes of the machines and so on.
        _wait_for_quiet(server)
        rest = operator.ask("rest")
        quiet = _idle_cores(operator)
        costs: dict[str, float] = {}
        for plural in ("capacityrequests", "pods"):
            operator.ask("look")
            server.send(f"touch {plural} {events}")
            costs[plural] = operator.ask(f"wait {plural} {events}")["cpu_seconds"]
            server.heard()
        operator.ask("look")
        reconnected = operator.ask("reconnect")
        time.sleep(SETTLE_SECONDS)
        recounted = operator.ask("look")
        server.send(f"more {events}")
        asked = operator.ask(f"wait capacityrequests {events}")["cpu_seconds"]
        server.heard()
        behind = _wait_for_statuses(server)
        time.sleep(1)
        last = operator.ask("look")
    expected = min(WORKLOADS, requests)
    assert started["requests"] == last["acknowledged"] == requests, (started, last)
    assert started["rows"] == last["rows"] == expected, (started, last)
    assert writes_at_start == 0, "the status of a cluster at rest was written again"
    assert behind == 0, behind
    lag = max(reconnected["own_lag_max_ms"], recounted["own_lag_max_ms"])
    return Measured(
        readings=(
            Reading("from the start of the process to the first roll-up", started["first_seconds"], "s"),
            Reading("the same, processor time", started["first_cpu_seconds"], "s", most=10.0),
            Reading("of that until it is loaded", started["import_cpu_seconds"], "s"),
            Reading("the loop is late by its own work during that, longest", start["own_lag_max_ms"], "ms"),
            Reading("memory at rest", rest["rss_mib"], "MiB", most=400.0),
            Reading("memory, peak", last["rss_peak_mib"], "MiB"),
            Reading("at rest, share of a core", quiet, "cores"),
            Reading("an event of a CapacityRequest", costs["capacityrequests"] / events * 1e6, "µs", most=200.0),
            Reading("an event of a pod", costs["pods"] / events * 1e6, "µs", most=200.0),
            Reading(
                "a request that asks for something else, with its status",
                (asked + last["cpu_seconds"]) / events * 1e6,
                "µs",
            ),
            Reading("the loop is late by its own work after a new session, longest", lag, "ms"),
            Reading("bytes of a CapacityRequest", ready["request_bytes"], "B"),
        ),
        checksum=checksum((started["requests"], started["rows"], last["acknowledged"], behind)),
    )


def _wait_for_quiet(server: Child) -> None:
    """Return when the operator has asked for nothing in a second."""
    deadline = time.monotonic() + WRITES_SECONDS_MAX
    former: dict[str, Any] = {}
    while (counted := server.ask("count")) != former and time.monotonic() < deadline:
        former = counted
        time.sleep(1)


def _wait_for_statuses(server: Child) -> int:
    """Return how many requests are not acknowledged as they are, once there is none or it has taken too long."""
    deadline = time.monotonic() + WRITES_SECONDS_MAX
    behind: int = server.ask("behind")["behind"]
    while behind and time.monotonic() < deadline:
        time.sleep(1)
        behind = server.ask("behind")["behind"]
    return behind


def _idle_cores(operator: Child, seconds: float = 10.0) -> float:
    """Return which share of a core the process takes when nothing happens; its watch of itself is in it."""
    operator.ask("look")
    time.sleep(seconds)
    taken: float = operator.ask("look")["cpu_seconds"]
    return taken / seconds


def operator(requests: int = 50_000, events: int = 5_000) -> Measurement:
    """W17: one process of the operator."""
    return Measurement(
        name="W17 operator",
        size=f"{requests:,} CapacityRequests and pods, {requests // _NODES_PER_REQUEST:,} nodes, {events:,} events",
        run=lambda: measure_operator(requests, events),
        is_slow=True,
    )


# ---- the pod controller ---------------------------------------------------------------------------------------------


def measure_pod_controller(requests: int, pods: int) -> Measured:
    """Run the real command beside the pods that there are, and create more at a rate."""
    with TemporaryDirectory() as name, _api_server(requests, Path(name) / "log") as (server, ready):
        folder, metrics_port = Path(name), free_port()
        (folder / "kubeconfig").write_text(_kubeconfig(ready["port"]), encoding="utf-8")
        arguments = [
            *("--kubeconfig", str(folder / "kubeconfig")),
            *("--metrics-addr", f"127.0.0.1:{metrics_port}"),
            *("--log-level", "warning"),
        ]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bigfleet.cli.main", "pod-controller", *arguments], stdout=log, stderr=log
            )
        try:
            wait_until_ready(metrics_port, folder / "log")
            # Every pod is looked at once; the requests of a cluster at rest are as they should be.
            _wait_for_rest(metrics_port)
            started, before = cpu_seconds(process.pid), server.ask("count")
            memory = _resident_mib(process.pid)
            waits = server.ask(f"pods {pods} {PODS_PER_SECOND}")
            time.sleep(1)
            taken, after = cpu_seconds(process.pid) - started, server.ask("count")
        finally:
            end(process)
        faults = (folder / "log").read_text(encoding="utf-8")
    applied = "PATCH capacityrequests"
    assert before.get(applied, 0) == 0, before
    assert after[applied] == waits["count"] == pods, (after, waits, faults[-2000:])
    return Measured(
        readings=(
            Reading("a pod until its CapacityRequest is stored, p99", waits["p99_ms"], "ms", most=1_000.0),
            Reading("the same, median", waits["p50_ms"], "ms"),
            Reading("the same, longest", waits["max_ms"], "ms"),
            Reading("the controller's processor time for each", taken / pods * 1000, "ms"),
            Reading("until every pod there is was looked at, processor time", started, "s"),
            Reading("memory at rest", memory, "MiB"),
        ),
        checksum=checksum((pods, waits["count"], after[applied])),
    )


def _kubeconfig(port: int) -> str:
    return msgspec.json.encode(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bench",
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
            "clusters": [{"name": "bench", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "bench", "user": {}}],
        }
    ).decode()


def _wait_for_rest(metrics_port: int) -> None:
    """Return when the controller leads and no pod waits to be looked at. Raises AssertionError when it takes long."""
    deadline = time.monotonic() + WRITES_SECONDS_MAX
    while time.monotonic() < deadline:
        with urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        if f"{_PREFIX}_leader 1.0" in lines and f"{_PREFIX}_backlog 0.0" in lines:
            return
        time.sleep(0.5)
    raise AssertionError("the pod controller does not come to rest")


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def pod_controller(requests: int = 50_000, pods: int = 1_500) -> Measurement:
    """W17: one process of the pod controller, with its flags as shipped."""
    return Measurement(
        name="W17 pod controller",
        size=f"{pods:,} pods at {PODS_PER_SECOND:g}/s beside {requests:,}; flags as shipped",
        run=lambda: measure_pod_controller(requests, pods),
        is_slow=True,
    )


# ---- roll-ups -------------------------------------------------------------------------------------------------------


class StoredRequests:
    """The CapacityRequests of a cluster as an operator has read them."""

    is_synced = True

    def __init__(self, count: int) -> None:
        self.objects: dict[tuple[str, str], CapacityRequestObject] = {}
        for index in range(count):
            found = msgspec.convert(request(index, 1_000), CapacityRequestObject)
            self.objects[found.metadata.key] = found

    def failing_seconds(self) -> float:
        """The view is healthy."""
        return 0.0

    def get(self, name: str, namespace: str = "") -> CapacityRequestObject | None:
        """Return one of them."""
        return self.objects.get((namespace, name))

    def __iter__(self) -> Iterator[CapacityRequestObject]:
        return iter(list(self.objects.values()))

    def __len__(self) -> int:
        return len(self.objects)


def counted_view(count: int) -> tuple[DemandView, StoredRequests]:
    """Return a view that has heard of so many requests."""
    stored = StoredRequests(count)
    view = DemandView(cluster=ClusterId("bench"), requests=stored, clock=SystemClock())
    for found in stored:
        view.put(found, None)
    return view, stored


def roll_up_times_ms(view: DemandView, stored: StoredRequests) -> tuple[list[float], int]:
    """Return how long each roll-up took after one request had changed, and their rows."""
    times_ms, rows, touched = [], 0, list(stored)
    for turn in range(ROLL_UPS):
        former = touched[turn % len(touched)]
        resources = dict(former.spec.resources) | {"cpu": "2" if turn % 2 else "3"}
        changed = msgspec.structs.replace(
            former,
            metadata=msgspec.structs.replace(former.metadata, generation=former.metadata.generation + 1),
            spec=msgspec.structs.replace(former.spec, resources=resources),
        )
        stored.objects[former.metadata.key] = changed
        view.put(changed, former)
        started = time.perf_counter()
        roll_up = view.roll_up()
        times_ms.append((time.perf_counter() - started) * 1000)
        assert roll_up is not None
        rows = len(roll_up.needs)
    return times_ms, rows


def measure_roll_ups(few: int, many: int) -> Measured:
    """Build roll-ups of a small and of a large cluster with equal rows, and recount the large one."""
    medians, rows = [], []
    for count in (few, many):
        view, stored = counted_view(count)
        view.roll_up()
        times_ms, found = roll_up_times_ms(view, stored)
        medians.append(statistics.median(times_ms))
        rows.append(found)
    started = time.perf_counter()
    assert view.recount()
    recount_seconds = time.perf_counter() - started
    assert rows == [WORKLOADS, WORKLOADS], rows
    return Measured(
        readings=(
            Reading(f"a roll-up of {few:,} requests, median", medians[0], "ms"),
            Reading(f"a roll-up of {many:,} requests, median", medians[1], "ms"),
            Reading("ratio of the two", medians[1] / medians[0], "", most=1.5),
            Reading(f"a recount of {many:,} requests, in one go", recount_seconds, "s"),
        ),
        checksum=checksum((rows, len(stored))),
    )


def roll_ups(few: int = 5_000, many: int = 50_000) -> Measurement:
    """W17: what a roll-up costs does not grow with the requests."""
    return Measurement(
        name="W17 roll-ups",
        size=f"{few:,} and {many:,} requests, {WORKLOADS} rows; median of {ROLL_UPS}, one request changed before each",
        run=lambda: measure_roll_ups(few, many),
        is_slow=True,
    )


OPERATORS = (roll_ups(), operator(), pod_controller())
