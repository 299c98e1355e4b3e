"""Owns a provider's state: turns per machine, group commit, the committed view (docs/spec/provider.md §3, §10, §11).

To change a machine, a caller takes its turn, computes the next record with `lifecycle`, and commits. Readers see it
after the commit, in order. Commits of many turns share one transaction. A change that failed to commit must never be
seen.
"""

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource, Rng
from bigfleet.model.machine import Machine
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.fence import Fence, Mark, Token
from bigfleet.provider.records.record import Record
from bigfleet.provider.records.refusal import ChangeRefused, HostShared, StartRefused, StoreDown
from bigfleet.provider.storage.blob_encryption import Sealed
from bigfleet.provider.storage.cursor import INCARNATION_BYTES
from bigfleet.provider.storage.machines_by_host import HostScope, one_scope, shared_text
from bigfleet.provider.storage.store import Batch, Store
from bigfleet.provider.storage.view import CommittedView, Tombstone

_log = structlog.get_logger("bigfleet.provider.storage.ledger")

#: More changes than this wait for the next transaction, so that one commit never holds the others up for long.
_BATCH_CHANGES_MAX = 2000
_PROBE_SECONDS = 1.0
_BROKEN = "a commit could not be shown, and no further one is taken; restart the provider"

#: Makes the bytes that List sends for a machine and its metadata, in pieces.
Encode = Callable[[Machine, Mapping[str, str]], tuple[bytes, ...]]
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change that one turn commits. At most one of record and removal."""

    record: Record | None = None
    removed_id: str | None = None
    mark: Mark | None = None
    #: Slots that come with it, and ids that go with it (`bigfleet.provider.operations.admission`).
    added: tuple[Record, ...] = ()
    removed_ids: tuple[str, ...] = ()
    #: The blob of an accepted Configure; it goes by itself when that ended.
    sealed: Sealed | None = None
    #: Ends every cursor that readers hold.
    incarnation: bytes | None = None
    #: What the backend said about an accepted call, for its log line; it is not stored.
    note: str = ""


@dataclass(slots=True)
class _Pending:
    change: Change
    done: asyncio.Future[Record | None]


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class Ledger:
    """State of one provider. `committing` None commits inline, without a thread."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        ids: IdSource,
        rng: Rng,
        encode: Encode,
        metrics: ProviderMetrics,
        committing: Executor | None,
        is_serial: bool = False,
        host_scope: HostScope = one_scope,
        on_health: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_serial` gives all machines one turn together, for a backend whose slots share room.

        `host_scope` returns the name space of a machine's host_ref. `on_health` is called whenever `is_up` changes.
        """
        self._store = store
        self._clock = clock
        self._ids = ids
        self._rng = rng
        self._encode = encode
        self._metrics = metrics
        self._committing = committing
        self._is_serial = is_serial
        self._host_scope = host_scope
        #: Stored blobs by machine.
        self._sealed: dict[str, Sealed] = {}
        self._turns: dict[str, _Turn] = {}
        self._pending: list[_Pending] = []
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = False
        #: False from a failed commit until the first that succeeds.
        self.is_up = True
        #: Set for good when a commit on disk could not be shown.
        self._is_broken = False
        self._on_health = on_health
        #: What the backend stored about the place of its hosts.
        self.identity: Mapping[str, str] = {}
        self.fence = Fence()
        self.view = self._empty_view(bytes(INCARNATION_BYTES), 0, 0)

    async def open(self) -> None:
        """Load the store and begin to commit. Raises StartRefused."""
        incarnation = self._new_incarnation()
        loaded = await self._offload(lambda: self._store.load(incarnation))
        self.view = self._empty_view(loaded.incarnation, loaded.head, loaded.floor)
        for record in loaded.records:
            # Frozen for its readers; there are none so far, and a copy of each would take as long as reading it.
            object.__setattr__(record, "wire", self._encode(record.machine, record.metadata))
            self.view.put(record)
        for tombstone in loaded.tombstones:
            self.view.restore_tombstone(tombstone)
        self.view.head = max(self.view.head, loaded.head)
        self._sealed = {sealed.machine_id: sealed for sealed in loaded.sealed}
        for mark in loaded.marks:
            self.fence.put(mark, is_known=mark.machine_id in self.view)
        self.identity = loaded.identity
        self._writer = asyncio.create_task(self._write())
        self._expose()

    async def store_identity(self, identity: Mapping[str, str]) -> None:
        """Store what the backend says about the place of its hosts, before the first turn. Raises StartRefused."""
        if identity == self.identity:
            return
        batch = Batch(head=self.view.head, floor=self.view.floor, identity=identity)
        try:
            await self._offload(lambda: self._store.commit(batch))
        except StoreDown as error:
            raise StartRefused(f"the state takes no commit: {error}") from error
        self.identity = identity

    def _empty_view(self, incarnation: bytes, head: int, floor: int) -> CommittedView:
        return CommittedView(
            incarnation=incarnation, head=head, floor=floor, rng=self._rng, host_scope=self._host_scope
        )

    async def close(self) -> None:
        """Commit what is pending and close the store."""
        self._is_closing = True
        self._wake.set()
        if self._writer is not None:
            await self._writer
        await self._offload(self._store.close)

    @asynccontextmanager
    async def turn(self, machine_id: str) -> AsyncIterator[Record | None]:
        """Hold a machine's turn and give its record; unknown ids have turns too. First come, first served."""
        key = "" if self._is_serial else machine_id
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = _Turn()
        turn.users += 1
        try:
            async with turn.lock:
                yield self.view.get(machine_id)
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]

    def has_room_for(self, machine_id: str, token: Token) -> bool:
        """Return whether the fence has room to remember a token for the machine."""
        return self.fence.has_room(machine_id, token, self._clock.unix_nanos())

    def mark_of(self, machine_id: str, token: Token) -> Mark | None:
        """Return the mark that a passing token leaves, or None for an absent one."""
        if token.is_absent:
            return None
        return Mark(
            machine_id=machine_id,
            shard_id=token.shard_id,
            epoch=token.epoch,
            sequence=token.sequence,
            used_unix_nanos=self._clock.unix_nanos(),
        )

    def sealed_of(self, record: Record) -> Sealed | None:
        """Return the stored blob of the Configure that a record is in."""
        sealed = self._sealed.get(record.id)
        return sealed if sealed is not None and _needs(record, sealed) else None

    def size_bytes(self) -> int:
        """Return the size of the state on disk."""
        return self._store.size_bytes()

    async def reset_cursors(self) -> None:
        """Give the store a new incarnation: every reader starts with a full list. Raises StoreDown."""
        await self.commit(Change(incarnation=self._new_incarnation()))

    def _new_incarnation(self) -> bytes:
        return hashlib.blake2b(self._ids.new_id().encode(), digest_size=INCARNATION_BYTES).digest()

    async def commit(self, change: Change) -> Record | None:
        """Make a change durable and visible, and return its record as committed.

        The caller holds the turn of the machine. Raises StoreDown, and ChangeRefused for a value that cannot be
        written; then nothing happened.
        """
        if self._is_broken:
            raise StoreDown(_BROKEN)
        done: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(change, done))
        self._wake.set()
        return await done

    async def commit_until_done(self, make: Callable[[], Change]) -> Record | None:
        """Commit, and retry every second while the store is down; the change is made again each time.

        Raises ChangeRefused, which no retry helps.
        """
        while True:
            try:
                return await self.commit(make())
            except StoreDown:
                await self._clock.sleep(_PROBE_SECONDS)

    async def _write(self) -> None:
        try:
            await self._write_all()
        except Exception as error:  # a commit that cannot be shown: disk and view may differ from here on
            self._is_broken = True
            _log.error("store.writer_failed", exc_info=error, advice="restart the provider: the file has every commit")
            for entry in self._pending:
                _answer(entry, StoreDown(_BROKEN))
            self._pending.clear()
            self._set_up(False)

    async def _write_all(self) -> None:
        while True:
            if not self._pending:
                if self._is_closing:
                    return
                await self._wait_for_work()
                continue
            pending = self._pending[:_BATCH_CHANGES_MAX]
            del self._pending[:_BATCH_CHANGES_MAX]
            await self._write_batch(pending)
            # One pass of the loop lets the turns that waited join the next transaction.
            await self._clock.sleep(0)

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        if self.is_up:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            await self._write_batch([])

    async def _write_batch(self, pending: Sequence[_Pending]) -> None:
        try:
            batch, records = self._batch([entry.change for entry in pending])
        except Exception as error:  # a value without bytes on the wire: the rest of the batch must not wait for it
            await self._write_halves(pending, error)
            return
        started = self._clock.monotonic_seconds()
        try:
            await self._offload(lambda: self._store.commit(batch))
        except (TypeError, ValueError, OverflowError) as error:  # a value that no row takes: the disk is not at fault
            await self._write_halves(pending, error)
            return
        except Exception as error:  # whatever a store raises, the turns of this batch must hear that nothing happened
            self._metrics.store_errors.inc()
            advice = "nothing was changed; check the disk of the state file"
            _log.error("store.commit_failed", error=str(error), changes=len(pending), advice=advice)
            for entry in pending:
                _answer(entry, StoreDown(str(error)))
            self._set_up(False)
            return
        self._metrics.commit_seconds.observe(self._clock.monotonic_seconds() - started)
        try:
            self._apply(batch)
        except Exception as error:
            for entry in pending:
                _answer(entry, error)
            raise
        self._set_up(True)
        for entry, record in zip(pending, records, strict=True):
            _answer(entry, record)

    async def _write_halves(self, pending: Sequence[_Pending], error: Exception) -> None:
        """Commit the halves of a batch that holds a value which cannot be written, until one change is left: its own.

        That one is refused, and the others are committed.
        """
        if len(pending) > 1:
            half = len(pending) // 2
            await self._write_batch(pending[:half])
            await self._write_batch(pending[half:])
            return
        for entry in pending:
            record = entry.change.record
            machine_id = entry.change.removed_id if record is None else record.id
            _log.error("store.change_refused", machine=machine_id, exc_info=error)
            refused = f"it cannot be written: {type(error).__name__}: {error}"
            _answer(entry, error if isinstance(error, ChangeRefused) else ChangeRefused(refused))

    def _set_up(self, is_up: bool) -> None:
        if self.is_up != is_up:
            self.is_up = is_up
            _log.info("store.became_available" if is_up else "store.became_unavailable")
            self._on_health()

    def _batch(self, changes: Sequence[Change]) -> tuple[Batch, list[Record | None]]:
        """Give the changes their revisions, in order. Nothing is applied here."""
        self._check_hosts(changes)
        now = self._clock.unix_nanos()
        head = self.view.head
        records: list[Record | None] = []
        added: list[Record] = []
        tombstones = []
        for change in changes:
            for machine_id in (*((change.removed_id,) if change.removed_id is not None else ()), *change.removed_ids):
                head += 1
                tombstones.append(Tombstone(machine_id=machine_id, revision=head, removed_unix_nanos=now))
            record = change.record
            if record is not None:
                record, head = self._numbered(record, head)
            records.append(record)
            for slot in change.added:
                slot, head = self._numbered(slot, head)
                added.append(slot)
        written = (*(record for record in records if record is not None), *added)
        returned = [record.id for record in written if self.view.has_tombstone(record.id)]
        marks = tuple(change.mark for change in changes if change.mark is not None)
        sealed = tuple(change.sealed for change in changes if change.sealed is not None)
        expired = self.view.expired_tombstones(now, len(tombstones))
        batch = Batch(
            head=head,
            floor=max([self.view.floor, *(t.revision for t in expired)]),
            records=written,
            tombstones=tuple(tombstones),
            tombstones_dropped=(*returned, *(t.machine_id for t in expired)),
            marks=marks,
            marks_dropped=(
                *self.fence.evictable(now, {(m.machine_id, m.shard_id) for m in marks}),
                *self.fence.crowded_out(marks),
            ),
            sealed=sealed,
            sealed_dropped=self._ended_seals(written, tombstones, sealed),
            incarnation=next((c.incarnation for c in reversed(changes) if c.incarnation is not None), None),
            needs_room=not self.is_up,
        )
        return batch, records

    def _check_hosts(self, changes: Sequence[Change]) -> None:
        """Raise HostShared for a change that gives a machine the host of another one, the changes before it counted."""
        hosts = self.view.hosts
        taken: dict[tuple[str, str], str] = {}
        left: set[tuple[str, str]] = set()
        for change in changes:
            machine_id = change.removed_id if change.record is None else change.record.id
            if machine_id is None:
                continue
            old = self.view.get(machine_id)
            old_ref = "" if old is None else old.machine.host.ref
            ref = "" if change.record is None else change.record.machine.host.ref
            if ref == old_ref:
                continue
            left.add((machine_id, old_ref))
            others = tuple(each for each in hosts.others(machine_id, ref) if (each, ref) not in left)
            first = taken.setdefault((hosts.scope_of(machine_id), ref), machine_id) if ref else machine_id
            if others or first != machine_id:
                raise HostShared(shared_text(ref, others or (first,)))

    def _ended_seals(
        self, written: Sequence[Record], tombstones: Sequence[Tombstone], sealed: Sequence[Sealed]
    ) -> tuple[str, ...]:
        """Return the machines whose stored blob goes in this batch, because its Configure ends in it."""
        stored = {**self._sealed, **{entry.machine_id: entry for entry in sealed}}
        if not stored:
            return ()
        ended = {t.machine_id for t in tombstones if t.machine_id in stored}
        for record in written:
            entry = stored.get(record.id)
            if entry is not None and not _needs(record, entry):
                ended.add(record.id)
        return tuple(sorted(ended))

    def _numbered(self, record: Record, head: int) -> tuple[Record, int]:
        old = self.view.get(record.id)
        if old is not None and record.shows_the_same_as(old):
            return replace(record, revision=old.revision, state_revision=old.state_revision, wire=old.wire), head
        head += 1
        is_moved = old is None or old.state is not record.state
        record = replace(record, revision=head, state_revision=head if is_moved or old is None else old.state_revision)
        return replace(record, wire=self._encode(record.machine, record.metadata)), head

    def _apply(self, batch: Batch) -> None:
        # The order of revisions is the order of the changes, removals and records interleaved.
        steps: list[tuple[int, Record | Tombstone]] = [(r.revision, r) for r in batch.records]
        steps += [(t.revision, t) for t in batch.tombstones]
        for _revision, step in sorted(steps, key=lambda entry: entry[0]):
            if isinstance(step, Tombstone):
                self.view.remove(step)
                self.fence.machine_removed(step.machine_id)
            else:
                is_new = step.id not in self.view
                self.view.put(step)
                if is_new:
                    self.fence.machine_added(step.id)
        for mark in batch.marks:
            self.fence.put(mark, is_known=mark.machine_id in self.view)
        self.fence.evict(batch.marks_dropped)
        if batch.incarnation is not None:
            self.view.incarnation = batch.incarnation
        self._sealed.update({entry.machine_id: entry for entry in batch.sealed})
        for machine_id in batch.sealed_dropped:
            self._sealed.pop(machine_id, None)
        self.view.drop_tombstones(batch.tombstones_dropped, batch.floor)

    def _expose(self) -> None:
        metrics, view, fence = self._metrics, self.view, self.fence
        metrics.revision.set_function(lambda: view.head)
        metrics.tombstones.set_function(lambda: view.tombstone_count)
        metrics.fence_marks.labels("known").set_function(lambda: fence.known_count)
        metrics.fence_marks.labels("unknown").set_function(lambda: fence.unknown_count)
        metrics.store_bytes.set_function(self._store.size_bytes)
        for state in set(MachineState) - {MachineState.UNSPECIFIED}:
            for capacity_type in set(CapacityType) - {CapacityType.UNSPECIFIED}:
                read = functools.partial(view.counts.__getitem__, (state, capacity_type))
                metrics.machines.labels(state.name, capacity_type.name).set_function(read)

    async def _offload(self, work: Callable[[], _R]) -> _R:
        if self._committing is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._committing, work)


def _needs(record: Record, sealed: Sealed) -> bool:
    """Return whether a record is still in the Configure that a blob was stored for."""
    operation = record.operation
    return record.state is MachineState.CONFIGURING and operation is not None and operation.id == sealed.operation_id


def _answer(entry: _Pending, result: Record | Exception | None) -> None:
    """Give a turn what became of its change, unless it went away."""
    if entry.done.done():
        return
    if isinstance(result, Exception):
        entry.done.set_exception(result)
    else:
        entry.done.set_result(result)
