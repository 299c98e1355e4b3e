"""The claims checker finds every rule that is broken, each planted alone in a sound answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.quality.claims import violations
from bench.quality.reports.handmade import GIB, instance, offer, row
from bench.quality.values import (
    CPU,
    MEMORY,
    MILLI,
    PODS,
    Claim,
    Holding,
    Instance,
    Offer,
    PackingOverhead,
    PackingRequirement,
    PackingShape,
    PackingSpread,
    RowReport,
    Settled,
)
from bigfleet.model import labels as keys


def zone(number: int, **fields: Any) -> Offer:
    """Return a class of one zone, with 8 cpu, 16 GiB and room for 4 pods."""
    return offer(
        f"m{number}",
        8,
        16,
        0.4,
        id=f"m{number}",
        instance_type="m",
        zone=f"z{number}",
        stock=2,
        allocatable={CPU: 8 * MILLI, MEMORY: 16 * GIB, PODS: 4 * MILLI},
        **fields,
    )


ROWS = (
    row("plain", [(2, 2, 2)]),
    row("single", [], shapes=(PackingShape({CPU: MILLI, MEMORY: GIB}, 2, 1),)),
    row("gang", [(1, 1, 2)], requirements=(PackingRequirement(keys.ZONE, "Same"),), group="g"),
    row("spread", [(1, 1, 2)], spreads=(PackingSpread(keys.ZONE, 1, True),)),
    row("pinned", [(1, 1, 1)], interruption_bucket=27),
)


def fleet() -> Instance:
    """Return an instance of two zones and one spot class, with a DaemonSet of 1 cpu in one pod."""
    spot = zone(2, capacity_type="Spot", interruption_probability=0.01)
    made = instance([zone(0), zone(1), spot], {"c": ROWS})
    clusters = (replace(made.clusters[0], overheads=(PackingOverhead({CPU: MILLI, PODS: MILLI}),)),)
    return replace(made, steps=(clusters,))


def holding(number: int, offer_number: int, **claims: int) -> Holding:
    """Return a machine with claims by row, all on the first shape."""
    return Holding(
        machine_id=f"m{offer_number}-{number}",
        offer=offer_number,
        cluster="c",
        claims=tuple(Claim(name, 0, count) for name, count in claims.items()),
    )


def answer(*holdings: Holding, short: dict[str, int] | None = None) -> Settled:
    """Return an answer; rows are satisfied but for those that are named as short."""
    missing = short or {}
    return Settled(
        holdings=holdings,
        rows=tuple(
            RowReport(
                cluster="c",
                row=one.id,
                is_satisfied=one.id not in missing,
                short={0: missing[one.id]} if one.id in missing else {},
            )
            for one in ROWS
        ),
        has_claims=True,
        cycles=1,
        actions=1,
        actions_unneeded=0,
        engine_seconds=0.0,
    )


FIRST = holding(0, 0, plain=2, single=1)
SECOND = holding(0, 1, single=1, spread=1, pinned=1)
THIRD = holding(1, 0, gang=2, spread=1)
SOUND = (FIRST, SECOND, THIRD)


def test_a_sound_answer_breaks_no_rule() -> None:
    assert violations(fleet(), answer(*SOUND)) == []


def with_claims(of: Holding, *claims: Claim) -> Holding:
    """Return the machine with other claims."""
    return replace(of, claims=claims)


PLANTED: list[tuple[str, Callable[[], Settled], str]] = [
    (
        "overfull cpu",
        lambda: answer(holding(0, 0, plain=2, single=1, gang=2, pinned=1), SECOND, holding(1, 0, spread=1)),
        "claims take 8000 of cpu, the machine has 7000",
    ),
    (
        "pods limit",
        lambda: answer(holding(0, 0, gang=2, single=1, pinned=1), holding(0, 1, plain=2, single=1), THIRD),
        "claims take 4000 of pods, the machine has 3000",
    ),
    (
        "one per machine",
        lambda: answer(holding(0, 0, single=2), holding(0, 1, plain=2, spread=1), holding(1, 0, gang=2, spread=1)),
        "2 pods of single/0, at most 1 may share a machine",
    ),
    (
        "pinned on spot",
        lambda: answer(FIRST, holding(0, 1, single=1, spread=1), THIRD, holding(0, 2, pinned=1)),
        "pinned is pinned, the machine may be interrupted",
    ),
    (
        "lost pod",
        lambda: answer(holding(0, 0, plain=1, single=1), SECOND, THIRD),
        "plain/0: 1 pods have a claim, 2 are",
    ),
    (
        "pod twice",
        lambda: answer(*SOUND, holding(1, 1, plain=1)),
        "plain/0: 3 pods have a claim, the row has 2",
    ),
    (
        "short beyond what it says",
        lambda: answer(holding(0, 0, single=1), SECOND, THIRD, short={"plain": 1}),
        "plain/0: 0 pods have a claim, 1 are reported as hosted",
    ),
    (
        "gang in two domains",
        lambda: answer(FIRST, holding(0, 1, single=1, spread=1, gang=1), holding(1, 0, gang=1, spread=1, pinned=1)),
        "a gang's claims lie in 2 domains: z0, z1",
    ),
    (
        "skew",
        lambda: answer(FIRST, holding(0, 1, single=1, pinned=1), holding(1, 0, spread=2), holding(1, 1, gang=2)),
        "the skew over topology.kubernetes.io/zone is 2, at most 1",
    ),
    ("held twice", lambda: answer(*SOUND, replace(THIRD, claims=())), "m0-1 is held 2 times"),
    (
        "beyond the stock",
        lambda: answer(*SOUND, holding(7, 0)),
        "m0: 3 machines are held, the stock is 2",
    ),
    (
        "no such row",
        lambda: answer(*SOUND, holding(1, 1, other=1)),
        "claim other/0 × 1 names no pods of c",
    ),
    (
        "no such cluster",
        lambda: answer(*SOUND, replace(holding(1, 1), cluster="d")),
        "held by d, which has no demand",
    ),
    (
        "nothing reported",
        lambda: replace(answer(*SOUND), rows=answer(*SOUND).rows[1:]),
        "c/plain: the candidate reports nothing",
    ),
]


@pytest.mark.parametrize(("planted", "says"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_found(planted: Callable[[], Settled], says: str) -> None:
    found = violations(fleet(), planted())

    assert any(says in sentence for sentence in found), found


def test_a_profile_that_does_not_match_is_found() -> None:
    made = instance([offer("m", 8, 8, 0.4), offer("n", 8, 8, 0.4)], {"c": [row("r", [(1, 1, 1)], "n")]})
    wrong = Settled(
        holdings=(Holding(machine_id="m-0", offer=0, cluster="c", claims=(Claim("r", 0, 1),)),),
        rows=(RowReport(cluster="c", row="r", is_satisfied=True),),
        has_claims=True,
        cycles=1,
        actions=1,
        actions_unneeded=0,
        engine_seconds=0.0,
    )

    assert violations(made, wrong) == ["m-0: r does not match the machine"]
    right = replace(wrong, holdings=(replace(wrong.holdings[0], offer=1),))
    assert violations(made, right) == []
