"""Stores the coordinator's tables in etcd, for any number of replicas (docs/spec/coordinator.md §3).

The leader is the replica that made the key `election`; its term is that key's create revision, and every write holds
only while the key is still the same one. So a leader that was paused, or cut off, writes nothing, regardless of its
clock. The lease only decides how long the others wait for one that is dead.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
import structlog

from bigfleet.coordinator.commands import Command, edits
from bigfleet.coordinator.stores.codec import UnreadableRow, check_key, decode_row, encode_row
from bigfleet.coordinator.stores.protocol import (
    TERM_STEP,
    LeaderInfo,
    Leadership,
    NotLeader,
    OutcomeUnknown,
    StoreUnavailable,
)
from bigfleet.coordinator.tables import Edit, RowKey, Table, Tables
from bigfleet.model.clock import Clock
from bigfleet.rpc.etcd.client import (
    CALL_SECONDS,
    TXN_OPERATIONS_MAX,
    EtcdClient,
    EtcdUnavailable,
    NoAnswer,
    created_at,
    delete,
    end_of_prefix,
    key_is_absent,
    modified_at,
    put,
    read,
)
from bigfleet.rpc.wire.gen import etcd_pb2

_log = structlog.get_logger("bigfleet.rpc.etcd.store")

#: Attempts of one command whose rows others change meanwhile.
_ATTEMPTS_MAX: Final = 3
_RETRY_FIRST_SECONDS: Final = 0.1
_RETRY_MAX_SECONDS: Final = 2.0
#: Edits of one transaction; a command with more is written in several, each of which leaves the tables sound.
_EDITS_MAX: Final = TXN_OPERATIONS_MAX - 1


class _Candidate(msgspec.Struct, frozen=True):
    replica: str
    address: str


@dataclass(slots=True)
class _Known:
    """The tables as last read or written, and at which revision each row was."""

    tables: Tables = field(default_factory=Tables)
    revisions: dict[bytes, int] = field(default_factory=dict)
    revision: int = 0


class EtcdStore:
    """A `StateStore` on an etcd cluster; made on a running event loop."""

    def __init__(
        self, client: EtcdClient, *, prefix: str, me: LeaderInfo, lease_ttl_seconds: int, clock: Clock
    ) -> None:
        """Keep everything under `prefix`, without a slash at its end. The client is closed with the store."""
        self._client = client
        self._prefix = prefix.encode() + b"/"
        self._election = self._prefix + b"election"
        self._meta = self._prefix + b"meta"
        self._me = me
        self._ttl_seconds = lease_ttl_seconds
        #: An answer that is just in time comes after a third of a lease and the time of a call.
        self._answer_seconds_max = max(lease_ttl_seconds, lease_ttl_seconds / 3 + CALL_SECONDS)
        self._clock = clock
        self._known = _Known()
        #: As last read; `leader` ages it.
        self._leader: LeaderInfo | None = None
        #: When etcd last answered a candidate that waits.
        self._answered_seconds = 0.0
        self._lease = 0
        #: Create revision of our election key while we lead, else 0.
        self._won_at = 0
        self._term = 0
        self._why_lost: asyncio.Future[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- leadership ---------------------------------------------------------------------------------------------

    async def campaign(self) -> Leadership:
        """Wait until this replica leads; whatever fails meanwhile is logged and tried again."""
        # A key of ours that outlived our leadership must go: leading by it again would be leading under an old term.
        await self.resign()
        wait_seconds = _RETRY_FIRST_SECONDS
        while True:
            try:
                won = await self._campaign_once()
            except (EtcdUnavailable, NoAnswer, UnreadableRow) as error:
                _log.warning("etcd.campaign_failed", error=str(error), retry_seconds=wait_seconds)
                await self._clock.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, _RETRY_MAX_SECONDS)
                continue
            if won is not None:
                return won
            wait_seconds = _RETRY_FIRST_SECONDS

    async def _campaign_once(self) -> Leadership | None:
        """Win, or return None once the leader that there is has gone."""
        found = await self._client.range(self._election)
        self._answered_seconds = self._clock.monotonic_seconds()
        if found.items and found.items[0].lease != self._lease:
            leader = _leader_of(found.items[0])
            # A key of this replica that outlived its process or its lease leads nothing; it goes when etcd ends it.
            self._leader = leader if leader != self._me else None
            with suppress(TimeoutError):
                # A watch is silent while nothing changes, and also while etcd is away: so etcd is asked now and then.
                async with asyncio.timeout(self._ttl_seconds / 3):
                    await self._client.wait_until_changed(self._election, found.revision)
            return None
        self._leader = None
        if not found.items:
            self._lease = await self._client.grant(self._ttl_seconds)
            candidate = msgspec.json.encode(_Candidate(self._me.replica, self._me.address))
            # A lost answer needs no care: the next round finds the key with our lease, or without.
            await self._client.txn([key_is_absent(self._election)], [put(self._election, candidate, self._lease)])
            found = await self._client.range(self._election)
        if not found.items or found.items[0].lease != self._lease:
            return None
        renewed_seconds = self._clock.monotonic_seconds()
        if not await self._client.keep_alive(self._lease):
            # Etcd may keep the key of an expired lease for a while; without this the next round would not wait for it.
            self._lease = 0
            return None
        tables = await self._read()
        self._term = await self._term_offset() + found.items[0].create_revision
        self._won_at = found.items[0].create_revision
        self._leader = self._me
        self._why_lost = asyncio.get_running_loop().create_future()
        self._start(self._keep_lease(renewed_seconds))
        self._start(self._watch_election(found.revision))
        return Leadership(self._term, tables)

    async def lost(self) -> str:
        """Wait until this replica leads no more and return why."""
        if self._why_lost is None:
            return "this replica never led"
        return await asyncio.shield(self._why_lost)

    async def is_leader(self) -> bool:
        """Ask etcd whether our election key stands. Raises StoreUnavailable."""
        try:
            found = await self._client.range(self._election)
        except EtcdUnavailable as error:
            raise StoreUnavailable(str(error)) from error
        is_ours = bool(self._won_at and found.items and found.items[0].create_revision == self._won_at)
        if not is_ours:
            self._step_down("the election key is another's")
        return is_ours

    def leader(self) -> LeaderInfo | None:
        """Return who leads as far as is known, None if etcd has not answered for longer than the time of a lease."""
        age_seconds = self._clock.monotonic_seconds() - self._answered_seconds
        return self._leader if self._won_at or age_seconds <= self._answer_seconds_max else None

    async def resign(self) -> None:
        """Revoke the lease, so that the next leader stands at once."""
        lease, self._lease = self._lease, 0
        self._step_down("leadership was given up")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if lease:
            try:
                await self._client.revoke(lease)
            except EtcdUnavailable as error:
                _log.warning("etcd.lease_revoke_failed", error=str(error), expires_seconds=self._ttl_seconds)

    async def close(self) -> None:
        """Resign and close the client."""
        await self.resign()
        await self._client.close()

    def _step_down(self, why: str) -> None:
        self._won_at = 0
        if self._leader == self._me:
            self._leader = None
        if self._why_lost is not None and not self._why_lost.done():
            self._why_lost.set_result(why)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(work))

    async def _keep_lease(self, renewed_seconds: float) -> None:
        """Renew the lease every third of its time; step down when two thirds have passed without."""
        won_at, third = self._won_at, self._ttl_seconds / 3
        while self._won_at == won_at:
            await self._clock.sleep(min(third, max(0.0, renewed_seconds + 2 * third - self._clock.monotonic_seconds())))
            if self._won_at != won_at:
                return
            began_seconds = self._clock.monotonic_seconds()
            if began_seconds - renewed_seconds >= 2 * third:
                self._step_down(f"the lease was not renewed for {began_seconds - renewed_seconds:.1f} s")
                return
            try:
                async with asyncio.timeout(max(0.0, renewed_seconds + 2 * third - began_seconds)):
                    is_alive = await self._client.keep_alive(self._lease)
            except (EtcdUnavailable, TimeoutError) as error:
                _log.warning("etcd.lease_renewal_failed", error=str(error) or "no answer in time")
                await self._clock.sleep(_RETRY_FIRST_SECONDS)
                continue
            if not is_alive:
                self._step_down("the lease has ended")
                return
            renewed_seconds = began_seconds

    async def _watch_election(self, revision: int) -> None:
        """Step down when the election key goes or becomes another's."""
        won_at = self._won_at
        while self._won_at == won_at:
            try:
                await self._client.wait_until_changed(self._election, revision)
                found = await self._client.range(self._election)
            except EtcdUnavailable:
                # Whether we still lead is then the lease's business.
                await self._clock.sleep(_RETRY_MAX_SECONDS)
                continue
            if not found.items or found.items[0].create_revision != won_at:
                self._step_down("the election key has gone")
                return
            revision = found.revision

    # ---- tables -------------------------------------------------------------------------------------------------

    async def load(self) -> Tables:
        """Return the tables as etcd has them now. Raises StoreUnavailable."""
        try:
            return await self._read()
        except (EtcdUnavailable, UnreadableRow) as error:
            raise StoreUnavailable(str(error)) from error

    def revision(self) -> int:
        """Return etcd's revision at the last read or write."""
        return self._known.revision

    async def commit(self, command: Command) -> Tables:
        """Apply a command. Raises CommandRefused, NotLeader, StoreUnavailable, OutcomeUnknown."""
        written: Sequence[Edit] = ()
        for _ in range(_ATTEMPTS_MAX):
            if not self._won_at:
                raise NotLeader("this replica does not lead")
            if written and self._known.tables.with_edits(written) == self._known.tables:
                # A transaction that got no answer has come after all.
                return self._known.tables
            written = edits(command, self._known.tables)
            if await self._written(written):
                return self._known.tables
        raise StoreUnavailable(f"etcd: the rows of {type(command).__name__} kept changing; try again")

    async def _written(self, written: Sequence[Edit]) -> bool:
        """Write edits, say whether all are in the store now; False after the rows were read again."""
        for start in range(0, len(written), _EDITS_MAX):
            part = written[start : start + _EDITS_MAX]
            try:
                answer = await self._write(part)
            except NoAnswer as error:
                if not await self._is_there(part, str(error)):
                    return False
                continue
            except EtcdUnavailable as error:
                raise StoreUnavailable(str(error)) from error
            if not answer.succeeded:
                if not await self.is_leader():
                    raise NotLeader("this replica does not lead any more; nothing was written")
                await self.load()
                return False
            self._take(part, answer.header.revision)
        return True

    async def _write(self, part: Sequence[Edit]) -> etcd_pb2.TxnResponse:
        keys = [self._key(key) for key, _ in part]
        guards = [created_at(self._election, self._won_at)]
        guards += [modified_at(key, self._known.revisions.get(key, 0)) for key in keys]
        writes = [
            delete(key) if row is None else put(key, encode_row(row)) for key, (_, row) in zip(keys, part, strict=True)
        ]
        return await self._client.txn(guards, writes, [read(self._election)])

    async def _is_there(self, part: Sequence[Edit], text: str) -> bool:
        """Read back what got no answer. Raises OutcomeUnknown when that gets none either."""
        try:
            tables = await self._read()
        except (EtcdUnavailable, UnreadableRow) as error:
            raise OutcomeUnknown(f"{text}; reading it back: {error}") from error
        # Not there: it may still come, and then fail at its guard, or make the next attempt fail at its own.
        return tables.with_edits(part) == tables

    def _take(self, part: Sequence[Edit], revision: int) -> None:
        self._known.tables = self._known.tables.with_edits(part)
        self._known.revision = revision
        for key, row in part:
            if row is None:
                self._known.revisions.pop(self._key(key), None)
            else:
                self._known.revisions[self._key(key)] = revision

    async def _read(self) -> Tables:
        found = await self._client.range(self._prefix, end_of_prefix(self._prefix))
        rows: list[Edit] = []
        revisions: dict[bytes, int] = {}
        for item in found.items:
            key = self._row_key(item.key)
            if key is not None:
                rows.append(Edit(key, decode_row(key, item.value)))
                revisions[item.key] = item.mod_revision
        self._known = _Known(Tables().with_edits(rows), revisions, found.revision)
        return self._known.tables

    # ---- terms --------------------------------------------------------------------------------------------------

    async def _term_offset(self) -> int:
        found = await self._client.range(self._meta)
        if not found.items:
            return 0
        try:
            return msgspec.json.decode(found.items[0].value, type=dict[str, int])["term_offset"]
        except (msgspec.MsgspecError, KeyError, RecursionError) as error:
            raise UnreadableRow(f"meta: {error}") from error

    async def raise_term(self, above: int) -> int:
        """Make the term `above` + 1,000,000. Raises NotLeader, StoreUnavailable."""
        won_at = self._won_at
        if not won_at:
            raise NotLeader("this replica does not lead")
        term = max(above, self._term) + TERM_STEP
        content = msgspec.json.encode({"term_offset": term - won_at})
        try:
            answer = await self._client.txn([created_at(self._election, won_at)], [put(self._meta, content)])
        except (NoAnswer, EtcdUnavailable) as error:
            raise StoreUnavailable(str(error)) from error
        if not answer.succeeded:
            self._step_down("the election key is another's")
            raise NotLeader("this replica does not lead any more; the term is as it was")
        self._term = term
        return term

    async def restore(self, rows: Sequence[Edit], *, term: int, is_forced: bool) -> None:
        """Write a snapshot's rows and its term offset without a leader. Raises StoreUnavailable with the reason."""
        try:
            if (await self._client.range(self._election)).items:
                raise StoreUnavailable("a coordinator leads on this store; stop all replicas first")
            found = await self._client.range(self._prefix, end_of_prefix(self._prefix))
        except EtcdUnavailable as error:
            raise StoreUnavailable(f"{error}; nothing was written") from error
        # By key alone: what cannot be read is what somebody restores for.
        gone = [item.key for item in found.items if item.key not in (self._meta, self._election)]
        if gone and not is_forced:
            raise StoreUnavailable(f"the store has {len(gone)} rows already; --force replaces them")
        operations = [put(self._key(key), encode_row(row)) for key, row in rows if row is not None]
        operations.append(put(self._meta, msgspec.json.encode({"term_offset": term})))
        try:
            await self._in_parts([delete(key) for key in gone])
            await self._in_parts(operations)
        except (EtcdUnavailable, NoAnswer) as error:
            raise StoreUnavailable(f"{error}; a part may be written: restore again with --force") from error

    async def _in_parts(self, operations: Sequence[etcd_pb2.RequestOp]) -> None:
        for start in range(0, len(operations), _EDITS_MAX):
            part = operations[start : start + _EDITS_MAX]
            if not (await self._client.txn([key_is_absent(self._election)], part)).succeeded:
                raise StoreUnavailable("a coordinator has begun to lead on this store; stop all replicas first")

    # ---- keys ---------------------------------------------------------------------------------------------------

    def _key(self, key: RowKey) -> bytes:
        parts = "/".join(quote(part, safe="") for part in key.parts)
        return self._prefix + f"{key.table.value}/{parts}".encode()

    def _row_key(self, key: bytes) -> RowKey | None:
        """Return the row that a key of ours holds, None for `meta` and `election`. Raises UnreadableRow."""
        name, _, rest = key.removeprefix(self._prefix).decode("utf-8", "replace").partition("/")
        if not rest:
            return None
        try:
            table = Table(name)
        except ValueError as error:
            raise UnreadableRow(f"there is no table {name!r}") from error
        row_key = RowKey(table, tuple(unquote(part) for part in rest.split("/")))
        check_key(row_key)
        return row_key


def _leader_of(item: etcd_pb2.KeyValue) -> LeaderInfo:
    try:
        candidate = msgspec.json.decode(item.value, type=_Candidate)
    except msgspec.MsgspecError:
        return LeaderInfo("unknown", "")
    return LeaderInfo(candidate.replica, candidate.address)
