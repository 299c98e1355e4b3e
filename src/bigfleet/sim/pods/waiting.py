"""Decides which pods of a simulated cluster are reported as `waiting`: pending for a minute though their row is met.

docs/spec/engine.md §3.7, docs/spec/operator.md. A pod is asked for once more until it runs, or until it waits beside a
node with room for it, five minutes after a node has joined that could have taken it: then capacity is not what it waits
for. It must never begin to ask for a pod of a row that is called unmet: the row's own demand asks for that one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NeedStatusUpdate, UnmetReason
from bigfleet.model.need import Need
from bigfleet.model.shapes import DemandShape, merged_upwards
from bigfleet.sim.pods.cluster_pods import PodCluster
from bigfleet.sim.pods.scheduler import Pod

#: How long a pod must be pending, and its row be called met, before it is reported.
WAITING_SECONDS: Final = 60.0
#: A pod that still waits so long after a node has joined for it, and beside room for it, is given up.
GIVEN_UP_SECONDS: Final = 300.0

_Row = tuple[str, str]


class WaitingPods:
    """The pods that one cluster reports as waiting."""

    def __init__(self, pods: PodCluster, clock: Clock) -> None:
        self._pods = pods
        self._clock = clock
        #: Since when each row has been called met without interruption.
        self._met_since_seconds: dict[_Row, float] = {}
        #: Pods that are reported, by id, with how many nodes had joined the cluster by then.
        self._reported: dict[str, int] = {}
        #: When a node that could have taken a reported pod was first seen to have joined since.
        self._served_seconds: dict[str, float] = {}
        #: Pods that are no longer asked for, by id.
        self._given_up: set[str] = set()

    def heard(self, update: NeedStatusUpdate) -> None:
        """Take a verdict: rows that it does not list are met, and those that lack only what no node can hold.

        The pods of a row that is met by machines that boot are pending for these, and ask for no others.
        """
        unmet = {(row.fingerprint, row.group) for row in update.rows if row.reason is not UnmetReason.REQUEST_TOO_LARGE}
        unmet.update(update.coming)
        now_seconds = self._clock.monotonic_seconds()
        known = {pod.template.row for pod in self._pods.waiting}
        met = set() if update.truncated else known - unmet
        self._met_since_seconds = {row: self._met_since_seconds.get(row, now_seconds) for row in met}

    def reported(self) -> dict[str, Pod]:
        """Return the pods to report at this moment, by id."""
        now_seconds = self._clock.monotonic_seconds()
        waiting = {pod.id: pod for pod in self._pods.waiting}
        self._reported = {pod_id: joins for pod_id, joins in self._reported.items() if pod_id in waiting}
        self._served_seconds = {i: seconds for i, seconds in self._served_seconds.items() if i in waiting}
        self._given_up &= waiting.keys()
        for pod in waiting.values():
            met_since = self._met_since_seconds.get(pod.template.row)
            if met_since is not None and now_seconds - max(met_since, pod.since_seconds) >= WAITING_SECONDS:
                self._reported.setdefault(pod.id, self._pods.joins)
        for pod_id, joins in self._reported.items():
            if self._pods.has_joined_for(waiting[pod_id].template, joins):
                self._served_seconds.setdefault(pod_id, now_seconds)
        for pod_id, since in self._served_seconds.items():
            # Without room other pods took the node, and this one waits for capacity as before.
            if now_seconds - since >= GIVEN_UP_SECONDS and self._pods.has_room_for(waiting[pod_id].template):
                self._given_up.add(pod_id)
        return {i: pod for i, pod in waiting.items() if i in self._reported and i not in self._given_up}

    def is_given_up(self, pod: Pod) -> bool:
        """Return whether a pod is no longer asked for, because capacity is not what it waits for."""
        return pod.id in self._given_up


def with_waiting(rows: Iterable[Need], waiting: Iterable[Pod]) -> tuple[Need, ...]:
    """Return the rows of a roll-up with their waiting pods."""
    by_row: dict[_Row, list[DemandShape]] = {}
    for template, count in Counter(pod.template for pod in waiting).items():
        by_row.setdefault(template.row, []).append(DemandShape(template.vector, count, template.max_per_node))
    return tuple(
        replace(row, waiting=merged_upwards(by_row[row.fingerprint, row.group]))
        if (row.fingerprint, row.group) in by_row
        else row
        for row in rows
    )
