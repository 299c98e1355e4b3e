"""Brings the records in line with the inventory, and brakes when the inventory looks like an outage.

docs/spec/provider.md §12, §13. State, host and binding change by the table there only; doubt never destroys. A failing
or broken inventory must change nothing.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import Rng
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import ExistingHost, Host, Slot
from bigfleet.provider.invoke import Author
from bigfleet.provider.ledger import Change, Ledger
from bigfleet.provider.lifecycle import failed, new_record, recovered_with_host, with_facts
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.quarantine import Quarantine
from bigfleet.provider.record import ErrorCode, Record
from bigfleet.provider.refusal import StartRefused
from bigfleet.provider.validate import Fault, Reason, change_fault, facts_fault

_log = structlog.get_logger("bigfleet.provider.reconcile")

#: Passes in a row before the absence of a host or slot is believed, and before an orphan is.
MISSING_PASSES = 3
ORPHAN_PASSES = 2
#: More strikes than this, and than this share of the machines, look like an outage of the inventory.
BRAKE_STRIKES = 10
BRAKE_SHARE = 0.05
FAULTS_LISTED_MAX = 20
_JITTER_SHARE = 0.1
_RETRY_SECONDS_MIN = 1.0
_CHUNK = 1000


class Effect(Enum):
    """What a pass does to one machine; the values are metric labels."""

    ADDED = "added"
    REFRESHED = "refreshed"
    ORPHAN = "orphan"
    HOST_LOST = "host_lost"
    REMOVED = "removed"


_STRIKES = frozenset({Effect.ORPHAN, Effect.HOST_LOST, Effect.REMOVED})


@dataclass(slots=True)
class _Seen:
    """What one pass saw of one id."""

    slot: Slot | None = None
    host: ExistingHost | None = None
    #: A refused fact: the id is there, but nothing is taken from it.
    is_refused: bool = False


@dataclass(slots=True)
class _Plan:
    effects: dict[str, Effect] = field(default_factory=dict)
    #: Passes in a row in which an id was an orphan, or missing, this pass included.
    orphans: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


class Reconciler:
    """One inventory pass at a time."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        author: Author,
        quarantine: Quarantine,
        clock: Clock,
        rng: Rng,
        metrics: ProviderMetrics,
        interval_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._author = author
        self._quarantine = quarantine
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._before = _Plan()
        self._loaded = asyncio.Event()
        self._refusal: StartRefused | None = None

    @property
    def is_loaded(self) -> bool:
        """Say whether there is an inventory to serve, from the store or from the backend."""
        return self._loaded.is_set() and self._refusal is None

    async def loaded(self) -> None:
        """Return once `is_loaded`. Raises StartRefused when the first inventory is unusable."""
        await self._loaded.wait()
        if self._refusal is not None:
            raise self._refusal

    async def run(self, on_loaded: Callable[[], None]) -> None:
        """Pass after pass until cancelled; on an empty store the first one is retried with back-off."""
        is_first_boot = len(self._ledger.view) == 0 and self._ledger.view.head == 0
        if not is_first_boot:
            self._loaded.set()
            on_loaded()
        retry_seconds = _RETRY_SECONDS_MIN
        while True:
            try:
                is_ok = await self.pass_once(is_first_boot=is_first_boot)
            except StartRefused as refusal:
                self._refusal = refusal
                self._loaded.set()
                return
            if is_ok and is_first_boot:
                is_first_boot = False
                self._loaded.set()
                on_loaded()
            if is_ok or not is_first_boot:
                jitter = self._rng.uniform(-_JITTER_SHARE, _JITTER_SHARE)
                await self._clock.sleep(self._interval_seconds * (1 + jitter))
            else:
                await self._clock.sleep(self._rng.uniform(0.5, 1.0) * retry_seconds)
                retry_seconds = min(2 * retry_seconds, self._interval_seconds)

    async def pass_once(self, *, is_first_boot: bool = False) -> bool:
        """Read the inventory to its end and apply it; return False when the pass was discarded.

        Raises StartRefused on the first boot when a fact is bad.
        """
        started_seconds = self._clock.monotonic_seconds()
        begin_revision = self._ledger.view.head
        try:
            facts = await self._author.inventory()
        except Exception as error:  # an inventory that breaks says nothing about any machine
            _log.error("reconcile.failed", error=f"{type(error).__name__}: {error}")
            self._observe(started_seconds, "error")
            return False
        seen, faults = await self._read(facts)
        if is_first_boot:
            _refuse_bad_start(faults)
            await self._add_all(seen)
        for machine_id, fault in faults:
            self._quarantine.put(machine_id, fault)
        plan = await self._plan(seen, begin_revision)
        outcome = self._brake(plan)
        await self._apply(plan, seen, begin_revision)
        self._before = plan
        self._observe(started_seconds, outcome)
        self._metrics.reconcile_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)
        return True

    def _observe(self, started_seconds: float, outcome: str) -> None:
        seconds = self._clock.monotonic_seconds() - started_seconds
        self._metrics.reconcile_seconds.labels(outcome).observe(seconds)

    # ---- reading -------------------------------------------------------------------------------------------------

    async def _read(self, facts: list[Slot]) -> tuple[dict[str, _Seen], list[tuple[str, Fault]]]:
        seen: dict[str, _Seen] = {}
        faults: list[tuple[str, Fault]] = []
        for number, fact in enumerate(facts):
            if number % _CHUNK == _CHUNK - 1:
                await self._clock.sleep(0)
            entry = seen.setdefault(fact.id, _Seen())
            fault = self._fault(fact, entry)
            if fault is not None:
                faults.append((fact.id, fault))
                entry.is_refused = True
            elif isinstance(fact, ExistingHost):
                entry.host = fact
            else:
                entry.slot = fact
        return seen, faults

    def _fault(self, fact: Slot, entry: _Seen) -> Fault | None:
        fault = facts_fault(fact)
        if fault is not None:
            return fault
        if (entry.host if isinstance(fact, ExistingHost) else entry.slot) is not None:
            return Fault(Reason.DUPLICATE, "the inventory names this id twice")
        record = self._ledger.view.get(fact.id)
        return None if record is None else change_fault(record, fact)

    async def _add_all(self, seen: dict[str, _Seen]) -> None:
        """Fill an empty store: nobody else is there yet, so that no turns are needed."""
        now = self._clock.unix_nanos()
        entries = [entry.host or entry.slot for entry in seen.values()]
        records = [new_record(fact, self._author.provider, now) for fact in entries if fact is not None]
        for start in range(0, len(records), _CHUNK):
            chunk = records[start : start + _CHUNK]
            await asyncio.gather(*(self._ledger.commit(Change(record=record)) for record in chunk))
        self._metrics.reconcile_changes.labels(Effect.ADDED.value).inc(len(records))

    # ---- deciding ------------------------------------------------------------------------------------------------

    async def _plan(self, seen: dict[str, _Seen], begin_revision: int) -> _Plan:
        plan = _Plan()
        for number, (machine_id, entry) in enumerate(seen.items()):
            if number % _CHUNK == _CHUNK - 1:
                await self._clock.sleep(0)
            record = self._ledger.view.get(machine_id)
            if record is None:
                is_usable = (entry.host or entry.slot) is not None
                if is_usable and not self._ledger.view.removed_since(machine_id, begin_revision):
                    plan.effects[machine_id] = Effect.ADDED
            elif record.state_revision <= begin_revision:
                self._plan_known(plan, record, entry)
        nothing = _Seen()
        for number, record in enumerate(self._ledger.view.snapshot()):
            if number % _CHUNK == _CHUNK - 1:
                await self._clock.sleep(0)
            if record.id not in seen and record.state_revision <= begin_revision:
                self._plan_known(plan, record, nothing)
        return plan

    def _plan_known(self, plan: _Plan, record: Record, entry: _Seen) -> None:
        if entry.is_refused:
            return
        match record.state:
            case MachineState.SPECULATIVE:
                self._plan_slot(plan, record, entry)
            case MachineState.IDLE | MachineState.CONFIGURED:
                self._plan_hosted(plan, record, entry)
            case MachineState.FAILED if record.machine.host.is_present:
                if entry.host is not None:
                    _plan_refresh(plan, record, entry.host)
            case MachineState.FAILED:
                self._plan_failed_slot(plan, record, entry)
            case _:
                pass

    def _plan_slot(self, plan: _Plan, record: Record, entry: _Seen) -> None:
        if entry.host is not None:
            count = self._before.orphans.get(record.id, 0) + 1
            plan.orphans[record.id] = count
            if count >= ORPHAN_PASSES:
                plan.effects[record.id] = Effect.ORPHAN
        elif entry.slot is not None:
            if entry.slot != record.slot:
                _plan_refresh(plan, record, entry.slot)
        else:
            self._plan_missing(plan, record, Effect.REMOVED)

    def _plan_failed_slot(self, plan: _Plan, record: Record, entry: _Seen) -> None:
        if entry.slot is not None:
            _plan_refresh(plan, record, entry.slot)
        elif entry.host is None:
            self._plan_missing(plan, record, Effect.REMOVED)

    def _plan_hosted(self, plan: _Plan, record: Record, entry: _Seen) -> None:
        if entry.host is None or entry.host.host_ref != record.machine.host.ref:
            self._plan_missing(plan, record, Effect.HOST_LOST)
        else:
            _plan_refresh(plan, record, entry.host)

    def _plan_missing(self, plan: _Plan, record: Record, effect: Effect) -> None:
        count = self._before.missing.get(record.id, 0) + 1
        plan.missing[record.id] = count
        if count >= MISSING_PASSES:
            plan.effects[record.id] = effect

    def _brake(self, plan: _Plan) -> str:
        """Hold the strikes back when there are too many of them; return the outcome of the pass."""
        strikes = [machine_id for machine_id, effect in plan.effects.items() if effect in _STRIKES]
        is_braked = len(strikes) > max(BRAKE_STRIKES, BRAKE_SHARE * len(self._ledger.view))
        self._metrics.brake_engaged.set(is_braked)
        if not is_braked:
            return "ok"
        for machine_id in strikes:
            del plan.effects[machine_id]
        _log.error("reconcile.braked", strikes=len(strikes), machines=len(self._ledger.view))
        return "braked"

    # ---- applying ------------------------------------------------------------------------------------------------

    async def _apply(self, plan: _Plan, seen: dict[str, _Seen], begin_revision: int) -> None:
        effects = list(plan.effects.items())
        for start in range(0, len(effects), _CHUNK):
            await asyncio.gather(
                *(
                    self._apply_one(machine_id, effect, seen.get(machine_id, _Seen()), begin_revision)
                    for machine_id, effect in effects[start : start + _CHUNK]
                )
            )
        for machine_id, entry in seen.items():
            if not entry.is_refused:
                self._quarantine.clear(machine_id)

    async def _apply_one(self, machine_id: str, effect: Effect, entry: _Seen, begin_revision: int) -> None:
        async with self._ledger.turn(machine_id) as record:
            # The plan was made of a moment that may have passed while other turns ran.
            if (record is None) != (effect is Effect.ADDED):
                return
            if record is not None and record.state_revision > begin_revision:
                return
            change = self._change(machine_id, effect, record, entry)
            await self._ledger.commit_until_done(lambda: change)
        self._metrics.reconcile_changes.labels(effect.value).inc()
        if effect is not Effect.REFRESHED:
            state_from = record.state.name if record is not None else None
            _log.info("reconcile.changed", machine_id=machine_id, change=effect.value, state_from=state_from)

    def _change(self, machine_id: str, effect: Effect, record: Record | None, entry: _Seen) -> Change:
        now = self._clock.unix_nanos()
        facts = entry.host or entry.slot
        if effect is Effect.REMOVED:
            return Change(removed_id=machine_id)
        if effect is Effect.ADDED:
            assert facts is not None, "what is added was seen"
            return Change(record=new_record(facts, self._author.provider, now))
        assert record is not None, "only an added machine has no record"
        if effect is Effect.HOST_LOST:
            passes = f"the inventory did not show host {record.machine.host.ref} in {MISSING_PASSES} passes"
            return Change(record=failed(record, ErrorCode.HOST_LOST, passes, now))
        if effect is Effect.ORPHAN:
            assert entry.host is not None, "an orphan is a host that was seen"
            host = Host(ref=entry.host.host_ref, node_name=entry.host.node_name)
            refreshed = with_facts(record, entry.host)
            return Change(record=recovered_with_host(refreshed, host, self._author.provider, now))
        assert facts is not None, "what is refreshed was seen"
        return Change(record=with_facts(record, facts))


def _plan_refresh(plan: _Plan, record: Record, facts: Slot) -> None:
    if with_facts(record, facts) != record:
        plan.effects[record.id] = Effect.REFRESHED


def _refuse_bad_start(faults: Iterable[tuple[str, Fault]]) -> None:
    lines = [f"{machine_id[:260]}: {fault.text}" for machine_id, fault in faults]
    if not lines:
        return
    shown = "; ".join(lines[:FAULTS_LISTED_MAX])
    more = f"; and {len(lines) - FAULTS_LISTED_MAX} more" if len(lines) > FAULTS_LISTED_MAX else ""
    raise StartRefused(f"the first inventory has {len(lines)} bad records: {shown}{more}")
