"""Drains one Node: cordons it and evicts its pods until none is left (docs/spec/operator.md §7.3).

The pods are those of the cache. That none is left is confirmed by the API server, because a cache may lag. A budget is
never bypassed before the deadline, and after it only with --drain-force. A voluntary drain ends before its deadline if
evictions are refused until then: the machine stays, and its pods run on.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.frames import DrainOutcome, DrainResult
from bigfleet.model.ids import Rng
from bigfleet.operator.backoff import doubled_seconds
from bigfleet.operator.drains import DrainRecord
from bigfleet.operator.kubernetes.access import ADVICE
from bigfleet.operator.kubernetes.api import ApiError, KubernetesApi
from bigfleet.operator.kubernetes.objects import PodObject
from bigfleet.operator.kubernetes.resources import PODS
from bigfleet.operator.nodes.cordon import NodeCordon, NodeGone
from bigfleet.operator.nodes.disruption import comes_back
from bigfleet.operator.nodes.drain_annotation import DrainAnnotation
from bigfleet.operator.nodes.evictions import EvictionAnswer, EvictionOutcome, PodEvictor
from bigfleet.operator.nodes.matching import NodeMatcher
from bigfleet.operator.nodes.pod_index import PodsByNode, moves_in_a_drain

log = structlog.get_logger(__name__)

ROUND_SECONDS: Final = 2.0
ROUND_JITTER: Final = 0.25
EVICTIONS_AT_ONCE_MAX: Final = 10
NAMES_MAX: Final = 10
CORDON_RETRY_SECONDS_MAX: Final = 30.0
#: A voluntary drain that is forbidden for so long is given up. An API server that was restarted refuses everybody until
#: it has read its roles; a right that is missing stays so.
FORBIDDEN_SECONDS: Final = 60.0
#: A voluntary drain whose evictions are refused is given up if none was accepted for this share of its grace.
PATIENCE_SHARE: Final = 0.5
#: It is given up as well when this share of its grace is left: at the end of it the shard takes the machine.
LAST_SHARE: Final = 0.1
_FORCED_ATTEMPTS: Final = 3
_FORCED_RETRY_SECONDS: Final = 1.0
#: A drain that is past its deadline may ask the API server once more, for so long.
_LAST_QUESTION_SECONDS: Final = 10.0
REASON_RECLAIM: Final = "reclaim"
_GOING: Final = (EvictionAnswer.ACCEPTED, EvictionAnswer.GONE)


@dataclass(slots=True)
class ActiveDrain:
    """One machine's drain, from its instruction until its machine's state ends it."""

    record: DrainRecord
    #: "" when no Node was found.
    node_name: str = ""
    node_uid: str = ""
    #: Why the drain cannot begin at all, with its outcome.
    fault: tuple[DrainOutcome, str] | None = None
    #: Whether the Node may have been patched: also when the answer was lost.
    is_begun: bool = False
    #: Set once the shard of this process has named the drain; a resumed one may be out of date before that.
    is_confirmed: asyncio.Event = field(default_factory=asyncio.Event)
    started_seconds: float = 0.0
    #: UIDs of the pods on the Node when its pods were first evicted; None before that.
    first_pods: frozenset[str] | None = None
    #: When each pod may be asked for again, by UID.
    ask_again_seconds: dict[str, float] = field(default_factory=dict)
    #: How the API server last refused to evict a pod, by UID; without those whose eviction it accepted later.
    refusals: dict[str, str] = field(default_factory=dict)
    #: When an eviction was last accepted, or the drain began to ask for evictions.
    progress_seconds: float | None = None
    result: DrainResult | None = None
    was_forced: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_voluntary(self) -> bool:
        """Return whether no higher priority waits for the machine."""
        return self.record.preemptor_priority == 0 and self.record.reason == REASON_RECLAIM


class DrainEnded(Exception):
    """A drain came to its end; carries the outcome."""

    def __init__(self, outcome: DrainOutcome, message: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainTools:
    """What every drain of a cluster uses."""

    api: KubernetesApi
    cordon: NodeCordon
    evictor: PodEvictor
    nodes: NodeMatcher
    pods: PodsByNode
    clock: Clock
    rng: Rng
    #: Delete what is left when the grace ends.
    force: bool
    #: Called with each answer to an eviction.
    on_eviction: Callable[[EvictionAnswer], None]


class NodeDrain:
    """Runs one drain. Every method raises DrainEnded when the drain is over."""

    def __init__(self, drain: ActiveDrain, tools: DrainTools) -> None:
        self._drain = drain
        self._tools = tools
        self._clock = tools.clock
        #: Since when the API server has refused for want of a right, and nothing else; None when it has not.
        self._forbidden_since_seconds: float | None = None
        #: What it refused last so, "" when it does not.
        self._forbidden_text = ""

    async def begin(self) -> None:
        """Cordon the Node; retried until the deadline."""
        drain = self._drain
        attempt = 0
        while True:
            deadline = self._clock.unix_nanos() / NANOS_PER_SECOND + self._left_seconds()
            wanted = DrainAnnotation(
                instruction=drain.record.instruction_id,
                machine=drain.record.machine_id,
                deadline_seconds=deadline,
                reason=drain.record.reason or REASON_RECLAIM,
                cordoned=False,
                priority=drain.record.preemptor_priority,
            )
            was_begun, drain.is_begun = drain.is_begun, True
            try:
                async with asyncio.timeout(max(self._left_seconds(), _LAST_QUESTION_SECONDS)):
                    await self._tools.cordon.begin(drain.node_name, drain.node_uid, wanted)
                return
            except NodeGone as gone:
                if was_begun and not gone.is_replaced:
                    # Nothing to cordon any more; its pods may still be there.
                    return
                outcome = DrainOutcome.FAILED if was_begun else DrainOutcome.NODE_NOT_FOUND
                raise DrainEnded(outcome, str(gone)) from gone
            except TimeoutError:
                error_text = "the API server did not answer"
            except ApiError as error:
                if error.is_forbidden:
                    self._check_right(f"cordon Node {drain.node_name}: {error}")
                elif not error.is_transient and not error.is_conflict:
                    raise DrainEnded(DrainOutcome.FAILED, f"cordon Node {drain.node_name}: {error}") from error
                error_text = str(error)
            if self._left_seconds() <= 0:
                text = f"Node {drain.node_name} could not be cordoned in time: {error_text}"
                raise DrainEnded(DrainOutcome.GRACE_EXPIRED, text)
            ceiling_seconds = doubled_seconds(attempt, first_seconds=1.0, seconds_max=CORDON_RETRY_SECONDS_MAX)
            delay_seconds = min(ceiling_seconds, self._left_seconds())
            log.info("drain.cordon_retried", node=drain.node_name, error=error_text, retry_in=delay_seconds)
            await self._clock.sleep(delay_seconds * self._tools.rng.uniform(0.5, 1.0))
            attempt += 1

    async def evict(self) -> None:
        """Evict the Node's pods until none is left, or the deadline has come."""
        if self._drain.progress_seconds is None:
            self._drain.progress_seconds = self._clock.monotonic_seconds()
        while True:
            self._check_node()
            left_seconds = self._left_seconds()
            pods = self._pods_to_go()
            if not pods:
                pods, problem = await self._confirm(max(left_seconds, _LAST_QUESTION_SECONDS))
                if not pods and not problem:
                    raise DrainEnded(DrainOutcome.DRAINED)
                left_seconds = self._left_seconds()
                if left_seconds <= 0 and problem:
                    text = f"which pods are left on Node {self._drain.node_name} is unknown: {problem}"
                    raise DrainEnded(DrainOutcome.GRACE_EXPIRED, text)
            if self._drain.is_voluntary:
                self._check_refusals(pods)
            if left_seconds <= 0:
                await self._expire(pods)
                continue
            try:
                async with asyncio.timeout(left_seconds):
                    await self._evict_round(pods, left_seconds)
            except TimeoutError:
                continue
            jitter = self._tools.rng.uniform(1 - ROUND_JITTER, 1 + ROUND_JITTER)
            await self._clock.sleep(min(ROUND_SECONDS * jitter, max(self._left_seconds(), 0.0)))

    def _left_seconds(self) -> float:
        return self._drain.record.deadline_seconds - self._clock.monotonic_seconds()

    def _check_node(self) -> None:
        node = self._tools.nodes.node(self._drain.node_name)
        if node is not None and node.metadata.uid != self._drain.node_uid:
            text = f"Node {self._drain.node_name} was deleted and made again during the drain"
            raise DrainEnded(DrainOutcome.FAILED, text)

    def _pods_to_go(self) -> list[PodObject]:
        return self._in_order(self._tools.pods.on(self._drain.node_name).pods.values())

    def _in_order(self, pods: Iterable[PodObject]) -> list[PodObject]:
        """Return the pods that the drain waits for.

        The scheduler may put a successor that tolerates the cordon on the Node. It is left there: it would come back
        until the deadline.
        """
        going = [pod for pod in pods if moves_in_a_drain(pod)]
        first = self._drain.first_pods
        if first is None:
            first = self._drain.first_pods = frozenset(pod.metadata.uid for pod in going)
        awaited = (pod for pod in going if pod.metadata.uid in first or not comes_back(pod))
        return sorted(awaited, key=lambda pod: pod.metadata.key)

    async def _confirm(self, seconds_max: float) -> tuple[list[PodObject], str]:
        """Return the pods that the API server knows on the Node, and what kept it from saying so."""
        found: list[PodObject] = []
        continue_token = ""
        try:
            async with asyncio.timeout(seconds_max):
                while True:
                    page = await self._tools.api.list_page(
                        PODS,
                        field_selector=f"spec.nodeName={self._drain.node_name}",
                        continue_token=continue_token,
                    )
                    found.extend(page.items)
                    continue_token = page.continue_token
                    if not continue_token:
                        return self._in_order(found), ""
        except TimeoutError:
            return [], "the API server did not answer"
        except ApiError as error:
            if error.is_forbidden:
                self._check_right(str(error))
            return [], str(error)

    async def _evict_round(self, pods: list[PodObject], left_seconds: float) -> None:
        now_seconds = self._clock.monotonic_seconds()
        again = self._drain.ask_again_seconds
        due = [p for p in pods if not p.is_terminating and again.get(p.metadata.uid, now_seconds) <= now_seconds]
        slots = asyncio.Semaphore(EVICTIONS_AT_ONCE_MAX)

        async def evict(pod: PodObject) -> EvictionOutcome:
            async with slots:
                outcome = await self._tools.evictor.evict(pod, min(left_seconds, self._left_seconds()))
            self._tools.on_eviction(outcome.answer)
            again[pod.metadata.uid] = self._clock.monotonic_seconds() + outcome.retry_in_seconds
            if outcome.answer in _GOING:
                self._drain.refusals.pop(pod.metadata.uid, None)
                self._drain.progress_seconds = self._clock.monotonic_seconds()
            else:
                self._drain.refusals[pod.metadata.uid] = outcome.text
            if outcome.answer is not EvictionAnswer.ACCEPTED:
                log.debug("drain.eviction_refused", pod=_name(pod), answer=outcome.answer.value, error=outcome.text)
            return outcome

        outcomes = await asyncio.gather(*(evict(pod) for pod in due))
        for pod, outcome in zip(due, outcomes, strict=True):
            if outcome.answer is EvictionAnswer.FORBIDDEN:
                self._check_right(f"evict pod {_name(pod)}: {outcome.text}")
            else:
                self._forbidden_since_seconds, self._forbidden_text = None, ""

    def _check_refusals(self, pods: list[PodObject]) -> None:
        """Give up a voluntary drain if pods may not be evicted and none is, or if its grace is nearly over.

        A budget that is only busy lets a pod go from time to time.
        """
        refusals = self._drain.refusals
        refused = [pod for pod in pods if not pod.is_terminating and pod.metadata.uid in refusals]
        if not refused:
            return
        now_seconds = self._clock.monotonic_seconds()
        grace_seconds = self._drain.record.deadline_seconds - self._drain.started_seconds
        waited_seconds = now_seconds - (self._drain.progress_seconds or 0.0)
        if waited_seconds >= grace_seconds * PATIENCE_SHARE or self._left_seconds() <= grace_seconds * LAST_SHARE:
            text = f"{_left_text(refused)}; not evicted: {refusals[refused[0].metadata.uid]}"
            raise DrainEnded(DrainOutcome.WOULD_NOT_FIT, text)

    def _check_right(self, text: str) -> None:
        """Note that a right is missing; give a voluntary drain up once it has been for longer than a server starts.

        Any other drain goes on to its deadline, as one that a budget blocks: if it ended, the shard would take the
        machine with the pods on it.
        """
        now_seconds = self._clock.monotonic_seconds()
        self._forbidden_text = text
        if self._forbidden_since_seconds is None:
            self._forbidden_since_seconds = now_seconds
            log.warning("drain.forbidden", machine=self._drain.record.machine_id, error=text, advice=ADVICE)
        if self._drain.is_voluntary and now_seconds - self._forbidden_since_seconds >= FORBIDDEN_SECONDS:
            raise DrainEnded(DrainOutcome.WOULD_NOT_FIT, f"the operator lacks a right: {text}")

    async def _expire(self, pods: list[PodObject]) -> None:
        """End the drain; a resumed one that is to force returns once the shard has named it in this process."""
        if not self._tools.force:
            why = f"; the operator lacks a right: {self._forbidden_text}" if self._forbidden_text else ""
            raise DrainEnded(DrainOutcome.GRACE_EXPIRED, _left_text(pods) + why)
        if not self._drain.is_confirmed.is_set():
            # The annotation may be older than the shard's last word, and what follows cannot be taken back.
            await self._drain.is_confirmed.wait()
            return
        left = pods
        problem = ""
        for attempt in range(_FORCED_ATTEMPTS):
            if attempt:
                await self._clock.sleep(_FORCED_RETRY_SECONDS)
            left, problem = await self._delete(left)
            if not left:
                break
        if left:
            raise DrainEnded(DrainOutcome.GRACE_EXPIRED, f"{_left_text(left)}; could not be deleted: {problem}")
        self._drain.was_forced = True
        raise DrainEnded(DrainOutcome.DRAINED, f"forced: {_left_text(pods)} at the deadline, and were deleted")

    async def _delete(self, pods: list[PodObject]) -> tuple[list[PodObject], str]:
        """Delete pods with grace 0; return those that are still there, and the last refusal."""
        slots = asyncio.Semaphore(EVICTIONS_AT_ONCE_MAX)

        async def delete(pod: PodObject) -> EvictionOutcome:
            async with slots:
                return await self._tools.evictor.delete(pod)

        outcomes = await asyncio.gather(*(delete(pod) for pod in pods))
        left = [(pod, o) for pod, o in zip(pods, outcomes, strict=True) if o.answer not in _GOING]
        for pod, outcome in left:
            if outcome.answer is EvictionAnswer.FORBIDDEN:
                raise DrainEnded(DrainOutcome.FAILED, f"delete pod {_name(pod)}: {outcome.text}")
        return [pod for pod, _outcome in left], left[-1][1].text if left else ""


def _name(pod: PodObject) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _left_text(pods: list[PodObject]) -> str:
    names = ", ".join(_name(pod) for pod in pods[:NAMES_MAX])
    more = ", …" if len(pods) > NAMES_MAX else ""
    count = f"{len(pods)} pods were left" if len(pods) != 1 else "1 pod was left"
    return f"{count}: {names}{more}"
