"""Executes the drains that the shard asks for: starts, hastens, withdraws and resumes them (docs/spec/operator.md §7).

One task per machine. Everything that a later process needs is in the annotation of the Node. A drain's result is passed
to `finished` once. The drain is stored until its machine's state ends it, because a withdrawal must find what was
cordoned. A Node is drained only if it certainly belongs to the machine.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.frames import DrainOutcome, DrainResult, NodeStateUpdate
from bigfleet.model.ids import Rng
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import NodeObject
from bigfleet.operator.nodes.budgets import DisruptionBudgets
from bigfleet.operator.nodes.cordon import NodeCordon, NodeGone
from bigfleet.operator.nodes.drain_annotation import UnreadableAnnotation, read_annotation
from bigfleet.operator.nodes.evictions import EvictionAnswer, PodEvictor
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.node_drain import ActiveDrain, DrainEnded, DrainTools, NodeDrain
from bigfleet.operator.nodes.pod_index import PodsByNode, leaving_pods
from bigfleet.operator.nodes.preflight import Preflight

log = structlog.get_logger(__name__)

#: Longest wait between two attempts to withdraw a drain, doubling from 1 s.
_WITHDRAW_RETRY_SECONDS_MAX: Final = 60.0
#: Outcomes that leave a Node as it was.
_UNTOUCHED: Final = frozenset({DrainOutcome.WOULD_NOT_FIT, DrainOutcome.NODE_NOT_FOUND})

#: Called with a Node, an Event's reason in CamelCase and its message.
NodeEvent = Callable[[NodeObject, str, str], None]


class DrainObserver(Protocol):
    """Counts drains and evictions, for metrics."""

    def drain_ended(self, outcome: str, seconds: float) -> None:
        """Hear of an end: an outcome in lower case, `forced` or `withdrawn`, and how long the drain took."""
        ...

    def eviction(self, answer: EvictionAnswer) -> None:
        """Hear how the API server answered an eviction."""
        ...


class NoDrainObserver:
    """Counts nothing."""

    def drain_ended(self, outcome: str, seconds: float) -> None:
        """Do nothing."""

    def eviction(self, answer: EvictionAnswer) -> None:
        """Do nothing."""


class DrainExecutor:
    """The drains of one cluster."""

    def __init__(
        self,
        *,
        api: KubernetesApi,
        nodes: NodeMatcher,
        pods: PodsByNode,
        budgets: DisruptionBudgets,
        preflight: Preflight,
        clock: Clock,
        rng: Rng,
        finished: Callable[[DrainResult], None],
        on_event: NodeEvent = lambda node, reason, message: None,
        observer: DrainObserver | None = None,
        force: bool = False,
    ) -> None:
        self._nodes = nodes
        self._pods = pods
        self._budgets = budgets
        self._preflight = preflight
        self._clock = clock
        self._finished = finished
        self._on_event = on_event
        self._observer = observer or NoDrainObserver()
        self._cordon = NodeCordon(api=api)
        self._tools = DrainTools(
            api=api,
            cordon=self._cordon,
            evictor=PodEvictor(api=api, budgets=budgets, pods=pods, clock=clock),
            nodes=nodes,
            pods=pods,
            clock=clock,
            rng=rng,
            force=force,
            on_eviction=self._observer.eviction,
        )
        #: By machine, until its state ends the drain.
        self._drains: dict[str, ActiveDrain] = {}
        self._withdrawals: dict[str, asyncio.Task[None]] = {}
        #: Whether the shard's last word on a machine was Configured.
        self._configured: set[str] = set()
        self._is_running = False
        nodes.listen(self._withdraw_if_stale)

    @property
    def drains_running(self) -> int:
        """How many drains have no result yet."""
        return sum(drain.result is None for drain in self._drains.values())

    # ---- what the session says ----------------------------------------------------------------------------------

    def start(self, record: DrainRecord) -> None:
        """Begin a drain, or hasten the one that runs for the same instruction.

        A machine without a Node, and one with several, is reported at once.
        """
        machine_id = record.machine_id
        self._cancel_withdrawal(machine_id)
        known = self._drains.get(machine_id)
        if known is not None and known.record.instruction_id == record.instruction_id:
            if known.result is None:
                self._stop(known)
                known.record = record
                known.is_confirmed.set()
                self._spawn(known)
            return
        drain = ActiveDrain(record=record, started_seconds=self._clock.monotonic_seconds())
        drain.is_confirmed.set()
        self._drains[machine_id] = drain
        self._find_node(drain)
        if known is not None:
            self._stop(known)
            # What an earlier instruction has begun is gone on with: its pods are leaving already.
            drain.is_begun = known.is_begun and known.node_uid == drain.node_uid
        if drain.fault is not None:
            self._finish(drain, *drain.fault)
            return
        self._spawn(drain)

    def end(self, record: DrainRecord, *, withdrawn: bool) -> None:
        """End a drain: its machine is gone or free, or it was withdrawn and the Node goes back into service."""
        machine_id = record.machine_id
        drain = self._drains.pop(machine_id, None)
        if drain is None:
            return
        self._stop(drain)
        if not withdrawn:
            return
        self._preflight.release(machine_id)
        if drain.result is None:
            self._observer.drain_ended("withdrawn", self._clock.monotonic_seconds() - drain.started_seconds)
        if drain.is_begun:
            self._withdraw(machine_id, drain.node_name, drain.node_uid)

    def node_state(self, update: NodeStateUpdate) -> None:
        """Hear the state of a machine, after the session has started and ended what follows from it."""
        machine_id = update.machine_id
        if update.state is MachineState.CONFIGURED:
            self._configured.add(machine_id)
            self._withdraw_if_stale(machine_id)
            return
        self._configured.discard(machine_id)
        drain = self._drains.get(machine_id)
        if drain is not None and update.state is MachineState.DRAINING:
            drain.is_confirmed.set()

    def resynced(self, machine_ids: frozenset[str]) -> None:
        """Forget the machines that are no longer the cluster's."""
        self._configured &= machine_ids

    def resume(self) -> list[DrainRecord]:
        """Begin the drains that the Nodes' annotations name; return them in node order, for the session's table.

        Call it once the caches are synced, before `SessionClient.run`.
        """
        resumed = []
        for node in sorted(self._nodes.nodes(), key=lambda node: node.metadata.name):
            try:
                annotation = read_annotation(node)
            except UnreadableAnnotation as error:
                log.error(
                    "drain.annotation_unreadable",
                    node=node.metadata.name,
                    error=str(error),
                    advice="remove the annotation; uncordon the Node if its machine stays",
                )
                continue
            if annotation is None or annotation.machine in self._drains:
                self._note_second_node(node, annotation.machine if annotation is not None else "")
                continue
            now_seconds = self._clock.monotonic_seconds()
            left_seconds = annotation.deadline_seconds - self._clock.unix_nanos() / NANOS_PER_SECOND
            record = DrainRecord(
                instruction_id=annotation.instruction,
                machine_id=annotation.machine,
                node=node.metadata.name,
                provider_id=node.spec.provider_id,
                deadline_seconds=now_seconds + left_seconds,
                preemptor_priority=annotation.priority,
                reason=annotation.reason,
            )
            drain = ActiveDrain(
                record=record,
                node_name=node.metadata.name,
                node_uid=node.metadata.uid,
                is_begun=True,
                started_seconds=now_seconds,
            )
            self._drains[annotation.machine] = drain
            self._spawn(drain)
            resumed.append(record)
            log.info("drain.resumed", node=record.node, machine=record.machine_id, left_seconds=round(left_seconds, 1))
        return resumed

    async def run(self) -> None:
        """Run the drains until cancelled; they stop where they are, and the annotations stay."""
        self._is_running = True
        try:
            for drain in self._drains.values():
                if drain.result is None:
                    self._spawn(drain)
            await asyncio.Event().wait()
        finally:
            self._is_running = False
            tasks = [drain.task for drain in self._drains.values() if drain.task is not None]
            tasks.extend(self._withdrawals.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- tasks --------------------------------------------------------------------------------------------------

    def _spawn(self, drain: ActiveDrain) -> None:
        if self._is_running:
            drain.task = asyncio.create_task(self._run_drain(drain))

    def _stop(self, drain: ActiveDrain) -> None:
        if drain.task is not None:
            drain.task.cancel()
            drain.task = None

    async def _run_drain(self, drain: ActiveDrain) -> None:
        try:
            await self._drain_node(drain)
        except DrainEnded as ended:
            self._finish(drain, ended.outcome, str(ended))
        except Exception as error:
            # A fault of ours must not leave the shard waiting, nor end the other drains.
            log.exception("drain.failed", machine=drain.record.machine_id, node=drain.node_name)
            self._finish(drain, DrainOutcome.FAILED, f"the operator failed: {type(error).__name__}: {error}")

    async def _drain_node(self, drain: ActiveDrain) -> None:
        if drain.fault is not None:
            raise DrainEnded(*drain.fault)
        node = self._nodes.node(drain.node_name)
        if drain.is_voluntary and node is not None:
            await self._check_room(drain, node)
        flow = NodeDrain(drain, self._tools)
        is_first = not drain.is_begun
        await flow.begin()
        if is_first and node is not None:
            record = drain.record
            left_seconds = max(0, round(record.deadline_seconds - self._clock.monotonic_seconds()))
            self._on_event(
                node,
                "BigFleetDrain",
                f"drain of machine {record.machine_id} within {left_seconds} s, reason {record.reason}, "
                f"preemptor priority {record.preemptor_priority}, instruction {record.instruction_id}",
            )
        await flow.evict()

    async def _check_room(self, drain: ActiveDrain, node: NodeObject) -> None:
        """Promise the pods of a voluntary drain their room. Raises DrainEnded if there is none, or a pod cannot leave.

        A drain that has begun goes on all the same. One that was resumed has no promises before: without them other
        drains would count on the room that its pods go to.
        """
        machine_id = drain.record.machine_id
        if drain.is_begun and self._preflight.promised(machine_id):
            return
        if not drain.is_begun:
            why_never = await self._budgets.why_never(leaving_pods(self._pods.on(drain.node_name)))
            if why_never is not None:
                raise DrainEnded(DrainOutcome.WOULD_NOT_FIT, why_never)
        refusal = await self._preflight.judge(
            machine_id,
            node,
            leaving=self.leaving,
            deadline_seconds=drain.record.deadline_seconds,
            is_begun=drain.is_begun,
        )
        if refusal is None:
            return
        if not drain.is_begun:
            raise DrainEnded(DrainOutcome.WOULD_NOT_FIT, refusal)
        log.info("drain.room_not_promised", machine=machine_id, node=drain.node_name, reason=refusal)

    def leaving(self) -> set[str]:
        """Return the Nodes that are drained, or are about to be."""
        return {
            drain.node_name
            for drain in self._drains.values()
            if drain.result is None or drain.result.outcome not in _UNTOUCHED
        }

    def _finish(self, drain: ActiveDrain, outcome: DrainOutcome, message: str) -> None:
        record = drain.record
        drain.result = DrainResult(
            instruction_id=record.instruction_id, machine_id=record.machine_id, outcome=outcome, message=message
        )
        seconds = self._clock.monotonic_seconds() - drain.started_seconds
        log.info(
            "drain.ended",
            machine=record.machine_id,
            node=drain.node_name,
            instruction=record.instruction_id,
            outcome=outcome.name,
            reason=message,
            seconds=round(seconds, 1),
        )
        self._observer.drain_ended("forced" if drain.was_forced else outcome.name.lower(), seconds)
        self._finished(drain.result)

    # ---- nodes --------------------------------------------------------------------------------------------------

    def _find_node(self, drain: ActiveDrain) -> None:
        search = self._nodes.search(drain.record)
        if not search.nodes:
            text = f"no Node fits machine {drain.record.machine_id}, provider id {drain.record.provider_id!r}"
            drain.fault = (DrainOutcome.NODE_NOT_FOUND, text)
            return
        names = [node.metadata.name for node in search.nodes]
        if len(names) > 1:
            drain.fault = (DrainOutcome.FAILED, f"ambiguous: {search.rule} fits the Nodes {', '.join(names)}")
            return
        node = search.nodes[0]
        for other in self._drains.values():
            if other is not drain and other.node_name == names[0] and other.result is None:
                text = f"ambiguous: Node {names[0]} is being drained for machine {other.record.machine_id}"
                drain.fault = (DrainOutcome.FAILED, text)
                return
        drain.node_name, drain.node_uid = names[0], node.metadata.uid

    def _note_second_node(self, node: NodeObject, machine_id: str) -> None:
        """Fail a resumed drain whose machine has a second Node with its annotation."""
        drain = self._drains.get(machine_id)
        if drain is not None and drain.node_name != node.metadata.name:
            text = f"ambiguous: the Nodes {drain.node_name}, {node.metadata.name} are both annotated for the machine"
            drain.fault = (DrainOutcome.FAILED, text)

    # ---- withdrawals --------------------------------------------------------------------------------------------

    def _withdraw_if_stale(self, machine_id: str) -> None:
        """Withdraw what an earlier drain left on the Node of a machine that is in service again."""
        if machine_id not in self._configured or machine_id in self._drains or machine_id in self._withdrawals:
            return
        node = self._nodes.node_of(machine_id)
        if node is None:
            return
        try:
            annotation = read_annotation(node)
        except UnreadableAnnotation:
            return
        if annotation is not None and annotation.machine == machine_id:
            self._withdraw(machine_id, node.metadata.name, node.metadata.uid)

    def _withdraw(self, machine_id: str, name: str, uid: str) -> None:
        self._cancel_withdrawal(machine_id)
        if self._is_running:
            flow: Coroutine[Any, Any, None] = self._uncordon(machine_id, name, uid)
            self._withdrawals[machine_id] = asyncio.create_task(flow)

    def _cancel_withdrawal(self, machine_id: str) -> None:
        task = self._withdrawals.pop(machine_id, None)
        if task is not None:
            task.cancel()

    async def _uncordon(self, machine_id: str, name: str, uid: str) -> None:
        attempt = 0
        try:
            while True:
                try:
                    node = await self._cordon.withdraw(name, uid, machine_id)
                    break
                except NodeGone:
                    return
                except ApiError as error:
                    report = log.info if error.is_transient or error.is_conflict else log.error
                    report("drain.withdrawal_retried", machine=machine_id, node=name, error=str(error))
                    await self._clock.sleep(min(_WITHDRAW_RETRY_SECONDS_MAX, 2.0**attempt))
                    attempt = min(attempt + 1, 10)
            if node is not None:
                log.info("drain.withdrawn", machine=machine_id, node=name)
                self._on_event(node, "BigFleetDrainWithdrawn", f"the drain of machine {machine_id} was withdrawn")
        finally:
            if self._withdrawals.get(machine_id) is asyncio.current_task():
                del self._withdrawals[machine_id]
