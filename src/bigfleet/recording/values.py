"""Defines the records of a recording: one head for each process that wrote, then one record per cycle.

docs/adr/0134-a-recording-is-what-the-engine-saw.md. A record says what differs from the one before; a fresh one differs
from nothing, so reading may begin there. Machines are rows of columns, as the engine sees them: names of hosts and
nodes, and what a provider or an operator was sent, have no field here. Arrays are little-endian: row numbers of 32
bits, states of 8, seconds as doubles. This module must not read or write a file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from bigfleet.engine.columns.store import Columns, Offer, Shape
from bigfleet.engine.decision import CapacityPool, Options, ParkingKey, Weights, WithheldPools
from bigfleet.engine.targets import ClassKey, Target, TargetClaim
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import Stamp
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import Family
from bigfleet.model.shapes import DemandShape, Overhead
from bigfleet.model.states import CapacityType
from bigfleet.model.vector import Vector

#: Rises when an older reader would misread what is written.
FORMAT: Final = 2
Rows = npt.NDArray[np.int64]
#: Beyond, a number of the file is a text: the wire form of the file has 64 bits, quantities have no bound.
_INT64: Final = range(-(2**63), 2**63)

_Pairs = tuple[tuple[str, str], ...]
_Amounts = tuple[tuple[str, int | str], ...]
#: Key, operator, values.
_RequirementEntry = tuple[str, int, tuple[str, ...]]


class RecordingHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Who writes from here on."""

    format: int
    bigfleet: str
    shard_id: str
    epoch: int
    #: Decisions between those that the shard checked itself; 0 for none.
    verify_every_cycles: int
    started_unix_nanos: int


class RecordedShape(msgspec.Struct, frozen=True, array_like=True):
    """One `Shape` of the vocabulary."""

    instance_type: str
    zone: str
    labels: _Pairs
    supply: _Amounts


class VocabularyDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Entries of the vocabulary that are new, each kind in the order of its numbers."""

    clusters: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    offers: tuple[Offer, ...] = ()
    shapes: tuple[RecordedShape, ...] = ()


class MachinesDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the machines differ: rows that went or came, and rows that were written."""

    vocabulary: VocabularyDelta
    #: Rows of the former numbering that are no more, ascending.
    gone: bytes = b""
    #: Rows of this numbering that are new, ascending, and their ids.
    come: bytes = b""
    ids: tuple[str, ...] = ()
    #: Rows of this numbering whose columns differ, ascending, and each of their columns.
    rows: bytes = b""
    columns: tuple[bytes, bytes, bytes, bytes, bytes, bytes] = (b"", b"", b"", b"", b"", b"")


class ProfileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One profile; rows refer to it by its number."""

    requirements: tuple[_RequirementEntry, ...]
    spreads: tuple[tuple[str, int, int], ...]
    priority: int
    interruption_bucket: int
    reclamation_bucket: int


class PodShapeEntry(msgspec.Struct, frozen=True, array_like=True):
    """One shape of a row: pods of equal requests."""

    resources: _Amounts
    count: int
    max_per_machine: int


class RecordedNeed(msgspec.Struct, frozen=True, array_like=True):
    """One row of demand."""

    cluster: str
    profile: int
    aggregate: _Amounts
    min_unit: _Amounts
    arrival_unix_nanos: int
    group: str
    parked: bool
    families: _Pairs
    shapes: tuple[PodShapeEntry, ...]
    waiting: tuple[PodShapeEntry, ...]


class DemandDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the listed rows differ: places of the former listing that went, places of this one that came, ascending."""

    profiles: tuple[ProfileEntry, ...] = ()
    gone: bytes = b""
    come: bytes = b""
    rows: tuple[RecordedNeed, ...] = ()


class RecordedOverhead(msgspec.Struct, frozen=True, array_like=True):
    """What DaemonSets take of every machine that holds the requirements."""

    requirements: tuple[_RequirementEntry, ...]
    resources: _Amounts


#: (instance type, zone, capacity type, price, probability, labels, supply) of a machine class.
_ClassEntry = tuple[str, str, int, float, float, tuple[tuple[str, str], ...], _Amounts]


class TargetEntry(msgspec.Struct, frozen=True, array_like=True):
    """A target composition; classes are written once and numbered."""

    classes: tuple[_ClassEntry, ...]
    #: (class, machines).
    counts: tuple[tuple[int, int], ...]
    #: (class, first machine, machines, cluster, fingerprint, group, shape, pods).
    claims: tuple[tuple[int, int, int, str, str, str, int, int], ...]
    runner_up: str
    runner_up_costs_more: float | None
    limited_pools: tuple[str, ...] = ()


#: Instance type, zone and capacity type of a pool.
PoolEntry = tuple[str, str, int]


class OptionsDelta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the options differ; None is as before."""

    now_seconds: float
    reported: tuple[str, ...] | None = None
    unjoined: tuple[str, ...] | None = None
    reserved: tuple[str, ...] | None = None
    hold_seconds: tuple[tuple[int, float], ...] | None = None
    weights: tuple[float, float, float, float] | None = None
    drain_seconds: float | None = None
    parking_ages: tuple[tuple[str, str, str, int], ...] | None = None
    overheads: tuple[tuple[str, tuple[RecordedOverhead, ...]], ...] | None = None
    #: (instance type, zone, capacity type); recordings of versions without these three begin with none of them.
    sold_out: tuple[PoolEntry, ...] | None = None
    probes: tuple[str, ...] | None = None
    set_aside: tuple[str, ...] | None = None
    #: Targets that changed since the cycle before, by cluster; None for a cluster that has none any more. Recordings of
    #: versions without these two begin with none.
    targets: tuple[tuple[str, TargetEntry | None], ...] | None = None
    awaiting_plan: tuple[str, ...] | None = None
    #: (machine, fullness); recordings of versions without it begin with none.
    fullness: tuple[tuple[str, int], ...] | None = None
    #: Recordings of versions without it begin with none.
    leaving: tuple[str, ...] | None = None
    #: (cluster, pools, probes); recordings of versions without it begin with none.
    withheld: tuple[tuple[str, tuple[PoolEntry, ...], tuple[str, ...]], ...] | None = None


class RecordedOutcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the shard decided: its actions, and digests of all that it said of rows."""

    #: One entry per action in emission order: `ActionKind`, row of the machine, place of the row in the folded list or
    #: -1 where it serves none.
    kinds: bytes
    machines: bytes
    places: bytes
    #: Rows of the folded list, and how many of them Phase 1 left short.
    rows: int
    short: int
    #: By the names of `bigfleet.recording.digest.PARTS`.
    digests: tuple[bytes, ...]


class CycleRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One cycle: what it decided on, as differences from the record before, and what it came to."""

    cycle: int
    at_unix_nanos: int
    is_timer: bool
    #: Whether everything differs, because the one before is nothing.
    is_fresh: bool
    #: Cycles right before this one that were not recorded.
    missed: int
    machines: MachinesDelta
    demand: DemandDelta
    options: OptionsDelta
    #: None when the engine failed.
    outcome: RecordedOutcome | None


def format_of_head(content: bytes) -> int | None:
    """Return the format that a head of any version names, None for what is no head."""
    try:
        fields = msgspec.msgpack.decode(content)
    except msgspec.MsgspecError:
        return None
    named = fields[0] if isinstance(fields, list) and fields else None
    return named if isinstance(named, int) else None


# ---- arrays ------------------------------------------------------------------------------------------------------


def rows_bytes(rows: npt.NDArray[np.integer]) -> bytes:
    """Return row numbers as they are written."""
    return rows.astype("<i4", copy=False).tobytes()


def rows_of(content: bytes) -> Rows:
    """Return row numbers as they were."""
    return np.frombuffer(content, "<i4").astype(np.int64)


def columns_bytes(columns: Columns, rows: Rows) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
    """Return some rows of the columns as they are written."""
    state, cluster, shape, offer, stamp, idle_since_seconds = columns
    return (
        state.take(rows).tobytes(),
        rows_bytes(cluster.take(rows)),
        rows_bytes(shape.take(rows)),
        rows_bytes(offer.take(rows)),
        rows_bytes(stamp.take(rows)),
        idle_since_seconds.take(rows).astype("<f8", copy=False).tobytes(),
    )


def columns_of(written: tuple[bytes, ...], rows: int) -> Columns:
    """Return the columns of so many rows. Raises ValueError when there are not as many."""
    columns = Columns(*(np.frombuffer(content, kind) for content, kind in zip(written, _TYPES, strict=True)))
    if {len(column) for column in columns} != {rows}:
        raise ValueError("columns of another length than their rows")
    return columns


_TYPES: Final = ("u1", "<i4", "<i4", "<i4", "<i4", "<f8")


# ---- vocabulary --------------------------------------------------------------------------------------------------


def shape_entry(shape: Shape) -> RecordedShape:
    """Return a shape as it is written."""
    supply = _amounts(sorted(shape.supply))
    return RecordedShape(shape.instance_type, shape.zone, tuple(sorted(shape.labels)), supply)


def shape_of(entry: RecordedShape) -> Shape:
    """Return a shape as it was."""
    supply = frozenset((name, int(milli)) for name, milli in entry.supply)
    return Shape(entry.instance_type, entry.zone, frozenset(entry.labels), supply)


# ---- demand ------------------------------------------------------------------------------------------------------


def profile_entry(profile: Profile) -> ProfileEntry:
    """Return a profile as it is written."""
    return ProfileEntry(
        _requirements(profile.requirements),
        tuple((one.topology_key, one.skew_max, int(one.mode)) for one in profile.spreads),
        profile.priority,
        profile.interruption_bucket,
        profile.reclamation_bucket,
    )


def profile_of(entry: ProfileEntry) -> Profile:
    """Return a profile as it was. Raises ValueError for an operator or mode that does not exist."""
    return Profile(
        requirements=_requirements_of(entry.requirements),
        spreads=tuple(TopologySpread(key, skew, SpreadMode(number)) for key, skew, number in entry.spreads),
        priority=entry.priority,
        interruption_bucket=entry.interruption_bucket,
        reclamation_bucket=entry.reclamation_bucket,
    )


def need_entry(need: Need, profile: int) -> RecordedNeed:
    """Return a row whose profile has that number as it is written."""
    return RecordedNeed(
        need.cluster,
        profile,
        _amounts(need.aggregate.items()),
        _amounts(need.min_unit.items()),
        need.arrival_unix_nanos,
        need.group,
        need.parked,
        tuple([(name, family.value) for name, family in need.families.items()]) if need.families else (),
        _pod_shapes(need.shapes),
        _pod_shapes(need.waiting),
    )


def need_of(entry: RecordedNeed, profile: Profile) -> Need:
    """Return a row as it was. Raises ValueError for a family that does not exist."""
    return Need(
        cluster=ClusterId(entry.cluster),
        profile=profile,
        aggregate=_vector(entry.aggregate),
        min_unit=_vector(entry.min_unit),
        arrival_unix_nanos=entry.arrival_unix_nanos,
        group=entry.group,
        parked=entry.parked,
        families={name: Family(value) for name, value in entry.families},
        shapes=_pod_shapes_of(entry.shapes),
        waiting=_pod_shapes_of(entry.waiting),
    )


def _pod_shapes(shapes: tuple[DemandShape, ...]) -> tuple[PodShapeEntry, ...]:
    if not shapes:
        return ()
    return tuple(
        [PodShapeEntry(_amounts(shape.resources.items()), shape.count, shape.max_per_machine) for shape in shapes]
    )


def _pod_shapes_of(entries: tuple[PodShapeEntry, ...]) -> tuple[DemandShape, ...]:
    return tuple(DemandShape(_vector(entry.resources), entry.count, entry.max_per_machine) for entry in entries)


def _requirements(requirements: Iterable[Requirement]) -> tuple[_RequirementEntry, ...]:
    return tuple((one.key, int(one.operator), one.values) for one in requirements)


def _requirements_of(entries: Iterable[_RequirementEntry]) -> tuple[Requirement, ...]:
    return tuple(Requirement(key, Operator(number), values) for key, number, values in entries)


def _amounts(pairs: Iterable[tuple[str, int]]) -> _Amounts:
    # Of a list, for a generator takes half as long again: once for every row of demand that came.
    return tuple([(name, milli if milli in _INT64 else str(milli)) for name, milli in pairs])


def _vector(amounts: _Amounts) -> Vector:
    return {name: int(milli) for name, milli in amounts}


# ---- options -----------------------------------------------------------------------------------------------------


def options_delta(options: Options, before: Options | None) -> OptionsDelta:
    """Return how options differ from those before, from nothing without any."""

    def changed(name: str) -> bool:
        return before is None or getattr(before, name) != getattr(options, name)

    weights = options.weights
    ages = options.parking_ages
    return OptionsDelta(
        now_seconds=options.now_seconds,
        reported=_sorted(options.reported) if changed("reported") else None,
        unjoined=_sorted(options.unjoined) if changed("unjoined") else None,
        reserved=_sorted(options.reserved) if changed("reserved") else None,
        hold_seconds=tuple((int(kind), seconds) for kind, seconds in options.hold_seconds.items())
        if changed("hold_seconds")
        else None,
        weights=(weights.priority, weights.drain, weights.interruption, weights.reclamation)
        if changed("weights")
        else None,
        drain_seconds=options.drain_seconds if changed("drain_seconds") else None,
        parking_ages=tuple((*key, age) for key, age in ages.items()) if changed("parking_ages") else None,
        overheads=tuple((cluster, _overheads(options.overheads[cluster])) for cluster in sorted(options.overheads))
        if changed("overheads")
        else None,
        sold_out=_pools(options.sold_out) if changed("sold_out") else None,
        probes=_sorted(options.probes) if changed("probes") else None,
        set_aside=_sorted(options.set_aside) if changed("set_aside") else None,
        targets=_targets_delta(options.targets, {} if before is None else before.targets),
        awaiting_plan=_sorted(options.awaiting_plan) if changed("awaiting_plan") else None,
        withheld=tuple(
            (cluster, _pools(each.pools), _sorted(each.probes)) for cluster, each in sorted(options.withheld.items())
        )
        if changed("withheld")
        else None,
        fullness=tuple(sorted(options.fullness.items())) if changed("fullness") else None,
        leaving=_sorted(options.leaving) if changed("leaving") else None,
    )


#: Options that a recording need not have: older versions had none of them, and a shard never sets the last one.
_ADDED_OPTIONS: Final = frozenset(
    {
        "sold_out",
        "probes",
        "set_aside",
        "targets",
        "awaiting_plan",
        "fullness",
        "leaving",
        "withheld",
        "idle_head_start",
    }
)


def _pools(pools: Iterable[CapacityPool]) -> tuple[PoolEntry, ...]:
    return tuple(sorted((pool.instance_type, pool.zone, int(pool.capacity_type)) for pool in pools))


def _pools_of(entries: Iterable[PoolEntry]) -> frozenset[CapacityPool]:
    return frozenset(CapacityPool(instance_type, zone, CapacityType(kind)) for instance_type, zone, kind in entries)


def options_of(delta: OptionsDelta, before: Options | None) -> Options:
    """Return the options that differ so from those before. Raises ValueError when something was never said."""
    said: dict[str, Any] = {"now_seconds": delta.now_seconds}
    for name in ("reported", "unjoined", "reserved", "probes", "set_aside", "awaiting_plan", "leaving"):
        names = getattr(delta, name)
        if names is not None:
            said[name] = frozenset(names)
    if delta.hold_seconds is not None:
        said["hold_seconds"] = {CapacityType(kind): seconds for kind, seconds in delta.hold_seconds}
    if delta.weights is not None:
        priority, drain, interruption, reclamation = delta.weights
        said["weights"] = Weights(priority=priority, drain=drain, interruption=interruption, reclamation=reclamation)
    if delta.drain_seconds is not None:
        said["drain_seconds"] = delta.drain_seconds
    if delta.parking_ages is not None:
        said["parking_ages"] = {ParkingKey(*key): age for *key, age in delta.parking_ages}
    if delta.overheads is not None:
        said["overheads"] = {cluster: _overheads_of(entries) for cluster, entries in delta.overheads}
    if delta.sold_out is not None:
        said["sold_out"] = _pools_of(delta.sold_out)
    if delta.withheld is not None:
        said["withheld"] = {
            cluster: WithheldPools(pools=_pools_of(pools), probes=frozenset(probes))
            for cluster, pools, probes in delta.withheld
        }
    if delta.fullness is not None:
        said["fullness"] = dict(delta.fullness)
    if delta.targets is not None:
        targets = dict(before.targets) if before is not None else {}
        for cluster, entry in delta.targets:
            targets.pop(cluster, None)
            if entry is not None:
                targets[cluster] = _target_of(entry)
        said["targets"] = targets
    if before is not None:
        return replace(before, **said)
    missing = sorted(Options.__dataclass_fields__.keys() - said.keys() - _ADDED_OPTIONS)
    if missing:
        raise ValueError(f"options that were never said: {', '.join(missing)}")
    return Options(**said)


def _targets_delta(
    targets: Mapping[str, Target], before: Mapping[str, Target]
) -> tuple[tuple[str, TargetEntry | None], ...] | None:
    """Return the targets that differ, None when all are the same."""
    if targets is before:
        return None
    changed = [cluster for cluster in sorted(targets) if before.get(cluster) is not targets[cluster]]
    found: list[tuple[str, TargetEntry | None]] = [(cluster, _target_entry(targets[cluster])) for cluster in changed]
    found += [(cluster, None) for cluster in sorted(before.keys() - targets.keys())]
    return tuple(found) or None


def _target_entry(target: Target) -> TargetEntry:
    number: dict[ClassKey, int] = {}
    for key in (*target.counts, *(claim.machine_class for claim in target.claims)):
        number.setdefault(key, len(number))
    return TargetEntry(
        classes=tuple(
            (key.instance_type, key.zone, int(key.capacity_type), *key[3:6], _amounts(key.supply)) for key in number
        ),
        counts=tuple((number[key], count) for key, count in target.counts.items()),
        claims=tuple(
            (number[claim.machine_class], claim.first, claim.machines, *claim.row, claim.shape, claim.count)
            for claim in target.claims
        ),
        runner_up=target.runner_up,
        runner_up_costs_more=target.runner_up_costs_more_usd_per_hour,
        limited_pools=target.limited_pools,
    )


def _target_of(entry: TargetEntry) -> Target:
    keys = [
        ClassKey(kind, zone, CapacityType(capacity), price, probability, labels, tuple(_vector(supply).items()))
        for kind, zone, capacity, price, probability, labels, supply in entry.classes
    ]
    return Target(
        counts={keys[number]: count for number, count in entry.counts},
        claims=tuple(
            TargetClaim(
                machine_class=keys[number],
                first=first,
                machines=machines,
                row=(cluster, fingerprint, group),
                shape=shape,
                count=count,
            )
            for number, first, machines, cluster, fingerprint, group, shape, count in entry.claims
        ),
        runner_up=entry.runner_up,
        runner_up_costs_more_usd_per_hour=entry.runner_up_costs_more,
        limited_pools=entry.limited_pools,
    )


def _overheads(overheads: Iterable[Overhead]) -> tuple[RecordedOverhead, ...]:
    return tuple(
        RecordedOverhead(_requirements(one.requirements), _amounts(one.resources.items())) for one in overheads
    )


def _overheads_of(entries: Iterable[RecordedOverhead]) -> tuple[Overhead, ...]:
    return tuple(Overhead(_requirements_of(entry.requirements), _vector(entry.resources)) for entry in entries)


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
