"""Backs off from pools that are out of stock, rows whose creations fail, and machines that failed to bootstrap.

docs/spec/shard.md §9.8, docs/adr/0145-stockouts-by-pool.md. A pool is (instance type, zone, capacity type) of the
shard's provider. The engine gets the result as options; the executor asks before each Create. A coordinator delivers
what other shards of the same provider report. Everything is bounded: back-offs expire, and only pools, rows and
machines that failed lately are stored.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

import structlog

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import CapacityPool, Options, WithheldPools
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need, RowKey
from bigfleet.model.states import MachineState
from bigfleet.shard.actuation.bootstrap_failures import BootstrapFailures
from bigfleet.shard.inventory.fleet_queries import FailingPools, OtherCandidates, rows_of_pool
from bigfleet.shard.inventory.machine_shapes import Attributes
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.outcomes import ActionOutcome

_log = structlog.get_logger("bigfleet.shard.actuation.stockouts")

POOL_BACKOFF_FIRST_SECONDS = 180.0
POOL_BACKOFF_MAX_SECONDS = 3_600.0
#: So many creations of one pool that fail in a row, for any reason, count as a stockout.
FAILURES_OF_A_STOCKOUT = 3
#: How long a failed creation counts against a row beyond the back-off, unless one succeeds in that pool before.
FAILING_SECONDS = 600.0
#: How long a machine that failed to bootstrap stays behind others, doubled to the maximum.
ASIDE_FIRST_SECONDS = 180.0
ASIDE_MAX_SECONDS = 3_600.0
#: After so many Configures in a row that may have been applied and left a machine Idle, it is set aside without another
#: candidate, too.
WITHOUT_EFFECT = 3
#: The code at the start of a Failed machine's text (docs/spec/provider.md §8).
STOCKOUT_CODE = "STOCKOUT"
#: Answers to a Configure that say that this machine cannot be bootstrapped.
_REJECTIONS = frozenset({ActionOutcome.PROVIDER_ERROR, ActionOutcome.EXHAUSTED, ActionOutcome.NOT_SUPPORTED})


@dataclass(slots=True)
class _Pool:
    #: End of the back-off after a failure of this shard; in the past without one.
    own_until_seconds: float
    #: The back-off that follows the next failure.
    next_seconds: float
    #: End of the longest back-off that another shard reports; in the past without one.
    others_until_seconds: float = -math.inf
    #: The machine that the next Create goes to; None before one is chosen.
    probe: MachineId | None = None
    #: Whether that Create was sent and has not ended.
    is_probing: bool = False
    #: Machines whose probe failed without a word on stock: others have their turn first.
    failed: set[MachineId] = field(default_factory=set)

    @property
    def until_seconds(self) -> float:
        """The end of the back-off; one machine is tried after it."""
        return max(self.own_until_seconds, self.others_until_seconds)


@dataclass(slots=True)
class _Aside:
    row: RowKey
    until_seconds: float
    next_seconds: float
    #: Configures in a row that were accepted, or whose outcome was not known, and that left the machine Idle.
    without_effect: int
    #: Whether a wait of it was ended because another machine worked again.
    was_ended_early: bool

    @property
    def is_repeated(self) -> bool:
        """Whether the machine is set aside without another candidate, too."""
        return self.without_effect >= WITHOUT_EFFECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """What one decision must not draw on; `engine.decision.Options` has the same fields."""

    sold_out: frozenset[CapacityPool] = frozenset()
    probes: frozenset[MachineId] = frozenset()
    set_aside: frozenset[MachineId] = frozenset()
    withheld: Mapping[str, WithheldPools] = field(default_factory=dict)


@dataclass(slots=True)
class Stockouts:
    """Back-offs of pools, rows and machines. Touched by the shard's loop alone."""

    clock: Clock
    metrics: ShardMetrics
    _pools: dict[CapacityPool, _Pool] = field(default_factory=dict)
    #: Creations in a row that failed otherwise, of pools that are not backed off.
    _failed_in_a_row: dict[CapacityPool, int] = field(default_factory=dict)
    #: Pools in which creations for a row failed, each with the second at which that is forgotten.
    _failing: dict[RowKey, dict[CapacityPool, float]] = field(default_factory=dict)
    _aside: dict[MachineId, _Aside] = field(default_factory=dict)
    #: Machines with a Configure that was accepted, or whose outcome is not known, and that has not ended.
    _configured: set[MachineId] = field(default_factory=set)
    #: What was read of the fleet's shapes, while machines wait.
    _attributes: Attributes = field(default_factory=Attributes)
    #: Pools that clusters leave alone because machines could not be bootstrapped.
    bootstraps: BootstrapFailures = field(init=False)

    def __post_init__(self) -> None:
        self.bootstraps = BootstrapFailures(self.clock, self.metrics)

    # ---- what happened --------------------------------------------------------------------------------------------

    def exhausted(self, machine: Machine) -> None:
        """A Create of this machine, with the stamps of its row, failed for want of capacity.

        Failures that arrive while the pool is backed off belong to the same round and double nothing.
        """
        name, now_seconds = CapacityPool.of(machine), self.clock.monotonic_seconds()
        self._failed_in_a_row.pop(name, None)
        known = self._pools.get(name)
        if known is None or known.is_probing or now_seconds >= known.own_until_seconds:
            known = self._back_off(name, machine)
        self._note_failure(machine, known.until_seconds + FAILING_SECONDS)

    def stuck(self, machine: Machine) -> None:
        """The creation or the configuration of this machine does not end: its pool is not the first choice any more."""
        if machine.state is MachineState.CONFIGURING:
            self.bootstraps.stuck(machine)
        else:
            self.exhausted(machine)

    def _back_off(self, name: CapacityPool, machine: Machine) -> _Pool:
        """Begin the next back-off of a pool, after a creation of this machine failed."""
        pool = self._pools.setdefault(name, _Pool(-math.inf, POOL_BACKOFF_FIRST_SECONDS))
        seconds = pool.next_seconds
        pool.own_until_seconds = self.clock.monotonic_seconds() + seconds
        pool.next_seconds = min(2 * seconds, POOL_BACKOFF_MAX_SECONDS)
        pool.probe, pool.is_probing = None, False
        self.metrics.stockouts.inc()
        _log.warning("pool.sold_out", **_named(name), machine=machine.id, backoff_seconds=seconds)
        return pool

    def others_report(self, pools: Mapping[CapacityPool, float]) -> None:
        """Take the whole of what other shards report: pools, each with the rest of its back-off in seconds.

        A pool that is reported no longer before the end of its back-off is available again.
        """
        now_seconds = self.clock.monotonic_seconds()
        for name, pool in list(self._pools.items()):
            if name not in pools and pool.others_until_seconds > now_seconds:
                pool.others_until_seconds = -math.inf
                if pool.own_until_seconds == -math.inf and not pool.is_probing:
                    del self._pools[name]
        for name, seconds in pools.items():
            known = self._pools.get(name)
            if known is None:
                known = self._pools[name] = _Pool(-math.inf, POOL_BACKOFF_FIRST_SECONDS)
                _log.info("pool.sold_out_elsewhere", **_named(name), backoff_seconds=seconds)
            known.others_until_seconds = now_seconds + seconds

    def configure_answered(self, machine: Machine, refusal: ActionOutcome | None, text: str) -> None:
        """The provider has accepted a Configure of this machine, rejected it with this text, or has not answered.

        What the provider shows of the machine afterwards is observed, unless it was rejected.
        """
        if refusal is None or refusal is ActionOutcome.UNKNOWN_OUTCOME:
            self._configured.add(machine.id)
        elif refusal in _REJECTIONS:
            self.bootstraps.failed(machine, text)

    def observed(self, before: Machine, after: Machine | None) -> None:
        """The provider shows another state than the one before; None when it shows the machine no more."""
        if before.state is MachineState.CONFIGURING:
            was_configured = before.id in self._configured
            self._configured.discard(before.id)
            if after is not None:
                self._bootstrap_ended(before, after, was_configured=was_configured)
        if before.state is not MachineState.CREATING:
            return
        if after is not None and after.state is MachineState.FAILED and _is_stockout(after.last_error):
            self.exhausted(before)
        elif after is not None and after.host.is_present and after.state is not MachineState.FAILED:
            self._created(before)
        else:
            self._failed_otherwise(before)

    def _failed_otherwise(self, machine: Machine) -> None:
        """A creation failed, or ended where it began, without a word on stock.

        The third in a row counts as a stockout, and so does each probe that fails; the next probe is another machine.
        """
        name = CapacityPool.of(machine)
        pool = self._pools.get(name)
        if pool is not None and pool.probe == machine.id:
            pool = self._back_off(name, machine)
            pool.failed.add(machine.id)
            self._note_failure(machine, pool.until_seconds + FAILING_SECONDS)
            return
        if pool is None:
            self._failed_in_a_row[name] = self._failed_in_a_row.get(name, 0) + 1
            if self._failed_in_a_row[name] >= FAILURES_OF_A_STOCKOUT:
                self.exhausted(machine)
                return
        self._note_failure(machine, self.clock.monotonic_seconds() + FAILING_SECONDS)

    def _created(self, machine: Machine) -> None:
        pool = CapacityPool.of(machine)
        self._failed_in_a_row.pop(pool, None)
        known = self._pools.get(pool)
        if known is not None and known.probe == machine.id:
            del self._pools[pool]
            _log.info("pool.became_available", **_named(pool), machine=machine.id)
        for row, pools in list(self._failing.items()):
            pools.pop(pool, None)
            if not pools:
                del self._failing[row]

    def _note_failure(self, machine: Machine, until_seconds: float) -> None:
        if machine.intended_cluster:
            row = (str(machine.intended_cluster), machine.assigned_need_fingerprint, machine.assigned_group)
            self._failing.setdefault(row, {})[CapacityPool.of(machine)] = until_seconds

    def _bootstrap_ended(self, before: Machine, after: Machine, *, was_configured: bool) -> None:
        if after.state is MachineState.FAILED:
            self.bootstraps.failed(before, after.last_error)
        elif after.state is MachineState.IDLE and was_configured:
            self.bootstraps.failed(before, "the provider shows the machine as Idle after its Configure")
        elif after.state is MachineState.CONFIGURED:
            self.bootstraps.configured(after)
        if after.state is MachineState.CONFIGURED:
            known = self._aside.pop(before.id, None)
            if known is not None and known.is_repeated:
                self._try_again()
        elif after.state is MachineState.IDLE:
            row = (str(before.cluster), before.assigned_need_fingerprint, before.assigned_group)
            known = self._aside.get(before.id)
            seconds = ASIDE_FIRST_SECONDS if known is None else known.next_seconds
            until_seconds = self.clock.monotonic_seconds() + seconds
            times = (0 if known is None else known.without_effect) + was_configured
            was_ended_early = known is not None and known.was_ended_early
            next_seconds = min(2 * seconds, ASIDE_MAX_SECONDS)
            aside = self._aside[before.id] = _Aside(row, until_seconds, next_seconds, times, was_ended_early)
            if was_configured and aside.is_repeated:
                _log.warning(
                    "machine.configures_without_effect", machine=before.id, times=times, backoff_seconds=seconds
                )

    def _try_again(self) -> None:
        """End the waits after repeated failures: a machine with such a wait works, so the provider's fault may be over.

        Once for each machine, and the counts stay: one that fails again then waits twice as long as before.
        """
        now_seconds = self.clock.monotonic_seconds()
        for aside in self._aside.values():
            if aside.is_repeated and not aside.was_ended_early:
                aside.until_seconds = min(aside.until_seconds, now_seconds)
                aside.was_ended_early = True

    # ---- what follows ---------------------------------------------------------------------------------------------

    def may_create(self, machine: Machine) -> bool:
        """Return whether a Create may go out now; for a pool that is out of stock it is then its probe."""
        pool = self._pools.get(CapacityPool.of(machine))
        if pool is None:
            return True
        if pool.is_probing or pool.probe != machine.id:
            return False
        pool.is_probing = True
        return True

    def options_with(
        self,
        options: Options,
        view: ColumnSnapshot,
        *,
        is_pending: Callable[[str], bool],
        rows_of: Callable[[RowKey], Need | None],
    ) -> Options:
        """Return the options of the next decision with what it must leave out, too."""
        found = self.unavailable(view, is_pending=is_pending, rows_of=rows_of, unjoined=options.unjoined)
        return replace(
            options,
            sold_out=found.sold_out,
            probes=found.probes,
            set_aside=options.set_aside | found.set_aside,
            withheld=found.withheld,
        )

    def unavailable(
        self,
        view: ColumnSnapshot,
        *,
        is_pending: Callable[[str], bool],
        rows_of: Callable[[RowKey], Need | None],
        unjoined: Set[str] = frozenset(),
    ) -> Unavailable:
        """Return what the next decision must leave out.

        `rows_of` returns a row in force, `unjoined` are the machines that missed the join deadline. Cost: nothing
        without a failure, else one look at the columns for each pool that is probed, one for all machines that wait,
        and one question for each row that they failed for.
        """
        now_seconds = self.clock.monotonic_seconds()
        self._forget_what_is_over(now_seconds)
        # One that was held, handed over or drained meanwhile is not observed as the end of its Configure.
        self._configured = {each for each in self._configured if _is_configuring(view, each)}
        for name, pool in self._pools.items():
            if now_seconds >= pool.until_seconds:
                self._choose_probe(view, name, pool, is_pending)
        self.metrics.pools_sold_out.set(len(self._pools))
        probes = frozenset(
            pool.probe for pool in self._pools.values() if pool.probe is not None and not pool.is_probing
        )
        sold_out = frozenset(self._pools)
        waiting = {machine_id: each for machine_id, each in self._aside.items() if now_seconds < each.until_seconds}
        repeated = sum(each.is_repeated and machine_id in view.rows for machine_id, each in waiting.items())
        self.metrics.machines_set_aside.set(repeated)
        served = self._rows_with_others(view, waiting, sold_out, rows_of)
        set_aside = frozenset(
            machine_id for machine_id, each in waiting.items() if each.is_repeated or each.row in served
        )
        self.bootstraps.unjoined(view, unjoined)
        withheld = self.bootstraps.withheld(
            view,
            is_pending=is_pending,
            is_hidden=lambda pool, each: each in set_aside or (pool in sold_out and each not in probes),
        )
        return Unavailable(sold_out=sold_out, probes=probes, set_aside=set_aside, withheld=withheld)

    def _rows_with_others(
        self,
        view: ColumnSnapshot,
        waiting: Mapping[MachineId, _Aside],
        sold_out: frozenset[CapacityPool],
        rows_of: Callable[[RowKey], Need | None],
    ) -> Set[RowKey]:
        """Return the rows of the waiting machines that have another candidate; each is asked about once."""
        rows = {each.row for each in waiting.values() if not each.is_repeated}
        needs = {row: need for row in rows if (need := rows_of(row)) is not None}
        if not needs:
            self._attributes = Attributes()
            return frozenset()
        others = OtherCandidates(view, self._attributes, sold_out=sold_out, besides=waiting)
        return {row for row, need in needs.items() if others.can_host(need)}

    def _choose_probe(
        self, view: ColumnSnapshot, name: CapacityPool, pool: _Pool, is_pending: Callable[[str], bool]
    ) -> None:
        """Keep the probe while it is under way or can be created; else take the first machine by id that can.

        One whose probe failed has another turn after all others.
        """
        row = None if pool.probe is None else view.rows.get(pool.probe)
        state = None if row is None else int(view.columns.state[row])
        if pool.probe is not None and (is_pending(pool.probe) or state == MachineState.CREATING):
            return
        pool.is_probing = False
        if state != MachineState.SPECULATIVE:
            rows = rows_of_pool(view, name, MachineState.SPECULATIVE).tolist()
            free = [each for row in rows if not is_pending(each := view.ids[row])]
            pool.probe = next((each for each in free if each not in pool.failed), None)
            if pool.probe is None and free:
                pool.failed.clear()
                pool.probe = free[0]

    def _forget_what_is_over(self, now_seconds: float) -> None:
        for name, pool in list(self._pools.items()):
            # Without demand there is no probe: after the longest back-off the pool counts as any other.
            if not pool.is_probing and now_seconds >= pool.until_seconds + POOL_BACKOFF_MAX_SECONDS:
                del self._pools[name]
        for row, pools in list(self._failing.items()):
            for name in [name for name, until_seconds in pools.items() if now_seconds >= until_seconds]:
                del pools[name]
            if not pools:
                del self._failing[row]
        for machine_id, aside in list(self._aside.items()):
            # The longest one past its end: by then the next failure is a first one again.
            if now_seconds >= aside.until_seconds + ASIDE_MAX_SECONDS:
                del self._aside[machine_id]

    def keep_only(self, is_wanted: Callable[[RowKey], bool]) -> None:
        """Forget rows that left the demand."""
        for row in [row for row in self._failing if not is_wanted(row)]:
            del self._failing[row]
        self.bootstraps.keep_only(is_wanted)

    def own(self) -> Mapping[CapacityPool, float]:
        """Return the pools that are backed off after failures of this shard, with the rest of it in seconds."""
        now_seconds = self.clock.monotonic_seconds()
        left = {name: pool.own_until_seconds - now_seconds for name, pool in self._pools.items()}
        return {name: seconds for name, seconds in left.items() if seconds > 0}

    def failing(self) -> Mapping[RowKey, FailingPools]:
        """Return the rows for which machines could not be created or bootstrapped, with the pools of those."""
        unbootable = self.bootstraps.failing()
        return {
            row: FailingPools(frozenset(self._failing.get(row, ())), frozenset(unbootable.get(row, ())))
            for row in {**self._failing, **unbootable}
        }


def _is_configuring(view: ColumnSnapshot, machine_id: MachineId) -> bool:
    row = view.rows.get(machine_id)
    return row is not None and int(view.columns.state[row]) == MachineState.CONFIGURING


def _is_stockout(last_error: str) -> bool:
    return last_error.partition(":")[0] == STOCKOUT_CODE


def _named(pool: CapacityPool) -> dict[str, str]:
    return {"instance_type": pool.instance_type, "zone": pool.zone, "capacity_type": pool.capacity_type.label}
