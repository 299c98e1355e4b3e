"""Stores the exchanges that a shard began, in its state file.

docs/spec/exchange.md §7. A record is written before the first machine is acquired, when everything that comes serves,
and when the exchange ends. Exchanges of a process that was killed are found open by the next one. One row of the table
`meta` holds all records, so files need no other schema.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from bigfleet.engine.decision import CapacityPool
from bigfleet.engine.shapes.choice import RELEASABLE
from bigfleet.exchange.course import ExchangeEnd
from bigfleet.exchange.price_paths import OUTCOME_SECONDS, PricePaths
from bigfleet.exchange.values import MachineKind
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.shard.ownership.ownership_file import DamagedRow

META_KEY: Final = "exchanges"
#: How long a record is kept after its exchange ended: longer than machines cool.
RETAINED_SECONDS: Final = 24 * 3600.0
#: Records at a time; no further exchange begins.
RECORDS_MAX: Final = 1_000
#: A wall clock that is set back by no more leaves stamps as they are.
_AHEAD_NANOS: Final = 60 * NANOS_PER_SECOND
_RENTED: Final = {each.label: each for each in RELEASABLE}


@dataclass(frozen=True, slots=True)
class RecordedKind:
    """Machines of one kind that go or come."""

    machines: int
    instance_type: str
    zone: str
    capacity_type: str
    price_usd_per_hour: float

    @classmethod
    def of(cls, kind: MachineKind, machines: int) -> "RecordedKind":
        """Return so many machines of a kind."""
        return cls(machines, kind.instance_type, kind.zone, kind.capacity_type, kind.price_usd_per_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """One exchange that was begun."""

    id: str
    cluster: str
    begun_unix_nanos: int
    #: Ids of the machines that go, and of those that came.
    goes_ids: tuple[str, ...]
    came_ids: tuple[str, ...] = ()
    goes: tuple[RecordedKind, ...]
    comes: tuple[RecordedKind, ...]
    promised_usd_per_hour: float
    #: 0 while it is under way.
    ended_unix_nanos: int = 0
    #: A value of `ExchangeEnd`; "" while it is under way.
    end: str = ""
    #: When it ended, dollars an hour; 0 before, and if that is not known.
    realised_usd_per_hour: float = 0.0
    #: Whether that has become the mean of the hours after the end.
    is_measured: bool = False
    #: How many machines had left when it ended.
    left: int = 0
    #: The cluster that the machines go to; "" for an exchange within a cluster.
    taker: str = ""
    #: The exchange of another cluster that gave the machines that come; "" for any other.
    giver_exchange_id: str = ""


class ExchangeStore(Protocol):
    """Where the records are. `put` raises OwnershipNotWritten when nothing was changed."""

    @property
    def records(self) -> Mapping[str, ExchangeRecord]:
        """The records by the id of their exchange, in the order in which they were begun; replaced, never changed."""
        ...

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Add a record, or replace that of the same exchange; drops records that were kept for long enough."""
        ...


class MemoryExchanges:
    """Records of a shard without a state file; they end with the process."""

    def __init__(self) -> None:
        self.records: Mapping[str, ExchangeRecord] = {}

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Add or replace a record."""
        self.records = with_record(self.records, record, now_unix_nanos)


class ExchangeFile:
    """The records of one open state file. Invariant: `records` is what a process that opens the file now would read."""

    def __init__(self, connection: sqlite3.Connection, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        """Read everything. `transaction` makes the changes of a block durable as a whole. Raises DamagedRow."""
        self._connection = connection
        self._transaction = transaction
        self.records: Mapping[str, ExchangeRecord] = _read(connection)

    def put(self, record: ExchangeRecord, now_unix_nanos: int) -> None:
        """Make a record durable. Raises OwnershipNotWritten."""
        records = with_record(self.records, record, now_unix_nanos)
        content = msgspec.json.encode(tuple(records.values())).decode()
        with self._transaction():
            self._connection.execute(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (META_KEY, content),
            )
        self.records = records


def still_stored(records: Iterable[ExchangeRecord], now_unix_nanos: int) -> dict[str, ExchangeRecord]:
    """Return the records by id, without those of exchanges that ended longer ago than records are stored."""
    earliest = now_unix_nanos - int(RETAINED_SECONDS * NANOS_PER_SECOND)
    return {each.id: each for each in records if not each.ended_unix_nanos or each.ended_unix_nanos > earliest}


def with_record(
    records: Mapping[str, ExchangeRecord], record: ExchangeRecord, now_unix_nanos: int
) -> dict[str, ExchangeRecord]:
    """Return the records that are still stored, with one more or another one; none has a stamp of later than now."""
    found = {**still_stored(records.values(), now_unix_nanos), record.id: record}
    return {each.id: _not_ahead(each, now_unix_nanos) for each in found.values()}


def measured(
    record: ExchangeRecord, paths: PricePaths, *, now_unix_nanos: int, now_seconds: float
) -> ExchangeRecord | None:
    """Return a record with what was realised on average since the end; None while that is not due, or not known.

    It is due once, when a turn of the prices soon after the end would have counted.
    """
    since_end_seconds = (now_unix_nanos - record.ended_unix_nanos) / NANOS_PER_SECOND
    is_due = record.end == ExchangeEnd.DONE.value and since_end_seconds >= OUTCOME_SECONDS
    if record.is_measured or not is_due:
        return None
    change = paths.mean_change_usd_per_hour(
        {} if record.taker else _rented(record.goes), _rented(record.comes), now_seconds - since_end_seconds
    )
    if change is None:
        return None
    return replace(record, realised_usd_per_hour=record.realised_usd_per_hour + change, is_measured=True)


def _rented(kinds: Iterable[RecordedKind]) -> Counter[CapacityPool]:
    """Return how many rented machines of each pool these are: the price of others is the same with and without them."""
    found: Counter[CapacityPool] = Counter()
    for each in kinds:
        if each.capacity_type in _RENTED:
            found[CapacityPool(each.instance_type, each.zone, _RENTED[each.capacity_type])] += each.machines
    return found


def is_ahead(record: ExchangeRecord, now_unix_nanos: int) -> bool:
    """Return whether a wall clock stamped the record that was ahead, and was set back since."""
    return max(record.begun_unix_nanos, record.ended_unix_nanos) > now_unix_nanos + _AHEAD_NANOS


def _not_ahead(record: ExchangeRecord, now_unix_nanos: int) -> ExchangeRecord:
    if not is_ahead(record, now_unix_nanos):
        return record
    begun, ended = min(record.begun_unix_nanos, now_unix_nanos), min(record.ended_unix_nanos, now_unix_nanos)
    return replace(record, begun_unix_nanos=begun, ended_unix_nanos=ended)


def _read(connection: sqlite3.Connection) -> dict[str, ExchangeRecord]:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (META_KEY,)).fetchone()
    if row is None:
        return {}
    try:
        records = msgspec.json.decode(row[0], type=tuple[ExchangeRecord, ...])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise DamagedRow(f"table meta: {META_KEY}: {error}") from error
    return {record.id: record for record in records}
