"""W14: a rebalancing pass over 200 shards with 100 shortfalls each, and a round of their reports.

docs/spec/benchmarks.md. In a quiet fleet nobody has anything to give; in a usual one a few per cent of the shards do.
Shards lack what others have, so that every shortfall that may move has someone to ask. Nothing here is random.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from bench.harness import Benchmark
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.leader_term import CoordinatorSettings, Term
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.rebalance_plan import plan
from bigfleet.coordinator.received_report import received_of
from bigfleet.coordinator.stores.protocol import LeaderInfo as Name
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.coordinator.transfers import FleetView
from bigfleet.model import labels
from bigfleet.model.ids import Fingerprint, ShardId
from bigfleet.model.ownership import Base, Domain, Owned
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shard_report import CapacityCount, Holding, ShardReport, ShardSummary, Shortfall
from bigfleet.model.states import CapacityType
from bigfleet.rpc.wire.convert_coordinator import answer_to_wire, report_from_wire, report_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2

SHARDS = 200
SHORTFALLS = 100
ROWS = 39
#: One shard in so many has something to give: four per cent.
GIVING_EVERY = 25
_TYPES = tuple(f"t{index}.xlarge" for index in range(40))
_SIZE = {"cpu": 16_000, "memory": 64_000}
_THIRD = 13


def _shortfall(shard: int, index: int) -> Shortfall:
    instance_type = _TYPES[(shard % 3) * _THIRD + index % _THIRD]
    requirements = [Requirement(labels.INSTANCE_TYPE, Operator.IN, (instance_type,))]
    if index % 4 == 0:
        requirements.append(Requirement(labels.ZONE, Operator.IN, ("abc"[index % 3],)))
    machines = 1 + index % 50
    return Shortfall(
        fingerprint=Fingerprint(f"{instance_type}/{index}"),
        requirements=tuple(requirements),
        deficit={"cpu": 4_000 * machines, "memory": 16_000 * machines},
        min_unit={"cpu": 1_000},
        priority=1_000 * (index % 7),
        age_cycles=6 + index % 20,
        interruption_bucket=index % 9,
        is_topology_constrained=index % 10 == 9,
    )


def report_of(shard: int, *, giving_every: int, cycle: int = 1, term: int = 0) -> ShardReport:
    """Return a shard's report; one of every `giving_every` has 39 rows of idle machines and of slots."""
    gives = bool(giving_every) and shard % giving_every == 0
    names = _TYPES[((shard + 1) % 3) * _THIRD :][:_THIRD]
    rows = tuple(
        CapacityCount(name, zone, CapacityType.ON_DEMAND, (shard * 7 + place) % 4 + 1 if shard % 10 else 1, _SIZE)
        for place, name in enumerate(names)
        for zone in "abc"
    )
    assert len(rows) == ROWS
    return ShardReport(
        shard_id=ShardId(f"s-{shard:03}"),
        epoch=1,
        cycle=cycle,
        echoed_term=term,
        address=f"s-{shard:03}:7780",
        summary=ShardSummary(
            provider_address="provider:9100",
            type_counts=dict.fromkeys(_TYPES, 500),
            idle=rows if gives else (),
            speculative=rows if gives else (),
        ),
        shortfalls=tuple(_shortfall(shard, index) for index in range(SHORTFALLS)),
        holding=Holding(owned=Owned(base=Base.DOMAINS, domains=frozenset({Domain(labels.ZONE, f"z-{shard}")}))),
    )


def _pass(giving_every: int, what: str) -> Benchmark:
    def prepare() -> Callable[[], object]:
        figures = []
        for shard in range(SHARDS):
            known = received_of(report_of(shard, giving_every=giving_every)).figures
            assert known is not None
            assert len(known.shortfalls) == SHORTFALLS
            figures.append(replace(known, base=Base.DOMAINS))
        view = FleetView(shards=tuple(figures))

        def run() -> object:
            planned = plan(view)
            return len(planned.moves), sorted(planned.skips().items())

        return run

    return Benchmark(
        name=f"W14 rebalancing pass, {what}",
        size=f"{SHARDS} shards, {SHARDS * SHORTFALLS:,} shortfalls",
        prepare=prepare,
        items=SHARDS * SHORTFALLS,
        target_ms=20.0,
    )


def _reports() -> Benchmark:
    """A round of reports, from the bytes of each to the bytes of its answer."""

    def prepare() -> Callable[[], object]:
        directory = tempfile.TemporaryDirectory(prefix="bigfleet-w14-")
        term = asyncio.run(_registered(Path(directory.name)))
        cycle = 1

        def run() -> object:
            nonlocal cycle
            cycle += 1
            contents = _contents(cycle, term.term)
            answered = asyncio.run(_answered(term, contents))
            # The directory lives as long as what is timed.
            assert directory.name
            return answered

        return run

    return Benchmark(
        name="W14 a round of reports, bytes to bytes",
        size=f"{SHARDS} shards, {SHORTFALLS} shortfalls each",
        prepare=prepare,
        items=SHARDS,
        # 20 % of a core when they report every ten seconds.
        target_ms=2_000.0,
    )


async def _registered(directory: Path) -> Term:
    term = await registered(directory)
    await _answered(term, _contents(1, term.term))
    return term


async def registered(directory: Path) -> Term:
    """Return a leader on a file that nobody has reported to."""
    clock = SystemClock()
    store = SqliteStateStore(directory / "c.db", leader=Name("bench", ""))
    leader = Leader(store, await store.campaign(), clock=clock, report_cycle_seconds=10.0)
    return Term(leader, settings=CoordinatorSettings(), clock=clock, metrics=CoordinatorMetrics(CollectorRegistry()))


def _contents(cycle: int, term: int) -> list[bytes]:
    reports = (report_of(shard, giving_every=GIVING_EVERY, cycle=cycle, term=term) for shard in range(SHARDS))
    return [report_to_wire(report).SerializeToString() for report in reports]


async def _answered(term: Term, contents: Sequence[bytes]) -> int:
    acknowledged = 0
    for content in contents:
        answer = await term.report(report_from_wire(coordinator_pb2.ShardReport.FromString(content)))
        acknowledged += coordinator_pb2.ReportAck.FromString(answer_to_wire(answer).SerializeToString()).acknowledged
    assert acknowledged == SHARDS
    return acknowledged


COORDINATOR: tuple[Benchmark, ...] = (_pass(0, "nothing to give"), _pass(GIVING_EVERY, "4 % give"), _reports())
