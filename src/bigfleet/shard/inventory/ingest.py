"""Applies changes to the inventory: those that the shard makes and those that the provider reports.

docs/spec/shard.md §5.3. The transition table applies to the shard's own changes only. Stamps belong to the shard: they
stay while the machine is being bound or is bound, and end together with the cluster when it is observed Idle,
Speculative or Deleting (ADR-0059 in docs/adr). Every change of a machine that is or was bound is sent to its cluster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from bigfleet.model import vector
from bigfleet.model.clock import Clock
from bigfleet.model.frames import NodeStateUpdate, NodeStatus
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine, Stamp, invariant_fault
from bigfleet.model.metadata import decode_metadata
from bigfleet.model.node_identity import node_labels, node_taints, provider_id
from bigfleet.model.states import UNBOUND_STATES, MachineState, is_legal_transition
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.shard.inventory.host_texts import PickedTexts
from bigfleet.shard.inventory.inventory import Inventory, InventoryRefusal
from bigfleet.shard.inventory.lost_bindings import LostBindings
from bigfleet.shard.inventory.machine_record import (
    Binding,
    InventoryRecord,
    NumberedBinding,
    NumberedFacts,
    Picked,
    binding_of,
)
from bigfleet.shard.inventory.record_checks import cluster_fault, facts_fault, record_fault
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ListedBinding, ListedMachine
from bigfleet.shard.sessions.registry import Sessions

_log = structlog.get_logger("bigfleet.shard.inventory.ingest")

#: Rejected records that are logged in so many seconds; all are counted.
REJECTIONS_LOGGED_MAX = 50
REJECTIONS_LOGGED_SECONDS = 60.0

NO_LONGER_REPORTED = "no longer reported by the provider"
BOUND_ELSEWHERE = "bound to another cluster by the provider"
#: What a machine without a binding has none of.
_BOUND = attrgetter("cluster", *Stamp._fields)


class Moment(NamedTuple):
    """One reading of both clocks."""

    seconds: float
    unix_nanos: int


class NodeLoad(NamedTuple):
    """The last report of the cluster about a machine's node."""

    observed_unix_nanos: int
    #: "" when the node is gone.
    node_name: str
    #: What its pods request in sum, milli-units; empty also when that was not said.
    requested: Vector
    #: How many pods it runs.
    pods: int


class _AppliedView(NamedTuple):
    """What a record says of a machine beside its facts."""

    state: MachineState
    cluster: ClusterId
    last_error: str

    @classmethod
    def of(cls, machine: Machine | InventoryRecord) -> "_AppliedView":
        return cls(machine.state, machine.cluster, machine.last_error)


class PlainBinding(NamedTuple):
    """The binding of a machine that is not known yet, by the binding that is listed."""

    binding: Binding
    #: Whether a machine with a host, and one without, is inserted with it as it is: nothing is refused or warned of.
    is_plain_with_host: bool
    is_plain_without_host: bool


#: Any host.
_SOME_HOST = HostRef("provider", "ref")


@lru_cache(maxsize=4096)
def _holds_invariant(price_usd_per_hour: float, interruption_probability: float) -> bool:
    """Return whether a machine with these facts holds the invariant, in a state that its host and cluster fit."""
    machine = Machine(
        id=MachineId(""),
        state=MachineState.IDLE,
        host=_SOME_HOST,
        price_usd_per_hour=price_usd_per_hour,
        interruption_probability=interruption_probability,
    )
    return invariant_fault(machine) is None


class Ingest:
    """Applies all changes to the inventory; only tests write to it otherwise."""

    def __init__(
        self,
        *,
        inventory: Inventory,
        sessions: Sessions,
        metrics: ShardMetrics,
        clock: Clock,
        owns: Callable[[ListedMachine], bool] = lambda _record: True,
        on_change: Callable[[Machine | None, Machine], None] = lambda _before, _after: None,
        on_insert_many: Callable[[Sequence[MachineId], Picked[NumberedBinding]], None] = lambda _ids, _bindings: None,
        on_observed: Callable[[Machine, Machine | None], None] = lambda _before, _after: None,
        on_remove: Callable[[MachineId, ClusterId], None] = lambda _machine, _cluster: None,
        on_status: Callable[[Machine, NodeStatus], None] = lambda _machine, _status: None,
    ) -> None:
        """`owns` says of each record, before anything else, whether the machine is ours.

        `on_change` takes (before, after) of each change of state or binding; before is None for a machine that
        is new here. `on_insert_many` is called in its place with many machines that are new here at once.
        `on_observed` takes the same of each other state that a provider shows of a known machine;
        after is None for a machine that it shows no more. `on_remove` is called with each machine that is gone and the
        cluster that it served, `on_status` with each status that was stored and the machine that it names.
        """
        self._inventory = inventory
        self._sessions = sessions
        self._metrics = metrics
        self._clock = clock
        #: What the last applied record reported, of all and only machines of which our view says something else by now;
        #: the facts of our view are always those of that record.
        self._applied: dict[MachineId, _AppliedView] = {}
        self._owns = owns
        self._on_change = on_change
        self._on_insert_many = on_insert_many
        self._on_observed = on_observed
        self._on_remove = on_remove
        self._on_status = on_status
        #: Known machines whose newest record was rejected.
        self._rejected: set[MachineId] = set()
        self._rejected_now: frozenset[MachineId] | None = frozenset()
        #: Records that were rejected since that second.
        self._rejections, self._rejections_since_seconds = 0, -math.inf
        #: Newest status that the bound cluster's operator reported, by machine.
        self._nodes: dict[str, NodeLoad] = {}
        #: Machines that lost their binding without a drain.
        self.lost_bindings = LostBindings(clock)

    def drive(self, machine: Machine) -> None:
        """Carry out a transition of ours. Raises InventoryRefusal when the table or the invariant forbids it."""
        before = self._inventory.apply(
            machine,
            now_seconds=self._clock.monotonic_seconds(),
            now_unix_nanos=self._clock.unix_nanos(),
        )
        self._applied.setdefault(machine.id, _AppliedView.of(before))
        self._publish(machine.id, before, machine)

    def is_unchanged(self, record: ListedMachine) -> bool:
        """Return whether the record equals the last applied one and our view has not moved away from it since."""
        shown = record.machine
        if shown.id in self._rejected:
            return False
        known = self._inventory.record_of(shown.id)
        if known is None or known.state is not shown.state or known.cluster != shown.cluster:
            return False
        applied = self._applied.get(shown.id)
        if applied is not None and applied != (shown.state, shown.cluster, shown.last_error):
            return False
        applied_error = known.last_error if applied is None else applied.last_error
        return applied_error == shown.last_error and known.declares(shown)

    def changed(self, records: Sequence[ListedMachine]) -> set[MachineId]:
        """Return the machines of all and only the records that are not unchanged, each judged as if it came first.

        Most records of a full List are unchanged, and are compared many at once; the others one by one.
        """
        machines = [machine for machine, _metadata in records]
        equal = self._inventory.equal(machines)
        if self._applied:
            equal &= np.array([machine.id not in self._applied for machine in machines], np.bool_)
        if self._rejected:
            equal &= np.array([machine.id not in self._rejected for machine in machines], np.bool_)
        left = compress(records, (~equal).tolist())
        return {record.machine.id for record in left if not self.is_unchanged(record)}

    def is_as_reported(self, machine_id: MachineId) -> bool:
        """Return whether our view of a known machine is what the last applied record reported of it."""
        return machine_id not in self._applied

    def moment(self) -> Moment:
        """Return the present, for several records that are shown at the same time."""
        return Moment(self._clock.monotonic_seconds(), self._clock.unix_nanos())

    def observe(self, record: ListedMachine, moment: Moment | None = None) -> bool:
        """Take what the provider shows; return False when the record was refused and the last good one stays.

        A machine that is not ours, or no longer, is not in the inventory afterwards.
        """
        if not self._owns(record):
            self.let_go(record, moment)
            return True
        return self.take(record, moment)

    def let_go(self, record: ListedMachine, moment: Moment | None = None) -> None:
        """Take a machine that is not ours out of the inventory, if it is there; it is not gone."""
        machine_id = record.machine.id
        known = self._inventory.record_of(machine_id)
        if known is None:
            return
        if known.cluster:
            # What became of it concerns the cluster that it served, and the timing of its transition.
            self.take(record, moment)
        self.drop(machine_id)

    def take(self, record: ListedMachine, moment: Moment | None = None) -> bool:
        """Take what the provider shows of a machine that is ours, as `observe` does, without the ownership filter."""
        shown = record.machine
        machine_id = shown.id
        known = self._inventory.record_of(machine_id)
        observed, binding = self._merged(record, known)
        seconds, unix_nanos = moment or self.moment()
        is_lost = known is not None and self._is_lost(known, shown)
        try:
            fault = record_fault(record, known)
            if fault is not None:
                raise InventoryRefusal(*fault)
            if known is None:
                self._inventory.insert(observed, now_seconds=seconds, now_unix_nanos=unix_nanos)
            else:
                self._inventory.replace(observed, known, seconds, unix_nanos, binding)
        except InventoryRefusal as refusal:
            self._reject(machine_id, refusal, seconds)
            if known is not None:
                self._note_rejected(machine_id)
            return False
        self._forget_rejected(machine_id)
        if known is not None and is_lost:
            self._hold_lost(machine_id, known.cluster)
        elif observed.cluster:
            self.lost_bindings.bound(machine_id, observed.cluster)
        if shown is observed or (
            shown.state is observed.state
            and shown.cluster == observed.cluster
            and shown.last_error == observed.last_error
        ):
            self._applied.pop(machine_id, None)
        else:
            self._applied[machine_id] = _AppliedView.of(shown)
        former = None if known is None else known.binding.state
        if known is not None and former is not None and former is not observed.state:
            self._on_observed(known.machine(machine_id), observed)
            if not is_legal_transition(former, observed.state):
                self._metrics.observed_jumps.labels(former.label, observed.state.label).inc()
            if observed.state is MachineState.SPECULATIVE and former is MachineState.DELETING:
                self._metrics.idle_releases.inc()
        self._publish(machine_id, known, observed)
        return True

    def is_binding_lost(self, shown: Machine) -> bool:
        """Return whether a record takes away a binding that this shard did not end.

        A drain of this shard changes the state of our view first, so a machine that is Configured here was not drained.
        """
        known = self._inventory.record_of(shown.id)
        return known is not None and self._is_lost(known, shown)

    def _hold_lost(self, machine_id: MachineId, cluster: ClusterId) -> None:
        load = self._nodes.get(machine_id)
        self.lost_bindings.lost(machine_id, cluster, None if load is None else load.node_name)

    def _is_lost(self, known: InventoryRecord, shown: Machine) -> bool:
        if not known.cluster or (shown.cluster in ("", known.cluster) and shown.state not in UNBOUND_STATES):
            return False
        return self._is_serving(shown.id, known)

    def _is_serving(self, machine_id: MachineId, known: InventoryRecord) -> bool:
        # A machine that this shard set to Failed serves on while its provider shows it Configured.
        return known.state is MachineState.CONFIGURED or (
            known.state is MachineState.FAILED and self.applied_state(machine_id) is MachineState.CONFIGURED
        )

    @property
    def rejected(self) -> frozenset[MachineId]:
        """The known machines whose newest record was rejected: what they are and cost now is not known."""
        if self._rejected_now is None:
            self._rejected_now = frozenset(self._rejected)
        return self._rejected_now

    def _note_rejected(self, machine_id: MachineId) -> None:
        if machine_id not in self._rejected:
            self._rejected.add(machine_id)
            self._rejected_now = None
            # The next record is read, also if it equals the last good one.
            self._inventory.forget_note(machine_id)

    def _forget_rejected(self, machine_id: MachineId) -> None:
        if machine_id in self._rejected:
            self._rejected.discard(machine_id)
            self._rejected_now = None

    def _reject(self, machine_id: MachineId, refusal: InventoryRefusal, now_seconds: float) -> None:
        """Count a rejected record, and log it unless many were logged lately."""
        self._metrics.machines_rejected.labels(refusal.reason).inc()
        if now_seconds >= self._rejections_since_seconds + REJECTIONS_LOGGED_SECONDS:
            self._rejections_since_seconds, self._rejections = now_seconds, 0
        self._rejections += 1
        if self._rejections > REJECTIONS_LOGGED_MAX:
            return
        _log.warning("inventory.record_rejected", machine=machine_id, reason=refusal.reason, error=str(refusal))
        if self._rejections == REJECTIONS_LOGGED_MAX:
            _log.warning("inventory.rejections_not_logged", seconds=REJECTIONS_LOGGED_SECONDS)

    # ---- many new machines at once ----------------------------------------------------------------------------------

    def is_sound(self, facts: Machine) -> bool:
        """Return whether facts hold the invariant and the limits, in a machine whose state and binding do."""
        is_whole = _holds_invariant(facts.price_usd_per_hour, facts.interruption_probability)
        return is_whole and facts_fault(facts) is None

    def plain_binding(self, listed: ListedBinding) -> PlainBinding:
        """Return what becomes of a listed binding in a machine that is not known yet."""
        machine = Machine(id=MachineId(""), state=listed.state, cluster=listed.cluster)
        if listed.state not in UNBOUND_STATES:
            machine, malformed = decode_metadata(machine, listed.metadata)
            is_plain = not malformed
        else:
            # A cluster that does not stay is another view than the provider's.
            is_plain = not listed.cluster
        is_plain = is_plain and cluster_fault(listed.cluster) is None
        with_host = invariant_fault(replace(machine, host=_SOME_HOST)) is None
        return PlainBinding(binding_of(machine), is_plain and with_host, is_plain and invariant_fault(machine) is None)

    def is_connected(self, cluster: str) -> bool:
        """Return whether a cluster has a session to which changes are sent."""
        return bool(cluster) and self._sessions.shown(cluster) is not None

    def insert_many(
        self,
        ids: Sequence[MachineId],
        facts: Picked[NumberedFacts],
        bindings: Picked[NumberedBinding],
        texts: PickedTexts,
        digests: npt.NDArray[np.uint64],
        moment: Moment,
    ) -> None:
        """Take the records of distinct machines that are not known: sound ones, ours, with plain bindings.

        `show` shows them to the clusters that are connected.
        """
        self._inventory.insert_many(
            ids, facts, bindings, texts, digests, now_seconds=moment.seconds, now_unix_nanos=moment.unix_nanos
        )
        self._on_insert_many(ids, bindings)

    def show(self, machine_id: MachineId) -> None:
        """Send a machine to its cluster, if it is bound and its cluster is connected."""
        machine = self._inventory.get(machine_id)
        if machine is not None and self.is_connected(machine.cluster):
            self._sessions.send_node_state(self.node_state(machine, machine.cluster))

    def fail(self, machine: Machine, cause: str) -> None:
        """Set a machine to Failed in our memory only; the record that says otherwise is retained for comparison."""
        failed = replace(machine, state=MachineState.FAILED, last_error=cause)
        before = self._inventory.observe(
            failed, now_seconds=self._clock.monotonic_seconds(), now_unix_nanos=self._clock.unix_nanos()
        )
        self._applied.setdefault(machine.id, _AppliedView.of(before))
        self._publish(machine.id, before, failed)

    def keep_bound(self, machine: Machine) -> None:
        """Undo a drain that its operator refused: the provider still shows the machine as Configured, and so do we."""
        restored = replace(machine, state=MachineState.CONFIGURED, preempted_for=None)
        before = self._inventory.observe(
            restored, now_seconds=self._clock.monotonic_seconds(), now_unix_nanos=self._clock.unix_nanos()
        )
        self._applied.pop(machine.id, None)
        self._publish(machine.id, before, restored)

    def applied_state(self, machine_id: MachineId) -> MachineState | None:
        """Return the state of the last record applied, None when there was none."""
        applied = self._applied.get(machine_id)
        if applied is not None:
            return applied.state
        known = self._inventory.record_of(machine_id)
        return known.state if known is not None else None

    def remove(self, machine_id: MachineId) -> None:
        """Forget a machine that the provider does not report any more; its cluster is notified that it failed."""
        known = self._inventory.record_of(machine_id)
        if known is not None and self.is_connected(known.cluster):
            self._report_lost(known.machine(machine_id), NO_LONGER_REPORTED)
        if known is not None:
            self._on_observed(known.machine(machine_id), None)
            if known.cluster and self._is_serving(machine_id, known):
                # It may come back as Idle.
                self._hold_lost(machine_id, known.cluster)
        self.drop(machine_id)

    def drop(self, machine_id: MachineId) -> None:
        """Take a machine out of the inventory; no cluster is notified that it failed."""
        before = self._inventory.remove(machine_id)
        self._applied.pop(machine_id, None)
        self._forget_rejected(machine_id)
        self._nodes.pop(machine_id, None)
        self._on_remove(machine_id, before.cluster)

    def note_node_name(self, cluster: str, status: NodeStatus) -> bool:
        """Keep what an operator reported of a node; False when the machine is not bound to its cluster, and was not.

        An empty name says that the node is gone; a status that is older than the stored one changes nothing.
        """
        machine = self._inventory.get(status.machine_id)
        if machine is None or machine.cluster != cluster:
            return self.lost_bindings.reported(MachineId(status.machine_id), cluster, status.node_name)
        known = self._nodes.get(status.machine_id)
        if known is None or status.observed_unix_nanos >= known.observed_unix_nanos:
            # A quantity that cannot be read is left out: what a node runs is a hint.
            requested = parse_vector(status.requested) if status.requested else vector.ZERO
            self._nodes[status.machine_id] = NodeLoad(
                status.observed_unix_nanos, status.node_name, requested, max(0, status.pods)
            )
            self._on_status(machine, status)
        return True

    def node_load(self, machine_id: MachineId) -> NodeLoad | None:
        """Return the newest status of a machine's node, None before the machine's cluster reported one."""
        return self._nodes.get(machine_id)

    def node_name(self, machine: Machine) -> str:
        """Return the provider's node name, else the one that an operator reported, else ""."""
        known = self._nodes.get(machine.id)
        return machine.node_name or (known.node_name if known is not None else "")

    def state_for(self, machine_id: MachineId, cluster: str) -> NodeStateUpdate | None:
        """Return the frame of a machine that is bound to a cluster; None when it is not, or no longer."""
        machine = self._inventory.get(machine_id)
        if machine is None or machine.cluster != cluster:
            return None
        return self.node_state(machine, machine.cluster)

    def node_state(self, machine: Machine, cluster: ClusterId) -> NodeStateUpdate:
        """Return the frame that shows a machine to a cluster (docs/spec/shard.md §10.3)."""
        return NodeStateUpdate(
            machine_id=machine.id,
            cluster_id=cluster,
            state=machine.state,
            node_name=self.node_name(machine),
            provider_id=provider_id(machine),
            last_error=machine.last_error,
            labels=node_labels(machine),
            resources=dict(machine.allocatable or machine.resources),
            taints=tuple(node_taints(machine)),
        )

    def _merged(self, record: ListedMachine, known: InventoryRecord | None) -> tuple[Machine, Binding | None]:
        """Return what our view will be: a machine, and the binding whose stamps it has where those are not its own."""
        machine, metadata = record
        if machine.state in UNBOUND_STATES:
            # Most are without one already, and then our view and the record are one object.
            return (machine.without_binding() if any(_BOUND(machine)) else machine), None
        if known is None:
            return self._restored(machine, metadata), None
        ours = known.binding
        if machine.state is ours.state is MachineState.CONFIGURING and not machine.cluster:
            # A provider may name the cluster only once the machine is Configured: absent is not said.
            machine = replace(machine, cluster=ours.cluster)
        if machine.cluster and ours.cluster != machine.cluster:
            # A binding that we did not make, or whose memory we lost: the provider's echo is the only account of it.
            if ours.cluster:
                self._metrics.binding_conflicts.inc()
                _log.warning(
                    "inventory.binding_conflicted", machine=machine.id, ours=ours.cluster, provider=machine.cluster
                )
            return self._restored(machine, metadata), None
        return machine, ours.moved(machine.state, machine.cluster)

    def _restored(self, machine: Machine, metadata: Mapping[str, str]) -> Machine:
        restored, malformed = decode_metadata(machine, metadata)
        for key in malformed:
            self._metrics.metadata_errors.inc()
            _log.warning(
                "inventory.metadata_rejected",
                machine=machine.id,
                key=key,
                advice="the field stays unset; the provider must return metadata as it was given",
            )
        return restored

    def _publish(self, machine_id: MachineId, before: InventoryRecord | None, after: Machine) -> None:
        """Notify listeners and the cluster of a change; the stamps of `after` are not used here."""
        former = None
        ours = None if before is None else before.binding
        if before is None or ours is None or ours.state is not after.state or ours.cluster != after.cluster:
            former = before.machine(machine_id) if before is not None else None
            # What a record reports has no stamps; those of the machine are in our view.
            self._on_change(former, self._inventory.known(machine_id) if former is not None else after)
        cluster = (ours.cluster if ours is not None else "") or after.cluster
        if not cluster:
            return
        if former is not None and former.cluster and after.cluster not in ("", former.cluster):
            self._report_lost(former, BOUND_ELSEWHERE)
            self._nodes.pop(after.id, None)
            self._sessions.send_node_state(self.node_state(after, after.cluster))
            return
        if self._sessions.shown(cluster) is not None and not (before is not None and before.is_framed_like(after)):
            update = self.node_state(after, ClusterId(cluster))
            if (
                before is None
                or before.state is not after.state
                or self.node_state(before.machine(machine_id), ClusterId(cluster)) != update
            ):
                self._sessions.send_node_state(update)
        if not after.cluster:
            self._nodes.pop(after.id, None)

    def _report_lost(self, machine: Machine, cause: str) -> None:
        """Notify a machine's cluster, if it is connected, that the machine is lost to it.

        The frame names no cluster: no further frame reports this machine's end to the operator.
        """
        session = self._sessions.shown(machine.cluster)
        if session is None:
            return
        lost = replace(machine, state=MachineState.FAILED, last_error=cause)
        session.outbox.put(self.node_state(lost, ClusterId("")))
