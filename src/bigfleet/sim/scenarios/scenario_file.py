"""Reads scenario files: what a closed world consists of, what happens in it, and what must hold (tests/cases/sim).

docs/spec/simulation.md, "Closed-loop scenarios". A file is YAML; an unknown key, a value of the wrong type and a name
that nothing carries are refused with file and place. This module must not run anything, or be read and then ignored.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.files.field_faults import field_fault
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.states import CapacityType, MachineState

#: The process that is no shard.
COORDINATOR: Final = "coordinator"
#: In place of a cluster's name: every cluster, each with its own.
EACH: Final = "each"
CYCLES_MAX: Final = 1_000_000
CLUSTERS_MAX: Final = 1_000
MACHINES_MAX: Final = 100_000
PODS_MAX: Final = 100_000
CRASHES_MAX: Final = 1_000
_STATES: Final = ("speculative", "idle", "configured")


class ScenarioFault(ValueError):
    """A scenario file cannot be used; the message names the file, the place in it and what is wrong there."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the file."""


class ShapeSpec(_Section, frozen=True, kw_only=True):
    """Machines that are alike."""

    instance_type: str
    allocatable: dict[str, str]
    capacity_type: str = "on_demand"
    price_per_hour: float = 1.0
    #: Within one hour.
    interruption_probability: float = 0.0
    #: The provider has no capacity of it: every Create fails for that reason.
    sold_out: bool = False

    @property
    def capacity(self) -> CapacityType:
        """The capacity type as the model has it."""
        return CapacityType[self.capacity_type.upper()]


class Stock(_Section, frozen=True, kw_only=True):
    """Some machines of one shape, in one state when the world begins."""

    shape: str
    count: int
    #: speculative, idle or configured.
    state: str = "speculative"
    #: Configured ones: their cluster; `each` gives every cluster so many.
    cluster: str = ""
    #: Configured ones: the workload that they were bound for; empty is an unknown one.
    workload: str = msgspec.field(name="for", default="")
    #: Of a workload of gangs: machines that each gang was given, in turn; 0 is as many as a gang has pods.
    per_gang: int = 0
    #: Rack names; `{cluster}` stands for the cluster's name.
    racks: tuple[str, ...] = ("rack",)
    #: Machines that stand in one rack before the next one is filled; 0 goes round the racks.
    per_rack: int = 0
    zone: str = "zone-1"


class Workload(_Section, frozen=True, kw_only=True):
    """Pods that are alike; as many gangs of them as wanted."""

    name: str
    #: Of the whole workload, or of each gang.
    pods: int
    resources: dict[str, str]
    cluster: str = EACH
    #: 0: the pods need no common place.
    gangs: int = 0
    #: The topology key whose value the pods of a gang share.
    topology_key: str = "topology.bigfleet/rack"
    instance_types: tuple[str, ...] = ()
    priority: int = 0
    #: Dollars, as Kubernetes quantities.
    interruption_penalty: str | None = None
    reclamation_penalty: str | None = None


class Takes(_Section, frozen=True, kw_only=True):
    """Cycles that a transition takes beyond the one in which it begins."""

    create: int = 0
    configure: int = 0
    drain: int = 0
    delete: int = 0


class Resize(_Section, frozen=True, kw_only=True):
    """A workload has so many pods, or so many in each gang, from now on."""

    workload: str
    pods: int
    cluster: str = EACH


class RandomResize(_Section, frozen=True, kw_only=True):
    """One cluster, drawn from the seed, has between so many and so many pods of a workload from now on."""

    workload: str
    pods_min: int
    pods_max: int


class LossEvent(_Section, frozen=True, kw_only=True):
    """Hosts that run pods of a workload are gone at once, the first ones by id."""

    workload: str
    cluster: str
    machines: int


class FailureEvent(_Section, frozen=True, kw_only=True):
    """The next calls of a kind fail in the substrate."""

    #: create, configure, drain or delete.
    call: str
    calls: int = 1
    text: str = "the substrate refused"


class Home(_Section, frozen=True, kw_only=True):
    """What one of several shards has at the beginning."""

    #: Their machines are the shard's; no other shard has one of them.
    zones: tuple[str, ...]
    clusters: tuple[str, ...]


class Crashes(_Section, frozen=True, kw_only=True):
    """One of the processes dies and comes back: in each arm another one, or at another time."""

    #: Of the shards, or `coordinator`.
    processes: tuple[str, ...]
    #: Seconds since the first cycle began.
    from_second: float
    to_second: float
    every_seconds: float = 1.0
    down_seconds: float = 12.0

    def arms(self) -> "list[Crash]":
        """Return every crash, processes in turn, earliest first."""
        count = int((self.to_second - self.from_second) / self.every_seconds) + 1
        return [
            Crash(process=process, at_second=self.from_second + number * self.every_seconds, down=self.down_seconds)
            for process in self.processes
            for number in range(count)
        ]


class Crash(NamedTuple):
    """One process that dies once."""

    process: str
    at_second: float
    #: Seconds until it is there again.
    down: float


class Event(_Section, frozen=True, kw_only=True):
    """Something that happens right before a cycle; exactly one of the things below."""

    #: The first cycle is 1.
    at: int
    #: 0 happens once; else again after so many cycles.
    every: int = 0
    resize: Resize | None = None
    random_resize: RandomResize | None = None
    lose: LossEvent | None = None
    fail: FailureEvent | None = None
    #: The shard dies and a new process takes its place after so many cycles.
    shard_dies_for_cycles: int | None = None
    #: A new process of the shard starts while the old one goes on for so many cycles.
    zombie_for_cycles: int | None = None
    #: The coordinator's process is gone for so many cycles.
    coordinator_gone_for_cycles: int | None = None
    #: The coordinator cannot reach its store for so many cycles.
    store_cut_for_cycles: int | None = None

    def happens_in(self, cycle: int) -> bool:
        """Return whether it happens right before that cycle."""
        if cycle == self.at:
            return True
        return self.every > 0 and cycle > self.at and (cycle - self.at) % self.every == 0

    @property
    def kinds(self) -> list[str]:
        """The names of the things that happen."""
        return [name for name in _EVENT_KINDS if getattr(self, name) is not None]


#: Everything of an event but when it happens.
_EVENT_KINDS: Final = tuple(name for name in Event.__struct_fields__ if name not in ("at", "every"))
#: Of the coordinator: without one they cannot happen.
COORDINATOR_EVENTS: Final = frozenset({"coordinator_gone_for_cycles", "store_cut_for_cycles"})


class Measure(Enum):
    """What an expectation is about; each says in `MEASURED` what it may be narrowed by."""

    #: Machines at the end.
    MACHINES = "machines"
    #: Machines that rows of a workload hold after the last cycle.
    HELD = "held"
    #: Gangs of a workload that are served whole in the last cycle.
    WHOLE_GANGS = "whole_gangs"
    #: Per cent of the pods that are bound at the end.
    BOUND_PERCENT = "bound_percent"
    #: Last cycles in a row without any action and with one and the same shortfall.
    QUIET_CYCLES = "quiet_cycles"
    #: Entries of the fleet's ledger after the last cycle.
    SHORTFALLS = "shortfalls"
    #: What the ledger lacks of a resource after the last cycle.
    SHORTFALL = "shortfall"
    #: Actions that were carried out.
    ACTIONS = "actions"
    #: Machines gained: Bootstraps and Provisions, a Bootstrap that ends a Provision being the same gain.
    ACQUISITIONS = "acquisitions"
    #: Actions that undo an earlier one: a binding of what was taken away, a taking away of what was bound.
    CHURN = "churn"
    #: How often the machines that a gang holds became others, from the first cycle in which it was whole.
    CLAIM_CHANGES = "claim_changes"
    #: Deletes of machines that nothing had been reclaimed from before.
    DELETES_BEFORE_RECLAIM = "deletes_before_reclaim"
    #: The longest stay of a machine in a transitional state, in cycles.
    TRANSITION_CYCLES = "transition_cycles"
    #: Pods that lost their node, by cause: evicted from a node that was drained, or taken with one that went.
    EVICTIONS = "evictions"
    #: Calls that the provider refused because of an older token.
    FENCED = "fenced"
    #: Machines that exactly one shard owns at the end.
    OWNED = "owned"
    #: Reports that the coordinator took, and those that no replica took.
    REPORTS_TAKEN = "reports_taken"
    REPORTS_LOST = "reports_lost"
    #: Growth of the process's objects over the second half of the run, per cent.
    GROWTH_PERCENT = "growth_percent"


MEASURED: Final[Mapping[Measure, frozenset[str]]] = {
    Measure.MACHINES: frozenset({"state", "cluster", "shape", "error"}),
    Measure.HELD: frozenset({"workload", "cluster", "shape"}),
    Measure.WHOLE_GANGS: frozenset({"workload", "cluster"}),
    Measure.BOUND_PERCENT: frozenset({"workload", "cluster"}),
    Measure.QUIET_CYCLES: frozenset(),
    Measure.SHORTFALLS: frozenset(),
    Measure.SHORTFALL: frozenset({"resource"}),
    Measure.ACTIONS: frozenset({"kind", "cluster", "shape", "from_cycle", "last_cycles"}),
    Measure.ACQUISITIONS: frozenset({"kind", "cluster", "shape", "from_cycle", "last_cycles"}),
    Measure.CHURN: frozenset(),
    Measure.CLAIM_CHANGES: frozenset({"workload"}),
    Measure.DELETES_BEFORE_RECLAIM: frozenset(),
    Measure.TRANSITION_CYCLES: frozenset(),
    Measure.EVICTIONS: frozenset({"from_cycle"}),
    Measure.FENCED: frozenset(),
    Measure.OWNED: frozenset(),
    Measure.REPORTS_TAKEN: frozenset(),
    Measure.REPORTS_LOST: frozenset(),
    Measure.GROWTH_PERCENT: frozenset(),
}
KINDS: Final = ("bootstrap", "provision", "reclaim", "preempt", "delete")


class Expectation(_Section, frozen=True, kw_only=True):
    """One sentence of `must_hold`: a measure, narrowed or not, and what it must be."""

    measure: Measure
    exactly: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    state: str = ""
    cluster: str = ""
    shape: str = ""
    #: A part of the text that a failed machine shows.
    error: str = ""
    workload: str = ""
    resource: str = ""
    kind: str = ""
    #: Only what happened in this cycle or later.
    from_cycle: int = 0
    #: Only what happened in so many cycles at the end.
    last_cycles: int = 0

    @property
    def narrowed_by(self) -> dict[str, str | int]:
        """The narrowing that is given, by name."""
        names = sorted(frozenset().union(*MEASURED.values()))
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def text(self) -> str:
        """The sentence."""
        where = ", ".join(f"{name} {value}" for name, value in self.narrowed_by.items())
        words = (("", self.exactly), ("at least ", self.at_least), ("at most ", self.at_most))
        wanted = " and ".join(f"{word}{value:g}" for word, value in words if value is not None)
        return f"{self.measure.value}{f' ({where})' if where else ''} is {wanted}"

    def holds(self, value: float) -> bool:
        """Return whether a measured value is what it must be."""
        return (
            (self.exactly is None or value == self.exactly)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )


class Scenario(_Section, frozen=True, kw_only=True):
    """The whole file."""

    about: str
    clusters: tuple[str, ...]
    shapes: dict[str, ShapeSpec]
    machines: tuple[Stock, ...]
    workloads: tuple[Workload, ...]
    cycles: int
    must_hold: tuple[Expectation, ...]
    events: tuple[Event, ...] = ()
    takes: Takes = Takes()
    #: Instead of `takes`: the same world once with each of these.
    arms: tuple[Takes, ...] = ()
    cycle_seconds: float = 10.0
    reclaim_cap: float = 0.05
    #: How long a machine must be excess before it is reclaimed; 0 is at once.
    reclaim_after_seconds: float = 0.0
    #: The clusters report one after the other, and another one is first in each cycle.
    rotating_reports: bool = False
    incremental_reconcile: bool = False
    #: A coordinator stands beside the shard. The same world runs once more without one, and must decide the same (S12).
    coordinator: bool = False
    #: Several shards with one coordinator, by name; empty is one shard that has everything.
    shards: dict[str, Home] = {}
    #: The same world once for each of their crashes.
    crashes: tuple[Crashes, ...] = ()
    #: The provider answers a Create when the host runs, not when it has begun to make it.
    synchronous_create: bool = False
    #: It takes minutes: no run of every day.
    slow: bool = False


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of one file. Raises ScenarioFault."""
    try:
        tree: Any = load_yaml(read_bounded(path, CONFIGURATION_BYTES_MAX).decode("utf-8"))
    except OSError as error:
        raise ScenarioFault(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioFault(f"{path}: not UTF-8 text ({error.reason})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScenarioFault(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    try:
        scenario = msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioFault(f"{path}: {field_fault(error, Scenario, root='$')}") from error
    fault = next(_faults(scenario), None)
    if fault is not None:
        raise ScenarioFault(f"{path}: {fault}")
    return scenario


# ---- what types cannot say ---------------------------------------------------------------------------------------


def _faults(scenario: Scenario) -> Iterator[str]:
    """Yield what is wrong with the file, each with its place."""
    yield from _head_faults(scenario)
    yield from _shard_faults(scenario)
    for number, stock in enumerate(scenario.machines):
        yield from _stock_faults(scenario, stock, f"$.machines[{number}]")
    for number, workload in enumerate(scenario.workloads):
        yield from _workload_faults(scenario, workload, f"$.workloads[{number}]")
    for number, event in enumerate(scenario.events):
        yield from _event_faults(scenario, event, f"$.events[{number}]")
    for number, expectation in enumerate(scenario.must_hold):
        yield from _expectation_faults(scenario, expectation, f"$.must_hold[{number}]")


def _head_faults(scenario: Scenario) -> Iterator[str]:
    if not 1 <= scenario.cycles <= CYCLES_MAX:
        yield f"$.cycles: {scenario.cycles} is not from 1 to {CYCLES_MAX}"
    if not 1 <= len(scenario.clusters) <= CLUSTERS_MAX:
        yield f"$.clusters: {len(scenario.clusters)} names, from 1 to {CLUSTERS_MAX} are wanted"
    if len(set(scenario.clusters)) < len(scenario.clusters) or EACH in scenario.clusters or "" in scenario.clusters:
        yield f"$.clusters: names must differ from each other, from {EACH!r} and from nothing"
    if not 0 < scenario.cycle_seconds < math.inf:
        yield f"$.cycle_seconds: {scenario.cycle_seconds:g} is not above 0, or has no end"
    if not 0 <= scenario.reclaim_cap <= 1:
        yield f"$.reclaim_cap: {scenario.reclaim_cap:g} is not from 0 to 1"
    if not 0 <= scenario.reclaim_after_seconds < math.inf:
        yield f"$.reclaim_after_seconds: {scenario.reclaim_after_seconds:g} is negative, or has no end"
    if not scenario.must_hold:
        yield "$.must_hold: a scenario without an expectation shows nothing"
    for name, shape in scenario.shapes.items():
        yield from _quantity_faults(shape.allocatable, f"$.shapes.{name}.allocatable")
        if shape.capacity_type.upper() not in CapacityType.__members__:
            names = ", ".join(each.name.lower() for each in CapacityType if each is not CapacityType.UNSPECIFIED)
            yield f"$.shapes.{name}.capacity_type: {shape.capacity_type!r} is none of {names}"
    for number, takes in enumerate((scenario.takes, *scenario.arms)):
        if min(msgspec.structs.astuple(takes)) < 0:
            place = "$.takes" if number == 0 else f"$.arms[{number - 1}]"
            yield f"{place}: a number of cycles is negative"


def _shard_faults(scenario: Scenario) -> Iterator[str]:
    if scenario.shards and not scenario.coordinator:
        yield "$.shards: several shards need a coordinator; say coordinator: true"
    homes = scenario.shards.values()
    if scenario.shards and sorted(c for home in homes for c in home.clusters) != sorted(scenario.clusters):
        yield "$.shards: every cluster must be bound to exactly one shard"
    zones = [zone for home in homes for zone in home.zones]
    if len(set(zones)) < len(zones):
        yield "$.shards: a zone is of one shard alone"
    for number, crashes in enumerate(scenario.crashes):
        yield from _crash_faults(scenario, crashes, f"$.crashes[{number}]")


def _crash_faults(scenario: Scenario, crashes: Crashes, place: str) -> Iterator[str]:
    for process in crashes.processes:
        if process not in scenario.shards and (process != COORDINATOR or not scenario.coordinator):
            yield f"{place}.processes: there is no process {process!r}"
    if not 0 <= crashes.from_second <= crashes.to_second or min(crashes.every_seconds, crashes.down_seconds) <= 0:
        yield f"{place}: from_second must not be above to_second, nor every_seconds or down_seconds 0"
    # The first before the arms are made: there may be too many to make.
    elif (crashes.to_second - crashes.from_second) / crashes.every_seconds > CRASHES_MAX or (
        len(crashes.arms()) > CRASHES_MAX
    ):
        yield f"{place}: these are more than {CRASHES_MAX} arms"


def _stock_faults(scenario: Scenario, stock: Stock, place: str) -> Iterator[str]:
    if stock.shape not in scenario.shapes:
        yield f"{place}.shape: there is no shape {stock.shape!r}"
    if not 0 <= stock.count <= MACHINES_MAX:
        yield f"{place}.count: {stock.count} is not from 0 to {MACHINES_MAX}"
    if stock.state not in _STATES:
        yield f"{place}.state: {stock.state!r} is none of {', '.join(_STATES)}"
    if not stock.racks or stock.per_rack < 0 or stock.per_gang < 0:
        yield f"{place}: racks must not be empty, per_rack and per_gang not negative"
    if (stock.state == "configured") != bool(stock.cluster):
        yield f"{place}.cluster: configured machines, and they alone, have a cluster"
    yield from _cluster_faults(scenario, stock.cluster, f"{place}.cluster", may_be_empty=True)
    if stock.workload:
        yield from _named_faults(scenario, stock.workload, f"{place}.for")


def _workload_faults(scenario: Scenario, workload: Workload, place: str) -> Iterator[str]:
    if sum(each.name == workload.name for each in scenario.workloads) > 1 or not workload.name:
        yield f"{place}.name: {workload.name!r} is empty or there twice"
    if not 0 <= workload.pods <= PODS_MAX or not 0 <= workload.gangs <= PODS_MAX:
        yield f"{place}: pods and gangs must be from 0 to {PODS_MAX}"
    yield from _quantity_faults(workload.resources, f"{place}.resources")
    for name in ("interruption_penalty", "reclamation_penalty"):
        text = getattr(workload, name)
        if text is not None:
            yield from _quantity_faults({name: text}, place)
    yield from _cluster_faults(scenario, workload.cluster, f"{place}.cluster")


def _event_faults(scenario: Scenario, event: Event, place: str) -> Iterator[str]:
    if len(event.kinds) != 1:
        yield f"{place}: exactly one of {', '.join(_EVENT_KINDS)} is wanted, there are {len(event.kinds)}"
    if not 1 <= event.at <= scenario.cycles or event.every < 0:
        yield f"{place}: at must be a cycle of the scenario, every not negative"
    for name in ("resize", "random_resize", "lose"):
        part = getattr(event, name)
        if part is not None:
            yield from _named_faults(scenario, part.workload, f"{place}.{name}.workload")
            if hasattr(part, "cluster"):
                yield from _cluster_faults(scenario, part.cluster, f"{place}.{name}.cluster")
    drawn = event.random_resize
    if drawn is not None and not 0 <= drawn.pods_min <= drawn.pods_max <= PODS_MAX:
        yield f"{place}.random_resize: pods_min must not be above pods_max, nor either out of 0 to {PODS_MAX}"
    if COORDINATOR_EVENTS.intersection(event.kinds) and not scenario.coordinator:
        yield f"{place}.{event.kinds[0]}: there is no coordinator; say coordinator: true"
    if event.zombie_for_cycles is not None and scenario.coordinator:
        yield f"{place}.zombie_for_cycles: with a coordinator a shard has a file, which no second process can open"
    if event.fail is not None and event.fail.call not in Takes.__struct_fields__:
        yield f"{place}.fail.call: {event.fail.call!r} is none of {', '.join(Takes.__struct_fields__)}"
    yield from _count_faults(event, place)


def _count_faults(event: Event, place: str) -> Iterator[str]:
    """Yield the numbers of an event with which nothing would happen, or nothing would end."""
    if event.resize is not None and not 0 <= event.resize.pods <= PODS_MAX:
        yield f"{place}.resize.pods: {event.resize.pods} is not from 0 to {PODS_MAX}"
    if event.lose is not None and event.lose.machines < 1:
        yield f"{place}.lose.machines: {event.lose.machines} is not above 0"
    if event.fail is not None and not 1 <= event.fail.calls <= MACHINES_MAX:
        yield f"{place}.fail.calls: {event.fail.calls} is not from 1 to {MACHINES_MAX}"
    for name in event.kinds:
        cycles = getattr(event, name)
        if name.endswith("_for_cycles") and cycles < 1:
            yield f"{place}.{name}: {cycles} is not above 0"


def _expectation_faults(scenario: Scenario, expectation: Expectation, place: str) -> Iterator[str]:
    if all(bound is None for bound in (expectation.exactly, expectation.at_least, expectation.at_most)):
        yield f"{place}: one of exactly, at_least, at_most is wanted"
    unknown = expectation.narrowed_by.keys() - MEASURED[expectation.measure]
    if unknown:
        yield f"{place}: {expectation.measure.value} cannot be narrowed by {', '.join(sorted(unknown))}"
    if expectation.measure is Measure.SHORTFALL and not expectation.resource:
        yield f"{place}.resource: a shortfall is one of a resource"
    if expectation.measure is Measure.GROWTH_PERCENT and scenario.cycles < 2:
        yield f"{place}: growth is from the middle to the end, of 2 cycles at least"
    if expectation.state and expectation.state.upper() not in MachineState.__members__:
        yield f"{place}.state: there is no state {expectation.state!r}"
    if expectation.kind and expectation.kind not in KINDS:
        yield f"{place}.kind: {expectation.kind!r} is none of {', '.join(KINDS)}"
    if expectation.shape and expectation.shape not in scenario.shapes:
        yield f"{place}.shape: there is no shape {expectation.shape!r}"
    if expectation.workload:
        yield from _named_faults(scenario, expectation.workload, f"{place}.workload")
    yield from _cluster_faults(scenario, expectation.cluster, f"{place}.cluster", may_be_empty=True)


def _named_faults(scenario: Scenario, workload: str, place: str) -> Iterator[str]:
    if all(each.name != workload for each in scenario.workloads):
        yield f"{place}: there is no workload {workload!r}"


def _cluster_faults(scenario: Scenario, cluster: str, place: str, *, may_be_empty: bool = False) -> Iterator[str]:
    allowed: Iterable[str] = (*scenario.clusters, EACH, *([""] if may_be_empty else []))
    if cluster not in allowed:
        yield f"{place}: there is no cluster {cluster!r}"


def _quantity_faults(quantities: Mapping[str, str], place: str) -> Iterator[str]:
    for name, text in quantities.items():
        try:
            parse_quantity(text)
        except QuantityError as error:
            yield f"{place}.{name}: {error}"
