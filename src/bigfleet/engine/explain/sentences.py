"""Writes explanations as sentences with figures and units (docs/spec/aggregates.md §8).

`sentences` is the one place where a decision becomes prose: the commands, the audit log and the console print what it
returns. Figures and reasons get their words in `bigfleet.engine.explain.words`. It adds nothing to the explanation and
leaves out only what a count stands for or another sentence says.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bigfleet.engine.decision import ActionKind
from bigfleet.engine.explain.explanation import (
    AcquiredMachine,
    DomainChoice,
    Explanation,
    MachineExplanation,
    NeedExplanation,
    RejectionCount,
    Victim,
)
from bigfleet.engine.explain.flips import Flip, FlipKind
from bigfleet.engine.explain.records import (
    MATCHING_COUNT_MAX,
    Acquired,
    HeldReason,
    MachineHeld,
    MachineKept,
    MachineReclaimed,
    MachineRecord,
    MachineReleased,
    MachineSpared,
    MatchingCounts,
    Mode,
    RankedDomain,
    ReclaimReason,
    Rejection,
    RowRef,
    SparedReason,
    Stage,
)
from bigfleet.engine.explain.words import (
    RowName,
    amounts_text,
    counted,
    dollars_text,
    figure_text,
    hourly_text,
    joined,
    listed,
    not_taken_sentence,
    percent_text,
    rejection_sentence,
    seconds_text,
    share_text,
)

__all__ = ["RowName", "amounts_text", "default_row_name", "dollars_text", "sentences", "shortfall_sentences"]

#: Reasons that are found before it is known whether the machine fits.
_WHATEVER_FITS: Final = frozenset(
    {
        Rejection.UNJOINED,
        Rejection.RESERVED,
        Rejection.SOLD_OUT,
        Rejection.SET_ASIDE,
        Rejection.CLAIMED,
        Rejection.EARMARKED,
        Rejection.TAKEN,
        Rejection.ASSIGNED_PRIORITY,
        Rejection.CLAIMED_BY_PEER,
    }
)

_PARKED: Final = (
    "It is parked after too many cycles without progress: it keeps what it has, and takes and preempts nothing."
)


def default_row_name(row: RowRef) -> str:
    """Name a row by its cluster and gang, and its place in the list, from 1."""
    gang = f" (gang {row.group})" if row.group else ""
    return f"row {row.position + 1} of {row.cluster}{gang}"


def sentences(explanation: Explanation, *, row_name: RowName = default_row_name) -> list[str]:
    """Return the explanation as sentences, each complete in itself; `row_name` says which row is meant."""
    if isinstance(explanation, NeedExplanation):
        return _need_sentences(explanation, row_name)
    return _machine_sentences(explanation, row_name)


def shortfall_sentences(explanation: NeedExplanation, *, row_name: RowName = default_row_name) -> list[str]:
    """Return only what says why a row stays short: what there is, what there would be, and why it is not taken."""
    found = []
    if explanation.domain is not None and explanation.domain.chosen is None:
        found += _domain_sentences(explanation.domain)
    if explanation.started.mode is Mode.PARKED:
        found.append(_PARKED)
    if explanation.finished.matching is not None:
        found.append(_matching_sentence(explanation.finished.matching))
    found += _best_domains(explanation)
    informative = [count for count in explanation.rejections if _explains_shortfall(count, explanation)]
    # What nearly fitted says more than what never could, of which there is often most.
    informative.sort(key=lambda count: (list(Stage).index(count.stage), count.reason is Rejection.PROFILE))
    found += [rejection_sentence(count, row_name) for count in informative]
    return found + _victim_priority(explanation)


def _explains_shortfall(count: RejectionCount, explanation: NeedExplanation) -> bool:
    if count.stage is Stage.DOMAIN and explanation.domain is not None and explanation.domain.chosen is not None:
        return False  # the scans in the chosen domain say it again
    if count.reason in _WHATEVER_FITS and _fitting(count.stage, explanation.finished.matching) == 0:
        return False  # of machines none of which would do, it does not matter who holds them
    # That a machine was not needed for what was covered says nothing about what was not.
    return count.reason not in (Rejection.COVERED, Rejection.NOT_OWN)


def _fitting(stage: Stage, matching: MatchingCounts | None) -> int | None:
    """Return how many machines of a scan fit the row, held or free; None when it is not known."""
    if matching is None:
        return None
    return {Stage.IDLE: matching.idle, Stage.SPECULATIVE: matching.speculative, Stage.VICTIM: matching.configured}.get(
        stage
    )


# ---- a row -------------------------------------------------------------------------------------------------------


def _need_sentences(explanation: NeedExplanation, row_name: RowName) -> list[str]:
    return [
        *_row_intro(explanation, row_name),
        *([] if explanation.domain is None else _domain_sentences(explanation.domain)),
        *_credit_sentences(explanation),
        *(
            sentence
            for group in _acquired_groups(explanation.acquired)
            for sentence in _acquired_sentences(group, "It", row_name)
        ),
        *_more_taken(explanation),
        *_finish_sentences(explanation),
        *_victim_sentences(explanation, row_name),
        *(rejection_sentence(count, row_name) for count in explanation.rejections),
    ]


def _row_intro(explanation: NeedExplanation, row_name: RowName) -> list[str]:
    start = explanation.started
    least = f", at least {amounts_text(start.min_unit)} on each machine," if start.min_unit else ""
    intro = (
        f"{row_name(start.row)} wants {amounts_text(start.aggregate)}{least} at priority {start.priority:,}; "
        f"{counted(start.rank, 'row was', 'rows were')} served before it."
    )
    found = [intro]
    if explanation.folded is not None:
        count, proof = len(explanation.folded.members), explanation.folded.proof_machine
        found.append(
            f"It stands for {counted(count, 'gang, which needs', 'gangs, which need')} no common domain, because "
            f"{proof} alone could host {'it' if count == 1 else 'any one of them'} whole."
        )
    if explanation.not_folded is not None:
        small = explanation.not_folded.matching_machines
        least = "at least " if small >= MATCHING_COUNT_MAX else ""
        matching = (
            f"; {least}{counted(small, 'machine matches but is', 'machines match but are')} too small" if small else ""
        )
        found.append(f"No single machine could host it whole, so all its machines must share one domain{matching}.")
    if start.mode is Mode.PARKED:
        found.append(_PARKED)
    return found


def _domain_sentences(choice: DomainChoice) -> list[str]:
    first, second = choice.chosen, choice.second
    if first is None:
        return [f"No domain of {choice.key} has a machine that fits, so it gets nothing."]
    if second is None:
        return [f"{_domain_name(choice, first)} is the only domain of {choice.key} with a machine that fits."]
    names = (_domain_name(choice, first), _domain_name(choice, second))
    return [
        f"Of {choice.domains:,} domains of {choice.key} it chose {names[0]}; next came {names[1]}.",
        _rule_sentence(choice, first, second, names),
    ]


def _domain_name(choice: DomainChoice, domain: RankedDomain) -> str:
    return domain.value or f'the one without a name ({choice.key} is "")'


def _rule_sentence(choice: DomainChoice, first: RankedDomain, second: RankedDomain, names: tuple[str, str]) -> str:
    if choice.decided_by == 1:
        return f"Rule 1 decided: {names[0]} could cover it whole, {names[1]} could not."
    if choice.decided_by == 4:
        return f"Rule 4 decided: {names[0]} has {first.members:,} machines for it, {names[1]} {second.members:,}."
    place = choice.decided_by_coverage
    if choice.decided_by == 5 or place is None:
        return f"Rule 5 decided: both offer the same, and {names[0]} comes first by name."
    what = (
        ("is covered by machines that serve its cluster", "is covered by its own machines", "would be offered")
        if choice.decided_by == 2
        else ("could be covered", "is covered by machines that serve its cluster", "is covered by its own machines")
    )[place]
    # A coverage sums over the dimensions, so that of two dimensions covered whole is 200%.
    left, right = percent_text(first.coverages[place]), percent_text(second.coverages[place])
    both = "both could cover it whole" if choice.decided_by == 2 else "neither could cover it whole"
    better = "tighter" if (choice.decided_by, place) == (2, 2) else "better"
    return (
        f"Rule {choice.decided_by} decided: {both}, and {names[0]} is {better}: {left} of the demand {what} there, "
        f"{right} in {names[1]} (summed over its resources)."
    )


def _credit_sentences(explanation: NeedExplanation) -> list[str]:
    if not explanation.credited:
        return []
    names = [f"{record.machine} ({record.state.label})" for record in explanation.credited_sample]
    count = counted(explanation.credited, "machine counts", "machines count")
    return [f"{count} for it already: {listed(names, explanation.credited)}."]


def _acquired_groups(acquired: Sequence[AcquiredMachine]) -> list[list[AcquiredMachine]]:
    """Return machines taken one after the other, together where the same is to be said of them."""
    groups: list[list[AcquiredMachine]] = []
    for taken in acquired:
        if groups and taken.record.domain is None and _alike(groups[-1][0]) == _alike(taken):
            groups[-1].append(taken)
        else:
            groups.append([taken])
    return groups


def _alike(taken: AcquiredMachine) -> tuple[object, ...]:
    record = taken.record
    # An idle machine is taken for its price alone; nothing is said of its interruptions.
    interruptions = (record.probability, record.cost) if record.kind is ActionKind.PROVISION else None
    return (
        record.kind,
        record.price,
        interruptions,
        record.runner_up,
        record.cost_difference,
        taken.is_spare,
    )


def _acquired_sentences(group: Sequence[AcquiredMachine], subject: str, row_name: RowName) -> list[str]:
    record = group[0].record
    who = subject if subject == "It" else row_name(record.row)
    names = joined([taken.record.machine for taken in group])
    one = len(group) == 1
    if record.kind is ActionKind.BOOTSTRAP:
        how = f"{who} takes {names}, which {'is idle at' if one else 'are idle, each at'} {hourly_text(record.price)}"
    else:
        how = f"{who} has {names} made {'at' if one else 'each at'} {_made_at(record)}"
    if record.domain is not None:
        how += (
            f"; {record.domain or 'its domain'} held {record.count} of the row's machines, the fewest in a domain were "
            f"{record.minimum}, and the skew may be {record.skew}"
        )
    if group[0].is_spare:
        return [f"{how}; the row's other machines would cover everything without {'it' if one else 'any one of them'}."]
    if not record.runner_up or record.cost_difference is None:
        return [f"{how}; no other candidate would have replaced {'it' if one else 'them'}."]
    second = _runner_up_sentence(record.runner_up, record.cost_difference)
    # At equal costs the runner-up's sentence says it all.
    flips = [flip for flip in group[0].flips if flip.change != 0]
    return [f"{how}.", second, *(_flip_sentence(flip) for flip in flips)]


def _made_at(record: Acquired) -> str:
    if not (record.probability and record.penalty_dollars):
        return hourly_text(record.price)
    return (
        f"an effective {hourly_text(record.cost)}: {hourly_text(record.price)} and a "
        f"{share_text(record.probability)} chance an hour of an interruption that costs "
        f"{dollars_text(record.penalty_dollars)}"
    )


def _runner_up_sentence(runner_up: str, difference: float) -> str:
    if difference == 0:
        return f"The runner-up {runner_up} costs the same and lost by the order of ids."
    less = "less, but the spread does not allow it" if difference < 0 else "more"
    return f"The runner-up {runner_up} costs {hourly_text(abs(difference))} {less}."


def _flip_sentence(flip: Flip) -> str:
    reach = "reached" if flip.at_equality else "exceeded"
    match flip.kind:
        case FlipKind.PRICE:
            assert flip.to is not None, "a price is known"
            rise = f"{hourly_text(flip.change)} more than now"
            return (
                f"{flip.instead} would go first if the price of {flip.machine} {reach} {hourly_text(flip.to)}, {rise}."
            )
        case FlipKind.INTERRUPTION_PROBABILITY:
            assert flip.to is not None, "a probability is known"
            return (
                f"{flip.instead} would go first if the chance of an interruption of {flip.machine} {reach} "
                f"{share_text(flip.to)} an hour."
            )
        case FlipKind.ROW_PENALTY:
            assert flip.to is not None, "a penalty is known"
            fell = "fell to" if flip.at_equality else "fell below"
            verb = reach if flip.change >= 0 else fell
            return f"{flip.instead} would go first if the row's interruption penalty {verb} {dollars_text(flip.to)}."
        case FlipKind.ASSIGNED_PRIORITY:
            assert flip.to is not None, "a priority is known"
            return (
                f"{flip.instead} would be drained first if {flip.machine} served a priority of {figure_text(flip.to)} "
                f"or more, {figure_text(flip.change)} above its own."
            )
        case FlipKind.ASSIGNED_PENALTY:
            assert flip.to is not None, "a penalty is known"
            return (
                f"{flip.instead} would be drained first if interrupting {flip.machine} cost more than "
                f"{dollars_text(flip.to)}."
            )


def _more_taken(explanation: NeedExplanation) -> list[str]:
    rest = explanation.bootstraps + explanation.provisions - len(explanation.acquired)
    if rest <= 0:
        return []
    return [
        f"It takes {counted(rest, 'more machine', 'more machines')} in the same way: in all "
        f"{explanation.bootstraps:,} idle and {explanation.provisions:,} to be made."
    ]


def _finish_sentences(explanation: NeedExplanation) -> list[str]:
    finish = explanation.finished
    if finish.satisfied:
        return ["With these it has everything it wants."]
    lacks = amounts_text(finish.deficit)
    then = "Then it still lacks" if finish.claimed else "It gets no machine and lacks everything that it wants:"
    found = [f"{then} {lacks}."]
    if finish.matching is not None:
        found.append(_matching_sentence(finish.matching))
    return found + _best_domains(explanation)


def _best_domains(explanation: NeedExplanation) -> list[str]:
    domains = explanation.finished.best_domains
    if not domains:
        return []
    best = ", ".join(f"{domain.value or '(no name)'} {domain.coverage_per_mille / 10:.4g}%" for domain in domains)
    return [f"The best domains could hold this much of it: {best}."]


def _matching_sentence(matching: MatchingCounts) -> str:
    more = "at least " if matching.is_capped else ""
    return (
        f"Machines that fit it, held or free: {more}{matching.idle:,} idle, {matching.speculative:,} that could "
        f"be made, {matching.configured:,} in service."
    )


def _victim_sentences(explanation: NeedExplanation, row_name: RowName) -> list[str]:
    found = []
    if explanation.coming:
        found.append(f"{counted(explanation.coming, 'machine is', 'machines are')} being drained for it already.")
    if explanation.preempted:
        found.append(
            f"Of {counted(explanation.possible_victims, 'machine', 'machines')} of lower priority "
            f"it preempts {explanation.preempted:,}."
        )
    for victim in explanation.victims:
        found += _victim_of(victim, "It", row_name)
    if explanation.unresolved is not None:
        found.append(f"What nothing covers is its shortfall: {amounts_text(explanation.unresolved.deficit)}.")
    return found + _victim_priority(explanation)


def _victim_priority(explanation: NeedExplanation) -> list[str]:
    if explanation.victim_priority is None:
        return []
    priority, machine = explanation.victim_priority
    return [f"At a priority of {priority:,} or more it could ask for {machine} too."]


def _victim_of(victim: Victim, subject: str, row_name: RowName) -> list[str]:
    record, ranked = victim.record, victim.ranked
    who = subject if subject == "It" else row_name(record.row)
    found = [
        f"{who} preempts {record.machine} of {record.cluster} with {record.grace_seconds} s of notice: score "
        f"{record.score:.4f}, of which {ranked.priority_term:.4f} for a priority {ranked.gap:,} lower, "
        f"{ranked.drain_term:.4f} for the drain, {ranked.interruption_term:.4f} and {ranked.reclamation_term:.4f} for "
        "its interruption and reclamation penalties, more the smaller they are."
    ]
    if record.claimed_by is not None:
        found.append(f"{record.machine} was held by {row_name(record.claimed_by)}.")
    if not record.runner_up or record.score_difference is None:
        found.append(f"No other machine could have been drained in place of {record.machine}.")
    elif record.score_difference == 0:
        found.append(f"The runner-up {record.runner_up} has the same score and was spared by the order of ids.")
    else:
        found.append(f"The runner-up {record.runner_up} scores {-record.score_difference:.4f} less.")
    return found + [_flip_sentence(flip) for flip in victim.flips]


# ---- a machine ---------------------------------------------------------------------------------------------------


def _machine_sentences(explanation: MachineExplanation, row_name: RowName) -> list[str]:
    found: list[str] = []
    # That a machine that is taken is not released goes without saying.
    is_plain = isinstance(explanation.outcome, MachineHeld) and explanation.outcome.reason is HeldReason.CLAIMED
    if explanation.outcome is not None and not (is_plain and explanation.acquired is not None):
        found.append(_outcome_sentence(explanation.outcome, row_name))
    if explanation.credited is not None:
        found.append(
            f"{explanation.machine} counts for {row_name(explanation.credited.row)} "
            f"with {amounts_text(explanation.credited.supply)}."
        )
    if explanation.acquired is not None:
        found += _acquired_sentences([explanation.acquired], "", row_name)
    if explanation.victim is not None:
        found += _victim_of(explanation.victim, "", row_name)
    if explanation.coming is not None:
        found.append(f"{explanation.machine} is being drained for {row_name(explanation.coming.row)}.")
    if explanation.earmarked is not None:
        found.append(
            f"{row_name(explanation.earmarked.row)} counted on {explanation.machine} when it chose its domain."
        )
    found += [not_taken_sentence(count, row_name) for count in explanation.rejections]
    if explanation.rows_left_out:
        rows = counted(explanation.rows_left_out, "more row was", "more rows were")
        found.append(f"{rows} not asked about it: less urgent, or no match for it.")
    return found or [f"Nothing was decided about {explanation.machine}, and no row looked at it."]


_RECLAIM_REASONS: Final[Mapping[ReclaimReason, str]] = {
    ReclaimReason.UNJOINED: "its node never joined the cluster",
    ReclaimReason.OTHER_DOMAIN: "the gang that it fits chose another domain",
    ReclaimReason.NO_ROW_FITS: "it fits no row of the cluster",
    ReclaimReason.EXCESS: "the rows that it fits were covered by machines that are kept before it",
}
_HELD_REASONS: Final[Mapping[HeldReason, str]] = {
    HeldReason.CLAIMED: "a row has just taken it",
    HeldReason.RESERVED: "it is reserved for another shard or held for its former cluster",
    HeldReason.FIXED_CAPACITY: "its kind of capacity is never released",
    HeldReason.NO_IDLE_STAMP: "it is not known since when it has been idle",
    HeldReason.HOLD_RUNNING: "its hold is not over",
}


def _outcome_sentence(outcome: MachineRecord, row_name: RowName) -> str:
    machine = outcome.machine
    match outcome:
        case MachineKept():
            return f"{machine} stays with {outcome.cluster}: {row_name(outcome.row)} holds it."
        case MachineReclaimed():
            return _reclaimed_sentence(outcome)
        case MachineSpared():
            return _spared_sentence(outcome, row_name)
        case MachineReleased():
            return (
                f"{machine} ({outcome.capacity_type.label}) is released: it has been idle for "
                f"{seconds_text(outcome.idle_seconds)} and is held for {seconds_text(outcome.hold_seconds)}."
            )
        case MachineHeld():
            left = "" if outcome.seconds_left is None else f"; {seconds_text(outcome.seconds_left)} are left"
            return f"{machine} is not released: {_HELD_REASONS[outcome.reason]}{left}."


def _spared_sentence(record: MachineSpared, row_name: RowName) -> str:
    start = f"{record.machine} is not reclaimed from {record.cluster}"
    if record.bound_for is not None:
        return (
            f"{start}: it was bound for {row_name(record.bound_for)}, which lacks {amounts_text(record.deficit)}, and "
            "a row that is short keeps the machines that were bound for it."
        )
    if record.reason is SparedReason.PREEMPTED:
        return f"{start}, because it is preempted."
    return f"{start}: the cluster has not reported what it wants, and silence gives nothing back."


def _reclaimed_sentence(record: MachineReclaimed) -> str:
    price = record.keep_key[0]
    found = (
        f"{record.machine} is reclaimed from {record.cluster}: {_RECLAIM_REASONS[record.reason]}. It costs "
        f"{hourly_text(price)} and is number {record.position + 1:,} in the order of keeping, cheap ones first"
    )
    if record.last_kept and record.price_difference is not None:
        found += (
            f"; {record.last_kept}, the last one kept before it, costs {hourly_text(record.price_difference)} less"
            if record.price_difference
            else f"; {record.last_kept}, the last one kept before it, costs the same"
        )
    return f"{found}."
