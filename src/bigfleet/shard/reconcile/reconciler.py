"""Reconciles the inventory with one List of the provider.

docs/spec/shard.md §5. List and Get only; there is no Watch. A record that was refused or skipped still counts as
listed: it is never taken for a removal. An error changes nothing, and a sudden loss of supply is accepted only the
third time in a row.
"""

import asyncio
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress, filterfalse, islice, repeat

import structlog

from bigfleet.engine.columns.store import NOTE_BYTES
from bigfleet.model.clock import Clock
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import UNBOUND_STATES, MachineState
from bigfleet.shard.actuation.action_ledger import ActionLedger
from bigfleet.shard.actuation.backoff import MachineBackoff
from bigfleet.shard.actuation.executors import Executors
from bigfleet.shard.inventory.ingest import Ingest, Moment
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import (
    ListedMachine,
    Listing,
    Provider,
    ProviderRefusal,
    RefusalKind,
    ShardSettings,
    SplitRecords,
)
from bigfleet.shard.reconcile.foreign_machines import ForeignMachines
from bigfleet.shard.reconcile.new_machines import (
    INSERTED_PER_TURN_MAX,
    NEW_MIN,
    NewMachines,
    places_without,
    split_new,
)
from bigfleet.shard.reconcile.ownership_filter import OwnershipFilter
from bigfleet.shard.reconcile.unchanged_records import UnchangedRecords, doubtful, recognise
from bigfleet.shard.safety_limits import RemovalBrake

_log = structlog.get_logger("bigfleet.shard.reconcile.reconciler")

REVISITS_PER_CYCLE_MAX = 256
REVISITS_AT_ONCE_MAX = 16
#: All of them together: a cycle waits for them, and each provider call alone may take longer.
REVISITS_SECONDS_MAX = 10.0
#: A longer cursor is not sent back: a provider that cannot take it would refuse each List from then on.
CURSOR_BYTES_MAX = 4 * 1024
#: A provider that reports every removal is still listed in full after so many times `full_list_every_cycles`: what a
#: full answer has left out, because it was cut on its way, no later delta reports.
GAPLESS_FULL_FACTOR = 3
#: Records that are applied before other tasks get their turn, some milliseconds of work.
RECORDS_PER_TURN_MAX = 500
BINDINGS_BRAKED_ADVICE = (
    "the provider shows machines as unbound that serve a cluster; was a backup of its state restored? Stop the shard "
    "and check the provider; nothing was changed, the third such List in a row is accepted"
)
BINDINGS_LOST_ADVICE = (
    "they are neither bound nor deleted until their former cluster reports that the node is gone, or for 10 minutes if "
    "it reported no node; bring back the bindings at the provider, or see BigFleetShardBindingsLost in operating.md"
)
#: Known machines that are looked for among those shown before other tasks get their turn, about as long.
UNSEEN_PER_TURN_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """What one pass did."""

    mode: str
    records: int
    removed: int
    braked: int
    #: Adopted machines that a full List does not name; None of a delta.
    unnamed: frozenset[MachineId] | None = None
    #: Machines that a full List names and that are not ours; None of a delta.
    foreign: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One answer, and of its records those that had to be read."""

    listing: Listing
    records: Sequence[ListedMachine]
    #: Where these records stand in the answer; empty when no digests are to be noted.
    places: Sequence[int] = ()
    recognised: UnchangedRecords | None = None
    #: Records of machines that were not known, beside these.
    split: SplitRecords | None = None

    def without(self, machine_ids: Set[MachineId]) -> "_Shown":
        """Return the same without the records of some machines."""
        if not machine_ids:
            return self
        chosen = [number for number, record in enumerate(self.records) if record.machine.id not in machine_ids]
        places = [self.places[number] for number in chosen] if self.places else ()
        return replace(self, records=[self.records[number] for number in chosen], places=places)

    def digests(self, places: Sequence[int]) -> list[bytes]:
        """Return the digests of the records at these places."""
        content = self.listing.digests
        return [content[NOTE_BYTES * place : NOTE_BYTES * (place + 1)] for place in places]


class Reconciler:
    """Reads the provider once per cycle and applies what it shows."""

    def __init__(
        self,
        *,
        settings: ShardSettings,
        provider: Provider,
        inventory: Inventory,
        ingest: Ingest,
        ledger: ActionLedger,
        executors: Executors,
        machine_backoff: MachineBackoff,
        metrics: ShardMetrics,
        clock: Clock,
        ownership_filter: OwnershipFilter,
        revisits: set[MachineId],
    ) -> None:
        """`revisits` are ids to read with Get as soon as they are not pending: a state that did not move makes no
        delta. Whoever drives a machine may add to them.
        """
        self._settings = settings
        self._clock = clock
        self._provider = provider
        self._inventory = inventory
        self._ingest = ingest
        self._ledger = ledger
        self._executors = executors
        self._machine_backoff = machine_backoff
        self._metrics = metrics
        self._cursor = b""
        self._knows_tombstones = False
        self._cycles_since_full = 0
        #: A record was refused since the last full list began.
        self._has_refused = False
        self._brake = RemovalBrake()
        self._binding_brake = RemovalBrake()
        #: Ids whose removal a delta reported and the brake held back.
        self._held_removals: set[MachineId] = set()
        self._revisit = revisits
        #: The pass in which each of them was last asked for, of those that were and still wait.
        self._revisited: dict[MachineId, int] = {}
        self._passes = 0
        self._foreign = ForeignMachines(ownership_filter)
        self._ownership_filter = ownership_filter
        #: How often more became ours, and for how many of these times a full answer came since.
        self._widenings, self._widenings_read = 0, 0

    def widen(self) -> None:
        """Read everything in the next reconcile that begins: more is ours than before."""
        self._widenings += 1

    async def run(self) -> ReconcileResult:
        """Read and apply. Raises ProviderRefusal or TimeoutError when List fails; then nothing was changed."""
        self._cycles_since_full += 1
        self._passes += 1
        widenings, revisits_before = self._widenings, frozenset(self._revisit)
        cursor = self._cursor_to_use()
        self._foreign.begin()
        mode = "delta" if cursor else "full"
        self._ledger.begin_view()
        try:
            async with asyncio.timeout(self._settings.list_timeout_seconds):
                listing = await self._provider.list(cursor)
                is_full = not cursor or (self._knows_tombstones and not listing.tombstones)
                shown = await self._read(listing, is_full=is_full)
        except (ProviderRefusal, TimeoutError):
            self._metrics.reconciles.labels(mode, "error").inc()
            raise
        mode = "full" if is_full else "delta"
        self._knows_tombstones = self._knows_tombstones or listing.tombstones
        known_before = len(self._inventory)
        self._has_refused = self._has_refused and not is_full
        unbound = await self._braked_bindings(shown.records)
        seen = await self._take(shown.without(unbound), is_full=is_full) | unbound
        unseen = await self._unseen(shown, seen) if is_full else None
        unnamed = self._unnamed(seen, unseen) if unseen is not None else None
        removals = await self._removals(listing, seen, unseen)
        removed, braked = self._remove(removals, known_before, is_full)
        if self._settings.incremental_reconcile:
            # What a full answer left out no later delta would report: a braked one is asked for again as a whole. So
            # is an answer of which records were left out here.
            is_usable = len(listing.revision) <= CURSOR_BYTES_MAX and not (unbound or (braked and is_full))
            self._cursor = listing.revision if is_usable else b""
            if is_full:
                self._cycles_since_full = 0
                # A full answer has shown them, but for those that were in flight.
                self._revisit -= revisits_before - self._ledger.touched()
            self._revisit.update(MachineId(machine_id) for machine_id in self._machine_backoff.expired())
        if is_full:
            self._widenings_read = widenings
        self._foreign.end(is_full=is_full)
        await self._read_revisits()
        self._show_lost_bindings()
        braked += len(unbound)
        self._metrics.reconciles.labels(mode, "braked" if braked else "ok").inc()
        self._metrics.removals_braked.set(braked)
        self._metrics.machines_held.set(len(self._machine_backoff))
        return ReconcileResult(
            mode=mode,
            records=len(listing.records),
            removed=removed,
            braked=braked,
            unnamed=unnamed,
            foreign=self._foreign.count if is_full else None,
        )

    def _cursor_to_use(self) -> bytes:
        if not self._settings.incremental_reconcile:
            return b""
        # A refused record is repeated by no delta until it changes, sound or not.
        is_gapless = self._knows_tombstones and not self._has_refused
        every_cycles = self._settings.full_list_every_cycles * (GAPLESS_FULL_FACTOR if is_gapless else 1)
        too_old = self._cycles_since_full >= every_cycles
        return b"" if too_old or self._widenings > self._widenings_read else self._cursor

    async def _read(self, listing: Listing, *, is_full: bool) -> "_Shown":
        """Return what an answer shows, with the records read that are not recognised, in turns.

        Raises ProviderRefusal when one cannot be read.
        """
        if not listing.digests:
            return _Shown(listing=listing, records=listing.records)
        everything = range(len(listing.records))
        if not is_full:
            # Who reads deltas lists in full once in a while at most, and notes would be in vain.
            return _Shown(listing=listing, records=await self._records(listing, everything))
        if self._foreign.must_read_all:
            return await self._read_at(listing, everything)
        recognised = await recognise(listing, self._inventory, self._clock)
        if recognised is None:
            places = await self._foreign.left_of(listing.digests, everything, self._clock)
            return await self._read_at(listing, places)
        places = await self._foreign.left_of(listing.digests, recognised.unread, self._clock)
        shown = await self._read_at(listing, places)
        unseen = set(recognised.unseen)
        if all(record.machine.id in unseen or record.machine.id not in self._inventory for record in shown.records):
            return replace(shown, recognised=recognised)
        # A machine that is listed twice, and once as it is known: the later record counts, so all are read.
        return _Shown(listing=listing, records=await self._records(listing, everything), places=everything)

    async def _read_at(self, listing: Listing, places: Sequence[int]) -> "_Shown":
        """Read the records at some places: in parts those of machines that are not known, where that is possible."""
        if listing.parts is None or len(places) < NEW_MIN:
            return _Shown(listing=listing, records=await self._records(listing, places), places=places)
        split = await split_new(listing.parts, places, self._inventory, self._clock)
        others = places_without(places, split.places)
        records = await self._records(listing, others)
        again = {record.machine.id for record in records}.intersection(split.ids) if records else ()
        if again:
            # A machine that is listed twice is read as a whole each time: the later record counts.
            split = split.chosen([machine_id not in again for machine_id in split.ids])
            others = places_without(places, split.places)
            records = await self._records(listing, others)
        return _Shown(listing=listing, records=records, places=others, split=split if split.ids else None)

    async def _records(self, listing: Listing, places: Sequence[int]) -> list[ListedMachine]:
        records: list[ListedMachine] = []
        for first in range(0, len(places), RECORDS_PER_TURN_MAX):
            if first:
                await self._clock.sleep(0)
            records += [listing.records[place] for place in places[first : first + RECORDS_PER_TURN_MAX]]
        return records

    async def _braked_bindings(self, records: Sequence[ListedMachine]) -> frozenset[MachineId]:
        """Return the machines whose records safety limit 4 leaves out: too many lose their binding at once.

        The measure is how many machines are bound.
        """
        if not self._settings.removal_brake or not self._inventory.clusters:
            return frozenset()
        lost: list[ListedMachine] = []
        for first in range(0, len(records), RECORDS_PER_TURN_MAX):
            if first:
                await self._clock.sleep(0)
            batch = records[first : first + RECORDS_PER_TURN_MAX]
            # Most records of a full List are unchanged, and are compared many at once.
            is_other = ~self._inventory.equal([machine for machine, _metadata in batch])
            lost += [record for record in compress(batch, is_other.tolist()) if self._loses_binding(record.machine)]
        foreign = self._ownership_filter.foreign(lost)
        unbound = frozenset(record.machine.id for record in lost) - foreign
        bound = sum(map(self._inventory.count_bound_to, self._inventory.clusters))
        held_before = self._binding_brake.braked_in_a_row
        admitted, self._binding_brake = self._binding_brake.admit(len(unbound), bound)
        counts = {"machines": len(unbound), "bound": bound, "sample": sorted(unbound)[:10]}
        if not admitted:
            _log.error("inventory.bindings_braked", **counts, advice=BINDINGS_BRAKED_ADVICE)
            return unbound
        if held_before and RemovalBrake.is_suspicious(len(unbound), bound):
            _log.error("inventory.bindings_accepted", **counts, advice=BINDINGS_LOST_ADVICE)
        return frozenset()

    def _loses_binding(self, shown: Machine) -> bool:
        if self._ledger.was_pending_since_view(shown.id):
            return False
        return self._ingest.is_binding_lost(shown)

    def _show_lost_bindings(self) -> None:
        """Log and count the machines that lost their binding without a drain of this shard."""
        lost_bindings = self._ingest.lost_bindings
        new = lost_bindings.take_new()
        if new:
            _log.warning(
                "inventory.bindings_lost",
                machines=len(new),
                clusters=sorted(set(new.values()))[:10],
                sample=sorted(new)[:10],
                advice=BINDINGS_LOST_ADVICE,
            )
        self._metrics.bindings_lost.set(lost_bindings.expire(self._inventory.state_of))

    async def _take(self, shown: "_Shown", *, is_full: bool) -> set[MachineId]:
        """Apply what an answer shows; return whose the records are that had to be read."""
        moment = self._ingest.moment()
        digests = shown.digests(shown.places)
        seen = await self._take_records(shown.records, digests, moment, is_full=is_full)
        if shown.split is not None:
            seen |= await self._take_new(shown.listing, shown.split, moment)
        recognised = shown.recognised
        if recognised is None:
            return seen
        # What was recognised and is in doubt by now is read, and judged like any other record.
        places = await doubtful(recognised, self._inventory, self._marked(), self._clock)
        records = await self._records(shown.listing, places)
        await self._take_records(records, shown.digests(places), moment, is_full=is_full)
        return seen

    async def _take_new(self, listing: Listing, split: SplitRecords, moment: Moment) -> set[MachineId]:
        """Apply split records of machines that were not known, in turns. Return whose they are."""
        new = NewMachines(
            split,
            listing.digests,
            inventory=self._inventory,
            ingest=self._ingest,
            ownership_filter=self._ownership_filter,
        )
        seen: set[MachineId] = set()
        for first in range(0, len(split.ids), INSERTED_PER_TURN_MAX):
            await self._clock.sleep(0)
            last = min(first + INSERTED_PER_TURN_MAX, len(split.ids))
            seen.update(split.ids[first:last])
            taken = new.take(first, last, self._marked(), moment)
            for number in taken.foreign:
                self._pass_over(split.ids[number])
                self._foreign.note(split.ids[number], new.digest(number))
            for start in range(0, len(taken.unshown), RECORDS_PER_TURN_MAX):
                await self._clock.sleep(0)
                for number in taken.unshown[start : start + RECORDS_PER_TURN_MAX]:
                    self._ingest.show(split.ids[number])
            places = [split.places[number] for number in taken.rest]
            digests = [new.digest(number) for number in taken.rest]
            records = await self._records(listing, places)
            await self._take_records(records, digests, moment, is_full=True)
        return seen

    async def _take_records(
        self,
        records: Sequence[ListedMachine],
        digests: Sequence[bytes],
        moment: Moment,
        *,
        is_full: bool,
    ) -> set[MachineId]:
        """Apply records in turns: streams, workers and health get theirs in between. Return whose they are.

        `digests` are those of the records, or none are known.
        """
        seen: set[MachineId] = set()
        for first in range(0, len(records), RECORDS_PER_TURN_MAX):
            if first:
                # Whatever is driven meanwhile was pending at some time since this List was sent, and is skipped.
                await self._clock.sleep(0)
            # Most records concern none of these, and of half a million each question counts.
            marked = self._marked()
            batch = records[first : first + RECORDS_PER_TURN_MAX]
            noted: Iterable[bytes] = digests[first : first + RECORDS_PER_TURN_MAX] or repeat(b"")
            machine_ids = [machine.id for machine, _metadata in batch]
            seen.update(machine_ids)
            foreign = self._ownership_filter.foreign(batch)
            if foreign:
                batch, noted = self._without(foreign, zip(batch, noted, strict=False), moment)
                machine_ids = [machine.id for machine, _metadata in batch]
            # A delta lists changes: to ask of each whether it is one would cost as much as to take it.
            changed = self._ingest.changed(batch) if is_full else set(machine_ids)
            if not changed and not digests and (not marked or marked.isdisjoint(machine_ids)):
                continue
            for record, digest in zip(batch, noted, strict=False):
                machine_id = record.machine.id
                if machine_id in marked:
                    self._one(record, moment)
                    continue
                is_known = machine_id not in changed or (
                    self._judged(self._ingest.take(record, moment)) and self._ingest.is_as_reported(machine_id)
                )
                if digest and is_known:
                    # The record says all that is known of the machine: its like need not be read again.
                    self._inventory.note(machine_id, digest)
        return seen

    def _without(
        self, foreign: Set[MachineId], pairs: Iterable[tuple[ListedMachine, bytes]], moment: Moment
    ) -> tuple[list[ListedMachine], list[bytes]]:
        """Pass over the records of machines that are not ours; return the others with their digests."""
        ours: list[ListedMachine] = []
        digests: list[bytes] = []
        for record, digest in pairs:
            machine_id = record.machine.id
            if machine_id not in foreign:
                ours.append(record)
                digests.append(digest)
                continue
            self._let_go(record, moment)
            self._foreign.note(machine_id, digest)
        return ours, digests

    def _let_go(self, record: ListedMachine, moment: Moment) -> None:
        """Take a machine that is not ours out of all that is stored of it; it is not gone."""
        self._ingest.let_go(record, moment)
        self._pass_over(record.machine.id)

    def _pass_over(self, machine_id: MachineId) -> None:
        self._executors.end_drain_wait(machine_id)
        self._machine_backoff.forget(machine_id)
        self._held_removals.discard(machine_id)
        self._revisit.discard(machine_id)

    def _unnamed(self, seen: Set[MachineId], unseen: Set[MachineId]) -> frozenset[MachineId]:
        """Return the adopted machines that a full answer does not name."""
        adopted = self._foreign.adopted_before
        return frozenset(m for m in adopted - seen if m in unseen or m not in self._inventory)

    def _marked(self) -> Set[str]:
        """Return the machines whose records more is asked about than whether they say anything new."""
        asked = self._held_removals | self._executors.draining() | self._machine_backoff.held() | self._ledger.touched()
        return asked | self._foreign.moved

    def _one(self, record: ListedMachine, moment: Moment) -> None:
        machine = record.machine
        self._held_removals.discard(machine.id)
        if self._executors.is_draining_with_operator(machine.id):
            if machine.state is not MachineState.CONFIGURED:
                self._end_drain_wait(record, moment)
            return
        if self._ledger.was_pending_since_view(machine.id):
            self._revisit.add(machine.id)
            return
        self._apply(record, moment)

    def _end_drain_wait(self, record: ListedMachine, moment: Moment) -> None:
        machine = record.machine
        before, load = self._inventory.record_of(machine.id), self._ingest.node_load(machine.id)
        if not self._observe(record, moment):
            return
        if before is not None and before.cluster and machine.state in UNBOUND_STATES:
            # The operator has not ended its drain.
            name = None if load is None else load.node_name
            self._ingest.lost_bindings.lost(machine.id, before.cluster, name)
        self._executors.end_drain_wait(machine.id)

    async def _removals(self, listing: Listing, seen: Set[MachineId], unseen: set[MachineId] | None) -> list[MachineId]:
        """Return what this answer says is gone; what is in flight is asked about again as soon as it is not.

        `unseen` names the known machines that a full answer does not show; a delta has none. A machine that a delta
        shows and reports as removed is read with Get.
        """
        if unseen is not None:
            reported = unseen
        else:
            self._held_removals = {machine_id for machine_id in self._held_removals if machine_id in self._inventory}
            reported = self._held_removals.union(
                MachineId(machine_id) for machine_id in listing.removed_ids if machine_id in self._inventory
            )
            contradicted = reported & seen
            if contradicted:
                advice = "the answer lists them and reports them as removed; each is read by itself"
                sample = sorted(contradicted)[:10]
                _log.warning(
                    "inventory.removals_contradicted", machines=len(contradicted), sample=sample, advice=advice
                )
                self._revisit |= contradicted
                reported = reported - contradicted
        in_flight = {machine_id for machine_id in reported if self._is_in_flight(machine_id)}
        self._revisit |= in_flight
        return sorted(reported - in_flight)

    async def _unseen(self, shown: "_Shown", seen: Set[MachineId]) -> set[MachineId]:
        """Return the known machines that a full answer did not show, with turns for others in between."""
        candidates = shown.recognised.unseen if shown.recognised is not None else list(self._inventory.ids)
        known, unseen = iter(candidates), set[MachineId]()
        while chunk := list(islice(known, UNSEEN_PER_TURN_MAX)):
            unseen.update(filterfalse(seen.__contains__, chunk))
            await self._clock.sleep(0)
        return {machine_id for machine_id in unseen if machine_id in self._inventory}

    def _is_in_flight(self, machine_id: MachineId) -> bool:
        is_draining = self._executors.is_draining_with_operator(machine_id)
        return not is_draining and self._ledger.was_pending_since_view(machine_id)

    def _remove(self, gone: list[MachineId], known_before: int, is_full: bool) -> tuple[int, int]:
        """Remove what safety limit 4 admits; return how many were removed and how many held back.

        The measure is what was known before this answer: what it adds makes no loss smaller.
        """
        if self._settings.removal_brake:
            held_before = self._brake.braked_in_a_row
            admitted, self._brake = self._brake.admit(len(gone), known_before)
            if not admitted:
                advice = "nothing was removed; check the provider, the third such List in a row is accepted"
                _log.error("inventory.removals_braked", machines=len(gone), known=known_before, advice=advice)
                if not is_full:
                    self._held_removals.update(gone)
                return 0, len(gone)
            if held_before and RemovalBrake.is_suspicious(len(gone), known_before):
                _log.error("inventory.removals_accepted", machines=len(gone), known=known_before)
        for machine_id in gone:
            self._executors.end_drain_wait(machine_id)
            self._ingest.remove(machine_id)
            self._machine_backoff.forget(machine_id)
            self._held_removals.discard(machine_id)
        if gone:
            _log.warning(
                "inventory.machines_removed", machines=len(gone), sample=[str(machine_id) for machine_id in gone[:10]]
            )
        return len(gone), 0

    async def _read_revisits(self) -> None:
        ready = [machine_id for machine_id in sorted(self._revisit) if not self._ledger.is_pending(machine_id)]
        if not self._settings.incremental_reconcile:
            # The next full List shows them all.
            self._revisit.difference_update(ready)
            return
        self._revisited = {each: asked for each, asked in self._revisited.items() if each in self._revisit}
        # Those that fail each time must not keep the others waiting: what was asked for longest ago comes first.
        ready.sort(key=lambda machine_id: self._revisited.get(machine_id, 0))
        gate = asyncio.Semaphore(REVISITS_AT_ONCE_MAX)

        async def read(machine_id: MachineId) -> None:
            async with gate:
                self._revisited[machine_id] = self._passes
                try:
                    async with asyncio.timeout(self._settings.execute_timeout_seconds):
                        record = await self._provider.get(machine_id)
                except ProviderRefusal as refusal:
                    if refusal.kind is RefusalKind.NOT_FOUND:
                        # Reported gone, like a tombstone: the next pass removes it, under the same brake.
                        self._revisit.discard(machine_id)
                        self._held_removals.add(machine_id)
                    return
                except TimeoutError:
                    return
            if not self._ledger.is_pending(machine_id):
                self._revisit.discard(machine_id)
                if record.machine.id == machine_id:
                    self._apply_revisited(record)

        # What is not read in time is read in a later pass.
        with suppress(TimeoutError):
            async with asyncio.timeout(REVISITS_SECONDS_MAX):
                await asyncio.gather(*(read(machine_id) for machine_id in ready[:REVISITS_PER_CYCLE_MAX]))

    def _apply_revisited(self, record: ListedMachine) -> None:
        if self._ownership_filter.owns(record):
            self._apply(record, self._ingest.moment())
        else:
            self._let_go(record, self._ingest.moment())

    def _apply(self, record: ListedMachine, moment: Moment) -> None:
        machine_id, backoff = record.machine.id, self._machine_backoff
        if backoff.is_held(machine_id) and backoff.holds(machine_id, record.machine.state):
            return
        if not self._ingest.is_unchanged(record):
            self._observe(record, moment)

    def _observe(self, record: ListedMachine, moment: Moment) -> bool:
        """Take a record; say whether it was taken."""
        return self._judged(self._ingest.observe(record, moment))

    def _judged(self, is_taken: bool) -> bool:
        self._has_refused = self._has_refused or not is_taken
        return is_taken
