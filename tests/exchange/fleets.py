"""Builds fleets of several clusters, and asks which machines could move between them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bigfleet.engine.decision import Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import DecisionState, build
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.engine.snapshot import Snapshot
from bigfleet.exchange.between_clusters import moves_of
from bigfleet.exchange.plausibility import current_prices, proportionate
from bigfleet.exchange.questions import ExchangeContext, questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import BlockReason, ExchangeProposal, ExchangeSettings, ExclusionReason
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType
from tests.exchange.building import held

RESERVED = CapacityType.RESERVED
SETTINGS = ExchangeSettings()


def in_cluster(cluster: str, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines in another cluster."""
    return [replace(machine, cluster=ClusterId(cluster)) for machine in machines]


def wants(cluster: str, *needs: Need) -> list[Need]:
    """Return rows of another cluster."""
    return [replace(each, cluster=ClusterId(cluster)) for each in needs]


def _size(cpu: int) -> str:
    return "" if cpu == 4 else str(cpu)


def own(cluster: str, count: int, price: float = 0.5, cpu: int = 4) -> list[Machine]:
    """Return Reserved machines of 4 cpu of a cluster."""
    machines = held(count, f"{cluster}-own{_size(cpu)}", cpu, price, capacity_type=RESERVED, instance_type=f"own{cpu}")
    return in_cluster(cluster, machines)


def rented(cluster: str, count: int, price: float = 3.0, cpu: int = 4) -> list[Machine]:
    """Return rented machines of 4 cpu of a cluster."""
    return in_cluster(cluster, held(count, f"{cluster}-rented{_size(cpu)}", cpu, price, instance_type=f"rented{cpu}"))


def options_of(demand: Sequence[Need]) -> Options:
    """Return the options of a cycle in which every cluster has reported."""
    return Options(now_seconds=0.0, reported=frozenset(str(each.cluster) for each in demand))


def state_of(
    machines: Sequence[Machine],
    demand: Sequence[Need],
    *,
    settings: ExchangeSettings = SETTINGS,
    options: Options | None = None,
    exclude: Mapping[str, ExclusionReason] | None = None,
    blocked: Mapping[str, BlockReason] | None = None,
) -> tuple[DecisionState, ExchangeContext]:
    """Return the state of a fleet, and the context of questions about it."""
    snapshot = Snapshot.of(machines)
    options = options or options_of(demand)
    context = ExchangeContext(
        rows=decide(snapshot, demand, options).rows,
        prices=proportionate(current_prices(machines), machines),
        settings=settings,
        exclude=exclude or {},
        blocked=blocked or {},
    )
    return build(SnapshotMachines(snapshot, options), demand, options), context


def moves(machines: Sequence[Machine], demand: Sequence[Need], **more: Any) -> dict[str, ExchangeProposal]:
    """Return the moves of a fleet by giver; further arguments are those of `state_of`."""
    fleet, context = state_of(machines, demand, **more)
    questions = questions_of(fleet, context)
    return moves_of(fleet, context, questions, [find_exchanges(question) for question in questions])
