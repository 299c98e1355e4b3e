"""Defects between shards and their coordinator, as those of `planted`, each with the invariant that has to find it.

Their world has two shards of one provider: the first starves, the second has machines to spare, and both change their
minds. None of this is reachable from the product.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import msgspec
import pytest

from bigfleet.coordinator import ownership_reconcile
from bigfleet.coordinator.leader import Leader
from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.link.client import Client
from bigfleet.link.inbox import Inbox
from bigfleet.link.reporter import CoordinatorLink
from bigfleet.model.ownership import RowKind
from bigfleet.rpc.etcd.store import EtcdStore
from bigfleet.shard import safety_limits
from bigfleet.shard.ownership.handover import Handover, HandoverDone
from bigfleet.shard.ownership.handover_host import ShardHandoverHost
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.shard.reconcile.ownership_filter import OwnershipFilter
from bigfleet.sim.plan_generator import GONE, LIVE, KindPlan, PoolPlan, WorldPlan
from tests.sim.world.planted import DEFECTS, Defect, Plant

_POOLS = (
    PoolPlan(instance_type="small", zone="a", capacity_type="bare_metal", count=4, cpu=4, price_usd_per_hour=0.04),
    PoolPlan(instance_type="small", zone="b", capacity_type="bare_metal", count=8, cpu=4, price_usd_per_hour=0.04),
    PoolPlan(instance_type="small", zone="b", capacity_type="on_demand", count=5, cpu=4, price_usd_per_hour=0.2),
)
_C0 = (
    KindPlan(name="web", count=16, cpu_milli=1000, priority=1000, penalty_dollars=16),
    KindPlan(name="service", count=4, cpu_milli=2000, priority=2000, penalty_dollars=64),
)
_C1 = (KindPlan(name="web", count=8, cpu_milli=1000, priority=100),)
#: What one zone has and both clusters want in turns.
_EVEN_POOLS = tuple(
    PoolPlan(instance_type="small", zone=zone, capacity_type="bare_metal", count=4, cpu=4, price_usd_per_hour=0.04)
    for zone in "ab"
)
#: One zone that is poor and one that is rich, and both want as much.
_UNEVEN_POOLS = tuple(
    PoolPlan(instance_type="small", zone=zone, capacity_type="bare_metal", count=count, cpu=4, price_usd_per_hour=0.04)
    for zone, count in (("a", 2), ("b", 10))
)
_EVEN = (KindPlan(name="web", count=16, cpu_milli=1000, priority=1000, penalty_dollars=16),)

#: Work that fills a zone and may be drained for others.
_CHEAP = (KindPlan(name="web", count=34, cpu_milli=1000, priority=100),)


def fleet(seed: int, *faults: str, **changes: Any) -> WorldPlan:
    """Return a small world of two shards with these faults."""
    plan = WorldPlan(
        seed=seed,
        faults=faults,
        pools=_POOLS,
        clusters=(_C0, _C1),
        safety_seconds=500.0,
        fault_seconds_mean=10.0,
        change_seconds_mean=60.0,
        cycle_interval_seconds=5.0,
        shards=2,
        homes=(0, 1),
        zones=(("a", 0), ("b", 1)),
        coordinator=LIVE,
        replicas=2,
        report_seconds=5.0,
    )
    return msgspec.structs.replace(plan, **changes)


def defect(name: str, invariant: str, *faults: str, found_by: int = 1, **changes: Any) -> Callable[[Plant], Plant]:
    """Register a defect with its world and the seed that is known to find it."""

    def register(plant: Plant) -> Plant:
        DEFECTS.append(Defect(name, invariant, plant, lambda seed: fleet(seed, *faults, **changes), found_by))
        return plant

    return register


# ---- one owner --------------------------------------------------------------------------------------------------


@defect("ownership is not asked for by reconcile", "S5")
def _not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnershipFilter, "owns", lambda _self, _record: True)
    patch.setattr(OwnershipFilter, "foreign", lambda _self, _records: set())


def _gives_up(before: Any, after: Any) -> bool:
    return any(
        row.kind is RowKind.RELEASED and before.rows.get(machine_id) is not row
        for machine_id, row in after.rows.items()
    )


@defect("what is given up is not written", "S5")
def _not_written(patch: pytest.MonkeyPatch) -> None:
    before = OwnershipFile.commit

    def commit(self: Any, owned: Any, reservations: Any = None) -> None:
        if _gives_up(self.owned, owned):
            self.owned = owned
        else:
            before(self, owned, reservations)

    patch.setattr(OwnershipFile, "commit", commit)


@defect("a machine is taken over before it was given up", "S5")
def _too_early(patch: pytest.MonkeyPatch) -> None:
    before = Handover._commit

    def commit(self: Any, owned: Any, reservations: Any = None) -> None:
        file, former = self._file, self._file.owned
        if not _gives_up(former, owned):
            before(self, owned, reservations)
            return
        file.owned = owned

        async def later() -> None:
            await self._clock.sleep(20.0)
            told, file.owned = file.owned, former
            before(self, told)

        self._later = asyncio.ensure_future(later())

    patch.setattr(Handover, "_commit", commit)


@defect(
    "older processes of a shard are not fenced off what it gives up",
    "S5",
    "shard-zombie",
    "shard-pause",
    "slow-reader",
    found_by=2,
    pools=_UNEVEN_POOLS,
    clusters=((_C0[0],), (KindPlan(name="web", count=16, cpu_milli=1000, priority=100),)),
    safety_seconds=700.0,
    fault_seconds_mean=5.0,
    change_seconds_mean=20.0,
)
def _open_doors(patch: pytest.MonkeyPatch) -> None:
    async def fence_machine(_self: Any, _machine_id: Any, _instruction_id: Any) -> None:
        return None

    patch.setattr(ShardHandoverHost, "fence_machine", fence_machine)


@defect("a released machine is handed to no shard", "S5")
def _to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership_reconcile, "_hand_on", lambda *_arguments: None)


# ---- instructions -----------------------------------------------------------------------------------------------


@defect("an instruction that comes again acts again", "S15", "answer-again", "coordinator-partition-one-way")
def _again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Handover, "_released_at", lambda _self, _turn: HandoverDone())
    patch.setattr(Inbox, "_answer", Inbox._judged)


@defect(
    "a leader that lost the lease continues, and terms are not checked",
    "S15",
    "lease-lost",
    "store-partition",
    "coordinator-partition",
    fault_seconds_mean=6.0,
    change_seconds_mean=20.0,
)
def _any_term(patch: pytest.MonkeyPatch) -> None:
    async def exchange(self: Any) -> bool:
        report = self._report()
        answer = await self._client.send(report)
        if answer is None:
            return False
        # Whoever answers is obeyed, as at first.
        self._inbox.accepted_term = 0
        self._inbox.carried(report.acks)
        self._acknowledged = None
        return bool(await self._handle(answer))

    async def leads(_self: Any) -> bool:
        return True

    async def ignore(_self: Any, _report: Any) -> None:
        return None

    patch.setattr(CoordinatorLink, "exchange", exchange)
    patch.setattr(EtcdStore, "_step_down", lambda _self, _why: None)
    patch.setattr(EtcdStore, "is_leader", leads)
    patch.setattr(Leader, "_outrun", ignore)


@defect("a reservation never ends", "L4", found_by=2, clusters=(_C0, _CHEAP), change_seconds_mean=60.0)
def _kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Handover, "_tended", lambda _self, kept: kept)


@defect(
    "cooldowns are ignored",
    "S17",
    found_by=2,
    pools=_EVEN_POOLS,
    clusters=(_EVEN, _EVEN),
    change_seconds_mean=100.0,
    cycle_interval_seconds=2.0,
    report_seconds=45.0,
    safety_seconds=2400.0,
)
def _no_cooldown(patch: pytest.MonkeyPatch) -> None:
    before = WorldPlan.coordinator_settings

    def eager(self: WorldPlan) -> CoordinatorSettings:
        # Passes that come with every report: the pace is no defect, and without it a machine seldom goes back in time.
        return replace(before(self), cooldown_seconds=0.0, rebalance_interval_seconds=self.report_seconds)

    patch.setattr(Handover, "_cools_down", lambda _self, _machine_id: False)
    patch.setattr(WorldPlan, "coordinator_settings", eager)


# ---- nobody answers ---------------------------------------------------------------------------------------------


@defect("a shard without a coordinator does one thing at a time", "S12", coordinator=GONE)
def _silence(patch: pytest.MonkeyPatch) -> None:
    before_send, before_choose = Client.send, safety_limits.choose
    #: The loops whose shards heard nothing; each lasts as long as its run.
    silent: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    async def send(self: Any, report: Any) -> Any:
        answer = await before_send(self, report)
        (silent.add if answer is None else silent.discard)(asyncio.get_running_loop())
        return answer

    def choose(actions: Any, **given: Any) -> Any:
        return before_choose(actions[:1] if asyncio.get_running_loop() in silent else actions, **given)

    patch.setattr(Client, "send", send)
    patch.setattr(safety_limits, "choose", choose)
