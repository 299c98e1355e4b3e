"""Checks that the cluster reported the node of each Configured machine as Ready.

docs/spec/shard.md §10.6. A machine is joined once a status with `ready` has named it since it was bound; a later status
without `ready` is shown and changes nothing. It is unjoined if it has been Configured for longer than the deadline, is
not joined, and its cluster's session could have reported it for a minute. The engine decides what follows: without a
session that can report it, nothing does.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from math import ceil

import numpy as np
import structlog

from bigfleet.model.frames import CAPABILITY_NODE_STATUS, NodeStatus
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState
from bigfleet.model.validation import ensure
from bigfleet.shard.inventory.machine_record import Binding, InventoryRecord, NumberedBinding, Picked
from bigfleet.shard.ports import JoinGate
from bigfleet.shard.sessions.missing_nodes import MissingNodes
from bigfleet.shard.sessions.registry import Sessions

_log = structlog.get_logger("bigfleet.shard.sessions.node_joins")

#: A session must have stood so long before the absence of a status means anything.
SESSION_SECONDS_MIN = 60.0
_NOT_CONFIGURED = float("inf")
_UNBOUND, _BOUND, _CONFIGURED = range(3)


class NodeJoins:
    """Which bound machines have not been seen Ready. Touched by the loop alone.

    Invariants: `_missing` holds all and only bound machines without a ready status since they were bound, with the
    second since which they are Configured; what is in `_overdue` is in `_missing` and Configured for longer than the
    deadline; with the gate off all is empty. Cost: what changes, never what is there.
    """

    def __init__(self, *, gate: JoinGate, deadline_seconds: float) -> None:
        self._gate = gate
        self._deadline_seconds = deadline_seconds
        self._missing = MissingNodes()
        #: Machines by the second at which they became Configured, ascending; entries that moved on stay until then.
        self._due: deque[tuple[float, list[MachineId]]] = deque()
        #: The newest entry that single machines are added to.
        self._due_singly: tuple[float, list[MachineId]] | None = None
        self._overdue: dict[str, dict[MachineId, None]] = {}
        self._judged: frozenset[str] = frozenset()
        #: Clusters that were judged last, and whether any of their machines have come or gone since.
        self._judged_clusters: frozenset[str] = frozenset()
        self._is_changed = False

    def changed(self, before: Machine | None, after: Machine, now_seconds: float) -> None:
        """Follow one machine's change of state or binding."""
        if self._gate is JoinGate.OFF:
            return
        if not after.cluster:
            if before is not None and before.cluster:
                self.removed(before.id, before.cluster)
            return
        if before is None or before.cluster != after.cluster:
            if before is not None:
                self.removed(before.id, before.cluster)
            self._missing.wait(after.id, _NOT_CONFIGURED)
        elif before.state is after.state:
            return
        if after.id not in self._missing:
            return
        self._not_overdue(after.id, after.cluster)
        if after.state is MachineState.CONFIGURED:
            since_seconds = _whole(now_seconds)
            self._missing.wait(after.id, since_seconds)
            if self._due_singly is None or self._due_singly[0] != since_seconds:
                self._due_singly = (since_seconds, [])
                self._due.append(self._due_singly)
            self._due_singly[1].append(after.id)
        else:
            self._missing.wait(after.id, _NOT_CONFIGURED)

    def inserted(self, machine_ids: Sequence[MachineId], bindings: Picked[NumberedBinding], now_seconds: float) -> None:
        """Follow machines that are new here."""
        if self._gate is JoinGate.OFF:
            return
        steps = np.array([_step(each.binding) for each in bindings.values], np.int8)[bindings.which]
        for machine_id in compress(machine_ids, (steps == _BOUND).tolist()):
            self._missing.wait(machine_id, _NOT_CONFIGURED)
        configured = list(compress(machine_ids, (steps == _CONFIGURED).tolist()))
        if configured:
            since_seconds = _whole(now_seconds)
            due = self._missing.wait_many(configured, since_seconds)
            if not self._due or self._due[-1][1] is not due:
                self._due.append((since_seconds, due))

    def removed(self, machine_id: MachineId, cluster: ClusterId) -> None:
        """Forget a machine that is gone; `cluster` is the one that it carried."""
        self._missing.end(machine_id)
        self._not_overdue(machine_id, cluster)

    def seen(self, machine: Machine, status: NodeStatus) -> None:
        """Take what the machine's own cluster says of it."""
        if status.ready and status.node_name and self._missing.end(machine.id):
            self._not_overdue(machine.id, machine.cluster)
            if not self._missing:
                # After a start every bound machine was missing: what held them all goes with the last one.
                self._due.clear()
                self._due_singly = None

    @property
    def is_on(self) -> bool:
        """Whether nodes are looked at."""
        return self._gate is not JoinGate.OFF

    def is_joined(self, machine: Machine) -> bool:
        """Return whether a Configured machine has been seen Ready; False for all while the gate is off."""
        return (
            self._gate is not JoinGate.OFF
            and machine.state is MachineState.CONFIGURED
            and machine.id not in self._missing
        )

    def is_unjoined(self, machine_id: str) -> bool:
        """Return whether the machine was unjoined when `judge` last looked."""
        return machine_id in self._judged

    @property
    def unjoined(self) -> frozenset[str]:
        """The machines that were unjoined when `judge` last looked."""
        return self._judged

    def for_engine(self) -> frozenset[str]:
        """Return what the engine must take for no supply: the unjoined under `enforce`, else nothing."""
        return self._judged if self._gate is JoinGate.ENFORCE else frozenset()

    def judge(
        self,
        sessions: Sessions,
        machine_of: Callable[[MachineId], Machine | InventoryRecord | None],
        *,
        now_seconds: float,
    ) -> frozenset[str]:
        """Return the machines that are unjoined at this moment; logs those that have become so."""
        while self._due and now_seconds - self._due[0][0] > self._deadline_seconds:
            since_seconds, machine_ids = self._due.popleft()
            for machine_id in machine_ids:
                machine = machine_of(machine_id)
                if machine is not None and self._missing.since_seconds(machine_id) == since_seconds:
                    self._overdue.setdefault(machine.cluster, {})[machine_id] = None
                    self._is_changed = True
        clusters = frozenset(self._judgeable(sessions, now_seconds))
        if clusters == self._judged_clusters and not self._is_changed:
            return self._judged
        self._judged_clusters, self._is_changed = clusters, False
        before, self._judged = self._judged, frozenset().union(*(self._overdue[cluster] for cluster in clusters))
        fresh = self._judged - before
        if fresh:
            _log.warning(
                "machine.join_timed_out",
                machines=len(fresh),
                first=min(fresh),
                unjoined=len(self._judged),
                advice="check the bootstrap template; bigfleet get machines --flag unjoined lists the machines",
            )
        return self._judged

    def validate(self) -> None:
        """Compare everything with the invariants. Raises InvariantBroken."""
        ensure(self.is_on or not (self._missing or self._overdue), "node joins: the gate is off, and machines are held")
        overdue = [machine_id for machines in self._overdue.values() for machine_id in machines]
        ensure(len(overdue) == len(set(overdue)), "node joins: a machine is overdue in two clusters")
        self._missing.validate()
        since = [self._missing.since_seconds(machine_id) for machine_id in overdue]
        ensure(None not in since, "node joins: an overdue machine is not missing")
        ensure(_NOT_CONFIGURED not in since, "node joins: overdue early")
        due = [since_seconds for since_seconds, _ in self._due]
        ensure(due == sorted(due), "node joins: deadlines are not ascending")

    def _judgeable(self, sessions: Sessions, now_seconds: float) -> Iterator[str]:
        for cluster in self._overdue:
            session = sessions.of(cluster)
            if (
                session is not None
                and session.can(CAPABILITY_NODE_STATUS)
                and now_seconds - session.opened_seconds >= SESSION_SECONDS_MIN
            ):
                yield cluster

    def _not_overdue(self, machine_id: MachineId, cluster: str) -> None:
        overdue = self._overdue.get(cluster)
        if overdue is not None and machine_id in overdue:
            del overdue[machine_id]
            self._is_changed = True
            if not overdue:
                del self._overdue[cluster]


def _whole(now_seconds: float) -> float:
    """Return the second, rounded up: machines of a first List share a few, and no machine is judged early."""
    return float(ceil(now_seconds))


def _step(binding: Binding) -> int:
    if not binding.cluster:
        return _UNBOUND
    return _CONFIGURED if binding.state is MachineState.CONFIGURED else _BOUND
