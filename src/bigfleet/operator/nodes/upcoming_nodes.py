"""Shows each machine of the cluster as an UpcomingNode object (docs/spec/operator.md §8).

The newest frame of the machine sets the phase; its Node and its drain set the conditions. Frames are coalesced by
machine: one worker handles a machine at a time and writes what differs from the stored object. After any order, loss
and repetition of frames, a resync results in exactly the objects of the bound machines. Objects without our label are
never deleted.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.frames import DrainOutcome, DrainResult, NodeStateUpdate
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.api import ApiError, JsonObject, KubernetesApi
from bigfleet.operator.kubernetes.objects import UpcomingNode
from bigfleet.operator.kubernetes.resources import FIELD_MANAGER, MANAGED_BY, UPCOMING_NODES
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.names import upcoming_node_name
from bigfleet.operator.nodes.upcoming_node_body import (
    DRAINED_PHASE,
    PHASES,
    NodeView,
    is_same_spec,
    is_same_status,
    spec_body,
    status_body,
)
from bigfleet.operator.work_queue import WorkQueue

log = structlog.get_logger(__name__)

#: How long a machine is shown without a newer frame whose bootstrap was rolled back, or that is lost to the cluster.
LEAVING_SECONDS: Final = 600.0
_REFUSED: Final = DrainOutcome.WOULD_NOT_FIT
#: A Speculative machine of a cluster is one whose host vanished, or could not be made: there is nothing to come.
_GONE_STATES: Final = frozenset({MachineState.SPECULATIVE, MachineState.DELETING, MachineState.UNSPECIFIED})
#: An Idle machine whose object is in one of these phases has been drained, or has failed: the object goes.
_ENDING_PHASES: Final = frozenset({"Draining", DRAINED_PHASE, "Failed"})

#: Called with the operation (create, spec_update, status_update, delete) and its outcome (success, conflict, error).
WriteListener = Callable[[str, str], None]


class UpcomingNodes:
    """The UpcomingNodes of one cluster; an ObjectListener of them."""

    def __init__(
        self,
        *,
        api: KubernetesApi,
        nodes: NodeMatcher,
        queue: WorkQueue,
        clock: Clock,
        on_write: WriteListener = lambda operation, outcome: None,
    ) -> None:
        self._api = api
        self._nodes = nodes
        self._queue = queue
        self._clock = clock
        self._on_write = on_write
        #: The newest frame of each machine that may have an object, and when it arrived.
        self._frames: dict[str, NodeStateUpdate] = {}
        self._arrived_seconds: dict[str, float] = {}
        #: Machine id by object name, for the machines in `_frames`.
        self._machine_by_name: dict[str, str] = {}
        self._results: dict[str, DrainResult] = {}
        #: Objects as last seen or written.
        self._stored: dict[str, UpcomingNode] = {}
        #: Objects that the last resync left without a machine, or that came later without one.
        self._unwanted: set[str] = set()
        #: Whether `_frames` names all machines of the cluster.
        self._is_resynced = False
        #: Objects that a write whose answer was lost may have made.
        self._unseen: set[str] = set()
        #: By the name of an object that is being written: uids that the watch has removed since the write began.
        self._removed_uids: dict[str, set[str]] = {}
        nodes.listen(self._node_changed)

    # ---- what happens -------------------------------------------------------------------------------------------

    def node_state(self, update: NodeStateUpdate) -> None:
        """Show the state of a machine; a newer frame replaces an older one that is not written yet."""
        machine_id = update.machine_id
        name = upcoming_node_name(machine_id)
        self._frames[machine_id] = update
        self._arrived_seconds[machine_id] = self._clock.monotonic_seconds()
        self._machine_by_name[name] = machine_id
        self._unwanted.discard(name)
        result = self._results.get(machine_id)
        # Why a reclaim was refused stays readable until the next one.
        if result is not None and update.state is MachineState.CONFIGURED and result.outcome is not _REFUSED:
            del self._results[machine_id]
        self._queue.put(self._reconcile, name)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Delete the objects of all machines that a resync did not name, unless a newer frame brings them back."""
        self._is_resynced = True
        gone = self._frames.keys() - machine_ids
        # Also what is being written in this moment, or may have been, and is not stored yet.
        names = self._stored.keys() | self._unseen | {upcoming_node_name(machine_id) for machine_id in gone}
        for machine_id in gone | (self._results.keys() - machine_ids):
            self._forget(machine_id)
        for name in sorted(names - {upcoming_node_name(machine_id) for machine_id in machine_ids}):
            self._unwanted.add(name)
            self._queue.put(self._reconcile, name)

    def drain_started(self, drain: DrainRecord) -> None:
        """Forget how an earlier drain of the machine ended."""
        if self._results.pop(drain.machine_id, None) is not None:
            self._queue.put(self._reconcile, upcoming_node_name(drain.machine_id))

    def drain_finished(self, result: DrainResult) -> None:
        """Show how a drain ended, until its machine is Configured again or leaves."""
        # Also before the machine's first frame: a resumed drain may end before the first session stands.
        self._results[result.machine_id] = result
        self._node_changed(result.machine_id)

    def put(self, stored: UpcomingNode, former: UpcomingNode | None) -> None:
        """Handle a stored object; if another writer changed it, queue it to be corrected."""
        name = stored.metadata.name
        known = self._stored.get(name)
        if known is not None and _is_older(stored, known):
            return
        self._stored[name] = stored
        self._unseen.discard(name)
        if self._is_resynced and name not in self._machine_by_name:
            # A former leader that was paused may write once more what it knew, after we have deleted it.
            self._unwanted.add(name)
        if name in self._machine_by_name or name in self._unwanted:
            self._queue.put(self._reconcile, name)

    def remove(self, former: UpcomingNode) -> None:
        """Forget a stored object; if another writer deleted it and its machine is still shown, it is created again."""
        name = former.metadata.name
        if name in self._removed_uids:
            self._removed_uids[name].add(former.metadata.uid)
        known = self._stored.get(name)
        if known is None or known.metadata.uid != former.metadata.uid:
            return
        del self._stored[name]
        self._unwanted.discard(name)
        if name in self._machine_by_name:
            self._queue.put(self._reconcile, name)

    def count_phases(self) -> Mapping[str, int]:
        """Return how many objects there are by phase."""
        return Counter(stored.status.phase for stored in self._stored.values() if _is_ours(stored))

    def _node_changed(self, machine_id: str) -> None:
        if machine_id in self._frames:
            self._queue.put(self._reconcile, upcoming_node_name(machine_id))

    def _forget(self, machine_id: str) -> None:
        self._frames.pop(machine_id, None)
        self._arrived_seconds.pop(machine_id, None)
        self._results.pop(machine_id, None)
        self._machine_by_name.pop(upcoming_node_name(machine_id), None)

    # ---- writing ------------------------------------------------------------------------------------------------

    async def _reconcile(self, name: str) -> None:
        """Write one object as its machine's newest frame demands."""
        machine_id = self._machine_by_name.get(name)
        frame = self._frames.get(machine_id) if machine_id is not None else None
        if frame is None:
            if name in self._unwanted:
                await self._delete(name)
            return
        if frame.state in _GONE_STATES:
            await self._delete_for(frame)
        elif frame.state is MachineState.IDLE:
            await self._write_idle(frame)
        elif frame.state is MachineState.FAILED and not frame.cluster_id:
            await self._write_leaving(frame, PHASES[frame.state])
        else:
            await self._write(frame, PHASES[frame.state])

    async def _write_idle(self, frame: NodeStateUpdate) -> None:
        stored = self._stored.get(upcoming_node_name(frame.machine_id))
        if stored is not None and stored.status.phase in _ENDING_PHASES:
            await self._write(frame, DRAINED_PHASE)
            await self._delete_for(frame)
            return
        await self._write_leaving(frame, "Launched")

    async def _write_leaving(self, frame: NodeStateUpdate, phase: str) -> None:
        """Show for some time, where it was shown, a machine that is not the cluster's any more: why can be read."""
        name = upcoming_node_name(frame.machine_id)
        if name not in self._stored:
            self._forget_if_unchanged(frame)
            return
        age_seconds = self._clock.monotonic_seconds() - self._arrived_seconds[frame.machine_id]
        if age_seconds >= LEAVING_SECONDS:
            await self._delete_for(frame)
            return
        await self._write(frame, phase)
        self._queue.put_later(self._reconcile, name, LEAVING_SECONDS - age_seconds)

    async def _write(self, frame: NodeStateUpdate, phase: str) -> None:
        machine_id = frame.machine_id
        name = upcoming_node_name(machine_id)
        stored = self._stored.get(name)
        spec = spec_body(name, frame)
        if stored is None or not is_same_spec(stored, spec):
            operation = "create" if stored is None else "spec_update"
            stored = await self._apply(operation, name, spec)
        view = NodeView(self._nodes.node_of(machine_id), self._nodes.ambiguous(machine_id))
        now_nanos = self._clock.unix_nanos()
        status = status_body(
            name, frame, phase, stored=stored, view=view, result=self._results.get(machine_id), now_nanos=now_nanos
        )
        if not is_same_status(stored, status):
            await self._apply("status_update", name, status)

    async def _apply(self, operation: str, name: str, body: JsonObject) -> UpcomingNode:
        resource = UPCOMING_NODES.status if operation == "status_update" else UPCOMING_NODES
        known = self._stored.get(name)
        removed_uids = self._removed_uids[name] = set()
        try:
            stored = await self._api.apply(resource, name, body, field_manager=FIELD_MANAGER)
        except ApiError as error:
            self._on_write(operation, "conflict" if error.is_conflict else "error")
            if operation == "create" and error.is_transient:
                self._unseen.add(name)
            if not error.is_not_found:
                raise
            # After a lost connection the watch does not show what came and went meanwhile.
            if known is not None and self._stored.get(name) is known:
                del self._stored[name]
            raise _deleted_meanwhile(name) from error
        finally:
            del self._removed_uids[name]
        self._on_write(operation, "success")
        self._unseen.discard(name)
        if stored.metadata.uid in removed_uids:
            raise _deleted_meanwhile(name)
        known = self._stored.get(name)
        if known is None or not _is_older(stored, known):
            self._stored[name] = stored
        return stored

    async def _delete_for(self, frame: NodeStateUpdate) -> None:
        """Delete the object of a machine that is not the cluster's, and forget the machine unless it came back."""
        await self._delete(upcoming_node_name(frame.machine_id))
        self._forget_if_unchanged(frame)

    def _forget_if_unchanged(self, frame: NodeStateUpdate) -> None:
        if self._frames.get(frame.machine_id) is frame:
            self._forget(frame.machine_id)

    async def _delete(self, name: str) -> None:
        stored = self._stored.get(name)
        if stored is None and name in self._unseen:
            # If it was made all the same, the watch brings it back here.
            self._unwanted.add(name)
            return
        if stored is None or not _is_ours(stored):
            self._unwanted.discard(name)
            return
        try:
            await self._api.delete(UPCOMING_NODES, name, uid=stored.metadata.uid)
        except ApiError as error:
            if not error.is_not_found and not error.is_conflict:
                self._on_write("delete", "error")
                raise
            self._on_write("delete", "conflict" if error.is_conflict else "success")
            if error.is_conflict and self._stored.get(name) is stored:
                # Made again by somebody; the watch has yet to bring it.
                raise
        else:
            self._on_write("delete", "success")
        if self._stored.get(name) is stored:
            del self._stored[name]
        self._unwanted.discard(name)


def _deleted_meanwhile(name: str) -> ApiError:
    """Return the error for which an object is written once more."""
    return ApiError(409, "Conflict", f"UpcomingNode {name} was deleted while it was written")


def _is_ours(stored: UpcomingNode) -> bool:
    return (stored.metadata.labels or {}).get(MANAGED_BY) == FIELD_MANAGER


def _is_older(stored: UpcomingNode, known: UpcomingNode) -> bool:
    """Return whether `stored` is an earlier version of the same object: an event that came after our own write."""
    if stored.metadata.uid != known.metadata.uid:
        return False
    versions = (stored.metadata.resource_version, known.metadata.resource_version)
    # API servers compare them as decimal numbers; anything else is taken as it comes.
    return all(version.isdecimal() for version in versions) and int(versions[0]) < int(versions[1])
