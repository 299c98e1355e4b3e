"""The rebalancing pass (docs/spec/coordinator.md §7): its worked examples, and what holds for every fleet."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.coordinator.rebalance_plan import plan
from bigfleet.coordinator.reports import ShardFigures, ZoneCapacity, asking_of, prepared
from bigfleet.coordinator.tables import ProviderRow, QuotaKey, QuotaRow
from bigfleet.coordinator.transfers import (
    FleetView,
    FlowKey,
    Knobs,
    Memory,
    RebalancePlan,
    ShortfallKey,
    Tier,
    Transfer,
)
from bigfleet.model import labels, vector
from bigfleet.model.ids import Fingerprint, MachineId, ShardId
from bigfleet.model.ownership import Base, Reservation
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.shard_report import Shortfall
from bigfleet.model.vector import parse_vector

PROVIDER = "provider:9100"
FILE = Path(__file__).parents[2] / "cases" / "rebalance" / "worked_examples.yaml"
DOCUMENT = yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
DEFAULTS: dict[str, Any] = DOCUMENT["defaults"]
TYPE = "m6i.4xlarge"


def shortfall_of(given_fields: Mapping[str, Any]) -> tuple[ShardId, Shortfall]:
    fields = DEFAULTS["shortfall"] | given_fields
    requirements = [Requirement(labels.INSTANCE_TYPE, Operator.IN, (fields["type"],))]
    if "zone" in fields:
        requirements.append(Requirement(labels.ZONE, Operator.IN, (fields["zone"],)))
    if "same" in fields:
        requirements.append(Requirement(fields["same"], Operator.SAME))
    profile = Profile(tuple(requirements), priority=fields["priority"], interruption_bucket=fields["bucket"])
    return ShardId(fields["shard"]), Shortfall(
        fingerprint=profile.fingerprint,
        requirements=profile.requirements,
        deficit=parse_vector(fields["deficit"]),
        min_unit=parse_vector(fields["min_unit"]),
        priority=fields["priority"],
        age_cycles=fields["age"],
        interruption_bucket=fields["bucket"],
        is_topology_constrained="same" in fields,
    )


def drained(machine_id: str, to: str, instance_type: str) -> Reservation:
    return Reservation(
        machine_id=MachineId(machine_id),
        to_shard=ShardId(to),
        instruction_id="1-1",
        is_ready=True,
        instance_type=instance_type,
        zone="a",
    )


def counts_of(zones: Mapping[str, int]) -> list[ZoneCapacity]:
    return [ZoneCapacity(TYPE, zone, count, parse_vector(DEFAULTS["types"][TYPE])) for zone, count in zones.items()]


def view_of(case: Mapping[str, Any]) -> tuple[FleetView, dict[str, ShortfallKey]]:
    shortfalls = [shortfall_of(each) for each in case["shortfalls"]]
    names = {"east-0", "east-1"} | {name for name, _ in shortfalls}
    names |= set(case.get("idle", {})) | set(case.get("speculative", {})) | set(case.get("bound", {}))
    shards = []
    for name in sorted(names):
        free = sum(case.get("idle", {}).get(name, {}).values()) + sum(
            case.get("speculative", {}).get(name, {}).values()
        )
        shards.append(
            prepared(
                shard_id=ShardId(name),
                provider_address="other:9100" if name in case.get("elsewhere", ()) else PROVIDER,
                base=Base.ALL if name in case.get("base_all", ()) else Base.DOMAINS,
                is_fresh=name not in case.get("stale", ()),
                shortfalls=[each for owner, each in shortfalls if owner == name],
                idle=counts_of(case.get("idle", {}).get(name, {})),
                speculative=counts_of(case.get("speculative", {}).get(name, {})),
                type_counts={TYPE: case.get("bound", {}).get(name, 0) + free},
                ready=[drained(machine, "east-0", TYPE) for machine in case.get("ready", {}).get(name, ())],
            )
        )
    providers, quotas = {}, {}
    if provider := case.get("provider"):
        providers = {provider["name"]: ProviderRow(PROVIDER, provider["region"])}
        quotas = {QuotaKey(provider["name"], provider["region"]): QuotaRow(provider["slots"])}
    # One known machine of the type somewhere, so that a drain knows its size.
    known = prepared(shard_id=ShardId("far"), provider_address="far:9100", base=Base.DOMAINS, idle=counts_of({"a": 1}))
    keys = {str(owner): ShortfallKey(owner, each.fingerprint) for owner, each in shortfalls}
    return FleetView(shards=(*shards, known), providers=providers, quotas=quotas), keys


def memory_of(case: Mapping[str, Any], keys: Mapping[str, ShortfallKey]) -> Memory:
    return Memory(
        cooling=frozenset(
            FlowKey.between(kind, zone, ShardId(left), ShardId(right))
            for kind, zone, left, right in case.get("cooling", ())
        ),
        refused_drains=frozenset(
            (ShardId(donor), keys["east-0"].fingerprint) for donor in case.get("refused_drains", ())
        ),
        moving={keys[name]: parse_vector(capacity) for name, capacity in case.get("moving", {}).items()},
        draining={keys[name]: parse_vector(capacity) for name, capacity in case.get("draining", {}).items()},
        draining_donors=frozenset(ShardId(name) for name in case.get("draining_donors", ())),
    )


def told(move: Transfer) -> dict[str, Any]:
    fields: dict[str, Any] = {"tier": move.tier.value, "donor": move.donor, "zone": move.zone, "count": move.count}
    if move.quota is not None:
        fields["quota"] = list(move.quota)
    if move.machine_ids:
        fields["ids"] = list(move.machine_ids)
    return fields


@pytest.mark.rule("coordinator 7.6/1")
@pytest.mark.parametrize("case", DOCUMENT["cases"], ids=lambda case: case["name"].replace(" ", "-"))
def test_worked_examples(case: Mapping[str, Any]) -> None:
    view, keys = view_of(case)

    planned = plan(view, memory_of(case, keys))

    assert [told(move) for move in planned.moves] == case.get("gives", [])
    assert {str(key.shard_id): reason.label for key, reason in planned.skipped().items()} == case.get("skipped", {})


@pytest.mark.rule("coordinator 7/2")
def test_a_move_says_in_one_sentence_who_lacks_what_and_who_gives() -> None:
    view, _ = view_of(DOCUMENT["cases"][0])

    (move,) = plan(view).moves

    assert move.why == (
        "east-0 lacks cpu 100 memory 400Gi at priority 700000 for 6 cycles: 7 idle machines of m6i.4xlarge in a come"
        " from east-1; they close all of it, 5 stay there"
    )


# ---- every fleet -------------------------------------------------------------------------------------------------

TYPES = {"small": {"cpu": 4_000}, "big": {"cpu": 16_000, "memory": 64_000}, "gpu": {"cpu": 8_000, "gpu": 1_000}}


@st.composite
def shortfalls(draw: st.DrawFn, number: int) -> Shortfall:
    requirements = []
    kinds = draw(st.sets(st.sampled_from(sorted(TYPES)), max_size=2))
    if kinds:
        requirements.append(Requirement(labels.INSTANCE_TYPE, Operator.IN, tuple(kinds)))
    if draw(st.booleans()):
        requirements.append(Requirement(labels.ZONE, Operator.IN, (draw(st.sampled_from("ab")),)))
    is_same = draw(st.integers(0, 5)) == 0
    if is_same:
        requirements.append(Requirement(labels.RACK, Operator.SAME))
    deficit = {
        name: draw(st.integers(1, 60)) * 1_000
        for name in draw(st.sets(st.sampled_from(["cpu", "memory", "gpu"]), min_size=1))
    }
    return Shortfall(
        fingerprint=Fingerprint(f"f-{number}"),
        requirements=tuple(requirements),
        deficit=deficit,
        min_unit={name: milli for name, milli in {"cpu": draw(st.sampled_from([0, 1_000, 5_000]))}.items() if milli},
        priority=draw(st.sampled_from([0, 100, 1_000])),
        age_cycles=draw(st.sampled_from([1, 5, 6, 12, 13])),
        interruption_bucket=draw(st.integers(0, 3)),
        is_topology_constrained=is_same,
    )


@st.composite
def rows(draw: st.DrawFn) -> list[ZoneCapacity]:
    kinds = draw(st.sets(st.tuples(st.sampled_from(sorted(TYPES)), st.sampled_from("ab")), max_size=4))
    return [
        ZoneCapacity(kind, zone, draw(st.integers(1, 30)), TYPES[kind] if draw(st.integers(0, 7)) else {})
        for kind, zone in sorted(kinds)
    ]


@st.composite
def fleets(draw: st.DrawFn) -> FleetView:
    shards = []
    for number in range(draw(st.integers(2, 5))):
        shards.append(
            prepared(
                shard_id=ShardId(f"s-{number}"),
                provider_address=draw(st.sampled_from(["p:1", "p:1", "p:1", "q:1", ""])),
                base=draw(st.sampled_from([Base.DOMAINS, Base.DOMAINS, Base.DOMAINS, Base.ALL])),
                is_fresh=draw(st.integers(0, 7)) > 0,
                shortfalls=[draw(shortfalls(index)) for index in range(draw(st.integers(0, 2)))],
                idle=draw(rows()),
                speculative=draw(rows()),
                type_counts={kind: draw(st.integers(0, 60)) for kind in TYPES},
                ready=[drained(f"m-{number}-{index}", f"s-{index}", "big") for index in range(draw(st.integers(0, 2)))],
            )
        )
    quotas = {QuotaKey("p", "r"): QuotaRow({ShardId("s-0"): 5, ShardId("s-1"): 9})} if draw(st.booleans()) else {}
    return FleetView(shards=tuple(shards), providers={"p": ProviderRow("p:1", "r")}, quotas=quotas)


def shards_of(view: FleetView) -> dict[ShardId, ShardFigures]:
    return {shard.shard_id: shard for shard in view.shards}


def shortfall_named(view: FleetView, move: Transfer) -> Shortfall:
    return next(s for s in shards_of(view)[move.requester].shortfalls if s.fingerprint == move.fingerprint)


@pytest.mark.rule("coordinator 7/1")
@given(fleets(), st.integers(0, 99))
def test_the_order_of_the_input_plays_no_part(view: FleetView, seed: int) -> None:
    shuffled = list(view.shards)
    random.Random(seed).shuffle(shuffled)

    def told_all(planned: RebalancePlan) -> tuple[object, ...]:
        return planned.moves, planned.skipped()

    assert told_all(plan(view)) == told_all(
        plan(FleetView(shards=tuple(shuffled), providers=view.providers, quotas=view.quotas))
    )


@pytest.mark.rule("coordinator 7.1/1", "coordinator 7.4/3")
@given(fleets())
def test_who_gives_who_gets_and_how_much(view: FleetView) -> None:
    given_away: Counter[tuple[ShardId, Tier, str, str]] = Counter()
    flows: list[FlowKey] = []
    got: dict[ShortfallKey, list[Transfer]] = {}
    for move in plan(view).moves:
        donor, requester = shards_of(view)[move.donor], shards_of(view)[move.requester]
        shortfall = shortfall_named(view, move)
        assert donor is not requester
        assert donor.provider_address == requester.provider_address != ""
        assert donor.is_fresh
        assert requester.is_fresh
        assert donor.base is requester.base is Base.DOMAINS
        assert shortfall.age_cycles > (12 if move.tier is Tier.PREEMPT else 5)
        assert not shortfall.is_topology_constrained
        given_away[(move.donor, move.tier, move.instance_type, move.zone)] += move.count
        got.setdefault(move.shortfall, []).append(move)
        if move.tier is not Tier.READY:
            flows.append(move.flow)
        if move.tier in (Tier.IDLE, Tier.SPECULATIVE):
            rows_there = donor.idle if move.tier is Tier.IDLE else donor.speculative
            row = next(r for r in rows_there if (r.instance_type, r.zone) == (move.instance_type, move.zone))
            assert asking_of(shortfall).is_served_by(row)
            assert not any(asking_of(s).is_served_by(row) for s in donor.shortfalls)
    for (donor_id, tier, kind, zone), count in given_away.items():
        if tier in (Tier.IDLE, Tier.SPECULATIVE):
            rows_there = getattr(shards_of(view)[donor_id], "idle" if tier is Tier.IDLE else "speculative")
            row = next(r for r in rows_there if (r.instance_type, r.zone) == (kind, zone))
            assert row.count - count >= max(1, -(-row.count // 10)), "a donor keeps its margin over the whole pass"
    assert len(flows) == len(set(flows)), "no flow is used twice without a rest"
    for moves in got.values():
        tiers = {move.tier for move in moves}
        assert Tier.PREEMPT not in tiers or tiers <= {Tier.PREEMPT, Tier.READY}
        lacking = dict(shortfall_named(view, moves[0]).deficit)
        for move in moves:
            # Without its last machine the move would leave something open that the machine helps with.
            one = {name: milli // move.count for name, milli in move.capacity.items()}
            rest = vector.subtract(lacking, vector.scale(one, move.count - 1)) if move.count > 1 else lacking
            assert not move.capacity or vector.is_useful(one, rest)
            lacking = dict(vector.subtract(lacking, move.capacity))


def best_by_hand(
    view: FleetView, requester: ShardFigures, shortfall: Shortfall, tier: Tier
) -> tuple[ShardId, str, str, int] | None:
    """Return the best first flow by looking at every row with the formulas of §7.1, or None."""
    ranked = []
    for donor in view.shards:
        is_usable = donor.is_fresh and donor.base is Base.DOMAINS
        if donor is requester or not is_usable or donor.provider_address != requester.provider_address:
            continue
        for row in donor.idle if tier is Tier.IDLE else donor.speculative:
            offer, deficit = row.allocatable, shortfall.deficit
            if not asking_of(shortfall).is_served_by(row):
                continue
            if any(asking_of(own).is_served_by(row) for own in donor.shortfalls):
                continue
            need = max(-(-milli // offer[name]) for name, milli in deficit.items() if name in offer)
            available = row.count - max(1, -(-row.count // 10))
            give = min(available, need, 100)
            if available <= 0:
                continue
            closed = [min(Fraction(1), Fraction(give * offer.get(name, 0), milli)) for name, milli in deficit.items()]
            if min(closed) < 1 and max(closed) < Fraction(1, 4):
                continue
            surplus = available - give
            key = (min(closed) < 1, -min(closed), -surplus, donor.shard_id, row.instance_type, row.zone)
            ranked.append((key, (donor.shard_id, row.instance_type, row.zone, give)))
    return min(ranked)[1] if ranked else None


def prepared_like(shard: ShardFigures, shortfalls: list[Shortfall]) -> ShardFigures:
    return prepared(
        shard_id=shard.shard_id,
        provider_address=shard.provider_address,
        base=shard.base,
        is_fresh=shard.is_fresh,
        shortfalls=shortfalls,
    )


@pytest.mark.rule("coordinator 7.2/1")
@pytest.mark.parametrize("tier", [Tier.IDLE, Tier.SPECULATIVE])
@given(view=fleets())
def test_the_first_flow_is_the_best_of_all(tier: Tier, view: FleetView) -> None:
    for requester in view.shards:
        for shortfall in requester.shortfalls:
            if shortfall.is_topology_constrained or not requester.is_fresh or requester.base is not Base.DOMAINS:
                continue
            if not requester.provider_address:
                continue
            # Nobody else asks; who lacks something itself still gives nothing of it.
            asking = replace(prepared_like(requester, [shortfall]), idle=requester.idle)
            others = [
                replace(
                    prepared_like(s, []),
                    idle=s.idle,
                    speculative=s.speculative,
                    idle_wanted_here=s.idle_wanted_here,
                    speculative_wanted_here=s.speculative_wanted_here,
                )
                for s in view.shards
                if s is not requester
            ]
            if tier is Tier.SPECULATIVE:
                others = [replace(s, idle=()) for s in others]
            moves = plan(FleetView(shards=(asking, *others)), knobs=Knobs(age_cycles=0, preempt_age_cycles=99)).moves
            first = next(((m.donor, m.instance_type, m.zone, m.count) for m in moves if m.tier is tier), None)

            assert first == best_by_hand(view, requester, shortfall, tier)
