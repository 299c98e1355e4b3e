"""Finds exchanges for the fleet of a plan, and shows them (docs/spec/exchange.md).

The prices of the files count as they are: there is no history in a file. Machines have no cooling time, because a file
does not say for how long they serve.
"""

from collections.abc import Sequence, Set
from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from bigfleet.cli.plan.document import plain
from bigfleet.cli.plan.planning import FleetPlan
from bigfleet.cli.runtime.kernel_cache import keep_kernels
from bigfleet.engine.explain.sentences import dollars_text
from bigfleet.engine.explain.words import counted
from bigfleet.engine.shapes.decide import says_pods
from bigfleet.engine.shapes.fleet import build
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.exchange.between_clusters import moves_of, with_move
from bigfleet.exchange.plausibility import current_prices, proportionate
from bigfleet.exchange.questions import ExchangeContext, questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.sentences import cluster_sentences, proposal_sentences
from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal, ExchangeQuestion, ExclusionReason

#: Exchanges that the text lists.
LINES_MAX: Final = 100


class ExchangeSearch:
    """Finds the exchanges of one plan after the other; a cluster of which nothing has changed is not searched again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ExchangeQuestion, ClusterExchanges]] = {}

    def exchanges_of(
        self, plan: FleetPlan, *, has_moves: bool = True, among: Set[str] | None = None
    ) -> list[ClusterExchanges]:
        """Return what could be exchanged in each cluster that holds machines, as the plan finds them; ids ascending.

        Nothing for a demand without shapes: it says of no pod where it fits. `has_moves`: also between clusters.
        `among`: only these clusters are looked at.
        """
        if not says_pods(plan.demand):
            return []
        keep_kernels()
        machines = list(plan.snapshot.machines.values())
        context = ExchangeContext(
            rows=plan.decision.rows,
            prices=proportionate(current_prices(machines), machines),
            plan_settings={str(need.cluster): plan.given.settings for need in plan.demand},
            exclude=dict.fromkeys((*plan.options.unjoined, *plan.options.reserved), ExclusionReason.UNAVAILABLE),
        )
        fleet = build(SnapshotMachines(plan.snapshot, plan.options), plan.demand, plan.options)
        questions = [each for each in questions_of(fleet, context) if among is None or each.cluster in among]
        found = [self._answer(question) for question in questions]
        moves = moves_of(fleet, context, questions, found) if has_moves else {}
        return [with_move(each, moves.get(each.cluster)) for each in found]

    def _answer(self, question: ExchangeQuestion) -> ClusterExchanges:
        known = self._known.get(question.cluster)
        if known is None or known[0] != question:
            known = self._known[question.cluster] = question, find_exchanges(question)
        return known[1]


def exchanges_document(found: Sequence[ClusterExchanges]) -> dict[str, Any]:
    """Return what could be exchanged, by cluster."""
    return {
        "clusters": {
            one.cluster: {
                "machines": one.machines,
                "cost_usd_per_hour": plain(one.cost_usd_per_hour),
                "blocked": None if one.blocked is None else one.blocked.value,
                "excluded": {reason.value: count for reason, count in one.excluded},
                "proposals": [_proposal(proposal) for proposal in one.proposals],
            }
            for one in found
        },
        "promised_usd_per_hour": sum(one.promised_usd_per_hour for one in found),
    }


def carried_out_document(carried_out: Sequence[tuple[str, ExchangeProposal]]) -> list[dict[str, Any]]:
    """Return the exchanges that were carried out, in their order."""
    return [{"cluster": cluster, **_proposal(proposal)} for cluster, proposal in carried_out]


def _proposal(proposal: ExchangeProposal) -> dict[str, Any]:
    gate, part = proposal.gate, proposal.taker_part
    return {
        "kind": proposal.kind.value,
        "gang": proposal.is_gang,
        "goes": [{**plain(kind), "machines": count} for kind, count in proposal.goes],
        "comes": [{**plain(kind), "machines": count} for kind, count in proposal.comes],
        "machine_ids": list(proposal.machine_ids),
        "waves": proposal.waves,
        "saving_usd_per_hour": gate.saving_usd_per_hour,
        "break_even_seconds": plain(gate.break_even_seconds),
        "gain_usd": gate.gain_usd,
        "required_usd": gate.required_usd,
        "terms": {name: value for name, value in plain(gate).items() if name != "settings"},
        "settings": plain(gate.settings),
        "waits_for": None if proposal.waits_for is None else proposal.waits_for.value,
        "taker": proposal.taker or None,
        "taker_goes": [] if part is None else [{**plain(kind), "machines": count} for kind, count in part.goes],
        "taker_machine_ids": [] if part is None else list(part.machine_ids),
        "sentences": proposal_sentences(proposal),
    }


def show_carried_out(
    console: Console, carried_out: Sequence[tuple[str, ExchangeProposal]], cost_before_usd_per_hour: float
) -> None:
    """Print the exchanges that were carried out, and what the machines cost before."""
    console.print()
    console.print(Text("Exchanged", style="bold"))
    for cluster, proposal in carried_out[:LINES_MAX]:
        console.print(Text(f"{cluster}: {proposal_sentences(proposal)[0]}"))
    if len(carried_out) > LINES_MAX:
        console.print(f"{len(carried_out) - LINES_MAX:,} more; --output json has every exchange.")
    cost = f"Before, the clusters' machines cost {dollars_text(cost_before_usd_per_hour)}/h."
    console.print(Text(cost if carried_out else "Nothing was exchanged."))


def show_exchanges(console: Console, found: Sequence[ClusterExchanges], *, is_rest: bool = False) -> None:
    """Print what could be exchanged; `is_rest`: what is left of it when no exchange is ready any more."""
    console.print()
    console.print(Text("Not exchanged" if is_rest else "Exchanges", style="bold"))
    if not found:
        console.print("No cluster with pods holds machines.")
    for one in found:
        machines = counted(one.machines, "machine", "machines")
        console.print(Text(f"{one.cluster}: {machines} for {dollars_text(one.cost_usd_per_hour)}/h"))
        for sentence in cluster_sentences(one):
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
        for number, proposal in enumerate(one.proposals, start=1):
            first, *rest = proposal_sentences(proposal)
            console.print(Padding(Text(f"{number}. {first}"), (0, 0, 0, 2), expand=False))
            for sentence in rest:
                console.print(Padding(Text(sentence), (0, 0, 0, 5), expand=False))
    if not is_rest:
        console.print(Text("Nothing of this is carried out: plan shows proposals.", style="dim"))
