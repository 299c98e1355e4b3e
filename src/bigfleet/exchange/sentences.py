"""Says exchanges in sentences: what goes and comes, the arithmetic term by term, and why it is not done yet."""

import math
from collections.abc import Sequence
from typing import Final

from bigfleet.exchange.course import ExchangeEnd
from bigfleet.exchange.values import (
    SECONDS_PER_HOUR,
    BlockReason,
    ClusterExchanges,
    ExchangeProposal,
    ExclusionReason,
    GateTerms,
    MachineKind,
    WaitReason,
)

_BLOCKS: Final = {
    BlockReason.NOT_REPORTED: "its operator has not reported since the shard started",
    BlockReason.QUARANTINED: "its roll-up is held back, because it lost most of its demand at once",
    BlockReason.OPERATOR_AWAY: "its operator has no session",
    BlockReason.SHORTFALL: "pods have no place",
    BlockReason.WAITING_PODS: "pods wait for the scheduler",
    BlockReason.MACHINES_CHANGING: "machines of it are coming or going",
    BlockReason.DEMAND_WITHOUT_PODS: "a row of its demand does not say of which pods it consists",
    BlockReason.TOO_LARGE: "it is too large to be planned",
    BlockReason.EXCHANGE_UNDER_WAY: "an exchange is under way",
    BlockReason.SEARCH_FAILED: "the search failed; the shard's log says why",
}
_EXCLUSIONS: Final = {
    ExclusionReason.PINNED: "pinned pods",
    ExclusionReason.COOLING: "cooling time",
    ExclusionReason.WOULD_NOT_FIT: "a drain that the operator refused",
    ExclusionReason.FORECAST: "pods that would not fit on other nodes",
    ExclusionReason.PRICE: "price not known or not settled",
    ExclusionReason.GANG: "a gang that cannot move whole",
    ExclusionReason.SPREAD: "a strict spread that cannot move whole",
    ExclusionReason.UNAVAILABLE: "not joined, or an action is under way",
}


_ENDS: Final = {
    ExchangeEnd.DONE: "all machines that should go have left",
    ExchangeEnd.MACHINE_FAILED: "a machine that came failed to boot, to bootstrap or to join, or was taken",
    ExchangeEnd.MACHINE_LEFT: "a machine that should go failed, was preempted or handed over",
    ExchangeEnd.PRICE_MOVED: "prices moved: it would save less than half of what was promised",
    ExchangeEnd.SHORTFALL: "pods had no place",
    ExchangeEnd.WAITING_PODS: "pods waited for the scheduler",
    ExchangeEnd.NEEDS_MACHINES: "the cluster acquired machines for its pods",
    ExchangeEnd.DEMAND_CHANGED: "the demand changed by more than 5%, or has other kinds of pods",
    ExchangeEnd.QUARANTINED: "the roll-up of the cluster is held back",
    ExchangeEnd.OPERATOR_AWAY: "the operator has no session",
    ExchangeEnd.WOULD_NOT_FIT: "the operator refused a drain: the pods would not fit on other nodes",
    ExchangeEnd.DOES_NOT_PACK: "the planner found no place for all pods without the machines that should go",
    ExchangeEnd.ACQUIRED_TOO_LATE: "the machines that should come did not serve within half an hour",
    ExchangeEnd.DRAINED_TOO_LATE: "the machines that should go did not drain in time",
    ExchangeEnd.SWITCHED_OFF: "the mode of the cluster is no longer on",
    ExchangeEnd.RESTARTED: "the shard was restarted",
}


def end_sentence(end: ExchangeEnd) -> str:
    """Return how an exchange ended."""
    if end is ExchangeEnd.DONE:
        return f"Done: {_ENDS[end]}."
    return f"Abandoned: {_ENDS[end]}. What has not left counts again."


def cluster_sentences(found: ClusterExchanges) -> list[str]:
    """Return why a cluster has no proposals, and which machines are excluded."""
    said = []
    if found.blocked is not None:
        said.append(f"Nothing is exchanged: {_BLOCKS[found.blocked]}.")
    elif not found.proposals:
        said.append("No exchange saves money.")
    if found.excluded:
        said.append(
            "Excluded: " + ", ".join(f"{count} ({_EXCLUSIONS[reason]})" for reason, count in found.excluded) + "."
        )
    return said


def proposal_sentences(proposal: ExchangeProposal) -> list[str]:
    """Return what one proposal does, its arithmetic, and what it waits for."""
    gate = proposal.gate
    return [
        f"{_what(proposal)}: "
        f"{_dollars(gate.saving_usd_per_hour)}/h less, {100 * gate.saving_fraction:.0f}% of what goes.",
        _prices(gate),
        f"Over {_time(gate.hold_seconds)} this saves {_dollars(gate.gain_usd)}. Required are "
        f"{gate.settings.margin:g} × ({_dollars(gate.double_running_usd)} of double running + "
        f"{_dollars(gate.boot_usd)} of boot + {_dollars(gate.reclamation_usd)} of reclamation penalties) = "
        f"{_dollars(gate.required_usd)}.",
        _pace(proposal),
    ]


def _what(proposal: ExchangeProposal) -> str:
    if proposal.taker_part is not None:
        comes = f"{_machines(proposal.comes)} come in their place" if proposal.comes else "nothing comes in their place"
        goes = _machines(proposal.taker_part.goes)
        return f"{_machines(proposal.goes)} move to {proposal.taker}, {comes}, and {goes} of {proposal.taker} go"
    gang = " (all machines of a gang)" if proposal.is_gang else ""
    return f"{_machines(proposal.goes)} go{gang}, {_machines(proposal.comes)} come"


def _prices(gate: GateTerms) -> str:
    before, after = gate.interruptions_before_usd_per_hour, gate.interruptions_after_usd_per_hour
    text = f"Price {_dollars(gate.goes_usd_per_hour)}/h before, {_dollars(gate.comes_usd_per_hour)}/h after"
    if before or after:
        text += f"; expected interruptions {_dollars(before)}/h before, {_dollars(after)}/h after"
    return text + "."


def _pace(proposal: ExchangeProposal) -> str:
    gate = proposal.gate
    waves = f" in {proposal.waves} waves" if proposal.waves > 1 else ""
    match proposal.waits_for:
        case None:
            return (
                f"Ready: the machines drain{waves}, and it has paid for itself after {_time(gate.break_even_seconds)}."
            )
        case WaitReason.SAVES_TOO_LITTLE:
            return f"Not ready: it saves less than {100 * gate.settings.saving_fraction_min:.0f}% of what goes."
        case WaitReason.DOES_NOT_PAY:
            return (
                f"Not ready: it does not pay{waves}. It would break even after {_time(gate.break_even_seconds)}; "
                f"machines that come are expected to stay the cheaper ones for {_time(gate.hold_seconds)}"
                f"{_as_before(gate)}."
            )
        case WaitReason.BUDGET:
            return "Not ready: proposals before it take the number of machines that may go at a time."
        case WaitReason.DOES_NOT_PACK:
            return "Not ready: the planner finds no place for all pods of the cluster on the machines afterwards."
        case WaitReason.NO_STOCK:
            return "Not ready: exchanges under way take the machines on offer that would come."
        case WaitReason.FORECAST:
            return "Not ready: the operator is asked whether the pods of what goes would fit on the other nodes."
        case WaitReason.WOULD_NOT_FIT:
            return "Not ready: the pods of what goes would not fit on the other nodes; the shard's log names the first."


def _as_before(gate: GateTerms) -> str:
    return ", as prices of the last days let expect" if gate.lasting_share < 1 else ""


def _machines(kinds: Sequence[tuple[MachineKind, int]]) -> str:
    return " + ".join(
        f"{count} × {kind.instance_type} {kind.capacity_type}{f' in {kind.zone}' if kind.zone else ''}"
        f"{', idle' if kind.is_idle else ''} ({_dollars(kind.price_usd_per_hour)}/h each)"
        for kind, count in kinds
    )


def _dollars(amount: float) -> str:
    in_cents = f"${amount:,.2f}"
    return in_cents if abs(amount) >= 1 or round(amount, 2) == amount else f"${amount:.3g}"


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "no time"
    if seconds < SECONDS_PER_HOUR:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / SECONDS_PER_HOUR:.3g} h"
