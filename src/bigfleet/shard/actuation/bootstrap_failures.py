"""Backs off from pools whose machines are created and then cannot be bootstrapped for a cluster.

docs/spec/shard.md §9.8, docs/adr/0246-bootstrap-failures-by-cluster-and-pool.md. What fails may be the machines or the
cluster's own bootstrap data, and nothing at the provider says which. So each cluster backs off from a pool by itself,
and never takes it from another cluster; where one cluster has backed off already, the first failure of another one is
enough. Everything is bounded: entries expire, and only clusters and pools that failed lately are stored.
"""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, WithheldPools
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import RowKey
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.inventory.fleet_queries import owner_of_row, pool_of_row, rows_of_pool
from bigfleet.shard.metrics import ShardMetrics

_log = structlog.get_logger("bigfleet.shard.actuation.bootstrap_failures")

BACKOFF_FIRST_SECONDS = 180.0
BACKOFF_MAX_SECONDS = 3_600.0
#: A cluster backs off from a pool after so many failures in a row; after one where another cluster has backed off.
FAILURES_OF_A_POOL = 3
#: Machines that are created on demand; of others each one is set aside by itself.
CREATED_TYPES = frozenset({CapacityType.ON_DEMAND, CapacityType.SPOT})
#: Longest text of a provider that is passed on.
TEXT_MAX = 200

_ON_ITS_WAY = (MachineState.CREATING, MachineState.CONFIGURING, MachineState.CONFIGURED)


@dataclass(slots=True)
class _Failures:
    """What failed in one pool for one cluster since its last success there."""

    #: Failures in a row, and when the last one was.
    count: int = 0
    failed_seconds: float = -math.inf
    #: The provider's text of the last one, the rows that machines were bootstrapped for, and the machines.
    text: str = ""
    rows: set[RowKey] = field(default_factory=set)
    tried: set[MachineId] = field(default_factory=set)
    #: Whether the last machine was Configured and did not join: then only one that joins is a success.
    is_unjoined: bool = False
    #: End of the back-off; before the first one in the past.
    until_seconds: float = -math.inf
    next_seconds: float = BACKOFF_FIRST_SECONDS
    #: The machine that is tried after the back-off.
    probe: MachineId | None = None
    #: Whether the wait was ended because the cluster's machines work in another pool, or its operator came back.
    was_ended_early: bool = False

    @property
    def is_backed_off(self) -> bool:
        """Return whether the cluster uses nothing of the pool but a probe after the back-off."""
        return self.until_seconds > -math.inf


@dataclass(slots=True)
class BootstrapFailures:
    """Back-offs of clusters from pools. Touched by the shard's loop alone."""

    clock: Clock
    metrics: ShardMetrics
    _failures: dict[tuple[str, CapacityPool], _Failures] = field(default_factory=dict)
    #: The machines that had not joined when `unjoined` last looked.
    _unjoined: Set[str] = frozenset()

    # ---- what happened --------------------------------------------------------------------------------------------

    def failed(self, machine: Machine, text: str) -> None:
        """A Configure of this machine, with the stamps of its row, was rejected, failed or had no effect."""
        if machine.cluster and machine.capacity_type in CREATED_TYPES:
            self._failed(_row_of(machine), CapacityPool.of(machine), machine.id, text)

    def stuck(self, machine: Machine) -> None:
        """The configuration of this machine does not end; one such machine is enough, because it took so long."""
        if machine.cluster and machine.capacity_type in CREATED_TYPES:
            text = "its configuration does not end"
            self._failed(_row_of(machine), CapacityPool.of(machine), machine.id, text, enough=1)

    def unjoined(self, view: ColumnSnapshot, machine_ids: Set[str]) -> None:
        """Count the Configured machines that have newly missed the join deadline."""
        fresh, self._unjoined = machine_ids - self._unjoined, machine_ids
        for machine_id in sorted(fresh):
            row = view.rows.get(MachineId(machine_id))
            owner = None if row is None else owner_of_row(view, row)
            if row is None or owner is None:
                continue
            pool = pool_of_row(view, row)
            is_configured = int(view.columns.state[row]) == MachineState.CONFIGURED
            if owner[0] and is_configured and pool.capacity_type in CREATED_TYPES:
                self._failed(owner, pool, MachineId(machine_id), "its node did not join in time")
                self._failures[owner[0], pool].is_unjoined = True

    def _failed(
        self, row: RowKey, pool: CapacityPool, machine_id: MachineId, text: str, *, enough: int = FAILURES_OF_A_POOL
    ) -> None:
        cluster, now_seconds = row[0], self.clock.monotonic_seconds()
        known = self._failures.setdefault((cluster, pool), _Failures())
        known.count += 1
        known.failed_seconds, known.text, known.is_unjoined = now_seconds, text[:TEXT_MAX], False
        known.rows.add(row)
        known.tried.add(machine_id)
        if now_seconds < known.until_seconds:
            return  # it belongs to the round that the back-off ended
        others = (each for (name, of), each in self._failures.items() if of == pool and name != cluster)
        if any(each.is_backed_off for each in others):
            enough = 1
        if not known.is_backed_off and known.count < enough:
            return
        seconds = known.next_seconds
        known.until_seconds, known.next_seconds = now_seconds + seconds, min(2 * seconds, BACKOFF_MAX_SECONDS)
        known.probe = None
        _log.warning(
            "pool.bootstraps_failed",
            cluster=cluster,
            **_named(pool),
            machine=machine_id,
            failures=known.count,
            error=known.text,
            backoff_seconds=seconds,
            advice="other pools are used; check the machines of this one, and the cluster's bootstrap data",
        )

    def configured(self, machine: Machine) -> None:
        """A machine of a cluster was Configured."""
        known = self._failures.get((machine.cluster, CapacityPool.of(machine)))
        if known is not None and not known.is_unjoined:
            self._succeeded(machine)

    def joined(self, machine: Machine) -> None:
        """The node of a Configured machine is Ready."""
        if (machine.cluster, CapacityPool.of(machine)) in self._failures:
            self._succeeded(machine)

    def _succeeded(self, machine: Machine) -> None:
        pool = CapacityPool.of(machine)
        known = self._failures.pop((machine.cluster, pool))
        if known.is_backed_off:
            _log.info("pool.bootstraps_succeed", cluster=machine.cluster, **_named(pool), machine=machine.id)
            self.try_again(machine.cluster)

    def try_again(self, cluster: str) -> None:
        """End the waits of a cluster, each once: the fault may have been its own, and may be over."""
        now_seconds = self.clock.monotonic_seconds()
        for (name, _pool), known in self._failures.items():
            if name == cluster and not known.was_ended_early and known.is_backed_off:
                known.until_seconds = min(known.until_seconds, now_seconds)
                known.was_ended_early = True

    # ---- what follows ---------------------------------------------------------------------------------------------

    def withheld(
        self,
        view: ColumnSnapshot,
        *,
        is_pending: Callable[[str], bool],
        is_hidden: Callable[[CapacityPool, MachineId], bool],
    ) -> dict[str, WithheldPools]:
        """Return the pools that each cluster must leave alone, with the machines that it may try.

        `is_hidden` says whether a free machine of a pool is no candidate for any cluster. Cost: nothing without
        failures, else one look at the columns for each cluster and pool that is probed.
        """
        now_seconds = self.clock.monotonic_seconds()
        found: dict[str, tuple[set[CapacityPool], set[str]]] = {}
        for key, known in list(self._failures.items()):
            cluster, pool = key
            if now_seconds >= max(known.until_seconds, known.failed_seconds) + BACKOFF_MAX_SECONDS and (
                known.probe is None or not self._is_under_way(view, cluster, known.probe, is_pending)
            ):
                # Without demand there is no probe: after the longest back-off the pool counts as any other.
                del self._failures[key]
                continue
            if not known.is_backed_off:
                continue
            pools, probes = found.setdefault(cluster, (set(), set()))
            pools.add(pool)
            if now_seconds >= known.until_seconds:
                known.probe = self._probe(view, key, known, is_pending, is_hidden)
                if known.probe is not None:
                    probes.add(known.probe)
        self.metrics.pools_withheld.set(sum(len(pools) for pools, _ in found.values()))
        return {
            cluster: WithheldPools(pools=frozenset(pools), probes=frozenset(probes))
            for cluster, (pools, probes) in found.items()
        }

    def _is_under_way(
        self, view: ColumnSnapshot, cluster: str, machine_id: MachineId, is_pending: Callable[[str], bool]
    ) -> bool:
        row = view.rows.get(machine_id)
        if row is None or int(view.columns.state[row]) not in _ON_ITS_WAY:
            return is_pending(machine_id)
        owner = owner_of_row(view, row)
        return owner is not None and owner[0] == cluster

    def _probe(
        self,
        view: ColumnSnapshot,
        key: tuple[str, CapacityPool],
        known: _Failures,
        is_pending: Callable[[str], bool],
        is_hidden: Callable[[CapacityPool, MachineId], bool],
    ) -> MachineId | None:
        """Keep the probe while it is under way or free; else take an Idle machine, or the last by id of the others.

        Other clusters take the first ones. One that failed has another turn after all others.
        """
        cluster, pool = key
        free = (MachineState.IDLE, MachineState.SPECULATIVE)
        if known.probe is not None:
            row = view.rows.get(known.probe)
            is_free = row is not None and int(view.columns.state[row]) in free and not is_hidden(pool, known.probe)
            if is_free or self._is_under_way(view, cluster, known.probe, is_pending):
                return known.probe
        found = [
            machine_id
            for state in free
            for row in reversed(rows_of_pool(view, pool, state).tolist())
            if not is_pending(machine_id := view.ids[row]) and not is_hidden(pool, machine_id)
        ]
        if found and known.tried.issuperset(found):
            known.tried.clear()
        return next((each for each in found if each not in known.tried), None)

    def keep_only(self, is_wanted: Callable[[RowKey], bool]) -> None:
        """Forget rows that left the demand."""
        for known in self._failures.values():
            known.rows = {row for row in known.rows if is_wanted(row)}

    def failing(self) -> dict[RowKey, set[CapacityPool]]:
        """Return the rows for which machines of a pool failed that their cluster leaves alone, with the pools."""
        found: dict[RowKey, set[CapacityPool]] = {}
        for (_cluster, pool), known in self._failures.items():
            for row in known.rows if known.is_backed_off else ():
                found.setdefault(row, set()).add(pool)
        return found

    def texts(self) -> dict[RowKey, str]:
        """Return what is said of each of these rows."""
        found: dict[RowKey, str] = {}
        for (_cluster, pool), known in self._failures.items():
            for row in known.rows if known.is_backed_off else ():
                kind = f"{pool.instance_type} {pool.capacity_type.label} in {pool.zone}"
                found[row] = f"machines of {kind} could not be bootstrapped ({known.text}); they are tried again"
        return found


def _row_of(machine: Machine) -> RowKey:
    return (str(machine.cluster), machine.assigned_need_fingerprint, machine.assigned_group)


def _named(pool: CapacityPool) -> dict[str, str]:
    return {"instance_type": pool.instance_type, "zone": pool.zone, "capacity_type": pool.capacity_type.label}
