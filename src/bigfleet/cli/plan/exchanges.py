"""Proposes exchanges for the fleet of a plan, and shows them (docs/spec/exchange.md).

The prices of the files count as they are: there is no history in a file. Machines have no cooling time, because a file
does not say for how long they serve.
"""

from typing import Any

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
from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal, ExclusionReason


def exchanges_of(plan: FleetPlan) -> list[ClusterExchanges]:
    """Return what could be exchanged in each cluster that holds machines, as the plan finds them; ids ascending.

    Nothing for a demand without shapes: it says of no pod where it fits.
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
    questions = questions_of(fleet, context)
    found = [find_exchanges(question) for question in questions]
    moves = moves_of(fleet, context, questions, found)
    return [with_move(each, moves.get(each.cluster)) for each in found]


def exchanges_document(found: list[ClusterExchanges]) -> dict[str, Any]:
    """Return the exchanges by cluster."""
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


def show_exchanges(console: Console, found: list[ClusterExchanges]) -> None:
    """Print what could be exchanged."""
    console.print()
    console.print(Text("Exchanges", style="bold"))
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
    console.print(Text("Nothing of this is carried out: plan shows proposals.", style="dim"))
