"""Defines the interfaces that a shard needs: the capacity provider and fence tokens.

Production implements them with gRPC; tests and the simulation use plain values. The kinds of a provider's refusal are a
closed list (docs/spec/shard.md §9.6), distinguished by type and never by message text.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bigfleet.model.ids import ClusterId, MachineId, ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.shard.inventory.host_texts import HostTextColumn, PickedTexts


class FenceToken(NamedTuple):
    """Proof of who calls: compared per (shard, machine), strictly rising (docs/spec/wire.md §5)."""

    shard_id: ShardId
    epoch: int
    sequence: int


class ListedMachine(NamedTuple):
    """A machine as its provider reports it; the stamps are in `metadata`, not yet in the machine."""

    machine: Machine
    metadata: Mapping[str, str]


class OversizedRecord(ListedMachine):
    """A record with more bytes than a shard reads: only the id of its machine is known."""

    size_bytes: int

    @classmethod
    def of(cls, machine_id: MachineId, size_bytes: int) -> "OversizedRecord":
        """Return the record of a machine; it has no state, so that no rule takes it for one that was read."""
        record = cls(Machine(id=machine_id, state=MachineState.UNSPECIFIED), {})
        record.size_bytes = size_bytes
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionAck:
    """A provider took a call: the operation, and the record as of acceptance."""

    operation_id: str
    record: ListedMachine


class ListedBinding(NamedTuple):
    """Where a machine is in its life as its provider reports it, and what for."""

    state: MachineState
    cluster: ClusterId
    metadata: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class SplitRecords:
    """Records of one answer in parts: facts and bindings once each, and of each record which ones it has."""

    #: Where the records stand in the answer, ascending.
    places: "array[int]" = field(default_factory=lambda: array("q"))
    ids: list[MachineId] = field(default_factory=list)
    #: Numbers of `facts_values` and `binding_values`.
    facts: "array[int]" = field(default_factory=lambda: array("i"))
    bindings: "array[int]" = field(default_factory=lambda: array("i"))
    #: Host reference and node name, all packed.
    texts: HostTextColumn = field(default_factory=HostTextColumn)
    #: Machines that are nothing but facts and the host's provider.
    facts_values: Sequence[Machine] = ()
    binding_values: Sequence[ListedBinding] = ()

    def chosen(self, is_chosen: Sequence[bool]) -> "SplitRecords":
        """Return some of the records."""
        texts = HostTextColumn()
        texts.extend_from(PickedTexts(self.texts, np.flatnonzero(np.array(is_chosen, np.bool_))))
        return replace(
            self,
            places=array("q", compress(self.places, is_chosen)),
            ids=list(compress(self.ids, is_chosen)),
            facts=array("i", compress(self.facts, is_chosen)),
            bindings=array("i", compress(self.bindings, is_chosen)),
            texts=texts,
        )


class RecordsInParts(Protocol):
    """Reads records of an answer in parts."""

    async def read(self, places: Sequence[int]) -> SplitRecords:
        """Return those of the records at these places that can be read in parts, in turns; each says what it says
        when it is read as a whole.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One answer to List."""

    #: They may be read from the wire only when they are asked for, and raise ProviderRefusal when they cannot be read.
    records: Sequence[ListedMachine]
    #: 16 bytes per record in their order, such that records with equal ones are equal; empty when not known.
    digests: bytes = b""
    #: The same records in parts; None where they cannot be read like that.
    parts: RecordsInParts | None = None
    #: Cursor for the next call; empty gives none.
    revision: bytes = b""
    #: Ids that left the inventory since the cursor; they mean something only with `tombstones`.
    removed_ids: tuple[str, ...] = ()
    #: This is a delta to the cursor's view and its removals are complete.
    tombstones: bool = False


class JoinGate(Enum):
    """What follows when a machine's node never became Ready (docs/spec/shard.md §10.6)."""

    OFF = "off"
    #: It is shown.
    OBSERVE = "observe"
    #: It is shown, and the engine takes it for no supply.
    ENFORCE = "enforce"


class RefusalKind(Enum):
    """The ways in which a mutating call is not accepted."""

    #: A newer process of this shard has called: never retried.
    FENCED = "fenced"
    NOT_FOUND = "not_found"
    NOT_SUPPORTED = "not_supported"
    #: The call may have been applied: timeouts, broken connections, cancelled calls.
    UNKNOWN_OUTCOME = "unknown_outcome"
    #: Nothing was applied: the provider takes no calls for now.
    NOT_READY = "not_ready"
    EXHAUSTED = "exhausted"
    #: Nothing was applied, for any other reason.
    REFUSED = "refused"

    @classmethod
    def of_status(cls, name: str) -> "RefusalKind":
        """Return what an answer with that gRPC status, such as `NOT_FOUND`, means."""
        return _KINDS_OF_STATUS.get(name, cls.REFUSED)


_KINDS_OF_STATUS: Mapping[str, RefusalKind] = {
    "FAILED_PRECONDITION": RefusalKind.FENCED,
    "NOT_FOUND": RefusalKind.NOT_FOUND,
    "UNIMPLEMENTED": RefusalKind.NOT_SUPPORTED,
    "UNAVAILABLE": RefusalKind.UNKNOWN_OUTCOME,
    "DEADLINE_EXCEEDED": RefusalKind.UNKNOWN_OUTCOME,
    "CANCELLED": RefusalKind.UNKNOWN_OUTCOME,
    "RESOURCE_EXHAUSTED": RefusalKind.EXHAUSTED,
}


class ProviderRefusal(Exception):
    """A provider call that did not succeed."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Provider(Protocol):
    """The six calls. Every one raises ProviderRefusal when it is not answered with success."""

    async def create(self, machine_id: MachineId, token: FenceToken) -> TransitionAck: ...

    async def configure(
        self,
        machine_id: MachineId,
        cluster: ClusterId,
        blob: bytes,
        metadata: Mapping[str, str],
        token: FenceToken,
    ) -> TransitionAck: ...

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck: ...

    async def delete(self, machine_id: MachineId, token: FenceToken) -> TransitionAck: ...

    async def get(self, machine_id: MachineId) -> ListedMachine: ...

    async def list(self, since_revision: bytes) -> Listing: ...


class TokenSource:
    """Makes fence tokens: a fresh sequence number for every attempt, rising from 1 (docs/spec/wire.md §5)."""

    def __init__(self, shard_id: ShardId, epoch: int) -> None:
        self.shard_id = shard_id
        self.epoch = epoch
        self._sequence = 0

    def next(self) -> FenceToken:
        """Return a token that is greater than every one before."""
        self._sequence += 1
        return FenceToken(self.shard_id, self.epoch, self._sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """What a person may set on a shard (docs/spec/shard.md §1)."""

    cycle_interval_seconds: float = 10.0
    #: Least time between the starts of woken cycles; None cycles on the timer alone.
    wake_gap_seconds: float | None = 0.5
    execute_concurrency_max: int = 64
    #: Bootstraps, and as many drains, that wait for an operator without holding a slot.
    execute_waiting_max: int = 1024
    execute_timeout_seconds: float = 30.0
    bootstrap_timeout_seconds: float = 30.0
    list_timeout_seconds: float = 120.0
    #: 0 is unlimited.
    actions_per_cycle_max: int = 0
    #: Decisions between those that are checked against a full pass; 0 checks none.
    engine_verify_every_cycles: int = 100
    incremental_reconcile: bool = False
    #: Cycles between full lists where deltas carry no tombstones.
    full_list_every_cycles: int = 30
    #: 0 switches the limit off.
    reclaim_cap_fraction: float = 0.05
    #: How long a machine must be excess before it is reclaimed; 0 reclaims at once.
    reclaim_after_seconds: float = 600.0
    #: How long a cluster whose demand changed waits for its target composition before it takes new machines.
    plan_wait_seconds: float = 10.0
    empty_rollup_guard: bool = True
    removal_brake: bool = True
    actuation_paused: bool = False
    dry_run: bool = False
    outbox_frames_max: int = 1024
    action_history_max: int = 10_000
    #: How long a machine may stay in a transition before it is driven again (docs/spec/shard.md §9.5).
    stuck_creating_seconds: float = 1200.0
    stuck_configuring_seconds: float = 900.0
    stuck_deleting_seconds: float = 1200.0
    #: On top of the drain's grace.
    stuck_draining_margin_seconds: float = 600.0
    join_gate: JoinGate = JoinGate.OBSERVE
    join_deadline_seconds: float = 900.0
    cluster_silence_seconds: float = 600.0
    #: How long the excess machines of a cluster without a session wait for one; infinity is for ever.
    reclaim_without_session_seconds: float = 3600.0
    #: Least time between two hints of one (cluster, fingerprint).
    available_capacity_interval_seconds: float = 5.0
    #: Shards that are gone for good, and whose bound machines count as ours.
    inherits: frozenset[ShardId] = frozenset()
    #: The pace of reports; reservations and the rest of what was adopted last some of them.
    report_interval_seconds: float = 30.0


@runtime_checkable
class SaysReadiness(Protocol):
    """A provider that can be asked whether it takes calls."""

    async def accepts_calls(self) -> bool:
        """Return False when it says that it takes none, or cannot be reached. Raises nothing."""
        ...
