"""An exchange is ready only if the planner can pack the whole cluster afterwards, excluded machines included."""

from collections import Counter
from dataclasses import replace

import pytest

from bigfleet.exchange.search import find_exchanges
from bigfleet.exchange.values import ExchangeQuestion, WaitReason, WholeCluster
from bigfleet.model.states import CapacityType
from bigfleet.planner.problem import PlannerShape
from tests.exchange.building import held, idle, need, offers, pods, question

DEAR, SPOT = 3.0, 0.1


def asked() -> ExchangeQuestion:
    """Return a question whose answer is one proposal: two dear machines go for a spot machine."""
    machines = held(2, "dear", 4, DEAR) + offers(4, "spot", 8, SPOT, capacity_type=CapacityType.SPOT)
    return question(machines, [need(pods(500, 1, 10))])


def with_more_pods(of: ExchangeQuestion, cpu_milli: int) -> ExchangeQuestion:
    """Return the question in a cluster with one more pod, which the parts that may move do not know of."""
    assert of.whole is not None
    problem = of.whole.problem
    shape = problem.shapes[0]
    at = problem.dimensions.index("cpu")
    request = tuple(cpu_milli if number == at else amount for number, amount in enumerate(shape.request))
    more: PlannerShape = replace(shape, request=request, count=1)
    whole = replace(of.whole, problem=replace(problem, shapes=(*problem.shapes, more)))
    return replace(of, whole=whole)


def test_it_waits_while_a_pod_of_the_cluster_would_have_no_place() -> None:
    """The spot machine has 8 cpu, ten pods take 5: a pod of 2 cpu has a place there, one of 3.5 cpu has not."""
    fits, does_not = (find_exchanges(with_more_pods(asked(), cpu)) for cpu in (2_000, 3_500))

    assert [each.waits_for for each in fits.proposals] == [None]
    assert [each.waits_for for each in does_not.proposals] == [WaitReason.DOES_NOT_PACK]
    assert does_not.promised_usd_per_hour == 0


def test_one_that_waits_takes_no_budget_of_the_next() -> None:
    """Two machines of their own would replace rented ones. With one fewer of them the first exchange does not pack."""
    reserved = idle(2, "own", 8, 0.3, capacity_type=CapacityType.RESERVED, instance_type="own8")
    of = question(held(2, "rented", 8, 0.4) + reserved, [need(pods(1000, 1, 12))])
    assert [each.waits_for for each in find_exchanges(of).proposals] == [None, WaitReason.BUDGET]

    waits = find_exchanges(with_more_pods(of, 9_000))

    # A pod that no machine is large enough for holds nothing up, as it does not block a cluster.
    assert [each.waits_for for each in waits.proposals] == [None, WaitReason.BUDGET]

    packed = find_exchanges(with_more_pods(of, 7_500))
    assert [each.waits_for for each in packed.proposals] == [WaitReason.DOES_NOT_PACK] * 2


def test_what_would_be_held_afterwards() -> None:
    """Machines go and come by class, and nothing is on offer."""
    whole = asked().whole
    assert whole is not None
    by_class = Counter(dict(zip(whole.keys, (kind.held for kind in whole.problem.classes), strict=True)))
    dear = next(key for key, count in by_class.items() if count)
    spot = next(key for key, count in by_class.items() if not count)

    after = whole.after(Counter({dear: 1}), Counter({spot: 2}))

    assert after is not None
    assert {key: kind.held for key, kind in zip(whole.keys, after.classes, strict=True)} == {dear: 1, spot: 2}
    assert {kind.stock for kind in after.classes} == {0}


@pytest.mark.parametrize(("goes", "comes"), [(3, 1), (1, 5)])
def test_more_than_is_held_or_on_offer_is_no_cluster(goes: int, comes: int) -> None:
    whole = asked().whole
    assert whole is not None
    dear = next(key for key, kind in zip(whole.keys, whole.problem.classes, strict=True) if kind.held)
    spot = next(key for key, kind in zip(whole.keys, whole.problem.classes, strict=True) if not kind.held)

    assert whole.after(Counter({dear: goes}), Counter({spot: comes})) is None
    assert isinstance(whole, WholeCluster)
