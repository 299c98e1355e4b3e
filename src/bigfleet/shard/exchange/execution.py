"""Carries exchanges out: acquires what comes, lets what goes leave, and abandons what no longer holds.

docs/spec/exchange.md §7. It hands the decision two inputs: a target composition that has the machines that come, or no
longer has those that go, and the machines that leave. The decision acquires and reclaims by its own rules, within all
safety limits. An exchange that is abandoned takes both inputs back; nothing else has to be undone.

One exchange of a cluster is under way at a time. All of it is touched by the shard's loop alone.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, Decision, Options, WithheldPools
from bigfleet.engine.targets import ClassKey, Target, class_key
from bigfleet.exchange.course import (
    ACQUIRING_SECONDS_MAX,
    ExchangeCourse,
    ExchangeEnd,
    ExchangePhase,
    Seen,
    Sighting,
    abandoned,
    begun,
    drains,
    followed,
    joined_by,
)
from bigfleet.exchange.price_paths import PricePaths
from bigfleet.exchange.sentences import proposal_sentences
from bigfleet.exchange.values import ExchangeProposal, ExchangeSettings
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.shard.actuation.stuck_transitions import StuckTransitions
from bigfleet.shard.audit.log import Audit
from bigfleet.shard.cycle.composition_plans import CompositionPlans, is_alike
from bigfleet.shard.cycle.reclaim_delay import FitHolds
from bigfleet.shard.exchange.exchange_records import (
    RECORDS_MAX,
    RETAINED_SECONDS,
    ExchangeRecord,
    ExchangeStore,
    RecordedKind,
    is_ahead,
    measured,
    still_stored,
)
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ownership.ownership_file import OwnershipNotWritten
from bigfleet.shard.sessions.demand import Intake
from bigfleet.shard.sessions.registry import Sessions
from bigfleet.shard.status.cycle_publisher import CyclePublisher

#: What an exchange that was abandoned leaves behind is not reclaimed before so long: the cluster is planned again.
SETTLING_SECONDS: Final = 60.0
#: For so long after its end machines that do not serve yet delay the reclaims of its cluster.
SETTLING_SECONDS_MAX: Final = ACQUIRING_SECONDS_MAX
#: For so long no other exchange takes a machine that was given for another cluster; pods may at any time.
PROMISED_SECONDS: Final = 1800.0

_log = structlog.get_logger("bigfleet.shard.exchange.execution")


@dataclass(frozen=True, slots=True)
class PromisedMachines:
    """Idle machines that one cluster gave for another one."""

    exchange_id: str
    taker: str
    machines: tuple[Machine, ...]

    @property
    def classes(self) -> Counter[ClassKey]:
        """How many machines of each class these are."""
        return Counter(class_key(machine) for machine in self.machines)

    def is_taken_by(self, proposal: ExchangeProposal) -> bool:
        """Return whether machines like these come in an exchange."""
        return not self.classes.keys().isdisjoint(proposal.comes_by_class)


class ExchangeHost(Protocol):
    """The parts of a shard that an exchange looks at, or acts through."""

    @property
    def epoch(self) -> int: ...
    @property
    def inventory(self) -> Inventory: ...
    @property
    def publisher(self) -> CyclePublisher: ...
    @property
    def intake(self) -> Intake: ...
    @property
    def sessions(self) -> Sessions: ...
    @property
    def fit_holds(self) -> FitHolds: ...
    @property
    def stuck(self) -> StuckTransitions: ...
    @property
    def plans(self) -> CompositionPlans: ...
    @property
    def audit(self) -> Audit: ...
    @property
    def metrics(self) -> ShardMetrics: ...


@dataclass(slots=True)
class _Running:
    """An exchange under way."""

    course: ExchangeCourse
    record: ExchangeRecord
    #: The cluster's rows that its target was made for.
    rows: tuple[Need, ...]
    #: What the decision follows.
    target: Target
    #: Machines that the last decision acquired for the cluster, with their classes.
    acquired: dict[MachineId, ClassKey] = field(default_factory=dict)
    #: Why the last decision ends it.
    reason: ExchangeEnd | None = None
    is_planning: bool = False
    #: The target without the machines that go, and the rows that it was made for.
    planned: tuple[Target, tuple[Need, ...]] | None = None


@dataclass(frozen=True, slots=True)
class _Settling:
    """A cluster whose exchange was abandoned; nothing of it is reclaimed. Times are monotonic seconds."""

    until_seconds: float
    #: From then on machines that do not serve yet are waited for no longer: one of them may never serve.
    waits_until_seconds: float
    #: Machines that must serve or be gone before the end.
    came: frozenset[str]


class ExchangeExecution:
    """The exchanges that a shard carries out, and the records of those that ended."""

    def __init__(self, host: ExchangeHost, *, clock: Clock, store: ExchangeStore) -> None:
        """End what another process began: its machines are found as they are, and count as any others."""
        self._host = host
        self._clock = clock
        self._store = store
        self._count = 0
        self._running: dict[str, _Running] = {}
        #: By cluster.
        self._settling: dict[str, _Settling] = {}
        #: Ends that are not durable yet, by exchange.
        self._unwritten: dict[str, ExchangeRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        for record in list(store.records.values()):
            if not record.ended_unix_nanos:
                self._put_ended(replace(record, end=ExchangeEnd.RESTARTED.value))
                self._settle(record.cluster, frozenset())
        self.export()

    @property
    def clusters(self) -> list[str]:
        """The clusters of which an exchange is under way."""
        return list(self._running)

    # ---- what others read ----------------------------------------------------------------------------------------

    @property
    def records(self) -> list[ExchangeRecord]:
        """The exchanges that are under way or ended lately, in the order in which they were begun."""
        return [self._unwritten.get(each.id, each) for each in self._store.records.values()]

    def course_of(self, cluster: str) -> ExchangeCourse | None:
        """Return the exchange of a cluster that is under way."""
        running = self._running.get(cluster)
        return None if running is None else running.course

    @property
    def missing(self) -> Counter[ClassKey]:
        """How many machines of each class the exchanges under way still acquire."""
        found: Counter[ClassKey] = Counter()
        for running in self._running.values():
            found += running.course.missing
        return found

    def is_busy(self, cluster: str) -> bool:
        """Return whether no exchange of the cluster may begin: one is under way, or ended a moment ago."""
        return cluster in self._running or cluster in self._settling

    def cooling(self, seconds: float) -> frozenset[str]:
        """Return the machines that went or came in an exchange of the last seconds, also if it was abandoned."""
        earliest = self._clock.unix_nanos() - int(seconds * NANOS_PER_SECOND)
        records = [each for each in self.records if (each.ended_unix_nanos or each.begun_unix_nanos) > earliest]
        return frozenset(machine_id for each in records for machine_id in (*each.goes_ids, *each.came_ids))

    def promises(self) -> list[PromisedMachines]:
        """Return the machines that have left their cluster for another one, which has not begun to acquire them.

        They follow from the records, so a restart forgets none of them.
        """
        now_unix_nanos, records = self._clock.unix_nanos(), self.records
        taken = {each.giver_exchange_id for each in records}
        found = []
        for record in records:
            left_for_seconds = (now_unix_nanos - record.ended_unix_nanos) / NANOS_PER_SECOND
            is_done = bool(record.taker) and record.end == ExchangeEnd.DONE.value and record.id not in taken
            if not is_done or left_for_seconds > PROMISED_SECONDS:
                continue
            machines = [self._host.inventory.get(each) for each in record.goes_ids]
            idle = tuple(each for each in machines if each is not None and each.state is MachineState.IDLE)
            if idle:
                found.append(PromisedMachines(record.id, record.taker, idle))
        return found

    def unfinished_takers(self, seconds: float) -> frozenset[str]:
        """Return the clusters to which a move began in the last seconds and whose part of it is not done.

        A move that was abandoned before everything was given does not count.
        """
        earliest, records = self._clock.unix_nanos() - int(seconds * NANOS_PER_SECOND), self.records
        done = {each.giver_exchange_id for each in records if each.end == ExchangeEnd.DONE.value}
        given = [each for each in records if each.taker and each.end in ("", ExchangeEnd.DONE.value)]
        return frozenset(each.taker for each in given if each.begun_unix_nanos > earliest and each.id not in done)

    @property
    def retained(self) -> Set[MachineId]:
        """The machines that may not be reclaimed now."""
        if not self._running and not self._settling:
            return frozenset()
        found = [running.course.retained for running in self._running.values()]
        found += [frozenset(self._host.inventory.bound_to(cluster)) for cluster in self._settling]
        return frozenset(MachineId(machine_id) for machines in found for machine_id in machines)

    # ---- beginning and abandoning --------------------------------------------------------------------------------

    def begin(
        self,
        proposal: ExchangeProposal,
        *,
        cluster: str,
        machines: int,
        rows: Sequence[Need],
        settings: ExchangeSettings,
    ) -> bool:
        """Begin a proposal that is ready; return whether it was begun.

        `machines` are those of the cluster, `rows` those that it was proposed for. It is not begun while another one
        is under way, for other demand, when one of its machines does not serve, and when it cannot be recorded.
        """
        target, held = self._host.plans.target_of(cluster), self._held_by(cluster)
        now = self._host.intake.table.by_cluster().get(cluster, ())
        is_possible = proposal.waits_for is None and not self.is_busy(cluster) and is_alike(rows, now)
        recorded = still_stored(self.records, self._clock.unix_nanos())
        if target is None or not is_possible or len(recorded) >= RECORDS_MAX:
            return False
        if proposal.taker and proposal.taker in self.unfinished_takers(settings.cooling_seconds):
            return False
        if _unpriced(target.counts) - _unpriced(held):
            return False  # the next decision acquires what is missing, and it would end as `needs-machines`
        course = begun(
            proposal,
            exchange_id=f"x-{self._host.epoch}-{self._count + 1}",
            cluster=cluster,
            machines=machines,
            settings=settings,
            now_seconds=self._clock.monotonic_seconds(),
        )
        is_single_wave = len(course.goes) <= course.budget
        if proposal.is_gang and not is_single_wave:
            return False  # a gang moves whole, and no more than the budget may go at a time
        if any(self._seen(each, cluster).sighting is not Sighting.SERVING for each in course.goes):
            return False
        given = (promise for promise in self.promises() if promise.taker == cluster)
        record = ExchangeRecord(
            id=course.id,
            cluster=cluster,
            begun_unix_nanos=self._clock.unix_nanos(),
            taker=proposal.taker,
            giver_exchange_id=next((each.exchange_id for each in given if each.is_taken_by(proposal)), ""),
            goes_ids=course.goes,
            goes=tuple(RecordedKind.of(kind, count) for kind, count in proposal.goes),
            comes=tuple(RecordedKind.of(kind, count) for kind, count in proposal.comes),
            promised_usd_per_hour=course.promised_usd_per_hour,
        )
        if not self._put(record):
            return False
        self._count += 1
        # A machine of the class that the cluster holds beyond its composition is none that comes.
        counts = Counter(target.counts)
        counts.update({key: max(0, held[key] - counts[key]) + count for key, count in course.comes})
        self._running[cluster] = _Running(course, record, now, replace(target, counts=dict(counts)))
        self._note("BeginExchange", record, record.promised_usd_per_hour, " ".join(proposal_sentences(proposal)))
        about = {"taker": record.taker} if record.taker else {}
        _log.info("exchange.begun", exchange=record.id, cluster=cluster, machines=len(course.goes), **about)
        self.export()
        return True

    def abandon(self, cluster: str, reason: ExchangeEnd) -> None:
        """End the exchange of a cluster if one is under way."""
        running = self._running.get(cluster)
        if running is not None:
            running.course = abandoned(running.course, reason)
            self._end(cluster, running)

    # ---- in a cycle ----------------------------------------------------------------------------------------------

    async def options_with(
        self,
        view: ColumnSnapshot,
        demand: Sequence[Need],
        by_cluster: Mapping[str, tuple[Need, ...]],
        options: Options,
        *,
        excess: Iterable[Machine],
    ) -> Options:
        """Follow all exchanges under way; return the options with the target of each cluster, and what leaves.

        Called before each decision; `excess` are the machines that the last one left without use.
        """
        self._follow_all(by_cluster, options.withheld)
        options = await self._host.plans.options_with(
            view, demand, by_cluster, options, frozen=self._running.keys(), excess=excess
        )
        if not self._running:
            return options
        # While one is planned, other tasks begin and abandon exchanges.
        for running in list(self._running.values()):
            if running.course.phase is ExchangePhase.ACQUIRING and running.course.has_all and not running.is_planning:
                await self._plan(running, view, demand, options)
        leaving = frozenset[str]().union(*(running.course.leaving for running in self._running.values()))
        targets = {cluster: running.target for cluster, running in self._running.items()}
        return replace(options, leaving=leaving, targets={**options.targets, **targets})

    def _follow_all(self, by_cluster: Mapping[str, tuple[Need, ...]], withheld: Mapping[str, WithheldPools]) -> None:
        now_seconds = self._clock.monotonic_seconds()
        for cluster, settling in list(self._settling.items()):
            if now_seconds < settling.waits_until_seconds and self._is_coming(cluster, settling.came):
                # Between Create and Configure it is Idle for a moment.
                self._settling[cluster] = replace(settling, until_seconds=now_seconds + SETTLING_SECONDS)
            elif settling.until_seconds < now_seconds:
                del self._settling[cluster]
        if not self._running:
            return
        for cluster, running in list(self._running.items()):
            if running.reason is None and _is_withheld(running.course, withheld.get(cluster)):
                running.reason = ExchangeEnd.MACHINE_FAILED
            self._follow(cluster, running, by_cluster.get(cluster, ()), now_seconds)
        self.export()

    def decided(self, decision: Decision) -> None:
        """Note what a decision acquires for clusters in exchange, and what clusters lack."""
        self._host.plans.decided(decision)
        if not self._running:
            return
        acquired: dict[str, list[MachineId]] = {cluster: [] for cluster in self._running}
        for row in decision.rows:
            running = self._running.get(row.need.cluster)
            if running is None:
                continue
            acquired[row.need.cluster] += (*row.bootstraps, *row.provisions)
            if row.unplaced or row.victims or (row.deficit and not row.impossible):
                running.reason = ExchangeEnd.SHORTFALL
            elif row.need.waiting:
                running.reason = ExchangeEnd.WAITING_PODS
        for cluster, ids in acquired.items():
            running = self._running[cluster]
            machines = [machine for each in ids if (machine := self._host.inventory.get(each)) is not None]
            running.acquired = {machine.id: class_key(machine) for machine in machines}
            if Counter(running.acquired.values()) - running.course.missing and running.reason is None:
                running.reason = ExchangeEnd.NEEDS_MACHINES

    async def close(self) -> None:
        """Cancel pending plans."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _follow(self, cluster: str, running: _Running, rows: Sequence[Need], now_seconds: float) -> None:
        found = {str(each): (key, self._seen(each, cluster)) for each, key in running.acquired.items()}
        on_way = (Sighting.CREATING, Sighting.BINDING, Sighting.SERVING)
        course = joined_by(running.course, {each: one for each, one in found.items() if one[1].sighting in on_way})
        seen = {each: self._seen(each, cluster) for each in (*course.goes, *course.came)}
        refused = frozenset(each for each in course.leaving if self._host.fit_holds.get(MachineId(each)) is not None)
        course = followed(course, seen, now_seconds=now_seconds, refused=refused)
        reason = running.reason or self._block_reason(cluster, running, rows)
        if reason is None and any(one.sighting is Sighting.AWAY for _, one in found.values()):
            reason = ExchangeEnd.MACHINE_FAILED
        if reason is not None and course.end is not ExchangeEnd.DONE:
            # What is seen of machines may follow from it: without a session no machine counts as joined.
            course = replace(course, phase=ExchangePhase.ENDED, end=reason)
        if course.phase is ExchangePhase.ACQUIRING and running.planned is not None and course.has_all:
            record = replace(running.record, came_ids=tuple(sorted(course.came)))
            # What came cools as well, also after a restart.
            if self._put(record):
                running.record, (running.target, running.rows) = record, running.planned
                course = drains(course, now_seconds)
                _log.info("exchange.draining", exchange=course.id, cluster=cluster, machines=len(course.goes))
        running.course = course
        if course.phase is ExchangePhase.ENDED:
            self._end(cluster, running)

    def _is_coming(self, cluster: str, came: frozenset[str]) -> bool:
        """Return whether a machine counts as supply of the cluster that does not serve yet.

        The decision counts on it, and would let others go before it is there.
        """
        waits = (Sighting.CREATING, Sighting.BINDING)
        return any(
            self._seen(each, cluster).sighting in waits for each in {*came, *self._host.inventory.bound_to(cluster)}
        )

    def _held_by(self, cluster: str) -> Counter[ClassKey]:
        """Return how many machines of each class serve a cluster, or are bound to it and will."""
        bound = [self._host.inventory.known(each) for each in self._host.inventory.bound_to(cluster)]
        is_held = (Sighting.BINDING, Sighting.SERVING)
        return Counter(class_key(each) for each in bound if self._sighting(each, cluster) in is_held)

    def _block_reason(self, cluster: str, running: _Running, rows: Sequence[Need]) -> ExchangeEnd | None:
        host = self._host
        if host.intake.is_quarantined(cluster):
            return ExchangeEnd.QUARANTINED
        if cluster not in host.sessions.clusters:
            return ExchangeEnd.OPERATOR_AWAY
        return None if is_alike(running.rows, rows) else ExchangeEnd.DEMAND_CHANGED

    def _seen(self, machine_id: str, cluster: str) -> Seen:
        machine = self._host.inventory.get(machine_id)
        if machine is None:
            return Seen(Sighting.AWAY)
        return Seen(self._sighting(machine, cluster), machine.price_usd_per_hour)

    def _sighting(self, machine: Machine, cluster: str) -> Sighting:
        publisher = self._host.publisher
        if self._host.stuck.is_no_supply(machine.id):
            return Sighting.AWAY
        match machine.state:
            case MachineState.CREATING:
                return Sighting.CREATING if machine.intended_cluster == cluster else Sighting.AWAY
            case MachineState.IDLE:
                return Sighting.IDLE
            case MachineState.SPECULATIVE | MachineState.DELETING:
                return Sighting.SPECULATIVE
        if machine.cluster != cluster:
            return Sighting.AWAY
        match machine.state:
            case MachineState.CONFIGURING:
                return Sighting.BINDING
            case MachineState.DRAINING:
                return Sighting.DRAINING
            case MachineState.CONFIGURED if publisher.joins.is_unjoined(machine.id):
                return Sighting.AWAY
            case MachineState.CONFIGURED:
                return Sighting.SERVING if publisher.has_joined(machine) else Sighting.BINDING
        return Sighting.AWAY

    # ---- planning without what goes ------------------------------------------------------------------------------

    async def _plan(self, running: _Running, view: ColumnSnapshot, demand: Sequence[Need], options: Options) -> None:
        """Plan the cluster without the machines that go; in the background where there are workers."""
        running.is_planning = True
        cluster = running.course.cluster
        rows = self._host.intake.table.by_cluster().get(cluster, ())
        machines = [self._host.inventory.get(each) for each in running.course.goes]
        going = Counter(class_key(machine) for machine in machines if machine is not None)
        answer = await self._host.plans.asked_without(view, demand, options, cluster, going)

        async def plan() -> None:
            target = None if answer is None else await self._host.plans.held_target(cluster, answer)
            if target is None:
                running.reason = running.reason or ExchangeEnd.DOES_NOT_PACK
            else:
                running.planned = (target, rows)

        if not self._host.plans.has_workers:
            await plan()
            return
        task = asyncio.create_task(plan(), name=f"exchange of {cluster}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _end(self, cluster: str, running: _Running) -> None:
        course = running.course
        assert course.end is not None, "an exchange that ended has a reason"
        del self._running[cluster]
        plans = self._host.plans
        if course.end is ExchangeEnd.DONE:
            plans.adopt(cluster, running.rows, running.target)
        else:
            # Its composition wants machines that may have left, and not those that came.
            plans.settle(cluster)
            came = frozenset[str]((*course.came, *running.acquired))
            self._settle(cluster, came)
        record = replace(
            running.record,
            came_ids=tuple(sorted(course.came)),
            end=course.end.value,
            realised_usd_per_hour=course.realised_usd_per_hour,
            left=len(course.gone),
        )
        self._put_ended(record)
        self.export()

    def _settle(self, cluster: str, came: frozenset[str]) -> None:
        now_seconds = self._clock.monotonic_seconds()
        self._settling[cluster] = _Settling(now_seconds + SETTLING_SECONDS, now_seconds + SETTLING_SECONDS_MAX, came)

    def _put_ended(self, record: ExchangeRecord) -> None:
        record = replace(record, ended_unix_nanos=self._clock.unix_nanos())
        if not self._put(record):
            self._unwritten[record.id] = record
        self._host.metrics.exchanges_ended.labels(record.end).inc()
        gone, came = len(record.goes_ids), len(record.came_ids)
        message = (
            f"{record.end}: {record.left} of {gone} machines left, {came} came; "
            f"${record.promised_usd_per_hour:,.2f}/h were promised, ${record.realised_usd_per_hour:,.2f}/h came of it."
        )
        if record.taker:
            message += f" What {record.taker} saves with the machines is its own exchange's."
        self._note("EndExchange", record, record.realised_usd_per_hour, message)
        _log.info("exchange.ended", exchange=record.id, cluster=record.cluster, end=record.end, left=record.left)

    def _put(self, record: ExchangeRecord) -> bool:
        """Return whether the record was made durable."""
        try:
            self._store.put(record, self._clock.unix_nanos())
        except OwnershipNotWritten as fault:
            advice = "an exchange that cannot be recorded is not begun, and its machines do not drain"
            _log.error("exchange.record_not_written", exchange=record.id, error=str(fault), advice=advice)
            return False
        self._unwritten.pop(record.id, None)
        return True

    def _note(self, kind: str, record: ExchangeRecord, saving_usd_per_hour: float, message: str) -> None:
        self._host.audit.note_exchange(
            kind=kind,
            cluster=record.cluster,
            machines=len(record.goes_ids),
            saving_usd_per_hour=saving_usd_per_hour,
            outcome=record.end or "begun",
            message=f"{record.id}: {message}",
            at_unix_nanos=record.ended_unix_nanos or record.begun_unix_nanos,
        )

    def measure(self, paths: PricePaths) -> None:
        """Record what exchanges that were done some hours ago have saved since."""
        now_unix_nanos, now_seconds = self._clock.unix_nanos(), self._clock.monotonic_seconds()
        for record in self.records:
            found = measured(record, paths, now_unix_nanos=now_unix_nanos, now_seconds=now_seconds)
            if found is not None and self._put(found):
                usd = found.realised_usd_per_hour
                _log.info("exchange.measured", exchange=found.id, cluster=found.cluster, realised_usd_per_hour=usd)

    def export(self) -> None:
        """Set the gauges; writes records again that could not be written, or whose stamps are ahead of the clock."""
        for record in list(self._unwritten.values()):
            self._put(record)
        metrics, records = self._host.metrics, self.records
        # A shard without records may be made before there is a clock to ask.
        now_unix_nanos = self._clock.unix_nanos() if records else 0
        ahead = next((each for each in records if is_ahead(each, now_unix_nanos)), None)
        # Writing one gives all of them the present as their stamp: they hold nothing for longer than they should.
        if ahead is not None and self._put(ahead):
            records = self.records
        earliest = now_unix_nanos - int(RETAINED_SECONDS * NANOS_PER_SECOND)
        ended = [record for record in records if record.ended_unix_nanos > earliest]
        metrics.exchange_saving.labels("ended").set(sum(each.promised_usd_per_hour for each in ended))
        metrics.exchange_saving.labels("realised").set(sum(each.realised_usd_per_hour for each in ended))
        metrics.exchanges_under_way.set(len(self._running))


def _is_withheld(course: ExchangeCourse, withheld: WithheldPools | None) -> bool:
    """Return whether an exchange still acquires machines of a pool that is withheld from its cluster."""
    pools = frozenset() if withheld is None else withheld.pools
    wanted = (CapacityPool(key.instance_type, key.zone, key.capacity_type) for key in course.missing)
    return course.phase is ExchangePhase.ACQUIRING and not pools.isdisjoint(wanted)


def _unpriced(counts: Mapping[ClassKey, int]) -> Counter[ClassKey]:
    """Return machines by class without its price, which may have changed since the composition was planned."""
    found: Counter[ClassKey] = Counter()
    for key, count in counts.items():
        found[key._replace(price_usd_per_hour=0.0)] += count
    return found
