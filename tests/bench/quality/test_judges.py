"""Verdicts have teeth: what is lost is seen, is bought in the completed cost, and is never excused twice."""

from dataclasses import replace

import pytest

from bench.quality.judges import Verdict, judge, packed
from bench.quality.reports.handmade import instance, offer, row
from bench.quality.values import Claim, Holding, Instance, RowReport, Scheduler, Settled

LEAST, MOST = Scheduler.LEAST_ALLOCATED, Scheduler.MOST_ALLOCATED


def settled(of: Instance, *machines: int, short: dict[str, int] | None = None, has_claims: bool = False) -> Settled:
    """Return an answer without claims that holds machines of some classes for the cluster c."""
    missing = short or {}
    return Settled(
        holdings=tuple(Holding(machine_id=f"m-{n}", offer=o, cluster="c") for n, o in enumerate(machines)),
        rows=tuple(
            RowReport(cluster="c", row=r.id, is_satisfied=r.id not in missing, short={0: missing.get(r.id, 0)})
            for r in of.clusters[0].rows
        ),
        has_claims=has_claims,
        cycles=1,
        actions=1,
        actions_unneeded=0,
        engine_seconds=0.0,
    )


def verdict(of: Instance, *machines: int, scheduler: Scheduler = LEAST, short: dict[str, int] | None = None) -> Verdict:
    """Return the verdict on such an answer."""
    return judge(of, settled(of, *machines, short=short), scheduler=scheduler)


EIGHT = offer("m8", 8, 8, 0.4)


def test_a_machine_too_few_is_lost_pods_and_a_purchase() -> None:
    of = instance([EIGHT], {"c": [row("r", [(2, 2, 8)])]})

    enough, too_few, none = verdict(of, 0, 0), verdict(of, 0), verdict(of)

    assert (enough.unplaced, enough.lost_mean, enough.completed_usd_per_hour) == (0, 0.0, 0.8)
    assert (too_few.unplaced, too_few.lost_mean, too_few.lost_worst) == (4, 4.0, 4)
    assert (too_few.cost_usd_per_hour, too_few.completed_usd_per_hour) == (0.4, 0.8)
    assert (none.unplaced, none.cost_usd_per_hour) == (8, 0.0)
    assert none.completed_usd_per_hour == pytest.approx(0.8)
    assert enough.held_ratio == pytest.approx({"cpu": 1.0, "memory": 1.0, "pods": enough.held_ratio["pods"]})


def test_the_scheduler_may_lose_what_first_fit_places() -> None:
    of = instance([EIGHT], {"c": [row("small", [(2, 2, 4)], priority=9), row("large", [(4, 4, 2)])]})

    least, most = verdict(of, 0, 0), verdict(of, 0, 0, scheduler=MOST)

    assert (least.unplaced, least.lost_mean) == (0, 0.0)
    assert (most.unplaced, most.lost_mean) == (0, 0.0)
    uneven = instance([EIGHT], {"c": [row("small", [(2, 2, 2)], priority=9), row("large", [(8, 8, 1)])]})
    least, most = verdict(uneven, 0, 0), verdict(uneven, 0, 0, scheduler=MOST)
    assert (least.unplaced, most.unplaced, most.lost_mean) == (0, 0, 0.0)
    # The pod of 8 cpu is one that no slack protects: even the largest machine hosts one alone.
    assert (least.lost_mean, least.lost_unprotected) == (0.0, 1.0)
    assert least.completed_usd_per_hour == pytest.approx(1.2)


def test_a_pod_that_a_larger_machine_would_host_twice_counts_as_lost() -> None:
    sixteen = offer("m16", 16, 16, 0.8)
    of = instance([EIGHT, sixteen], {"c": [row("small", [(2, 2, 2)], priority=9), row("large", [(8, 8, 1)])]})

    assert (verdict(of, 0, 0).lost_mean, verdict(of, 0, 0).lost_unprotected) == (1.0, 0.0)


def test_what_is_called_short_is_not_lost_and_must_not_be_hostable() -> None:
    of = instance([EIGHT], {"c": [row("r", [(2, 2, 8)])]})
    short = verdict(of, 0, short={"r": 4})

    assert (short.unplaced, short.lost_mean, short.short) == (0, 0.0, 4)
    assert short.short_hostable == 4, "machines are on offer"
    assert short.completed_usd_per_hour == 0.8, "starving is not cheap"
    sold_out = instance([replace(EIGHT, stock=1)], {"c": [row("r", [(2, 2, 8)])]})
    assert verdict(sold_out, 0, short={"r": 4}).short_hostable == 0
    assert verdict(sold_out, 0, short={"r": 6}).short_hostable == 2, "two of them have room on what is held"


def test_an_impossible_pod_costs_nothing_and_excuses_nobody_else() -> None:
    of = instance([EIGHT], {"c": [row("r", [(2, 2, 4), (1000, 1, 1)])]})
    whole = settled(of, 0)
    report = replace(whole.rows[0], is_satisfied=False, short={1: 1})
    good = judge(of, replace(whole, rows=(report,)), scheduler=LEAST)
    bad = judge(of, replace(settled(of), rows=(replace(report, short={0: 4, 1: 1}),)), scheduler=LEAST)

    assert (good.impossible, good.short_hostable, good.lost_to_neighbour) == (1, 0, 0)
    assert good.completed_usd_per_hour == 0.4
    assert good.held_ratio["cpu"] == 1.0
    assert (bad.short_hostable, bad.lost_to_neighbour) == (4, 4)
    assert bad.completed_usd_per_hour == pytest.approx(0.4)


def test_expected_interruptions_follow_the_claims() -> None:
    """Half of a machine at $64 and 0.01 an hour costs $0.32, wherever the claims say that the pods run."""
    spot = offer("s8", 8, 8, 0.1, capacity_type="Spot", interruption_probability=0.01)
    of = instance([EIGHT, spot], {"c": [row("dear", [(4, 2, 1)], interruption_bucket=9)]})
    claims = (Claim("dear", 0, 1),)

    def cost(offer_of_claims: int) -> float:
        held = tuple(
            replace(h, claims=claims if h.offer == offer_of_claims else ())
            for h in settled(of, 0, 1, has_claims=True).holdings
        )
        return judge(of, replace(settled(of, 0, 1, has_claims=True), holdings=held), scheduler=LEAST).cost_usd_per_hour

    assert cost(0) == pytest.approx(0.5)
    assert cost(1) == pytest.approx(0.82)


def test_paid_machines_cost_nothing_and_complete_for_nothing() -> None:
    metal = offer("metal", 8, 8, 3.0, capacity_type="Reserved", is_existing=True, stock=2)
    of = instance([metal, EIGHT], {"c": [row("r", [(2, 2, 8)])]})

    assert verdict(of, 0).cost_usd_per_hour == 0.0
    assert verdict(of, 0).completed_usd_per_hour == 0.0
    assert verdict(of, 1).completed_usd_per_hour == 0.4


def test_machines_of_a_cluster_without_demand_are_paid_for() -> None:
    of = instance([EIGHT], {"c": [row("r", [(2, 2, 4)])]})
    answer = settled(of, 0)
    stray = Holding(machine_id="stray", offer=0, cluster="gone")

    assert judge(of, replace(answer, holdings=(*answer.holdings, stray)), scheduler=LEAST).cost_usd_per_hour == 0.8


def test_verdicts_are_equal_for_equal_answers() -> None:
    of = instance([EIGHT], {"c": [row("r", [(3, 1, 9), (1, 3, 9)]), row("s", [(2, 2, 5)], priority=4)]})
    answer = packed(of)

    assert judge(of, answer, scheduler=LEAST) == judge(of, answer, scheduler=LEAST)
    assert judge(of, answer, scheduler=LEAST).violations == ()
