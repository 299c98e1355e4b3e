"""Defines the commands that change the coordinator's tables, and the rules that admit or reject them.

docs/spec/coordinator.md §2. `edits(tables, command)` is a pure function: it returns the rows to write, none if the
tables already have them, and raises if a rule forbids the command. The proposer sets times and other values that are
not in the tables. This module must not write.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import singledispatch

from bigfleet.coordinator.tables import (
    ClusterRow,
    DomainRow,
    DomainState,
    Edit,
    ProviderRow,
    QuotaKey,
    QuotaMoveRow,
    QuotaRow,
    RowKey,
    ShardRow,
    Table,
    Tables,
)
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Domain

#: How long the marker of a quota transfer is retained.
QUOTA_MOVE_RETENTION_NANOS = 24 * 3600 * NANOS_PER_SECOND


class Rule(Enum):
    """Why a command was refused."""

    EMPTY_KEY = "EmptyKey"
    BAD_KEY = "BadKey"
    SHARD_EXISTS = "ShardExists"
    SHARD_NOT_FOUND = "ShardNotFound"
    EPOCH_FELL = "EpochFell"
    CLUSTER_ALREADY_BOUND = "ClusterAlreadyBound"
    DOMAIN_ALREADY_ASSIGNED = "DomainAlreadyAssigned"
    SECOND_KEY = "SecondKey"
    STILL_ASSIGNED = "StillAssigned"
    NEGATIVE_SLOTS = "NegativeSlots"
    QUOTA_NOT_FOUND = "QuotaNotFound"
    QUOTA_UNDERFLOW = "QuotaUnderflow"
    BAD_ADDRESS = "BadAddress"


class CommandRefused(Exception):
    """A rule forbids the command; the message names the rule and the owner, if there is one."""

    def __init__(self, rule: Rule, text: str) -> None:
        super().__init__(text)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class AddShard:
    """Insert a shard."""

    shard_id: ShardId
    address: str
    epoch: int
    now_unix_nanos: int


@dataclass(frozen=True, slots=True)
class UpdateShard:
    """Note a shard's address and epoch; an epoch never falls."""

    shard_id: ShardId
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RemoveShard:
    """Delete a shard and every cluster, domain and quota entry that points to it."""

    shard_id: ShardId


@dataclass(frozen=True, slots=True)
class BindCluster:
    """Bind a cluster to a shard. The first binding is permanent."""

    cluster: ClusterId
    shard_id: ShardId
    now_unix_nanos: int


@dataclass(frozen=True, slots=True)
class BindClusters:
    """Bind those of the clusters that are not bound to a shard, as one report names them."""

    clusters: tuple[ClusterId, ...]
    shard_id: ShardId
    now_unix_nanos: int


@dataclass(frozen=True, slots=True)
class SetDomainOwner:
    """Give a domain to a shard."""

    domain: Domain
    shard_id: ShardId
    #: The shards behind the same provider address, as reports show it; all their domains use one topology key.
    neighbours: frozenset[ShardId] = frozenset()


@dataclass(frozen=True, slots=True)
class ReleaseDomain:
    """Begin to take a domain away: its shard acquires nothing there any more."""

    domain: Domain


@dataclass(frozen=True, slots=True)
class DropDomain:
    """Delete the row of a domain that its shard has left."""

    domain: Domain


@dataclass(frozen=True, slots=True)
class SetQuota:
    """Replace the slots of one provider and region; an empty mapping, or zeros alone, delete the row."""

    key: QuotaKey
    slots_of: Mapping[ShardId, int]


@dataclass(frozen=True, slots=True)
class MoveQuota:
    """Book slots from one shard to another, once for each instruction."""

    key: QuotaKey
    from_shard_id: ShardId
    to_shard_id: ShardId
    slots: int
    instruction_id: str
    now_unix_nanos: int


@dataclass(frozen=True, slots=True)
class ReturnQuota:
    """Undo what MoveQuota booked for an instruction, for at most so many slots and at most what is left of them."""

    key: QuotaKey
    from_shard_id: ShardId
    to_shard_id: ShardId
    slots: int
    instruction_id: str


@dataclass(frozen=True, slots=True)
class UpsertProvider:
    """Replace a provider; an empty address deletes it."""

    name: str
    address: str
    region: str


Command = (
    AddShard
    | UpdateShard
    | RemoveShard
    | BindCluster
    | BindClusters
    | SetDomainOwner
    | ReleaseDomain
    | DropDomain
    | SetQuota
    | MoveQuota
    | ReturnQuota
    | UpsertProvider
)


def apply(tables: Tables, command: Command) -> Tables:
    """Return the tables after the command. Raises CommandRefused."""
    return tables.with_edits(edits(command, tables))


@singledispatch
def edits(command: Command, tables: Tables) -> tuple[Edit, ...]:
    """Return the rows that the command writes, empty where the tables say so already. Raises CommandRefused."""
    raise TypeError(f"{type(command).__name__} is no command on {type(tables).__name__}")


@edits.register
def _add_shard(command: AddShard, tables: Tables) -> tuple[Edit, ...]:
    _need("shard_id", command.shard_id)
    if command.shard_id in tables.shards:
        raise CommandRefused(Rule.SHARD_EXISTS, f"shard {command.shard_id!r} is registered already")
    row = ShardRow(command.address, command.now_unix_nanos, command.epoch)
    return (Edit(RowKey(Table.SHARDS, (command.shard_id,)), row),)


@edits.register
def _update_shard(command: UpdateShard, tables: Tables) -> tuple[Edit, ...]:
    known = _shard(tables, command.shard_id)
    if command.epoch < known.epoch:
        raise CommandRefused(
            Rule.EPOCH_FELL,
            f"shard {command.shard_id!r} has epoch {known.epoch}; {command.epoch} is of a superseded process",
        )
    row = replace(known, address=command.address, epoch=command.epoch)
    return () if row == known else (Edit(RowKey(Table.SHARDS, (command.shard_id,)), row),)


@edits.register
def _remove_shard(command: RemoveShard, tables: Tables) -> tuple[Edit, ...]:
    gone = command.shard_id
    _shard(tables, gone)
    written = [
        Edit(RowKey(Table.CLUSTERS, (cluster,)), None)
        for cluster, bound in sorted(tables.clusters.items())
        if bound.shard_id == gone
    ]
    written += [
        Edit(RowKey(Table.DOMAINS, tuple(domain)), None)
        for domain, owned in sorted(tables.domains.items())
        if owned.shard_id == gone
    ]
    for key, quota in sorted(tables.quotas.items()):
        if gone in quota.slots_of:
            written.append(_quota(key, {shard: slots for shard, slots in quota.slots_of.items() if shard != gone}))
    # The last to go: a store that needs several transactions may stop between two, and the command then goes on.
    written.append(Edit(RowKey(Table.SHARDS, (gone,)), None))
    return tuple(written)


@edits.register
def _bind_cluster(command: BindCluster, tables: Tables) -> tuple[Edit, ...]:
    _need("cluster_id", command.cluster)
    _shard(tables, command.shard_id)
    bound = tables.clusters.get(command.cluster)
    if bound is None:
        row = ClusterRow(command.shard_id, command.now_unix_nanos)
        return (Edit(RowKey(Table.CLUSTERS, (command.cluster,)), row),)
    if bound.shard_id != command.shard_id:
        raise CommandRefused(
            Rule.CLUSTER_ALREADY_BOUND, f"cluster {command.cluster!r} is bound to shard {bound.shard_id!r}"
        )
    return ()


@edits.register
def _bind_clusters(command: BindClusters, tables: Tables) -> tuple[Edit, ...]:
    for cluster in command.clusters:
        _need("cluster_id", cluster)
    _shard(tables, command.shard_id)
    row = ClusterRow(command.shard_id, command.now_unix_nanos)
    new = sorted(set(command.clusters) - tables.clusters.keys())
    return tuple(Edit(RowKey(Table.CLUSTERS, (cluster,)), row) for cluster in new)


@edits.register
def _assign_domain(command: SetDomainOwner, tables: Tables) -> tuple[Edit, ...]:
    key, value = command.domain
    _need("topology_key", key)
    _need("topology_value", value)
    _shard(tables, command.shard_id)
    wanted = DomainRow(command.shard_id, DomainState.ASSIGNED)
    owned = tables.domains.get(command.domain)
    if owned == wanted:
        return ()
    if owned is not None:
        doing = "belongs to" if owned.state is DomainState.ASSIGNED else "is still being released by"
        raise CommandRefused(Rule.DOMAIN_ALREADY_ASSIGNED, f"{key}={value} {doing} shard {owned.shard_id!r}")
    near = command.neighbours | {command.shard_id}
    for other, row in sorted(tables.domains.items()):
        if row.shard_id in near and other.topology_key != key:
            raise CommandRefused(
                Rule.SECOND_KEY,
                f"shard {row.shard_id!r} has {other.topology_key}={other.topology_value}: the shards of one provider"
                f" share one topology key, or a machine could lie in two domains; use {other.topology_key}",
            )
    return (Edit(RowKey(Table.DOMAINS, tuple(command.domain)), wanted),)


@edits.register
def _release_domain(command: ReleaseDomain, tables: Tables) -> tuple[Edit, ...]:
    owned = tables.domains.get(command.domain)
    if owned is None or owned.state is DomainState.RELEASING:
        return ()
    row = replace(owned, state=DomainState.RELEASING)
    return (Edit(RowKey(Table.DOMAINS, tuple(command.domain)), row),)


@edits.register
def _drop_domain(command: DropDomain, tables: Tables) -> tuple[Edit, ...]:
    owned = tables.domains.get(command.domain)
    if owned is None:
        return ()
    if owned.state is DomainState.ASSIGNED:
        key, value = command.domain
        raise CommandRefused(
            Rule.STILL_ASSIGNED, f"{key}={value} is assigned to shard {owned.shard_id!r}; release it first"
        )
    return (Edit(RowKey(Table.DOMAINS, tuple(command.domain)), None),)


@edits.register
def _set_quota(command: SetQuota, tables: Tables) -> tuple[Edit, ...]:
    _need("provider", command.key.provider)
    _need("region", command.key.region)
    for shard_id, slots in sorted(command.slots_of.items()):
        _shard(tables, shard_id)
        if slots < 0:
            raise CommandRefused(Rule.NEGATIVE_SLOTS, f"shard {shard_id!r} cannot have {slots} slots")
    edit = _quota(command.key, command.slots_of)
    return () if edit.row == tables.quotas.get(command.key) else (edit,)


@edits.register
def _move_quota(command: MoveQuota, tables: Tables) -> tuple[Edit, ...]:
    if command.instruction_id in tables.quota_moves:
        return ()
    _shard(tables, command.to_shard_id)
    if command.slots < 0:
        raise CommandRefused(Rule.NEGATIVE_SLOTS, f"cannot move {command.slots} slots")
    provider, region = command.key
    quota = tables.quotas.get(command.key)
    if quota is None:
        raise CommandRefused(Rule.QUOTA_NOT_FOUND, f"there is no quota of provider {provider!r} in {region!r}")
    slots_of = dict(quota.slots_of)
    left = slots_of.get(command.from_shard_id, 0) - command.slots
    if left < 0:
        raise CommandRefused(
            Rule.QUOTA_UNDERFLOW,
            f"shard {command.from_shard_id!r} has {left + command.slots} slots of {provider!r} in {region!r},"
            f" {command.slots} were to move",
        )
    slots_of[command.from_shard_id] = left
    slots_of[command.to_shard_id] = slots_of.get(command.to_shard_id, 0) + command.slots
    marker = QuotaMoveRow(command.now_unix_nanos, command.slots)
    old = [
        Edit(RowKey(Table.QUOTA_MOVES, (instruction_id,)), None)
        for instruction_id, row in sorted(tables.quota_moves.items())
        if command.now_unix_nanos - row.booked_at_unix_nanos > QUOTA_MOVE_RETENTION_NANOS
    ]
    return (
        _quota(command.key, slots_of),
        Edit(RowKey(Table.QUOTA_MOVES, (command.instruction_id,)), marker),
        *old,
    )


@edits.register
def _return_quota(command: ReturnQuota, tables: Tables) -> tuple[Edit, ...]:
    booked = tables.quota_moves.get(command.instruction_id)
    if booked is None:
        return ()
    _shard(tables, command.to_shard_id)
    if command.slots < 0:
        raise CommandRefused(Rule.NEGATIVE_SLOTS, f"cannot return {command.slots} slots")
    # Without its marker the same instruction can be booked again.
    unbooked = Edit(RowKey(Table.QUOTA_MOVES, (command.instruction_id,)), None)
    quota = tables.quotas.get(command.key)
    if quota is None:
        return (unbooked,)
    slots_of = dict(quota.slots_of)
    left = slots_of.get(command.from_shard_id, 0)
    slots = min(command.slots, booked.slots, left)
    slots_of[command.from_shard_id] = left - slots
    slots_of[command.to_shard_id] = slots_of.get(command.to_shard_id, 0) + slots
    return (_quota(command.key, slots_of), unbooked)


@edits.register
def _upsert_provider(command: UpsertProvider, tables: Tables) -> tuple[Edit, ...]:
    _need("name", command.name)
    key = RowKey(Table.PROVIDERS, (command.name,))
    known = tables.providers.get(command.name)
    if not command.address:
        return () if known is None else (Edit(key, None),)
    _, colon, port = command.address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65_536
    if not colon or not is_port or any(character.isspace() for character in command.address):
        raise CommandRefused(Rule.BAD_ADDRESS, f"{command.address!r} is no host:port")
    row = ProviderRow(command.address, command.region)
    return () if row == known else (Edit(key, row),)


def _need(field: str, value: str) -> None:
    if not value:
        raise CommandRefused(Rule.EMPTY_KEY, f"{field} is empty")
    if "\0" in value:
        # The SQLite store joins the parts of a key with it.
        raise CommandRefused(Rule.BAD_KEY, f"{field} has a NUL character; use a name without one")


def _shard(tables: Tables, shard_id: ShardId) -> ShardRow:
    known = tables.shards.get(shard_id)
    if known is None:
        raise CommandRefused(Rule.SHARD_NOT_FOUND, f"shard {shard_id!r} is not registered")
    return known


def _quota(key: QuotaKey, slots_of: Mapping[ShardId, int]) -> Edit:
    nonzero = {shard_id: slots for shard_id, slots in sorted(slots_of.items()) if slots}
    return Edit(RowKey(Table.QUOTAS, tuple(key)), QuotaRow(nonzero) if nonzero else None)
