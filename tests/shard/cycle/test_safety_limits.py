"""Which of a decision's actions may be enqueued: machines that are free, then the cap, then the limit."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.shard.safety_limits import choose, reclaim_cap
from tests.engine.proof import in_proportion
from tests.shard.world import need


@st.composite
def actions(draw: st.DrawFn) -> list[Action]:
    """Draw actions on different machines."""
    kinds = draw(st.lists(st.sampled_from(ActionKind), max_size=30))
    return [
        Action(
            kind=kind,
            machine_id=MachineId(f"m{number}"),
            cluster=ClusterId(draw(st.sampled_from(["c1", "c2"]))),
            reason="test",
        )
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.rule("shard 3/10")
@given(
    actions(),
    st.frozensets(st.integers(0, 29).map(lambda number: MachineId(f"m{number}")), max_size=10),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.integers(0, 12),
    st.dictionaries(st.sampled_from(["c1", "c2"]), st.integers(0, 3)),
    st.integers(1, 40),
)
@settings(max_examples=in_proportion(200), deadline=None)
def test_every_action_is_kept_or_accounted_for(
    decided: list[Action],
    in_flight: frozenset[MachineId],
    fraction: float,
    actions_max: int,
    spent: dict[str, int],
    room: int,
) -> None:
    """In the order that was decided; the cap counts what the period has seen, and is no business of other kinds."""
    configured = {"c1": 40}
    chosen = choose(
        decided,
        in_flight=in_flight,
        fraction=fraction,
        configured_by_cluster=configured,
        spent=spent,
        actions_max=actions_max,
        backed_off=frozenset(),
        room=room,
    )

    told = chosen.in_flight + chosen.refused + chosen.capped + chosen.postponed + chosen.left
    assert len(chosen.actions) + told == len(decided)
    assert (chosen.left == 0) or (not actions_max and len(chosen.actions) == room)
    free = [action for action in decided if action.machine_id not in in_flight]
    assert chosen.left or chosen.in_flight == len(decided) - len(free)
    places = [free.index(action) for action in chosen.actions]
    assert places == sorted(places)
    assert not actions_max or len(chosen.actions) <= actions_max
    if fraction:
        for cluster in ("c1", "c2"):
            assert chosen.spent.get(cluster, 0) <= max(
                spent.get(cluster, 0), reclaim_cap(fraction, configured.get(cluster, 0))
            )
    if not chosen.capped and not chosen.postponed and not chosen.left:
        assert list(chosen.actions) == free
        reclaims = Counter(action.cluster for action in free if action.kind is ActionKind.RECLAIM)
        assert not fraction or Counter(chosen.spent) == Counter(spent) + reclaims


@pytest.mark.rule("shard 8/5")
def test_rows_that_are_backed_off_take_no_room() -> None:
    """Others behind them get their turn; machines that are taken from such a row's cluster are another matter."""
    row = need("c1", "4")
    decided = [
        Action(kind=kind, machine_id=MachineId(name), cluster=row.cluster, reason="test", profile=profile)
        for name, kind, profile in (
            ("m1", ActionKind.BOOTSTRAP, row.profile),
            ("m2", ActionKind.PROVISION, row.profile),
            ("m3", ActionKind.PREEMPT, None),
            ("m4", ActionKind.BOOTSTRAP, need("c1", "4", priority=7).profile),
            ("m5", ActionKind.DELETE, None),
        )
    ]
    chosen = choose(
        decided,
        in_flight=frozenset(),
        backed_off=frozenset({row.key}),
        fraction=0.05,
        configured_by_cluster={},
        spent={},
        actions_max=0,
        room=2,
    )

    assert [action.machine_id for action in chosen.actions] == ["m3", "m4"]
    assert (chosen.refused, chosen.left) == (2, 1)
