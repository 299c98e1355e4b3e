"""Holds the machines that one decision over aggregates may use, in the orders of its phases.

Orders: docs/spec/model.md §3. Hidden machines: docs/spec/engine.md §1.1.

The pool hides what no phase but reclaim may see: machines that missed the join gate, reserved ones while they are Idle,
Speculative or Draining, Speculative ones of pools without stock, and Idle ones that are set aside. It keeps no claims
and chooses nothing.
"""

from collections import defaultdict
from collections.abc import Sequence

from bigfleet.engine.decision import CapacityPool, Options
from bigfleet.engine.matching import Fit, Shapes
from bigfleet.engine.snapshot import Snapshot, idle_order_key
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.penalty import bucket_upper_dollars
from bigfleet.model.states import MachineState

RESERVABLE_STATES = frozenset({MachineState.IDLE, MachineState.SPECULATIVE, MachineState.DRAINING})
SET_ASIDE_STATES = frozenset({MachineState.IDLE, MachineState.SPECULATIVE})


def is_sold_out(machine: Machine, options: Options) -> bool:
    """Return whether the machine cannot be created for now because its pool has no stock."""
    return (
        machine.state is MachineState.SPECULATIVE
        and bool(options.sold_out)
        and CapacityPool.of(machine) in options.sold_out
        and machine.id not in options.probes
    )


def is_set_aside(machine: Machine, options: Options) -> bool:
    """Return whether the machine is not to be tried for now."""
    return machine.state in SET_ASIDE_STATES and machine.id in options.set_aside


class CandidatePool:
    """The candidates of every stage. All sequences are complete and ordered; claims are the caller's business."""

    def __init__(self, snapshot: Snapshot, options: Options) -> None:
        """Sort what every row needs; what depends on a row is worked out on first use and cached for the call."""
        self._snapshot = snapshot
        self._options = options
        #: Shapes of every machine of the snapshot.
        self.shapes = Shapes(snapshot.machines.values())
        #: Idle machines: price, id.
        self.idle: Sequence[Machine] = sorted(self._usable(MachineState.IDLE), key=idle_order_key)
        #: Configured machines of every cluster, by id.
        self.configured: Sequence[Machine] = self._usable(MachineState.CONFIGURED)
        self._speculative = self._usable(MachineState.SPECULATIVE)
        self._speculative_by_bucket: dict[int, Sequence[Machine]] = {}
        self._bound: dict[str, Sequence[Machine]] = {}
        self._bound_shapes: dict[str, frozenset[int]] = {}
        #: Shapes of the Idle and Speculative machines.
        self.free_shapes = frozenset(self.shapes.of[m.id] for m in (*self.idle, *self._speculative))
        self._creating: defaultdict[tuple[str, str], list[Machine]] = defaultdict(list)
        for machine in self._usable(MachineState.CREATING):
            self._creating[(machine.assigned_need_fingerprint, machine.assigned_group)].append(machine)
        self._coming: defaultdict[tuple[str, str, str], list[Machine]] = defaultdict(list)
        for machine in self._usable(MachineState.DRAINING):
            if machine.preempted_for is not None:
                self._coming[machine.preempted_for].append(machine)
        self._idle_fitting: dict[Fit, Sequence[Machine]] = {}
        self._speculative_fitting: dict[Fit, Sequence[Machine]] = {}
        self._bound_fitting: dict[tuple[str, Fit], Sequence[Machine]] = {}

    def is_usable(self, machine: Machine) -> bool:
        """Return whether any phase but reclaim and release may see the machine."""
        options = self._options
        if machine.id in options.unjoined or is_sold_out(machine, options) or is_set_aside(machine, options):
            return False
        return machine.id not in options.reserved or machine.state not in RESERVABLE_STATES

    def _usable(self, state: MachineState) -> Sequence[Machine]:
        return [machine for machine in self._snapshot.of_state(state) if self.is_usable(machine)]

    def bound(self, cluster: str) -> Sequence[Machine]:
        """Return a cluster's Configured, then its Configuring machines, each in keep-priority order."""
        known = self._bound.get(cluster)
        if known is None:
            states = (MachineState.CONFIGURED, MachineState.CONFIGURING)
            known = self._bound[cluster] = [
                machine
                for state in states
                for machine in self._snapshot.of_cluster(cluster, state)
                if self.is_usable(machine)
            ]
        return known

    def bound_shapes(self, cluster: str) -> frozenset[int]:
        """Return the shapes of what is bound to the cluster."""
        known = self._bound_shapes.get(cluster)
        if known is None:
            known = self._bound_shapes[cluster] = frozenset(self.shapes.of[m.id] for m in self.bound(cluster))
        return known

    def own_creating(self, need: Need) -> Sequence[Machine]:
        """Return the row's own machines in creation: recorded for its cluster first, then unrecorded; each by id."""
        own = self._creating.get((need.fingerprint, need.group), ())
        return [
            *(machine for machine in own if machine.intended_cluster and machine.intended_cluster == need.cluster),
            *(machine for machine in own if not machine.intended_cluster),
        ]

    def speculative(self, interruption_bucket: int) -> Sequence[Machine]:
        """Return the Speculative machines by effective cost at the bucket's upper bound, then id."""
        known = self._speculative_by_bucket.get(interruption_bucket)
        if known is None:
            dollars = bucket_upper_dollars(interruption_bucket)
            known = sorted(self._speculative, key=lambda m: (m.effective_cost_usd_per_hour(dollars), m.id))
            self._speculative_by_bucket[interruption_bucket] = known
        return known

    def coming(self, need: Need) -> Sequence[Machine]:
        """Return the machines that drain for the row, by id, whatever they offer."""
        return self._coming.get(need.key, ())

    def fitting(self, machines: Sequence[Machine], fit: Fit) -> Sequence[Machine]:
        """Return those of the machines that fit, in the same order."""
        shape_of, shapes = self.shapes.of, fit.shapes
        return [machine for machine in machines if shape_of[machine.id] in shapes]

    def idle_fitting(self, fit: Fit) -> Sequence[Machine]:
        """Return the Idle machines that fit, in acquisition order."""
        known = self._idle_fitting.get(fit)
        if known is None:
            known = self._idle_fitting[fit] = self.fitting(self.idle, fit)
        return known

    def speculative_fitting(self, fit: Fit) -> Sequence[Machine]:
        """Return the Speculative machines that fit, in the acquisition order of the profile's bucket."""
        known = self._speculative_fitting.get(fit)
        if known is None:
            machines = self.speculative(fit.profile.interruption_bucket)
            known = self._speculative_fitting[fit] = self.fitting(machines, fit)
        return known

    def creditable(self, need: Need, fit: Fit) -> Sequence[Machine]:
        """Return what may be credited to a row: bound to its cluster and fitting, then its own in creation."""
        known = self._bound_fitting.get((need.cluster, fit))
        if known is None:
            known = self._bound_fitting[(need.cluster, fit)] = self.fitting(self.bound(need.cluster), fit)
        creating = self.own_creating(need)
        return [*known, *self.fitting(creating, fit)] if creating else known
