"""Ties the Nodes of the cluster to the machines that the shard has named (docs/spec/operator.md §7.1, §10).

A Node is tied by its machine-id label, else by its provider id. Then label and annotation are written, so that the tie
outlives the process. Lookups use indexes that follow each change; no event costs a scan. An ambiguous match is reported
and never resolved by a guess: the wrong Node must not be drained.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.frames import NodeStateUpdate
from bigfleet.model.states import UNBOUND_STATES, MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.kubernetes.resources import MACHINE_ID, NODES
from bigfleet.operator.nodes.names import is_hashed_label, machine_label
from bigfleet.operator.nodes.provider_ids import comparable_part, last_part
from bigfleet.operator.work_queue import WorkQueue

log = structlog.get_logger(__name__)

#: A machine that is Configured for longer without a Node is unmatched.
UNMATCHED_SECONDS: Final = 300.0

#: Called with a machine id whose Node, or whose Node's state, has changed.
TieListener = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NodeSearch:
    """Which Nodes a drain means, by the first rule of docs/spec/operator.md §7.1 that finds any."""

    nodes: tuple[NodeObject, ...]
    #: What was compared, for a message.
    rule: str = ""


@dataclass(slots=True)
class _ReportedMachine:
    """The newest frame of the shard about a machine."""

    provider_id: str
    state: MachineState
    #: When it became Configured; None while it is not.
    configured_since_seconds: float | None = None


@dataclass(slots=True)
class _NodeIndex:
    """Names of Nodes by what ties them."""

    by_label: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    by_provider_id: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    by_last_part: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


class NodeMatcher:
    """The ties between Nodes and machines; an ObjectListener of Nodes."""

    def __init__(self, *, api: KubernetesApi, queue: WorkQueue, clock: Clock) -> None:
        self._api = api
        self._queue = queue
        self._clock = clock
        self._nodes: dict[str, NodeObject] = {}
        self._index = _NodeIndex()
        self._machines: dict[str, _ReportedMachine] = {}
        #: Machine ids by what ties a Node to them.
        self._machine_by_label: defaultdict[str, set[str]] = defaultdict(set)
        self._machine_by_provider_id: defaultdict[str, set[str]] = defaultdict(set)
        self._machine_by_last_part: defaultdict[str, set[str]] = defaultdict(set)
        #: All and only the ties: both ways.
        self._node_of: dict[str, str] = {}
        self._machine_of: dict[str, str] = {}
        #: Machines that several Nodes fit, with the names of those.
        self._ambiguous: dict[str, tuple[str, ...]] = {}
        #: Ties that were written and that the cache does not show yet: UID and version of the Node before, by machine.
        self._written: dict[str, tuple[str, str]] = {}
        self._listeners: list[TieListener] = []

    # ---- reading ------------------------------------------------------------------------------------------------

    def listen(self, listener: TieListener) -> None:
        """Call `listener` with each machine whose tie, or whose Node, changes."""
        self._listeners.append(listener)

    def node_of(self, machine_id: str) -> NodeObject | None:
        """Return the machine's Node; None when there is none, or more than one."""
        name = self._node_of.get(machine_id)
        return self._nodes.get(name) if name is not None else None

    def machine_of(self, node_name: str) -> str | None:
        """Return the machine that a Node is tied to."""
        return self._machine_of.get(node_name)

    def node(self, name: str) -> NodeObject | None:
        """Return a Node by its name."""
        return self._nodes.get(name)

    def nodes(self) -> Iterable[NodeObject]:
        """Return all Nodes, in no particular order."""
        return self._nodes.values()

    def ambiguous(self, machine_id: str) -> tuple[str, ...]:
        """Return the names of the Nodes that all fit the machine, () when it is not ambiguous."""
        return self._ambiguous.get(machine_id, ())

    def is_reported(self, machine_id: str) -> bool:
        """Return whether the shard has named the machine as one of this cluster."""
        return machine_id in self._machines

    def tied_machines(self) -> Iterable[str]:
        """Return the machines that have a Node."""
        return self._node_of.keys()

    def machines_in_service(self) -> list[str]:
        """Return the machines that the shard named Configured or Draining, in order."""
        states = (MachineState.CONFIGURED, MachineState.DRAINING)
        return sorted(machine_id for machine_id, machine in self._machines.items() if machine.state in states)

    def count_unmatched(self) -> int:
        """Return how many machines have been Configured for more than 5 minutes without a Node."""
        since_max = self._clock.monotonic_seconds() - UNMATCHED_SECONDS
        return sum(
            machine.configured_since_seconds is not None
            and machine.configured_since_seconds < since_max
            and machine_id not in self._node_of
            for machine_id, machine in self._machines.items()
        )

    def search(self, drain: DrainRecord) -> NodeSearch:
        """Return the Nodes that a drain means: by provider id, else by label, else by name.

        An equal provider id goes before an equal last path part. A Node with another machine's label is meant only if
        its provider id is equal.
        """
        label = machine_label(drain.machine_id)
        if drain.provider_id:
            equal = self._index.by_provider_id.get(drain.provider_id, ())
            alike = [name for name in self._alike(drain.provider_id) if self._may_be(name, label)]
            for names in (equal, alike):
                if names:
                    return self._found(names, f"provider id {drain.provider_id}")
        labelled = self._index.by_label.get(label, ())
        if labelled:
            return self._found(labelled, f"label {MACHINE_ID}={label}")
        if drain.node in self._nodes and self._may_be(drain.node, label):
            return self._found((drain.node,), f"name {drain.node}")
        return NodeSearch(())

    def _found(self, names: Iterable[str], rule: str) -> NodeSearch:
        return NodeSearch(tuple(self._nodes[name] for name in sorted(names)), rule)

    def _alike(self, provider_id: str) -> Iterable[str]:
        """Return the Nodes whose provider id ends in `/` and the last path part of a machine's."""
        part = comparable_part(provider_id)
        return self._index.by_last_part.get(part, ()) if part else ()

    def _may_be(self, node_name: str, label: str) -> bool:
        """Return whether a Node carries no machine's label, or this one."""
        return _label_of(self._nodes[node_name]) in ("", label)

    # ---- changes ------------------------------------------------------------------------------------------------

    def put(self, stored: NodeObject, former: NodeObject | None) -> None:
        """Follow one Node."""
        name = stored.metadata.name
        known = self._nodes.get(name)
        same_keys = known is not None and _keys(known) == _keys(stored)
        if known is not None and not same_keys:
            self._unindex(known)
        self._nodes[name] = stored
        if same_keys:
            machine_id = self._machine_of.get(name)
            if machine_id is not None:
                self._write_tie_if_missing(machine_id)
                self._say(machine_id)
            return
        label, provider_id, _annotation = _keys(stored)
        if label:
            self._index.by_label[label].add(name)
        if provider_id:
            self._index.by_provider_id[provider_id].add(name)
            if "/" in provider_id:
                self._index.by_last_part[last_part(provider_id)].add(name)
        self._tie_all(self._candidates(stored) | (self._candidates(known) if known is not None else set()))

    def remove(self, former: NodeObject) -> None:
        """Forget one Node."""
        known = self._nodes.get(former.metadata.name)
        if known is None:
            return
        candidates = self._candidates(known)
        self._unindex(known)
        del self._nodes[former.metadata.name]
        self._tie_all(candidates)

    def node_state(self, update: NodeStateUpdate) -> None:
        """Handle a frame of the shard about a machine."""
        machine_id = update.machine_id
        if update.state in UNBOUND_STATES or update.state is MachineState.UNSPECIFIED:
            self._forget(machine_id)
            return
        known = self._machines.get(machine_id)
        if known is None or known.provider_id != update.provider_id:
            if known is not None:
                self._forget_keys(machine_id, known)
            self._machine_by_label[machine_label(machine_id)].add(machine_id)
            if update.provider_id:
                self._machine_by_provider_id[update.provider_id].add(machine_id)
                self._machine_by_last_part[comparable_part(update.provider_id)].add(machine_id)
        since_seconds = None
        if update.state is MachineState.CONFIGURED:
            since_seconds = known.configured_since_seconds if known is not None else None
            since_seconds = self._clock.monotonic_seconds() if since_seconds is None else since_seconds
        is_new = known is None or known.provider_id != update.provider_id
        self._machines[machine_id] = _ReportedMachine(update.provider_id, update.state, since_seconds)
        if is_new:
            # Machines that shared the former id as well: one of them may be alone with it now.
            former = self._rivals(known.provider_id) if known is not None else set()
            self._tie_all({machine_id} | former | self._rivals(update.provider_id))
            if machine_id not in self._node_of:
                # Without a Node there was nothing to say of it; that it is expected is new.
                self._say(machine_id)

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Forget the machines that are no longer the cluster's."""
        for machine_id in sorted(self._machines.keys() - machine_ids):
            self._forget(machine_id)

    def _forget(self, machine_id: str) -> None:
        known = self._machines.pop(machine_id, None)
        if known is not None:
            self._forget_keys(machine_id, known)
            self._tie_all({machine_id} | self._rivals(known.provider_id))

    def _rivals(self, provider_id: str) -> set[str]:
        """Return the machines whose provider id is equal, or ends alike."""
        equal = self._machine_by_provider_id.get(provider_id, set())
        return equal | self._machine_by_last_part.get(comparable_part(provider_id), set())

    def _forget_keys(self, machine_id: str, known: _ReportedMachine) -> None:
        _discard(self._machine_by_label, machine_label(machine_id), machine_id)
        _discard(self._machine_by_provider_id, known.provider_id, machine_id)
        _discard(self._machine_by_last_part, comparable_part(known.provider_id), machine_id)

    def _unindex(self, node: NodeObject) -> None:
        name = node.metadata.name
        label, provider_id, _annotation = _keys(node)
        _discard(self._index.by_label, label, name)
        _discard(self._index.by_provider_id, provider_id, name)
        _discard(self._index.by_last_part, last_part(provider_id), name)

    # ---- ties ---------------------------------------------------------------------------------------------------

    def _candidates(self, node: NodeObject) -> set[str]:
        """Return every machine that the Node could be tied to, or is."""
        label, provider_id, annotation = _keys(node)
        machines = set()
        if label:
            machines |= self._machine_by_label.get(label, set())
            if annotation and machine_label(annotation) == label:
                machines.add(annotation)
            elif not is_hashed_label(label):
                machines.add(label)
        if provider_id:
            machines |= self._machine_by_provider_id.get(provider_id, set())
            if "/" in provider_id:
                machines |= self._machine_by_last_part.get(last_part(provider_id), set())
        tied = self._machine_of.get(node.metadata.name)
        if tied is not None:
            machines.add(tied)
        return machines

    def _tie_all(self, machine_ids: set[str]) -> None:
        for machine_id in sorted(machine_ids):
            self._tie(machine_id)

    def _tie(self, machine_id: str) -> None:
        names = self._fitting(machine_id)
        former = self._node_of.pop(machine_id, None)
        if former is not None and self._machine_of.get(former) == machine_id:
            del self._machine_of[former]
        if len(names) > 1:
            if self._ambiguous.get(machine_id) != names:
                self._ambiguous[machine_id] = names
                log.warning(
                    "operator.node_ambiguous",
                    machine=machine_id,
                    nodes=list(names),
                    advice=f"remove the label {MACHINE_ID} from all Nodes but the machine's own",
                )
        else:
            self._ambiguous.pop(machine_id, None)
        if len(names) == 1:
            self._node_of[machine_id] = names[0]
            self._machine_of[names[0]] = machine_id
            self._write_tie_if_missing(machine_id)
        else:
            self._written.pop(machine_id, None)
        if former is not None or names:
            self._say(machine_id)

    def _fitting(self, machine_id: str) -> tuple[str, ...]:
        """Return the Nodes that fit the machine, in order: those with its label, else those with its provider id."""
        label = machine_label(machine_id)
        labelled = self._index.by_label.get(label)
        if labelled:
            if machine_id in self._machines or not is_hashed_label(label):
                return tuple(sorted(labelled))
            # A hash names no machine by itself: the annotation, or the shard, must.
            return tuple(sorted(name for name in labelled if _keys(self._nodes[name])[2] == machine_id))
        reported = self._machines.get(machine_id)
        if reported is None or not reported.provider_id:
            return ()
        equal = self._unlabelled(self._index.by_provider_id.get(reported.provider_id, ()))
        if equal:
            return equal if self._is_alone(machine_id, self._machine_by_provider_id[reported.provider_id]) else ()
        # One that another machine's provider id equals is that machine's.
        alike = tuple(
            name
            for name in self._unlabelled(self._alike(reported.provider_id))
            if not self._machine_by_provider_id.get(self._nodes[name].spec.provider_id)
        )
        rivals = self._machine_by_last_part.get(comparable_part(reported.provider_id), set())
        return alike if alike and self._is_alone(machine_id, rivals) else ()

    def _is_alone(self, machine_id: str, rivals: set[str]) -> bool:
        if rivals == {machine_id}:
            return True
        log.warning(
            "operator.machine_ambiguous",
            machine=machine_id,
            machines=sorted(rivals),
            reason="provider ids",
            advice=f"set the label {MACHINE_ID} on the Node of each of these machines",
        )
        return False

    def _unlabelled(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(name for name in names if not _label_of(self._nodes[name])))

    def _say(self, machine_id: str) -> None:
        for listener in self._listeners:
            listener(machine_id)

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write_tie_if_missing(self, machine_id: str) -> None:
        node = self.node_of(machine_id)
        if node is not None and not _says(node, machine_id):
            self._queue.put(self._write_tie, machine_id)
        else:
            self._written.pop(machine_id, None)

    async def _write_tie(self, machine_id: str) -> None:
        node = self.node_of(machine_id)
        if node is None or _says(node, machine_id):
            return
        written = self._written.get(machine_id)
        if written == (node.metadata.uid, node.metadata.resource_version):
            # The Node has changed in the server alone so far.
            return
        body: dict[str, Any] = {
            # Another Node under this name is refused: its UID is another one.
            "metadata": {
                "uid": node.metadata.uid,
                "labels": {MACHINE_ID: machine_label(machine_id)},
                "annotations": {MACHINE_ID: machine_id},
            }
        }
        try:
            await self._api.patch(NODES, node.metadata.name, body)
        except ApiError as error:
            # Its watch event says so, or brings the other Node.
            if not error.is_not_found and not error.is_conflict:
                raise
            return
        after = self.node_of(machine_id)
        if after is not None and not _says(after, machine_id):
            self._written[machine_id] = (node.metadata.uid, node.metadata.resource_version)
        if written is None or written[0] != node.metadata.uid:
            log.info(
                "operator.node_tied", machine=machine_id, node=node.metadata.name, provider_id=node.spec.provider_id
            )


def _discard(index: defaultdict[str, set[str]], key: str, name: str) -> None:
    names = index.get(key)
    if names is not None:
        names.discard(name)
        if not names:
            del index[key]


def _keys(node: NodeObject) -> tuple[str, str, str]:
    """Return what ties a Node: label, provider id, annotation; "" for what is absent."""
    return _label_of(node), node.spec.provider_id, (node.metadata.annotations or {}).get(MACHINE_ID, "")


def _label_of(node: NodeObject) -> str:
    return (node.metadata.labels or {}).get(MACHINE_ID, "")


def _says(node: NodeObject, machine_id: str) -> bool:
    """Return whether label and annotation of the Node name the machine."""
    label, _provider_id, annotation = _keys(node)
    return label == machine_label(machine_id) and annotation == machine_id
