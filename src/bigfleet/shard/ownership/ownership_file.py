"""Stores what a shard owns: base, domains, moved machines, reservations, the accepted term; changes are atomic.

docs/spec/shard.md §2, docs/spec/coordinator.md §9. Tables of `shard.db`, which `bigfleet.shard.ownership.state_file`
opens. A row that cannot be read ends the start and is named. This module does not decide what is owned, and damaged
content is never recreated or skipped.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bigfleet.model.ids import MachineId, ShardId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.ownership import Base, Domain, Owned, OwnershipRow, OwnershipVersion, Reservation, RowKind
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.model.validation import ensure, validate

#: Of the tables that schema 2 added; schema 1 had `meta` alone.
TABLES = (
    "CREATE TABLE domains (topology_key TEXT NOT NULL, topology_value TEXT NOT NULL, standing TEXT NOT NULL,"
    " PRIMARY KEY (topology_key, topology_value)) STRICT",
    "CREATE TABLE rows (machine_id TEXT PRIMARY KEY, kind TEXT NOT NULL, term INTEGER NOT NULL,"
    " sequence INTEGER NOT NULL, other TEXT NOT NULL, since_unix_nanos INTEGER NOT NULL, record BLOB) STRICT",
    "CREATE TABLE reservations (machine_id TEXT PRIMARY KEY, to_shard TEXT NOT NULL, instruction_id TEXT NOT NULL,"
    " is_ready INTEGER NOT NULL, expires_unix_nanos INTEGER NOT NULL, instance_type TEXT NOT NULL,"
    " zone TEXT NOT NULL) STRICT",
)
#: Makes the changes of a block durable as a whole. Raises sqlite3.Error; then nothing was changed.
Transaction = Callable[[], AbstractContextManager[None]]
BASE_KEY, TERM_KEY = "base", "coordinator_term"

_HELD, _LEAVING = "held", "leaving"
#: Stored fields of a released machine: all that its provider declares of one that is not bound.
_RECORD_FIELDS = (
    "instance_type",
    "zone",
    "resources",
    "allocatable",
    "labels",
    "price_usd_per_hour",
    "interruption_probability",
    "last_error",
    "node_name",
)


class DamagedRow(Exception):
    """A row cannot be read; the message names the row and the fault."""


class OwnershipNotWritten(Exception):
    """A change could not be committed and has no effect; the message gives the reason."""


class OwnershipFile:
    """The tables of one open state file, and what they hold.

    Invariant: `owned`, `reservations` and `accepted_term` are what a process that opens the file now would read.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        fault: Callable[[], str] = lambda: "",
        transaction: Transaction | None = None,
    ) -> None:
        """Read everything. `fault` returns why the file on disk is no longer this one. Raises DamagedRow.

        `transaction` makes the changes of a block durable as a whole, or raises sqlite3.Error.
        """
        self._connection = connection
        self._path = path
        self._fault = fault
        self._transaction = transaction if transaction is not None else partial(plain_transaction, connection)
        self.owned, reservations, self.accepted_term = _read(connection)
        #: By machine.
        self.reservations: Mapping[MachineId, Reservation] = reservations

    def accept_term(self, term: int) -> None:
        """Make a higher term durable; one that is not higher changes nothing. Raises OwnershipNotWritten."""
        if term <= self.accepted_term:
            return
        with self.transaction():
            self._put_meta(TERM_KEY, str(term))
        self.accepted_term = term

    def commit(self, owned: Owned, reservations: Mapping[MachineId, Reservation] | None = None) -> None:
        """Make what is owned, and what is reserved, durable in one transaction. Raises OwnershipNotWritten.

        It costs what differs from before, and a look at each row.
        """
        reserved = self.reservations if reservations is None else reservations
        with self.transaction():
            self._write_domains(owned)
            self._write_rows(owned.rows)
            self._write_reservations(reserved)
            if owned.base is not self.owned.base:
                self._put_meta(BASE_KEY, owned.base.value)
        self.owned, self.reservations = owned, dict(reserved)
        validate(self)

    def validate(self) -> None:
        """Compare what is remembered with what the file says. Raises InvariantBroken."""
        owned, reservations, term = _read(self._connection)
        ensure(self.owned == owned, f"{self._path}: the file says that other machines or domains are owned")
        ensure(self.reservations == reservations, f"{self._path}: the file holds other reservations")
        ensure(self.accepted_term == term, f"{self._path}: the file holds term {term}, not {self.accepted_term}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the changes of a block to the tables of the file durable as a whole. Raises OwnershipNotWritten."""
        fault = self._fault()
        if fault:
            raise OwnershipNotWritten(fault)
        try:
            with self._transaction():
                yield
        except sqlite3.Error as error:
            raise OwnershipNotWritten(f"{self._path}: {error}; make room, or look at the file's rights") from error

    def _put_meta(self, key: str, value: str) -> None:
        self._connection.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
        )

    def _write_domains(self, owned: Owned) -> None:
        before, after = _standings(self.owned), _standings(owned)
        self._connection.executemany(
            "DELETE FROM domains WHERE topology_key = ? AND topology_value = ?", sorted(before.keys() - after.keys())
        )
        self._connection.executemany(
            "INSERT OR REPLACE INTO domains VALUES (?, ?, ?)",
            [(*domain, standing) for domain, standing in sorted(after.items()) if before.get(domain) != standing],
        )

    def _write_rows(self, rows: Mapping[MachineId, OwnershipRow]) -> None:
        before = self.owned.rows
        if rows is before:
            return
        self._delete("DELETE FROM rows WHERE machine_id = ?", before.keys() - rows.keys())
        self._connection.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (machine_id, row.kind.value, *row.version, row.other, row.since_unix_nanos, _packed(row.machine))
                for machine_id, row in rows.items()
                if before.get(machine_id) is not row
            ],
        )

    def _write_reservations(self, reservations: Mapping[MachineId, Reservation]) -> None:
        before = self.reservations
        if reservations is before:
            return
        self._delete("DELETE FROM reservations WHERE machine_id = ?", before.keys() - reservations.keys())
        self._connection.executemany(
            "INSERT OR REPLACE INTO reservations VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    each.machine_id,
                    each.to_shard,
                    each.instruction_id,
                    int(each.is_ready),
                    each.expires_unix_nanos,
                    each.instance_type,
                    each.zone,
                )
                for machine_id, each in reservations.items()
                if before.get(machine_id) != each
            ],
        )

    def _delete(self, statement: str, machine_ids: Iterable[MachineId]) -> None:
        self._connection.executemany(statement, [(machine_id,) for machine_id in machine_ids])


@contextmanager
def plain_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make the changes of a block to tables without checksums durable as a whole. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def make_tables(connection: sqlite3.Connection, base: Base) -> None:
    """Make the tables, and say what a file without any row owns, within the caller's transaction."""
    for statement in TABLES:
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES (?, ?)", (BASE_KEY, base.value))


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(connection: sqlite3.Connection) -> tuple[Owned, dict[MachineId, Reservation], int]:
    """Return what is owned, the reservations, and the highest term that was accepted, 0 before the first."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    owned = Owned(
        base=_base(meta),
        domains=frozenset(_domains(connection, _HELD)),
        leaving=frozenset(_domains(connection, _LEAVING)),
        rows=dict(_rows(connection)),
    )
    return owned, dict(_reservations(connection)), _term(meta)


def _standings(owned: Owned) -> dict[Domain, str]:
    # A domain that is both would be held: taking it again ended its leaving.
    return dict.fromkeys(owned.leaving, _LEAVING) | dict.fromkeys(owned.domains, _HELD)


def _base(meta: Mapping[str, str]) -> Base:
    try:
        return Base(meta.get(BASE_KEY))
    except ValueError:
        raise DamagedRow(f"table meta: {BASE_KEY} is {meta.get(BASE_KEY)!r}, and must be all or domains") from None


def _term(meta: Mapping[str, str]) -> int:
    text = meta.get(TERM_KEY, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise DamagedRow(f"table meta: {TERM_KEY} is {text!r}, and must be a number")
    return int(text)


def _domains(connection: sqlite3.Connection, wanted: str) -> Iterator[Domain]:
    for key, value, standing in connection.execute("SELECT topology_key, topology_value, standing FROM domains"):
        if standing not in (_HELD, _LEAVING):
            raise DamagedRow(f"table domains: {key}={value} is {standing!r}, and must be held or leaving")
        if standing == wanted:
            yield Domain(key, value)


def _rows(connection: sqlite3.Connection) -> Iterator[tuple[MachineId, OwnershipRow]]:
    query = "SELECT machine_id, kind, term, sequence, other, since_unix_nanos, record FROM rows"
    for machine_id, kind, term, sequence, other, since, record in connection.execute(query):
        try:
            machine = _unpacked(MachineId(machine_id), record)
            row = OwnershipRow(RowKind(kind), OwnershipVersion(term, sequence), ShardId(other), since, machine)
        except (ValueError, TypeError, KeyError, msgspec.DecodeError) as error:
            raise DamagedRow(f"table rows: machine {machine_id!r}: {error}") from error
        if term < 0 or sequence < 0:
            raise DamagedRow(f"table rows: machine {machine_id!r}: its turn {term}-{sequence} is below zero")
        yield MachineId(machine_id), row


def _reservations(connection: sqlite3.Connection) -> Iterator[tuple[MachineId, Reservation]]:
    query = (
        "SELECT machine_id, to_shard, instruction_id, is_ready, expires_unix_nanos, instance_type, zone"
        " FROM reservations"
    )
    for each in connection.execute(query):
        machine_id, to_shard, instruction_id, is_ready, expires, instance_type, zone = each
        if is_ready not in (0, 1):
            raise DamagedRow(f"table reservations: machine {machine_id!r}: is_ready is {is_ready}")
        yield (
            MachineId(machine_id),
            Reservation(
                machine_id=MachineId(machine_id),
                to_shard=ShardId(to_shard),
                instruction_id=instruction_id,
                is_ready=bool(is_ready),
                expires_unix_nanos=expires,
                instance_type=instance_type,
                zone=zone,
            ),
        )


def _packed(machine: Machine | None) -> bytes | None:
    if machine is None:
        return None
    fields: dict[str, Any] = {name: getattr(machine, name) for name in _RECORD_FIELDS}
    fields |= {"state": int(machine.state), "capacity_type": int(machine.capacity_type), "host": tuple(machine.host)}
    return msgspec.msgpack.encode({name: dict(v) if isinstance(v, Mapping) else v for name, v in fields.items()})


def _unpacked(machine_id: MachineId, record: bytes | None) -> Machine | None:
    if record is None:
        return None
    fields = msgspec.msgpack.decode(record, type=dict[str, Any])
    provider, ref = fields["host"]
    return Machine(
        id=machine_id,
        state=MachineState(fields["state"]),
        capacity_type=CapacityType(fields["capacity_type"]),
        host=HostRef(provider, ref),
        **{name: fields[name] for name in _RECORD_FIELDS},
    )
