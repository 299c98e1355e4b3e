"""Runs a scenario of overload on whole processes: shard, provider, honest operators, and those who flood.

The shard is the real `bigfleet shard` under a limit of memory. The clients of the flood run at the lowest priority, so
that on few cores the shard's own work is measured rather than theirs.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.overload.scenario import MEBIBYTE, Scenario
from bench.overload.watch import Memory, MemoryLimit, Watch, resident_mib, watching
from bench.workloads.streams import Child, child, cpu_seconds, free_port, shard_command, wait_until_ready

#: The shard runs a cycle often enough for a median of each phase.
SHARD_FLAGS: Final = ("--cycle-interval", "2s", "--incremental-reconcile")
SETTLE_SECONDS_MAX: Final = 300.0
#: How much longer than planned a flood may take to do all that it has to.
FLOOD_SECONDS_MORE: Final = 600.0
_POLL_SECONDS: Final = 0.25
#: Crowds that come with the flood and go with it.
_VISITORS: Final = ("sessions", "silent readers", "slow writers", "reconnects", "frames")


@dataclass
class Phase:
    """What one phase showed."""

    name: str
    seconds: float
    cycle_ms: float
    cycles_ms: list[float]
    latencies: dict[str, float]
    #: Processor seconds of the shard and of the flood's clients.
    shard_cpu_seconds: float
    clients_cpu_seconds: float


@dataclass
class Outcome:
    """What a run showed."""

    limit: str
    memory: Memory
    phases: dict[str, Phase] = field(default_factory=dict)
    #: (wanted, configured) of each honest cluster at the end of each phase.
    decided: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    sessions_lost: int = 0
    lost_because: list[str] = field(default_factory=list)
    #: After the flood, until everything was as before; infinite when it never was.
    back_seconds: float = float("inf")
    #: What the flood's clients saw, and the reasons that the shard gave them, by kind.
    crowds: dict[str, Any] = field(default_factory=dict)
    #: Counters of the shard that the flood has moved.
    counted: dict[str, float] = field(default_factory=dict)
    has_survived: bool = True
    #: Why the run did not come to its end.
    faults: list[str] = field(default_factory=list)

    def cycle_ratio(self, phase: str) -> float:
        """Return the median cycle of a phase as a multiple of the quiet one; infinite when a phase has none."""
        if phase not in self.phases or "quiet" not in self.phases:
            return float("inf")
        return self.phases[phase].cycle_ms / self.phases["quiet"].cycle_ms

    def undecided(self, scenario: Scenario) -> int:
        """Return how many honest clusters have not got all that they wanted at the end."""
        wanted = scenario.wanted_at_the_end
        at_the_end = self.decided.get("after", [])
        return scenario.honest - sum(found == (wanted, wanted) for found in at_the_end)

    @property
    def checksum(self) -> str:
        """The hash of what was decided for honest clusters, in each phase."""
        return hashlib.sha256(repr(sorted(self.decided.items())).encode()).hexdigest()[:12]


class Run:
    """One run over processes that stand."""

    def __init__(
        self, scenario: Scenario, shard_pid: int, watch: Watch, honest: Child, crowds: Sequence[Child]
    ) -> None:
        self.scenario = scenario
        self.outcome = Outcome(limit="", memory=watch.memory)
        self._pid = shard_pid
        self._watch = watch
        self._honest = honest
        self._crowds = crowds

    def phase(self, name: str, seconds: float, visitors: Child | None = None) -> None:
        """Let time pass while honest demand grows, and note what there was to see.

        It lasts until the visitors have done all that they have to.
        """
        scenario = self.scenario
        self._honest.ask("latencies")
        began, cpu_before, clients_before = time.monotonic(), cpu_seconds(self._pid), self._clients_cpu_seconds()
        # The last step has time to be carried out.
        for step in range(scenario.steps):
            self._honest.send("step")
            self._sleep_until(began + seconds * (step + 1) / (scenario.steps + 1))
        self._sleep_until(began + seconds)
        while visitors is not None and not all(crowd["finished"] for crowd in visitors.ask("count").values()):
            assert time.monotonic() - began < seconds + FLOOD_SECONDS_MORE, "the flood did not come to its end"
            time.sleep(_POLL_SECONDS)
        ended = time.monotonic()
        self.outcome.phases[name] = Phase(
            name=name,
            seconds=ended - began,
            cycle_ms=self._watch.scrapes.median_cycle_ms(began, ended),
            cycles_ms=self._watch.scrapes.cycle_ms(began, ended),
            latencies=self._honest.ask("latencies"),
            shard_cpu_seconds=cpu_seconds(self._pid) - cpu_before,
            clients_cpu_seconds=self._clients_cpu_seconds() - clients_before,
        )

    def note_decided(self, name: str) -> None:
        """Wait until honest demand is carried out, and note what each cluster wants and has."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        counted = self._honest.ask("count")
        while counted["settled"] < self.scenario.honest and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            counted = self._honest.ask("count")
        self.outcome.decided[name] = list(zip(counted["wanted"], counted["configured"], strict=True))
        self.outcome.sessions_lost = counted["lost"]
        self.outcome.lost_because = counted["because"]

    def wait_until_back(self, sessions: int) -> None:
        """Wait until only the sessions of before are left, honest demand is carried out and cycles are as short."""
        began = time.monotonic()
        quiet_ms = self.outcome.phases["quiet"].cycle_ms
        while time.monotonic() - began < SETTLE_SECONDS_MAX:
            values = self._watch.scrape()
            counted = self._honest.ask("count")
            latest = self._watch.scrapes.cycle_ms(began, time.monotonic())[-1:]
            is_short = bool(latest) and latest[0] <= quiet_ms * self.scenario.cycle_ratio_max
            has_no_others = values["bigfleet_shard_active_sessions"] <= sessions
            if is_short and has_no_others and counted["settled"] == self.scenario.honest:
                self.outcome.back_seconds = time.monotonic() - began
                return
            time.sleep(_POLL_SECONDS)

    def _clients_cpu_seconds(self) -> float:
        return sum(cpu_seconds(crowd.process.pid) for crowd in self._crowds)

    @staticmethod
    def _sleep_until(moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


def run(scenario: Scenario, *, floods: bool = True, shard_module: str = "bigfleet.cli.main") -> Outcome:
    """Run a scenario; without `floods` only the honest clusters do what they do."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        log, port, metrics_port, provider_port = folder / "log", free_port(), free_port(), free_port()
        stack.enter_context(child("provider", str(provider_port), str(scenario.machines), log=log))
        limit = MemoryLimit(scenario.memory_bytes)
        stack.callback(limit.close)
        shard = stack.enter_context(shard_command(port, metrics_port, provider_port, folder, SHARD_FLAGS, shard_module))
        limit.hold(shard.pid)
        wait_until_ready(metrics_port, log)
        honest = _child(stack, log, "bench.overload.honest", str(port), str(scenario.honest))
        honest.heard()
        flood = json.dumps(asdict(scenario.flood))
        greedy = _child(stack, log, "bench.overload.clients", str(port), flood, "greedy")
        visitors = _child(stack, log, "bench.overload.clients", str(port), flood, *_VISITORS)
        for crowd in (greedy, visitors):
            crowd.heard()
        watch = stack.enter_context(watching(shard.pid, metrics_port))
        running = Run(scenario, shard.pid, watch, honest, (greedy, visitors))
        try:
            _phases(running, watch, greedy, visitors, floods=floods)
        except (AssertionError, KeyError, OSError) as error:
            running.outcome.has_survived = shard.poll() is None
            running.outcome.faults.append(str(error) or type(error).__name__)
        running.outcome.has_survived = running.outcome.has_survived and shard.poll() is None
        watch.close()
        running.outcome.limit = limit.kind
        if scenario.memory_bytes < running.outcome.memory.peak * MEBIBYTE:
            running.outcome.has_survived = False
        return running.outcome


def _phases(running: Run, watch: Watch, greedy: Child, visitors: Child, *, floods: bool) -> None:
    scenario, outcome = running.scenario, running.outcome
    has_greedy = floods and scenario.flood.greedy > 0
    running.note_decided("start")
    if has_greedy:
        greedy.send("begin")
        _wait_for_rows(watch, scenario.flood.greedy * scenario.flood.greedy_rows)
    watch.memory.start = resident_mib(watch.pid)
    before = watch.scrape()
    running.phase("quiet", scenario.quiet_seconds if floods else 2.0 * scenario.steps)
    running.note_decided("quiet")
    if floods:
        visitors.send("begin")
    if has_greedy:
        greedy.send("flood")
    if floods:
        running.phase("flood", scenario.flood_seconds, visitors)
    else:
        running.phase("flood", 2.0 * scenario.steps)
    running.note_decided("flood")
    if floods:
        if has_greedy:
            greedy.send("rest")
            outcome.crowds |= greedy.ask("count")
        outcome.crowds |= visitors.ask("end")
        running.wait_until_back(scenario.honest + (scenario.flood.greedy if has_greedy else 0))
    running.phase("after", scenario.after_seconds if floods else 2.0 * scenario.steps)
    running.note_decided("after")
    after = watch.scrape()
    outcome.counted = {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.partition("{")[0].endswith("_total") and value != before.get(name, 0.0)
    }


def _wait_for_rows(watch: Watch, rows: int) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while watch.scrape()["bigfleet_shard_demand_rows"] < rows:
        assert time.monotonic() < deadline, f"the shard has not decided on {rows} rows of the greedy clusters"
        time.sleep(_POLL_SECONDS)


def _child(stack: ExitStack, log: Path, module: str, *arguments: str) -> Child:
    started = Child(*arguments, log=log, module=module)
    stack.callback(started.close)
    return started
