"""What is counted by class is what looking at each machine and row would find."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.engine.columnar.engine import ColumnarEngine
from bigfleet.engine.columns.store import ColumnSnapshot, ColumnStore, Offer, column_snapshot
from bigfleet.engine.decision import ActionKind, CapacityPool, Options
from bigfleet.engine.matching import fits
from bigfleet.model import vector
from bigfleet.model.frames import Confidence
from bigfleet.model.labels import ZONE
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.shard.inventory.machine_shapes import Ask, FleetClasses, classes_of, live_prices
from bigfleet.shard.status.capacity_hints import HintOffer, HintOffers
from bigfleet.shard.status.cycle_publisher import claimed_machines, taken_rows
from bigfleet.shard.status.need_status import UnmetRows
from bigfleet.shard.status.views import ViewContext, need_views
from tests.engine.proof import in_proportion
from tests.shard.world import machine
from tests.strategies import FleetInput, fleets

_NOTHING = np.zeros(0, np.int64)


def _profile() -> Profile:
    return Profile(requirements=(Requirement(ZONE, Operator.IN, ("za",)),))


def _is_sold_out(each: Machine, options: Options) -> bool:
    if each.state is not MachineState.SPECULATIVE or each.id in options.probes:
        return False
    return CapacityPool.of(each) in options.sold_out


def looked_at(need: Need, rows: list[Need], free: list[Machine]) -> tuple[int, Confidence, float]:
    """Return the hint about a row, found machine by machine."""
    unit = need.min_unit
    for row in rows:
        unit = vector.maximum(unit, row.min_unit)
    fitting = [each for each in free if fits(need.profile, unit, each)]
    idle = [each.price_usd_per_hour for each in fitting if each.state is MachineState.IDLE]
    slots = [each.price_usd_per_hour for each in fitting if each.state is MachineState.SPECULATIVE]
    confidence = Confidence.HIGH if idle else Confidence.MEDIUM if slots else Confidence.NONE
    return len(idle) + len(slots), confidence, min(idle or slots or [0.0])


@pytest.mark.rule("shard 10.5/4")
@given(fleets(), st.data())
@settings(max_examples=in_proportion(120), deadline=None)
def test_offers_claims_and_unmet_rows_equal_what_looking_at_each_finds(fleet: FleetInput, data: st.DataObject) -> None:
    """Hints, the demand gauge and verdicts, after a decision with some machines pending."""
    view = column_snapshot(fleet.snapshot)
    decision = ColumnarEngine().decide(view, fleet.demand, fleet.options)
    busy = data.draw(st.sets(st.sampled_from(sorted(view.rows)))) if view.rows else set()
    context = ViewContext(
        cycle=1,
        computed_at_unix_nanos=1,
        snapshot=view,
        demand=fleet.demand,
        options=fleet.options,
        refused=frozenset(),
    )
    classes, fitting = FleetClasses().of(view, taken_rows(decision, context, busy))
    by_cluster: dict[str, list[Need]] = {}
    for need in fleet.demand:
        by_cluster.setdefault(need.cluster, []).append(need)
    offers = HintOffers()
    offers.update(by_cluster, classes, fitting)
    claimed = {a.machine_id for a in decision.actions if a.kind in (ActionKind.BOOTSTRAP, ActionKind.PROVISION)}
    machines = fleet.snapshot.machines.values()
    gone = claimed | busy | {each.id for each in machines if _is_sold_out(each, fleet.options)}
    free = [each for each in machines if each.id not in gone]

    for need in fleet.demand:
        hint = offers.hint((need.cluster, need.fingerprint))
        alike = [row for row in by_cluster[need.cluster] if row.fingerprint == need.fingerprint]
        assert hint is not None
        told = (hint.available_count, hint.confidence, hint.price_usd_per_hour)
        assert told == looked_at(need, alike, free)

    buckets = bytes(need.profile.interruption_bucket for need in fleet.demand)
    held = {bucket: count for bucket, count in claimed_machines(decision.rows, buckets).items() if count}
    assert held == {bucket: count for bucket, count in claimed_machines(tuple(decision.rows), b"").items() if count}

    short = [row for row in decision.rows if not row.satisfied]
    unmet = [(id(row.need), row.residual, row.reason) for row in UnmetRows().of(short, context, fitting)]
    shown = [(id(row.need), row.residual, row.reason) for row in need_views(decision, context) if not row.satisfied]
    assert sorted(unmet, key=lambda row: row[0]) == sorted(shown, key=lambda row: row[0])


@given(fleets(rows_max=8), st.data())
@settings(max_examples=in_proportion(60), deadline=None)
def test_offers_that_follow_demand_are_those_that_begin_with_it(fleet: FleetInput, data: st.DataObject) -> None:
    """Rows come, go and stay the same object; only what asks differently or is offered otherwise counts as changed."""
    view, pool = column_snapshot(fleet.snapshot), list(fleet.demand)
    following = HintOffers()
    before: dict[tuple[str, str], tuple[Ask, HintOffer | None]] = {}
    taken = st.lists(st.integers(0, max(0, len(view.rows) - 1)), max_size=4, unique=True)
    for _cycle in range(4):
        # A row that is an equal copy is another object, and asks the same.
        rows = [replace(row) if data.draw(st.booleans()) else row for row in pool if data.draw(st.booleans())]
        by_cluster = {str(name): [row for row in rows if row.cluster == name] for name in {row.cluster for row in rows}}
        is_taken = np.array(data.draw(taken) if view.rows else [], np.int64)
        classes, fitting = FleetClasses().of(view, is_taken)

        changed = following.update(by_cluster, classes, fitting)

        beginning = HintOffers()
        keys = beginning.update(by_cluster, classes, fitting)
        now = {key: (_asked_under(key, rows), beginning.offer(key)) for key in keys}
        assert keys == {(row.cluster, row.fingerprint) for row in rows}
        assert {key: following.hint(key) for key in keys | before.keys()} == {
            key: beginning.hint(key) for key in keys | before.keys()
        }
        assert all(list(following.of(name)) == list(beginning.of(name)) for name in by_cluster)
        assert changed == {key for key in keys if now[key] != before.get(key)}
        before = now


def _asked_under(key: tuple[str, str], rows: list[Need]) -> Ask:
    alike = [row for row in rows if (row.cluster, row.fingerprint) == key]
    unit = alike[0].min_unit
    for row in alike:
        unit = vector.maximum(unit, row.min_unit)
    return Ask(alike[0].profile.requirements, vector.vector_key(unit))


def test_classes_follow_a_vocabulary_that_grows_and_one_that_is_made_anew() -> None:
    """A requirement is asked again of the shapes that are new, and of all when they are numbered again."""
    store, kept = ColumnStore(), FleetClasses()
    ask = Ask.of(Need(cluster=machine("m", MachineState.IDLE).cluster, profile=_profile(), aggregate={}))

    def count(view: ColumnSnapshot) -> int:
        classes, fitting = kept.of(view, _NOTHING)
        return int(classes.idle[fitting.fitting(ask)].sum())

    counts = []
    for number in range(4):
        zone = "za" if number % 2 else "zb"
        store.insert(machine(f"m{number}", MachineState.IDLE, zone=zone, instance_type=f"t{number}"), 0.0)
        counts.append(count(store.snapshot()))
    store._forget_unused()
    store.insert(machine("m9", MachineState.IDLE, zone="za"), 0.0)
    counts.append(count(store.snapshot()))

    assert counts == [0, 1, 1, 2, 3]


def test_prices_that_no_machine_has_any_more_are_not_looked_up() -> None:
    """Of a thousand offers two are read."""

    class Counted(list[Offer]):
        reads = 0

        def __iter__(self) -> Iterator[Offer]:
            self.reads += len(self)
            return super().__iter__()

        def __getitem__(self, place: Any) -> Any:
            self.reads += 1
            return super().__getitem__(place)

    store = ColumnStore()
    for number in range(1000):
        store.insert(machine("m0", MachineState.IDLE, price_usd_per_hour=2.0 + number), 0.0)
    store.insert(machine("m0", MachineState.IDLE, price_usd_per_hour=1.5), 0.0)
    store.insert(machine("m1", MachineState.IDLE, price_usd_per_hour=1.25), 0.0)
    view = store.snapshot()
    classes = classes_of(view, _NOTHING)
    offers = view.vocabulary.offers = Counted(view.vocabulary.offers)

    assert live_prices(view, classes).tolist() == [1.25]
    assert offers.reads == 2


def test_a_price_counts_in_any_state_but_failed() -> None:
    store = ColumnStore()
    for number, (state, price) in enumerate(
        ((MachineState.FAILED, 0.1), (MachineState.CONFIGURED, 0.5), (MachineState.IDLE, 2.0))
    ):
        cluster = "c1" if state is MachineState.CONFIGURED else ""
        each = machine(f"m{number}", state, price_usd_per_hour=price, cluster=cluster, last_error="x" * (number == 0))
        store.insert(each, None)
    view = store.snapshot()

    assert live_prices(view, classes_of(view, _NOTHING)).tolist() == [0.5]
