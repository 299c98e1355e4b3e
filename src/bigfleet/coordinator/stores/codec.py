"""Encodes rows as text, the same in all stores and snapshots (docs/spec/coordinator.md §3, §10).

JSON with sorted keys, so that equal rows are equal bytes. Reading checks every field: a row that cannot be decoded is
reported, never guessed.
"""

from typing import Any

import msgspec

from bigfleet.coordinator.tables import (
    ClusterRow,
    DomainRow,
    ProviderRow,
    QuotaMoveRow,
    QuotaRow,
    Row,
    RowKey,
    ShardRow,
    Table,
)

_TYPES: dict[Table, type[Any]] = {
    Table.SHARDS: ShardRow,
    Table.CLUSTERS: ClusterRow,
    Table.DOMAINS: DomainRow,
    Table.QUOTAS: QuotaRow,
    Table.PROVIDERS: ProviderRow,
    Table.QUOTA_MOVES: QuotaMoveRow,
}
_PARTS = {Table.DOMAINS: 2, Table.QUOTAS: 2}
_ENCODER = msgspec.json.Encoder(order="sorted")


class UnreadableRow(Exception):
    """A stored row cannot be decoded; the message names the row and the fault."""


def encode_row(row: Row) -> bytes:
    """Return the JSON of a row."""
    return _ENCODER.encode(row)


def decode_row(key: RowKey, content: bytes) -> Row:
    """Return the row that was encoded under that key. Raises UnreadableRow."""
    check_key(key)
    try:
        row: Row = msgspec.json.decode(content, type=_TYPES[key.table])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableRow(f"{key.table.value}/{'/'.join(key.parts)}: {error}") from error
    return row


def check_key(key: RowKey) -> None:
    """Raise UnreadableRow when a key has not as many parts as those of its table."""
    if len(key.parts) != _PARTS.get(key.table, 1) or not all(key.parts):
        raise UnreadableRow(f"{key.table.value}/{'/'.join(key.parts)}: is no key of {key.table.value}")
