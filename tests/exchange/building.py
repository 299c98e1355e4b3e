"""Builds fleets at rest for tests of exchanges, and asks what could be exchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bigfleet.engine.decision import Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.shapes.fleet import build
from bigfleet.engine.shapes.machines import SnapshotMachines
from bigfleet.engine.snapshot import Snapshot
from bigfleet.exchange.plausibility import PriceBook, current_prices, proportionate
from bigfleet.exchange.questions import ExchangeContext, questions_of
from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import (
    BlockReason,
    ClusterExchanges,
    ExchangeQuestion,
    ExchangeSettings,
    ExclusionReason,
)
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.model.states import CapacityType, MachineState

GIB = 2**30 * 1000
OPTIONS = Options(now_seconds=0.0, reported=frozenset({"c"}))


def machine(name: str, cpu: int, price: float, **fields: Any) -> Machine:
    """Return a Speculative on-demand machine with 4 GiB of memory per cpu."""
    values: dict[str, Any] = {
        "id": MachineId(name),
        "state": MachineState.SPECULATIVE,
        "instance_type": f"t{cpu}",
        "zone": "a",
        "capacity_type": CapacityType.ON_DEMAND,
        "allocatable": {"cpu": str(cpu), "memory": f"{4 * cpu}Gi", "pods": "110"},
        "price_usd_per_hour": price,
        **fields,
    }
    return Machine(**values)


def offers(number: int, name: str, cpu: int, price: float, **fields: Any) -> list[Machine]:
    """Return so many equal machines on offer."""
    return [machine(f"{name}-{n:03}", cpu, price, **fields) for n in range(number)]


def held(number: int, name: str, cpu: int, price: float, **fields: Any) -> list[Machine]:
    """Return so many equal machines that cluster c holds."""
    return [
        replace(one, state=MachineState.CONFIGURED, host=HostRef("p", one.id), cluster=ClusterId("c"))
        for one in offers(number, name, cpu, price, **fields)
    ]


def idle(number: int, name: str, cpu: int, price: float, **fields: Any) -> list[Machine]:
    """Return so many equal Idle machines."""
    return [
        replace(one, state=MachineState.IDLE, host=HostRef("p", one.id))
        for one in offers(number, name, cpu, price, **fields)
    ]


def need(*shapes: DemandShape, **profile: Any) -> Need:
    """Return a row of pods of cluster c."""
    amounts = amounts_of(shapes, aggregate={}, min_unit={})
    values: dict[str, Any] = {"priority": 100, "interruption_bucket": 1, "reclamation_bucket": 1, **profile}
    return Need(
        cluster=ClusterId("c"),
        profile=Profile(**values),
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        shapes=amounts.shapes,
    )


def pods(cpu_milli: int, memory_gib: float, count: int) -> DemandShape:
    """Return equal pods."""
    return DemandShape({"cpu": cpu_milli, "memory": round(memory_gib * GIB)}, count)


def question(
    machines: Sequence[Machine],
    demand: Sequence[Need],
    *,
    settings: ExchangeSettings | None = None,
    prices: PriceBook | None = None,
    exclude: Mapping[str, ExclusionReason] | None = None,
    blocked: Mapping[str, BlockReason] | None = None,
    options: Options = OPTIONS,
) -> ExchangeQuestion:
    """Return what is asked about cluster c; prices are those of the machines unless given."""
    snapshot = Snapshot.of(machines)
    context = ExchangeContext(
        rows=decide(snapshot, demand, options).rows,
        prices=prices if prices is not None else proportionate(current_prices(machines), machines),
        settings=settings or ExchangeSettings(),
        exclude=exclude or {},
        blocked=blocked or {},
    )
    questions = questions_of(build(SnapshotMachines(snapshot, options), demand, options), context)
    assert [each.cluster for each in questions] == ["c"]
    return questions[0]


def asked(machines: Sequence[Machine], demand: Sequence[Need], **more: Any) -> ClusterExchanges:
    """Return what can be exchanged in cluster c; further arguments are those of `question`."""
    return find_exchanges(question(machines, demand, **more))
