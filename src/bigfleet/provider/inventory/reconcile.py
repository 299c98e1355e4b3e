"""Reconciles records with inventory and offers, and holds changes back if the inventory looks like an outage.

docs/spec/provider.md §12, §13. State, host and binding change only as the table there says. In doubt, nothing is
removed. A failing or broken inventory must change nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import Rng
from bigfleet.model.states import MachineState
from bigfleet.model.validation import validate
from bigfleet.provider.backend import ExistingHost, Host, PartialFacts, Slot
from bigfleet.provider.inventory.offers import Offers
from bigfleet.provider.inventory.shared_hosts import NamedHosts
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.operations.admission import Admissions
from bigfleet.provider.operations.invoke import BackendAdapter
from bigfleet.provider.records.lifecycle import failed, in_service, new_record, recovered_with_host, with_facts
from bigfleet.provider.records.quarantine import FactsQuarantine
from bigfleet.provider.records.record import ErrorCode, Record
from bigfleet.provider.records.refusal import ChangeRefused, HostShared, OfferingsRefused, StartRefused
from bigfleet.provider.records.reset import with_label
from bigfleet.provider.records.validate import (
    Fault,
    Reason,
    change_fault,
    entry_id,
    facts_fault,
    joined_faults,
    type_fault,
)
from bigfleet.provider.storage.ledger import Change, Ledger

_log = structlog.get_logger("bigfleet.provider.inventory.reconcile")

#: Passes in a row before the absence of a host or slot is believed, and before an orphan is.
MISSING_PASSES = 3
ORPHAN_PASSES = 2
#: How long a machine must be IDLE before it is believed that its host serves a cluster: after a Drain the Node stays
#: Ready for up to 50 s, and the interval between passes may be shorter.
IN_SERVICE_SECONDS_MIN = 120
#: More losses than this, and than this share of the machines, look like an outage of the inventory.
BRAKE_LOSSES = 10
BRAKE_SHARE = 0.05
FAULTS_LISTED_MAX = 20
_JITTER_SHARE = 0.1
_RETRY_SECONDS_MIN = 1.0
#: Changes that are committed together.
_CHUNK = 1000
#: Machines looked at in one turn of the loop, which is held for some milliseconds.
_LOOK_CHUNK = 250


class Effect(Enum):
    """What a pass does to one machine; the values are metric labels."""

    ADDED = "added"
    REFRESHED = "refreshed"
    ORPHAN = "orphan"
    IN_SERVICE = "in_service"
    HOST_LOST = "host_lost"
    REMOVED = "removed"


_LOSSES = frozenset({Effect.ORPHAN, Effect.HOST_LOST, Effect.REMOVED})
#: What changes the state of a machine; of many at once, machines that turn out to be in service are no outage.
_MOVES = _LOSSES | {Effect.IN_SERVICE}


@dataclass(slots=True)
class _Seen:
    """What one pass saw of one id."""

    slot: Slot | None = None
    host: ExistingHost | None = None
    #: A refused fact: the id is there, but nothing is taken from it.
    is_refused: bool = False
    #: What the inventory named under the id, refused entries too.
    named: set[type[Slot]] = field(default_factory=set)


@dataclass(slots=True)
class _Plan:
    effects: dict[str, Effect] = field(default_factory=dict)
    #: Passes in a row in which an id was an orphan, or idle and in service, or missing, this pass included.
    orphans: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    #: What the inventory could not read.
    unread_prefixes: tuple[str, ...] = ()
    unread_host_prefixes: tuple[str, ...] = ()
    #: Machines of which it showed neither slot nor host.
    unseen: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Braked:
    """The losses that are held back, by id."""

    effects: Mapping[str, Effect]
    machines: int


class InventoryReconciler:
    """One inventory pass at a time."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        adapter: BackendAdapter,
        admissions: Admissions,
        quarantine: FactsQuarantine,
        clock: Clock,
        rng: Rng,
        metrics: ProviderMetrics,
        interval_seconds: float,
        offers: Offers | None,
        is_inline: bool,
    ) -> None:
        self._ledger = ledger
        self._adapter = adapter
        self._admissions = admissions
        self._quarantine = quarantine
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._offers = offers
        self._is_inline = is_inline
        self._before = _Plan()
        #: Strikes that a person said to let happen.
        self._accepted: frozenset[str] = frozenset()
        self.braked: Braked | None = None
        self._wake = asyncio.Event()
        self._loaded = asyncio.Event()
        self._refusal: StartRefused | None = None

    @property
    def is_loaded(self) -> bool:
        """Return whether there is an inventory to serve, from the store or from the backend."""
        return self._loaded.is_set() and self._refusal is None

    async def loaded(self) -> None:
        """Return once `is_loaded`. Raises StartRefused when the first inventory is unusable."""
        await self._loaded.wait()
        if self._refusal is not None:
            raise self._refusal

    async def open(self) -> None:
        """Merge the offers, before anything is served: new slots appear. Raises OfferingsRefused on an empty store."""
        offers = self._offers
        if offers is None:
            return
        if self._is_first_boot and offers.faults:
            raise OfferingsRefused(_listed(f"{len(offers.faults)} mistakes", [str(fault) for fault in offers.faults]))
        await self._merge_offers(offers)
        self._loaded.set()

    async def replace_offers(self, offers: Offers) -> None:
        """Take other offers: new slots appear now, and a pass begins that sees the rest."""
        former, self._offers = self._offers, offers.after(self._offers)
        for fault in former.faults if former is not None else ():
            self._quarantine.clear(fault.place)
        await self._merge_offers(self._offers)
        self._wake.set()

    async def _merge_offers(self, offers: Offers) -> None:
        for fault in offers.faults:
            self._quarantine.put(fault.place, fault.fault._replace(text=f"{fault.key}: {fault.fault.text}"))
        begin_revision = self._ledger.view.head
        seen = {machine_id: _Seen(slot=slot) for machine_id, slot in (await self._offered()).items()}
        plan = _Plan()
        plan.effects = {machine_id: Effect.ADDED for machine_id in seen if machine_id not in self._ledger.view}
        await self._apply(plan, seen, begin_revision)

    def offered(self) -> list[Slot]:
        """Return the slots on offer now, beside those of the inventory."""
        return [] if self._offers is None else list(self._offers.slots(self._ledger.view.snapshot()).values())

    async def _offered(self) -> dict[str, Slot]:
        if self._offers is None:
            return {}
        records = self._ledger.view.snapshot()
        if self._is_inline:
            return self._labelled(self._offers.slots(records))
        return self._labelled(await asyncio.to_thread(self._offers.slots, records))

    def _labelled(self, slots: dict[str, Slot]) -> dict[str, Slot]:
        reset = self._adapter.reset
        if reset is None:
            return slots
        return {machine_id: with_label(slot, reset) for machine_id, slot in slots.items()}

    def is_offered(self, record: Record) -> bool:
        """Return whether there is a slot for a failed machine to be again; in doubt there is.

        Doubt is: no inventory was read yet, the last one could not read the id, or it missed so many that it looks
        like an outage.
        """
        # A backend whose slots share room adds and removes them itself, in the same commit.
        if self._adapter.admits is not None or _is_outage(len(self._before.unseen), len(self._ledger.view)):
            return True
        if record.id in self._before.unseen:
            return False
        return self._offers is None or self._offers.has_room_for(record, self._ledger.view.snapshot())

    def accept_losses(self) -> tuple[str, ...]:
        """Apply the losses that the brake holds back, in a pass that begins now; return their ids."""
        if self.braked is None:
            return ()
        self._accepted = frozenset(self.braked.effects)
        self._wake.set()
        return tuple(self.braked.effects)

    @property
    def _is_first_boot(self) -> bool:
        return len(self._ledger.view) == 0 and self._ledger.view.head == 0

    async def run(self, on_loaded: Callable[[], None]) -> None:
        """Pass after pass until cancelled; on an empty store the first one is retried with back-off."""
        is_first_boot = self._is_first_boot and not self._loaded.is_set()
        if not is_first_boot:
            self._loaded.set()
            on_loaded()
        retry_seconds = _RETRY_SECONDS_MIN
        while True:
            try:
                is_ok = await self._try_pass(is_first_boot=is_first_boot)
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
                await self._rest(self._interval_seconds * (1 + jitter))
            else:
                await self._rest(self._rng.uniform(0.5, 1.0) * retry_seconds)
                retry_seconds = min(2 * retry_seconds, self._interval_seconds)

    async def _try_pass(self, *, is_first_boot: bool) -> bool:
        """Return whether a pass was applied, so that there is a next one after any failure. Raises StartRefused."""
        started_seconds = self._clock.monotonic_seconds()
        try:
            return await self.pass_once(is_first_boot=is_first_boot)
        except StartRefused:
            raise
        except Exception as error:  # what no check foresaw: without further passes no lost host is seen any more
            _log.error("reconcile.failed", exc_info=error)
            self._observe(started_seconds, "error")
            return False

    async def _rest(self, seconds: float) -> None:
        """Wait for the next pass, or until somebody wants it now."""
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({sleeping, waking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            waking.cancel()
        self._wake.clear()

    async def pass_once(self, *, is_first_boot: bool = False) -> bool:
        """Read the inventory to its end and apply it; return False when the pass was discarded.

        Raises StartRefused on the first boot when a fact is bad.
        """
        started_seconds = self._clock.monotonic_seconds()
        begin_revision = self._ledger.view.head
        try:
            inventory = await self._adapter.inventory()
            seen, faults = await self._read(inventory)
        except Exception as error:  # an inventory that breaks says nothing about any machine
            _log.error("reconcile.failed", error=f"{type(error).__name__}: {error}")
            self._observe(started_seconds, "error")
            return False
        if is_first_boot:
            _refuse_bad_start(faults)
            await self._add_all(seen)
        for machine_id, fault in faults:
            self._quarantine.put(machine_id, fault)
        plan = await self._plan(seen, begin_revision, inventory)
        outcome = self._brake(plan)
        await self._apply(plan, seen, begin_revision)
        self._before = plan
        validate(self._ledger.view)
        self._observe(started_seconds, outcome)
        self._metrics.reconcile_last_success.set(self._clock.unix_nanos() / NANOS_PER_SECOND)
        return True

    def _observe(self, started_seconds: float, outcome: str) -> None:
        seconds = self._clock.monotonic_seconds() - started_seconds
        self._metrics.reconcile_seconds.labels(outcome).observe(seconds)

    # ---- reading -------------------------------------------------------------------------------------------------

    async def _read(self, inventory: PartialFacts) -> tuple[dict[str, _Seen], list[tuple[str, Fault]]]:
        offered = await self._offered()
        seen = {machine_id: _Seen(slot=slot) for machine_id, slot in offered.items()}
        faults = [(machine_id, Fault(Reason.ID, text)) for machine_id, text in inventory.refused]
        named_hosts = NamedHosts(self._ledger.view.hosts)
        are_slots_taken = self._offers is None or not self._offers.replaces_inventory
        for number, stated in enumerate(inventory.facts):
            if number % _LOOK_CHUNK == _LOOK_CHUNK - 1:
                await self._clock.sleep(0)
            named = entry_id(number, stated)
            is_host = isinstance(stated, ExistingHost)
            if not is_host and (named in offered or not are_slots_taken):
                continue
            named_hosts.take(named, stated)
            entry = seen.setdefault(named, _Seen())
            kind = ExistingHost if is_host else Slot
            if kind in entry.named:
                faults.append((named, Fault(Reason.DUPLICATE, "the inventory names this id twice")))
                entry.is_refused = True
            entry.named.add(kind)
            fault = type_fault(stated)
            fact = stated if fault is not None else with_label(stated, self._adapter.reset)
            fault = fault or self._fault(fact)
            if fault is not None:
                faults.append((named, fault))
                entry.is_refused = True
            elif isinstance(fact, ExistingHost):
                entry.host = fact
            else:
                entry.slot = fact
        for machine_id, fault in named_hosts.faults():
            faults.append((machine_id, fault))
            seen[machine_id].is_refused = True
        for machine_id, slot in offered.items():
            record = self._ledger.view.get(machine_id)
            fault = None if record is None else change_fault(record, slot)
            if fault is not None:
                faults.append((machine_id, fault))
                seen[machine_id].is_refused = True
        return seen, joined_faults(faults)

    def _fault(self, fact: Slot) -> Fault | None:
        fault = facts_fault(fact)
        if fault is not None:
            return fault
        record = self._ledger.view.get(fact.id)
        return None if record is None else change_fault(record, fact)

    async def _add_all(self, seen: dict[str, _Seen]) -> None:
        """Fill an empty store: there is no other writer yet, so that no turns are needed."""
        now = self._clock.unix_nanos()
        entries = [entry.host or entry.slot for entry in seen.values()]
        records = [new_record(fact, self._adapter.provider, now) for fact in entries if fact is not None]
        for start in range(0, len(records), _CHUNK):
            chunk = records[start : start + _CHUNK]
            await asyncio.gather(*(self._add(record) for record in chunk))
        self._metrics.reconcile_changes.labels(Effect.ADDED.value).inc(len(records))

    async def _add(self, record: Record) -> None:
        await self._ledger.commit_until_done(lambda: Change(record=record))

    # ---- deciding ------------------------------------------------------------------------------------------------

    async def _plan(self, seen: dict[str, _Seen], begin_revision: int, inventory: PartialFacts) -> _Plan:
        plan = _Plan(unread_prefixes=inventory.unread_prefixes, unread_host_prefixes=inventory.unread_host_prefixes)
        for number, (machine_id, entry) in enumerate(seen.items()):
            if number % _LOOK_CHUNK == _LOOK_CHUNK - 1:
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
            if number % _LOOK_CHUNK == _LOOK_CHUNK - 1:
                await self._clock.sleep(0)
            if record.id in seen:
                continue
            if not self._is_unknown(plan, record.id):
                plan.unseen.add(record.id)
            if record.state_revision <= begin_revision:
                self._plan_known(plan, record, nothing)
        return plan

    def _plan_known(self, plan: _Plan, record: Record, entry: _Seen) -> None:
        if entry.is_refused:
            return
        if self._is_unknown(plan, record.id):
            # Neither seen nor missing: what was counted before goes on counting.
            for counts, before in ((plan.missing, self._before.missing), (plan.orphans, self._before.orphans)):
                if record.id in before:
                    counts[record.id] = before[record.id]
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

    def _is_unknown(self, plan: _Plan, machine_id: str) -> bool:
        """Return whether this pass has nothing to say about an id."""
        is_held = self._offers is not None and self._offers.is_held(machine_id)
        return is_held or machine_id.startswith(plan.unread_prefixes)

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
        if entry.host is None and record.id.startswith(plan.unread_host_prefixes):
            return
        if entry.host is None or entry.host.host_ref != record.machine.host.ref:
            self._plan_missing(plan, record, Effect.HOST_LOST)
            return
        _plan_refresh(plan, record, entry.host)
        if entry.host.in_cluster and record.state is MachineState.IDLE:
            count = self._before.orphans.get(record.id, 0) + 1
            plan.orphans[record.id] = count
            idle_nanos = self._clock.unix_nanos() - record.state_since_unix_nanos
            if count >= ORPHAN_PASSES and idle_nanos >= IN_SERVICE_SECONDS_MIN * NANOS_PER_SECOND:
                plan.effects[record.id] = Effect.IN_SERVICE

    def _plan_missing(self, plan: _Plan, record: Record, effect: Effect) -> None:
        count = self._before.missing.get(record.id, 0) + 1
        plan.missing[record.id] = count
        if count >= MISSING_PASSES:
            plan.effects[record.id] = effect

    def _brake(self, plan: _Plan) -> str:
        """Hold the losses back when there are too many of them; return the outcome of the pass."""
        losses = {
            machine_id: effect
            for machine_id, effect in plan.effects.items()
            if effect in _LOSSES and machine_id not in self._accepted
        }
        self._accepted = frozenset()
        machines = len(self._ledger.view)
        is_braked = _is_outage(len(losses), machines)
        self._metrics.brake_engaged.set(is_braked)
        if not is_braked:
            if self.braked is not None:
                _log.info("reconcile.brake_released", passes=len(losses), machines=machines)
            self.braked = None
            return "ok"
        for machine_id in losses:
            del plan.effects[machine_id]
        self.braked = Braked(effects=losses, machines=machines)
        advice = "check the backend; if the hosts are gone, run bigfleet provider admin accept-losses"
        _log.error("reconcile.braked", passes=len(losses), machines=machines, advice=advice)
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
        mended = [i for i in self._quarantine.faults if (entry := seen.get(i)) is not None and not entry.is_refused]
        for machine_id in mended:
            self._quarantine.clear(machine_id)

    async def _apply_one(self, machine_id: str, effect: Effect, entry: _Seen, begin_revision: int) -> None:
        async with self._ledger.turn(machine_id) as record:
            # The plan was made of a moment that may have passed while other turns ran.
            if (record is None) != (effect is Effect.ADDED):
                return
            if record is not None and record.state_revision > begin_revision:
                return
            change = self._change(machine_id, effect, record, entry)
            if record is not None and effect in _MOVES:
                reached = MachineState.UNSPECIFIED if change.record is None else change.record.state
                change = self._admissions.settled(change, record, reached)
            try:
                await self._ledger.commit_until_done(lambda: change)
            except ChangeRefused as refused:
                entry.is_refused = True
                reason = Reason.SHARED_HOST if isinstance(refused, HostShared) else Reason.TYPE
                self._quarantine.put(machine_id, Fault(reason, str(refused)))
                return
            self._admissions.committed(change)
        self._metrics.reconcile_changes.labels(effect.value).inc()
        if effect is not Effect.REFRESHED:
            state_from = record.state.name if record is not None else None
            state_to = change.record.state.name if change.record is not None else None
            _log.info(
                "reconcile.changed",
                machine=machine_id,
                change=effect.value,
                state_from=state_from,
                state_to=state_to,
            )

    def _change(self, machine_id: str, effect: Effect, record: Record | None, entry: _Seen) -> Change:
        now = self._clock.unix_nanos()
        facts = entry.host or entry.slot
        if effect is Effect.REMOVED:
            return Change(removed_id=machine_id)
        if effect is Effect.ADDED:
            assert facts is not None, "what is added was seen"
            return Change(record=new_record(facts, self._adapter.provider, now))
        assert record is not None, "only an added machine has no record"
        if effect is Effect.HOST_LOST:
            passes = f"the inventory did not show host {record.machine.host.ref} in {MISSING_PASSES} passes"
            return Change(record=failed(record, ErrorCode.HOST_LOST, passes, now))
        if effect is Effect.ORPHAN:
            assert entry.host is not None, "an orphan is a host that was seen"
            host = Host(ref=entry.host.host_ref, node_name=entry.host.node_name)
            refreshed = with_facts(record, entry.host)
            found = recovered_with_host(refreshed, host, self._adapter.provider, now)
            cluster = entry.host.in_cluster
            return Change(record=in_service(found, cluster, now) if cluster else found)
        if effect is Effect.IN_SERVICE:
            assert entry.host is not None, "a host in service was seen"
            return Change(record=in_service(with_facts(record, entry.host), entry.host.in_cluster, now))
        assert facts is not None, "what is refreshed was seen"
        return Change(record=with_facts(record, facts))


def _is_outage(losses: int, machines: int) -> bool:
    """Return whether so many machines went at once that the inventory is to be doubted."""
    return losses > max(BRAKE_LOSSES, BRAKE_SHARE * machines)


def _plan_refresh(plan: _Plan, record: Record, facts: Slot) -> None:
    if with_facts(record, facts) != record:
        plan.effects[record.id] = Effect.REFRESHED


def _refuse_bad_start(faults: Iterable[tuple[str, Fault]]) -> None:
    lines = [f"{machine_id[:260]}: {fault.text}" for machine_id, fault in faults]
    if lines:
        raise StartRefused(_listed(f"the first inventory has {len(lines)} bad records", lines))


def _listed(what: str, lines: list[str]) -> str:
    shown = "; ".join(lines[:FAULTS_LISTED_MAX])
    more = f"; and {len(lines) - FAULTS_LISTED_MAX} more" if len(lines) > FAULTS_LISTED_MAX else ""
    return f"{what}: {shown}{more}"
