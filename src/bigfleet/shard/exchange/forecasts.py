"""Asks operators before an exchange begins whether the pods of the machines that go would fit elsewhere.

docs/spec/exchange.md §7. The planner packs pods where it likes; the pods stand where the scheduler put them. Without a
question that shows only at the drain, when what comes is paid for already. An operator that cannot be asked, or does
not know, stops no exchange. All of it runs in the shard's loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import structlog

from bigfleet.engine.targets import ClassKey
from bigfleet.exchange.values import ExchangeProposal, WholeCluster
from bigfleet.model.clock import Clock
from bigfleet.model.frames import (
    CAPABILITY_DRAIN_FORECAST,
    ComingNodes,
    DrainForecast,
    DrainForecastRequest,
    ForecastOutcome,
)
from bigfleet.model.ids import MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.node_identity import node_labels, node_taints
from bigfleet.model.states import MachineState
from bigfleet.model.vector import format_vector
from bigfleet.planner.problem import QUANTITY_MAX
from bigfleet.shard.cycle.reclaim_delay import FitHolds
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.sessions.registry import Session, Sessions

#: An answer that is older says nothing: pods have moved.
ANSWER_SECONDS_MAX: Final = 60.0
#: A question about more machines that go and come is not asked.
QUESTION_MACHINES_MAX: Final = 1_000

_log = structlog.get_logger("bigfleet.shard.exchange.forecasts")


class ForecastState(Enum):
    """What is known of a proposal."""

    #: The operator cannot be asked, or does not know.
    NOT_KNOWN = "not_known"
    ASKED = "asked"
    FITS = "fits"
    WOULD_NOT_FIT = "would_not_fit"


_STATES: Final = {
    ForecastOutcome.UNSPECIFIED: ForecastState.NOT_KNOWN,
    ForecastOutcome.FITS: ForecastState.FITS,
    ForecastOutcome.WOULD_NOT_FIT: ForecastState.WOULD_NOT_FIT,
}


@dataclass(slots=True)
class _Question:
    """The last question to one operator, and its answer."""

    request: DrainForecastRequest
    at_seconds: float
    state: ForecastState = ForecastState.ASKED


class DrainForecasts:
    """The last question of each cluster: at most one in a look, and a newer one takes the place of the last."""

    def __init__(
        self, *, sessions: Sessions, clock: Clock, metrics: ShardMetrics, on_answer: Callable[[str], None]
    ) -> None:
        """`on_answer` is called with the cluster of each answer."""
        self._sessions = sessions
        self._clock = clock
        self._metrics = metrics
        self._on_answer = on_answer
        self._questions: dict[str, _Question] = {}
        self._count = 0
        #: Machines whose pods would not fit: they are left out for 10 minutes, then longer.
        self._holds = FitHolds(clock)
        sessions.listen_to_forecasts(self.received)

    def state(
        self, cluster: str, proposal: ExchangeProposal, *, whole: WholeCluster | None, scheduler: str
    ) -> ForecastState:
        """Return what is known of a proposal that is ready; asks the operator where nothing is."""
        session = self._sessions.of(cluster)
        machines = len(proposal.machine_ids) + proposal.comes_by_class.total()
        is_asked = session is not None and session.can(CAPABILITY_DRAIN_FORECAST)
        if session is None or not is_asked or whole is None or machines > QUESTION_MACHINES_MAX:
            return ForecastState.NOT_KNOWN
        now_seconds = self._clock.monotonic_seconds()
        request = DrainForecastRequest(
            request_id=f"forecast-{self._count + 1}",
            machine_ids=proposal.machine_ids,
            comes=tuple(_coming(proposal, whole)),
            scheduler=scheduler,
        )
        known = self._questions.get(cluster)
        is_known = known is not None and _is_same(known.request, request)
        if known is not None and is_known and now_seconds - known.at_seconds < ANSWER_SECONDS_MAX:
            return known.state
        self._count += 1
        self._questions[cluster] = _Question(request, now_seconds)
        session.outbox.put(request)
        return ForecastState.ASKED

    def received(self, session: Session, answer: DrainForecast) -> bool:
        """Take an answer; return whether its question waited for it."""
        known = self._questions.get(session.cluster)
        if known is None or known.state is not ForecastState.ASKED or known.request.request_id != answer.request_id:
            return False
        known.state, known.at_seconds = _STATES[answer.outcome], self._clock.monotonic_seconds()
        self._metrics.exchange_forecasts.labels(known.state.value).inc()
        if known.state is ForecastState.WOULD_NOT_FIT:
            # Only a machine of the question is held.
            goes = known.request.machine_ids
            machine_id = MachineId(answer.machine_id if answer.machine_id in goes else goes[0])
            seconds = self._holds.hold(machine_id, answer.message)
            _log.info(
                "exchange.would_not_fit",
                cluster=session.cluster,
                machine=machine_id,
                reason=answer.message,
                hold_seconds=seconds,
            )
        self._on_answer(session.cluster)
        return True

    def refused(self) -> frozenset[MachineId]:
        """Return the machines whose pods would not fit, while they are left out."""
        return self._holds.held()

    def forget(self, cluster: str) -> None:
        """Forget the question of a cluster."""
        self._questions.pop(cluster, None)


def _is_same(before: DrainForecastRequest, now: DrainForecastRequest) -> bool:
    return (before.machine_ids, before.comes, before.scheduler) == (now.machine_ids, now.comes, now.scheduler)


def _coming(proposal: ExchangeProposal, whole: WholeCluster) -> Iterator[ComingNodes]:
    """Yield the nodes of the machines that come, with what pods may use of them."""
    supply = {key: of.supply for key, of in zip(whole.keys, whole.problem.classes, strict=True)}
    for key, count in proposal.comes_by_class.items():
        # The planner knows what DaemonSets take, of the resources that the demand names.
        planned = zip(whole.problem.dimensions, supply.get(key, ()), strict=key in supply)
        amounts = dict(key.supply) | {name: milli for name, milli in planned if milli < QUANTITY_MAX}
        machine = _example(key)
        yield ComingNodes(
            count=count,
            labels=node_labels(machine),
            resources=format_vector(amounts),
            taints=tuple(node_taints(machine)),
        )


def _example(key: ClassKey) -> Machine:
    return Machine(
        id=MachineId("coming"),
        state=MachineState.SPECULATIVE,
        instance_type=key.instance_type,
        zone=key.zone,
        capacity_type=key.capacity_type,
        labels=dict(key.labels),
    )
