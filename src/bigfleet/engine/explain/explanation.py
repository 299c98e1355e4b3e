"""Explains one row or one machine of a decision, from the records (docs/spec/aggregates.md §8).

An explanation is a value: what was taken and what nearly was, why the others were not, which domain beat which, and the
smallest change that would have turned the choice. `explain` runs the reference with a reporter that listens for one row
or one machine and counts instead of keeping, so that a large fleet costs no memory. `bigfleet.engine.explain.sentences`
says it in sentences. This module does not decide: what no record says is not explained.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigfleet.engine.decision import Decision, Options, RowResult, Weights
from bigfleet.engine.explain.flips import Flip, acquisition_flips, penalty_flip, victim_flips
from bigfleet.engine.explain.records import (
    Acquired,
    CandidateConsidered,
    CandidateRejected,
    Credited,
    Detail,
    DomainsRanked,
    Earmarked,
    MachineHeld,
    MachineKept,
    MachineReclaimed,
    MachineRecord,
    MachineReleased,
    MachineSpared,
    Mode,
    RankedDomain,
    RankedVictim,
    Record,
    Rejection,
    RowFinished,
    RowFolded,
    RowNotFolded,
    RowRecord,
    RowRef,
    RowStarted,
    RowUnresolved,
    Stage,
    VictimComing,
    VictimPicked,
    VictimsRanked,
)
from bigfleet.engine.folding import folded_need
from bigfleet.engine.matching import fits
from bigfleet.engine.reference.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import MachineState
from bigfleet.model.vector import covers, is_useful, subtract

#: Machines, or rows, that a count of rejections names.
SAMPLE_MAX = 5
#: Rows that are asked about one machine: each costs a scan of the fleet.
ROWS_ASKED_MAX = 20
#: Machines taken, of one kind, that an explanation describes one by one; the rest is counted.
DESCRIBED_MAX = 10

_MACHINE_RECORDS = (MachineKept, MachineReclaimed, MachineSpared, MachineReleased, MachineHeld)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """One machine that a row's scan passed over."""

    row: RowRef
    machine: str
    #: What the reason compared.
    detail: Detail


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionCount:
    """How often one reason rejected a machine for a row in one scan."""

    stage: Stage
    reason: Rejection
    count: int
    #: The first few, in scan order.
    sample: tuple[PassedOver, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainChoice:
    """Which domain a gang got, and why not the next one."""

    key: str
    #: How many there were to choose from.
    domains: int
    chosen: RankedDomain | None
    second: RankedDomain | None
    #: Rule 1 to 5 of docs/spec/aggregates.md §5.3; None with fewer than two domains.
    decided_by: int | None
    #: Of rules 2 and 3: which of the three coverages differs first, from 0.
    decided_by_coverage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquiredMachine:
    """A machine newly taken, and what would have turned the choice."""

    record: Acquired
    flips: tuple[Flip, ...]
    #: Whether the row's other machines cover everything without it, which is why nothing would have replaced it; only
    #: `explain` knows it, for it takes the machines themselves.
    is_spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A machine preempted, what its score is made of, and what would have spared it."""

    record: VictimPicked
    ranked: RankedVictim
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedExplanation:
    """Why one row got what it got."""

    started: RowStarted
    finished: RowFinished
    folded: RowFolded | None = None
    not_folded: RowNotFolded | None = None
    domain: DomainChoice | None = None
    credited: int = 0
    #: The first few of those credited, in claim order.
    credited_sample: tuple[Credited, ...] = ()
    bootstraps: int = 0
    provisions: int = 0
    #: The first few of those newly taken, in claim order.
    acquired: tuple[AcquiredMachine, ...] = ()
    earmarked: int = 0
    coming: int = 0
    #: How many machines could have been preempted.
    possible_victims: int = 0
    preempted: int = 0
    #: The first few of those preempted, in pick order.
    victims: tuple[Victim, ...] = ()
    unresolved: RowUnresolved | None = None
    #: By scan, then reason.
    rejections: tuple[RejectionCount, ...] = ()
    #: Short rows: the smallest priority at which one more machine that helps might be preempted, and which; only
    #: `explain` knows it, for it takes the machines themselves.
    victim_priority: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineExplanation:
    """Why one machine serves whom it serves, and what becomes of it."""

    machine: str
    #: What became of a Configured or Idle machine; None in other states.
    outcome: MachineRecord | None = None
    credited: Credited | None = None
    acquired: AcquiredMachine | None = None
    victim: Victim | None = None
    coming: VictimComing | None = None
    earmarked: Earmarked | None = None
    #: The rows that did not take it, by scan, then reason.
    rejections: tuple[RejectionCount, ...] = ()
    #: Rows of less urgency, or that it fits less, which were not asked.
    rows_left_out: int = 0


Explanation = NeedExplanation | MachineExplanation


@dataclass(slots=True)
class _Rejections:
    """Counts rejections by scan and reason and keeps the first few of each."""

    counts: dict[tuple[Stage, Rejection], int] = field(default_factory=dict)
    samples: dict[tuple[Stage, Rejection], list[PassedOver]] = field(default_factory=dict)

    def add(self, record: CandidateRejected) -> None:
        key = (record.stage, record.reason)
        self.counts[key] = self.counts.get(key, 0) + 1
        sample = self.samples.setdefault(key, [])
        if len(sample) < SAMPLE_MAX:
            sample.append(PassedOver(row=record.row, machine=record.machine, detail=record.detail))

    def found(self) -> tuple[RejectionCount, ...]:
        stages, reasons = list(Stage), list(Rejection)
        order = sorted(self.counts, key=lambda key: (stages.index(key[0]), reasons.index(key[1])))
        return tuple(
            RejectionCount(
                stage=stage,
                reason=reason,
                count=self.counts[stage, reason],
                sample=tuple(self.samples[stage, reason]),
            )
            for stage, reason in order
        )


class NeedStory:
    """A reporter that gathers what happens to one row; it keeps counts and samples, whatever the size of the fleet."""

    def __init__(self, row: RowRef, *, weights: Weights | None = None) -> None:
        """Listen for the row at one place of the folded list; `weights` are those of the decision's victim score."""
        self._row = row
        self._weights = weights or Weights()
        self._one: dict[type[Record], Record] = {}
        self._credited: list[Credited] = []
        self._acquired: list[Acquired] = []
        self._picked: list[VictimPicked] = []
        self._earmarked = 0
        self._coming = 0
        self._rejections = _Rejections()

    def wants_row(self, row: RowRef) -> bool:
        """Return whether it is the row that is listened for."""
        return row == self._row

    def wants_machine(self, machine_id: str) -> bool:
        """Say that every machine is of interest: the ones passed over are counted."""
        return True

    def report(self, record: Record) -> None:
        """Take one record; those about other rows and about machines alone are passed over."""
        if isinstance(record, _MACHINE_RECORDS) or record.row != self._row:
            return
        match record:
            case CandidateRejected():
                self._rejections.add(record)
            case Credited():
                self._credited.append(record)
            case Acquired():
                self._acquired.append(record)
            case VictimPicked():
                self._picked.append(record)
            case Earmarked():
                self._earmarked += 1
            case VictimComing():
                self._coming += 1
            case CandidateConsidered():
                pass  # a place in a scan says nothing that its taking or its rejection does not say better
            case _:
                self._one[type(record)] = record

    def explanation(self) -> NeedExplanation | None:
        """Return the explanation, or None when the row took no part in the decision."""
        started, finished = self._one.get(RowStarted), self._one.get(RowFinished)
        if not isinstance(started, RowStarted) or not isinstance(finished, RowFinished):
            return None
        folded, not_folded = self._one.get(RowFolded), self._one.get(RowNotFolded)
        ranked, unresolved = self._one.get(VictimsRanked), self._one.get(RowUnresolved)
        domains = self._one.get(DomainsRanked)
        return NeedExplanation(
            started=started,
            finished=finished,
            folded=folded if isinstance(folded, RowFolded) else None,
            not_folded=not_folded if isinstance(not_folded, RowNotFolded) else None,
            domain=_domain_choice(domains) if isinstance(domains, DomainsRanked) else None,
            credited=len(self._credited),
            credited_sample=tuple(self._credited[:DESCRIBED_MAX]),
            bootstraps=len(finished.bootstraps),
            provisions=len(finished.provisions),
            acquired=tuple(_acquired(record) for record in self._acquired[:DESCRIBED_MAX]),
            earmarked=self._earmarked,
            coming=self._coming,
            possible_victims=len(ranked.victims) if isinstance(ranked, VictimsRanked) else 0,
            preempted=len(self._picked),
            victims=_victims(self._picked[:DESCRIBED_MAX], ranked, started, self._weights),
            unresolved=unresolved if isinstance(unresolved, RowUnresolved) else None,
            rejections=self._rejections.found(),
        )


class MachineStory:
    """A reporter that gathers what happens to one machine."""

    def __init__(
        self, machine_id: str, *, weights: Weights | None = None, positions: frozenset[int] | None = None
    ) -> None:
        """Listen for one machine, and for the rows at some places of the folded list alone; None is all of them.

        `weights` are those of the decision's victim score.
        """
        self._machine = machine_id
        self._positions = positions
        self._weights = weights or Weights()
        self._outcome: MachineRecord | None = None
        self._taken: dict[type[RowRecord], RowRecord] = {}
        #: The ranking in which the machine was picked; a ranking comes right before its picks.
        self._ranking: VictimsRanked | None = None
        #: The start of each row that may preempt it.
        self._started: dict[RowRef, RowStarted] = {}
        self._rejections = _Rejections()

    def wants_row(self, row: RowRef) -> bool:
        """Return whether it is among the rows that are asked."""
        return self._positions is None or row.position in self._positions

    def wants_machine(self, machine_id: str) -> bool:
        """Return whether it is the machine that is listened for."""
        return machine_id == self._machine

    def report(self, record: Record) -> None:
        """Take one record; those about other machines are passed over."""
        match record:
            case RowStarted():
                self._started[record.row] = record
            case VictimsRanked():
                if VictimPicked not in self._taken:
                    self._ranking = record
            case (
                RowFolded() | RowNotFolded() | DomainsRanked() | RowFinished() | RowUnresolved() | CandidateConsidered()
            ):
                pass  # about rows, or a mere place in a scan
            case _:
                if record.machine != self._machine:
                    return
                if isinstance(record, _MACHINE_RECORDS):
                    self._outcome = record
                elif isinstance(record, CandidateRejected):
                    self._rejections.add(record)
                else:
                    self._taken[type(record)] = record

    def explanation(self) -> MachineExplanation:
        """Return the explanation; a machine of which nothing was heard has an empty one."""
        credited, acquired = self._taken.get(Credited), self._taken.get(Acquired)
        picked, coming = self._taken.get(VictimPicked), self._taken.get(VictimComing)
        earmarked = self._taken.get(Earmarked)
        victims: tuple[Victim, ...] = ()
        if isinstance(picked, VictimPicked):
            victims = _victims([picked], self._ranking, self._started[picked.row], self._weights)
        return MachineExplanation(
            machine=self._machine,
            outcome=self._outcome,
            credited=credited if isinstance(credited, Credited) else None,
            acquired=_acquired(acquired) if isinstance(acquired, Acquired) else None,
            victim=victims[0] if victims else None,
            coming=coming if isinstance(coming, VictimComing) else None,
            earmarked=earmarked if isinstance(earmarked, Earmarked) else None,
            rejections=self._rejections.found(),
        )


def explain_need(records: Iterable[Record], row: RowRef, *, weights: Weights | None = None) -> NeedExplanation | None:
    """Return why the row at one place of the folded list got what it got, or None when no record is about it."""
    story = NeedStory(row, weights=weights)
    for record in records:
        story.report(record)
    return story.explanation()


def explain_machine(
    records: Iterable[Record], machine_id: str, *, weights: Weights | None = None
) -> MachineExplanation:
    """Return why the machine serves whom it serves and what becomes of it."""
    story = MachineStory(machine_id, weights=weights)
    for record in records:
        story.report(record)
    return story.explanation()


def explain(
    snapshot: Snapshot,
    demand: Sequence[Need],
    options: Options,
    *,
    need: Need | None = None,
    machine: str | None = None,
) -> Explanation:
    """Decide with the reference, listening for one row or one machine, and return why.

    Exactly one of `need`, a row of `demand`, and `machine`, an id of the snapshot, is given; ValueError otherwise.
    """
    if (need is None) == (machine is None):
        raise ValueError("explain takes either a need or a machine")
    if need is not None:
        return explain_needs(snapshot, demand, options, [need])[0]
    assert machine is not None, "checked above"
    if machine not in snapshot.machines:
        raise ValueError(f"no machine has the id {machine!r}")
    rows = decide(snapshot, demand, options).rows
    asked = rows_to_ask(rows, snapshot.machines[MachineId(machine)])
    story = MachineStory(machine, weights=options.weights, positions=asked)
    decide(snapshot, demand, options, story)
    explanation = story.explanation()
    acquired = explanation.acquired
    if acquired is not None:
        acquired = _with_machines(acquired, rows[acquired.record.row.position], snapshot)
    return replace(explanation, acquired=acquired, rows_left_out=len(rows) - len(asked))


def rows_to_ask(rows: Sequence[RowResult], machine: Machine) -> frozenset[int]:
    """Return the places of the rows that have most to say: those that take the machine, that it fits, the urgent."""

    def urgency(position: int) -> tuple[object, ...]:
        row = rows[position]
        takes = machine.id in row.claimed or machine.id in row.victims
        fitting = fits(row.need.profile, row.need.min_unit, machine)
        return (not takes, not fitting, *(-part for part in row.need.profile.precedence), position)

    return frozenset(sorted(range(len(rows)), key=urgency)[:ROWS_ASKED_MAX])


def explain_needs(
    snapshot: Snapshot, demand: Sequence[Need], options: Options, needs: Sequence[Need]
) -> list[NeedExplanation]:
    """Decide once and return why, for some rows of `demand`. Raises ValueError for a row that it does not have."""
    places = [_place_of(need, demand) for need in needs]
    stories = _StoriesByRow(needs, options.weights)
    decision = decide(snapshot, demand, options, stories)
    position_of = {id(member): position for position, row in enumerate(decision.rows) for member in row.members}
    holders = {machine_id: row.need for row in decision.rows for machine_id in row.claimed}
    explained = []
    for place in places:
        position = position_of[id(demand[place])]
        explanation, row = stories.explanation_at(position), decision.rows[position]
        explained.append(
            replace(
                explanation,
                acquired=tuple(_with_machines(taken, row, snapshot) for taken in explanation.acquired),
                victim_priority=_victim_priority(row, snapshot, options, holders),
            )
        )
    return explained


def _place_of(need: Need, demand: Sequence[Need]) -> int:
    identical = (place for place, row in enumerate(demand) if row is need)
    equal = (place for place, row in enumerate(demand) if row == need)
    place = next(identical, None)
    place = next(equal, None) if place is None else place
    if place is None:
        raise ValueError(f"the demand has no row {need.key}")
    return place


class _StoriesByRow:
    """A reporter that gathers what happens to some rows: folding may give each another fingerprint and place."""

    def __init__(self, needs: Iterable[Need], weights: Weights) -> None:
        self._weights = weights
        self._keys: set[tuple[str, str, str]] = set()
        for need in needs:
            self._keys.add(need.key)
            if need.profile.same_key is not None:
                self._keys.add(folded_need(need).key)
        self._stories: dict[int, NeedStory] = {}

    def wants_row(self, row: RowRef) -> bool:
        return row[:3] in self._keys

    def wants_machine(self, machine_id: str) -> bool:
        return True

    def report(self, record: Record) -> None:
        if not isinstance(record, _MACHINE_RECORDS):
            row = record.row
            self._stories.setdefault(row.position, NeedStory(row, weights=self._weights)).report(record)

    def explanation_at(self, position: int) -> NeedExplanation:
        explanation = self._stories[position].explanation()
        assert explanation is not None, "every row of the demand has its turn"
        return explanation


def _with_machines(taken: AcquiredMachine, row: RowResult, snapshot: Snapshot) -> AcquiredMachine:
    """Add what the machines show and the records do not."""
    flip = penalty_flip(taken.record, snapshot.machines)
    others = subtract(row.held, snapshot.machines[MachineId(taken.record.machine)].supply)
    return replace(
        taken,
        flips=taken.flips if flip is None else (*taken.flips, flip),
        is_spare=not taken.record.runner_up and covers(others, row.need.aggregate),
    )


def _victim_priority(
    row: RowResult, snapshot: Snapshot, options: Options, holders: Mapping[MachineId, Need]
) -> tuple[int, str] | None:
    """Return the smallest priority at which one more machine that helps might be preempted for a short row."""
    need = row.need
    if not row.unresolved or need.parked or (need.profile.same_key is not None and not row.has_domain):
        return None
    found: list[tuple[int, str]] = []
    for machine in snapshot.of_state(MachineState.CONFIGURED):
        holder = holders.get(machine.id)
        if machine.id in options.unjoined or machine.id in row.claimed or not is_useful(machine.supply, row.unresolved):
            continue
        if need.profile.same_key is not None and machine.attribute(need.profile.same_key) != row.domain:
            continue
        wall = max(machine.assigned_priority, machine.assigned_priority if holder is None else holder.profile.priority)
        if wall >= need.profile.priority and fits(need.profile, need.min_unit, machine):
            found.append((wall + 1, machine.id))
    return min(found, default=None)


def _domain_choice(record: DomainsRanked) -> DomainChoice:
    domains = record.domains
    first, second = (*domains[:2], None, None)[:2]
    differing = None
    if first is not None and second is not None and record.decided_by in (2, 3):
        pairs = zip(first.coverages, second.coverages, strict=True)
        differing = next(place for place, (left, right) in enumerate(pairs) if left != right)
    return DomainChoice(
        key=record.key,
        domains=len(domains),
        chosen=first,
        second=second,
        decided_by=record.decided_by,
        decided_by_coverage=differing,
    )


def _acquired(record: Acquired) -> AcquiredMachine:
    return AcquiredMachine(record=record, flips=acquisition_flips(record))


def _victims(
    picked: Sequence[VictimPicked], ranked: Record | None, started: RowStarted | None, weights: Weights
) -> tuple[Victim, ...]:
    if not picked or not isinstance(ranked, VictimsRanked) or started is None:
        return ()
    by_machine = {victim.machine: victim for victim in ranked.victims}
    return tuple(
        Victim(
            record=record,
            ranked=by_machine[record.machine],
            flips=()
            if started.mode is Mode.SPREAD
            else victim_flips(record, by_machine, priority=started.priority, weights=weights),
        )
        for record in picked
    )


def explain_decision(decision: Decision, subject: Need | RowKey | MachineId) -> Explanation:
    """Return why a row got what it got, or why a machine serves whom it serves (docs/spec/aggregates.md §8).

    `subject` is a row of the demand, a row of this decision, the (cluster, fingerprint, group) of either, or the id of
    a machine; a folded row is explained as its first member. Equal to `explain` on what the decision was made of, and
    costs the same: the reference decides again with a listener. Raises ValueError for what took no part in the
    decision, and when the decision has no basis.
    """
    basis = decision.basis
    if basis is None:
        raise ValueError("the decision does not hold what it was made of; call `explain` with it")
    if isinstance(subject, str):
        return explain(basis.snapshot(), basis.demand, basis.options, machine=subject)
    return explain(basis.snapshot(), basis.demand, basis.options, need=_asked(decision, subject, basis.demand))


def _asked(decision: Decision, subject: Need | RowKey, demand: Sequence[Need]) -> Need:
    """Return the row of the demand that is meant: folding and parking give rows another form."""

    def is_meant(need: Need) -> bool:
        return need == subject if isinstance(subject, Need) else need.key == subject

    # Equal rows are distinguished by identity, so the object that was given goes before any that equals it.
    given = next((need for need in demand if need is subject), None)
    given = given or next((need for need in demand if is_meant(need)), None)
    given = given or next((row.members[0] for row in decision.rows if is_meant(row.need)), None)
    if given is None:
        raise ValueError(f"the demand has no row {subject.key if isinstance(subject, Need) else subject}")
    return given
