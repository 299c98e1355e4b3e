"""Defines the coordinator's durable tables as immutable values, and the edits that change them.

docs/spec/coordinator.md §2. `bigfleet.coordinator.commands` decides which edits are allowed, a store persists them.
This module does not read a clock or a store.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Domain


class DomainState(Enum):
    """Whether a shard may acquire in a domain, or only empties it."""

    ASSIGNED = "assigned"
    RELEASING = "releasing"


class QuotaKey(NamedTuple):
    """What a provider lets us have at most in one region."""

    provider: str
    region: str


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard that has reported at least once."""

    address: str
    registered_at_unix_nanos: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """The shard that a cluster is permanently bound to (ADR-0007)."""

    shard_id: ShardId
    bound_at_unix_nanos: int


@dataclass(frozen=True, slots=True)
class DomainRow:
    """The shard that owns a domain."""

    shard_id: ShardId
    state: DomainState


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """Slots of each shard; a shard with none has no entry."""

    slots_of: Mapping[ShardId, int]


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """Where a provider listens, and the region that its quotas apply to."""

    address: str
    region: str


@dataclass(frozen=True, slots=True)
class QuotaMoveRow:
    """Records a quota transfer, so that the same handover never transfers quota twice."""

    booked_at_unix_nanos: int
    #: 0 for one that an older version wrote: how many it moved is not known.
    slots: int = 0


Row = ShardRow | ClusterRow | DomainRow | QuotaRow | ProviderRow | QuotaMoveRow


class Table(Enum):
    """The tables, by the names that stores and snapshots use; `quota_moves` holds markers only."""

    SHARDS = "shards"
    CLUSTERS = "clusters"
    DOMAINS = "domains"
    QUOTAS = "quotas"
    PROVIDERS = "providers"
    QUOTA_MOVES = "quota_moves"


class RowKey(NamedTuple):
    """Names one row: its table, and the parts of its key in the order in which stores write them."""

    table: Table
    parts: tuple[str, ...]


class Edit(NamedTuple):
    """Puts a row, or deletes it where `row` is None."""

    key: RowKey
    row: Row | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All tables at one revision. Nobody changes one: `with_edits` returns another."""

    shards: Mapping[ShardId, ShardRow] = field(default_factory=dict)
    clusters: Mapping[ClusterId, ClusterRow] = field(default_factory=dict)
    domains: Mapping[Domain, DomainRow] = field(default_factory=dict)
    quotas: Mapping[QuotaKey, QuotaRow] = field(default_factory=dict)
    providers: Mapping[str, ProviderRow] = field(default_factory=dict)
    #: By instruction_id.
    quota_moves: Mapping[str, QuotaMoveRow] = field(default_factory=dict)

    def with_edits(self, edits: Iterable[Edit]) -> "Tables":
        """Return the tables after the edits, in their order; deleting an absent row changes nothing."""
        changed: dict[str, Any] = {}
        for (table, parts), row in edits:
            rows = changed.setdefault(table.value, dict(getattr(self, table.value)))
            if row is None:
                rows.pop(_native(table, parts), None)
            else:
                rows[_native(table, parts)] = row
        return replace(self, **changed) if changed else self

    def rows(self) -> Iterator[Edit]:
        """Yield what makes these tables out of empty ones: table by table, keys ascending."""
        for table in Table:
            rows: Mapping[Any, Row] = getattr(self, table.value)
            for native in sorted(rows):
                yield Edit(RowKey(table, (native,) if isinstance(native, str) else tuple(native)), rows[native])


def _native(table: Table, parts: tuple[str, ...]) -> str | Domain | QuotaKey:
    """Return the key as the table's mapping has it."""
    if table is Table.DOMAINS:
        return Domain(*parts)
    if table is Table.QUOTAS:
        return QuotaKey(*parts)
    (name,) = parts
    return name
