"""Tests that a shard asks an operator before an exchange acquires anything, and does what the answer says."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bigfleet.exchange.course import ExchangePhase
from bigfleet.exchange.values import ExclusionReason, WaitReason
from bigfleet.model.frames import (
    CAPABILITY_DRAIN_FORECAST,
    CAPABILITY_DRAIN_RESULT,
    DrainForecast,
    DrainForecastRequest,
    ForecastOutcome,
)
from bigfleet.model.machine import Machine
from tests.shard.cycle.test_pods import pods
from tests.shard.exchange.test_execution import Exchanging
from tests.shard.exchange.test_proposals import spot

pytestmark = pytest.mark.virtual_time

Answer = Callable[[DrainForecastRequest], DrainForecast | None]


def says(outcome: ForecastOutcome, **fields: str) -> Answer:
    """Return an answer that is always the same."""
    return lambda request: DrainForecast(request_id=request.request_id, outcome=outcome, **fields)


class Asking(Exchanging):
    """A cluster whose operator can be asked."""

    def __init__(self, answer: Answer, *more: Machine, **fields: Any) -> None:
        super().__init__(*more, **fields)
        self.operator = self.world.connect("c1", CAPABILITY_DRAIN_RESULT, CAPABILITY_DRAIN_FORECAST)
        self.operator.forecast = answer
        self.operator.report(pods("c1", ("500m", 12)))

    @property
    def questions(self) -> list[DrainForecastRequest]:
        """What the operator was asked."""
        return [frame for frame in self.operator.frames if isinstance(frame, DrainForecastRequest)]

    def waits(self) -> list[WaitReason | None]:
        """What the cluster's proposals wait for."""
        return [each.waits_for for each in self.only().proposals]

    def answers(self, outcome: str) -> float:
        """How many answers of a kind were counted."""
        return self.world.metric("exchange_forecasts_total", outcome=outcome)


async def test_the_operator_is_asked_with_what_goes_and_what_comes() -> None:
    """Once, and the exchange begins with its answer, without another look."""
    fleet = Asking(says(ForecastOutcome.FITS))
    await fleet.until(ExchangePhase.ACQUIRING)

    (question,) = fleet.questions
    assert question.machine_ids == ("c1-dear0", "c1-dear1")
    assert question.scheduler == "least-allocated"
    (coming,) = question.comes
    assert (coming.count, coming.taints) == (1, ())
    assert coming.labels == {"node.kubernetes.io/instance-type": "cheap", "topology.kubernetes.io/zone": "za"}
    assert coming.resources == {"cpu": "8", "memory": "32Gi"}
    assert fleet.answers("fits") == 1
    await fleet.minutes(30)
    assert fleet.end() == "done"


async def test_nothing_is_acquired_where_pods_would_not_fit() -> None:
    """The machine that the operator names is left out at the next look, for ten minutes and then for longer."""
    fleet = Asking(
        lambda request: DrainForecast(
            request_id=request.request_id,
            outcome=ForecastOutcome.WOULD_NOT_FIT,
            machine_id=request.machine_ids[-1],
            message="pod d/p fits on no other node",
        )
    )
    await fleet.minutes(16)
    await asyncio.sleep(1)
    assert fleet.waits() == [WaitReason.WOULD_NOT_FIT]
    assert fleet.world.metric("exchange_proposals", waits_for="would-not-fit") == 1
    calls = len(fleet.provider.calls)

    await fleet.minutes(1)
    assert (ExclusionReason.FORECAST, 1) in fleet.only().excluded
    await fleet.minutes(60)
    assert fleet.records_of() == []
    assert fleet.provider.calls[calls:] == []
    assert fleet.holds() == ["c1-dear0", "c1-dear1"]
    assert sum("c1-dear1" in each.machine_ids for each in fleet.questions) == 3
    assert len(fleet.questions) == fleet.answers("would_not_fit")


async def test_an_exchange_waits_for_an_answer_and_is_asked_for_again() -> None:
    """A question that was lost with its session must not hold it up for good."""
    fleet = Asking(lambda _request: None)
    await fleet.minutes(16)
    await asyncio.sleep(1)
    assert fleet.waits() == [WaitReason.FORECAST]
    assert fleet.records_of() == []
    fleet.operator.forecast = says(ForecastOutcome.FITS)
    await fleet.minutes(2)

    assert len(fleet.questions) == 2
    assert len(fleet.records_of()) == 1


async def test_an_operator_that_cannot_tell_stops_nothing() -> None:
    fleet = Asking(says(ForecastOutcome.UNSPECIFIED, message="no node of machine m"))
    await fleet.until(ExchangePhase.ACQUIRING)
    assert fleet.answers("not_known") == 1


async def test_an_operator_that_cannot_be_asked_is_not_asked() -> None:
    fleet = Asking(says(ForecastOutcome.WOULD_NOT_FIT))
    fleet.operator = fleet.world.connect("c1", CAPABILITY_DRAIN_RESULT)
    fleet.operator.report(pods("c1", ("500m", 12)), at_unix_nanos=2)
    await fleet.until(ExchangePhase.ACQUIRING)
    assert fleet.questions == []


async def test_an_answer_counts_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods have moved since: the same exchange is asked for again."""
    fleet = Asking(says(ForecastOutcome.FITS))
    with monkeypatch.context() as patch:
        patch.setattr(fleet.world.shard.exchanges, "begin", lambda *_args, **_named: False)
        await fleet.minutes(19)
    assert len(fleet.questions) > 1
    await fleet.minutes(2)

    assert len(fleet.records_of()) == 1


@pytest.mark.parametrize("request_id", ["", "forecast-99"])
async def test_an_answer_to_another_question_is_dropped(request_id: str) -> None:
    fleet = Asking(lambda _request: None)
    await fleet.minutes(16)
    await asyncio.sleep(1)
    stray = DrainForecast(request_id=request_id, outcome=ForecastOutcome.FITS)

    assert fleet.world.shard.sessions.receive_drain_forecast(fleet.operator.session, stray) is False
    assert fleet.records_of() == []


async def test_an_answer_is_taken_once() -> None:
    fleet = Asking(lambda _request: None, spot(4))
    await fleet.minutes(16)
    await asyncio.sleep(1)
    (question,) = fleet.questions
    answer = DrainForecast(request_id=question.request_id, outcome=ForecastOutcome.WOULD_NOT_FIT, machine_id="other")
    taken = [fleet.world.shard.sessions.receive_drain_forecast(fleet.operator.session, answer) for _ in range(2)]

    assert taken == [True, False]
    await fleet.minutes(1)
    # A machine that was not asked about is not left out: the first that was is.
    assert (ExclusionReason.FORECAST, 1) in fleet.only().excluded
