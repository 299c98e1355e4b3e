"""Settling many shortfalls at once (bigfleet.coordinator.pending_shortfalls) changes no move: one by one gives the
same."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.coordinator.rebalance_plan import _Pass, plan
from bigfleet.coordinator.reports import ZoneCapacity, prepared
from bigfleet.coordinator.tables import ProviderRow, QuotaKey, QuotaRow
from bigfleet.coordinator.transfers import FleetView, FlowKey, Knobs, Memory, ShortfallKey
from bigfleet.model import labels
from bigfleet.model.ids import Fingerprint, ShardId
from bigfleet.model.ownership import Base
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shard_report import Shortfall
from tests.engine.proof import in_proportion

TYPES = {"small": {"cpu": 4_000}, "big": {"cpu": 16_000, "memory": 64_000}}
NAMES = [("cpu",), ("cpu", "memory")]
SHARDS = [ShardId(f"s-{number}") for number in range(4)]


@st.composite
def shortfalls(draw: st.DrawFn, number: int) -> Shortfall:
    kinds = draw(st.sampled_from([(), ("small",), ("big",)]))
    requirements = (Requirement(labels.INSTANCE_TYPE, Operator.IN, kinds),) if kinds else ()
    return Shortfall(
        fingerprint=Fingerprint(f"f-{number}"),
        requirements=requirements,
        deficit={name: draw(st.integers(1, 400)) * 1_000 for name in draw(st.sampled_from(NAMES))},
        min_unit={},
        priority=draw(st.sampled_from([0, 100])),
        age_cycles=draw(st.sampled_from([5, 6, 13])),
        interruption_bucket=0,
        is_topology_constrained=False,
    )


@st.composite
def crowded_fleets(draw: st.DrawFn) -> tuple[FleetView, Memory]:
    """Return a fleet in which many ask for the same few kinds of machine, and few have any."""
    shards = []
    for shard_id in SHARDS:
        kinds = draw(st.sets(st.tuples(st.sampled_from(sorted(TYPES)), st.sampled_from("ab")), max_size=2))
        rows = [ZoneCapacity(*kind, draw(st.integers(1, 12)), TYPES[kind[0]]) for kind in sorted(kinds)]
        is_idle = draw(st.booleans())
        shards.append(
            prepared(
                shard_id=shard_id,
                provider_address=draw(st.sampled_from(["p:1", "p:1", "q:1"])),
                base=Base.DOMAINS,
                shortfalls=[draw(shortfalls(index)) for index in range(draw(st.integers(0, 6)))],
                idle=rows if is_idle else (),
                speculative=() if is_idle else rows,
                type_counts={kind: draw(st.sampled_from([0, 30])) for kind in TYPES},
            )
        )
    flows = draw(
        st.sets(st.tuples(st.sampled_from(sorted(TYPES)), st.sampled_from("ab"), st.integers(0, 2)), max_size=3)
    )
    memory = Memory(
        cooling=frozenset(FlowKey.between(kind, zone, SHARDS[at], SHARDS[at + 1]) for kind, zone, at in flows),
        moving={ShortfallKey(SHARDS[0], Fingerprint("f-0")): {"cpu": 9_000}},
    )
    slots = QuotaRow({SHARDS[0]: draw(st.integers(0, 5)), SHARDS[1]: 9})
    quotas = {QuotaKey("p", "r"): slots} if draw(st.booleans()) else {}
    return FleetView(shards=tuple(shards), providers={"p": ProviderRow("p:1", "r")}, quotas=quotas), memory


@pytest.mark.rule("coordinator 7/1")
@pytest.mark.slow
@settings(max_examples=in_proportion(300))
@given(crowded_fleets(), st.integers(0, 12))
def test_many_at_once_and_one_by_one_give_the_same_moves(given_fleet: tuple[FleetView, Memory], drains: int) -> None:
    view, memory = given_fleet
    knobs = Knobs(drains_max=drains)

    at_once = plan(view, memory, knobs)
    with patch.object(_Pass, "_settle", lambda *_: None):
        one_by_one = plan(view, memory, knobs)

    assert at_once.moves == one_by_one.moves
    assert at_once.skipped().keys() == one_by_one.skipped().keys()
