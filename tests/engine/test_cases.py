"""Every case of tests/cases/engine that the engine itself answers: one test per case.

The stages `inventory`, `needs_table`, `guard` and `rails` belong to the shard and run in tests/shard.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from bigfleet.engine.decision import Decision, ParkingKey, RowResult, Weights
from bigfleet.engine.domains import Domain, rank_domains
from bigfleet.engine.folding import fold
from bigfleet.engine.parking import next_ages, stamp_parked
from bigfleet.engine.pool import Pool
from bigfleet.engine.preempt import grace_seconds, score_terms
from bigfleet.engine.reference import decide
from bigfleet.engine.shortfalls import Ledger, Shortfall, record, report
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.metadata import decode_metadata, encode_metadata
from bigfleet.model.need import Need, merge_rows
from bigfleet.model.penalty import bucket_for_dollars, bucket_upper_dollars
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.quantity import Family, QuantityError, format_quantity, parse_quantity
from bigfleet.model.states import MachineState, is_legal_transition
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.shard.rails import cap_reclaims, reclaim_cap
from tests.engine_cases import (
    STATES,
    Case,
    Entry,
    Fleet,
    action_text,
    dollars,
    fingerprints_of,
    fleet_of,
    load_cases,
    machine_of,
    need_of,
    row_name,
    vector_of,
)

RecordProperty = Callable[[str, object], None]


def cases_of(*stages: str) -> pytest.MarkDecorator:
    """Parametrize a test over the cases of the stages, named as in the files."""
    cases = load_cases(*stages)
    assert cases, f"no case has a stage of {stages}"
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.topic}-{case.name}") for case in cases])


@pytest.fixture(autouse=True)
def _count_the_case(request: pytest.FixtureRequest, record_property: RecordProperty) -> None:
    case: Case = request.getfixturevalue("case")
    record_property("engine case", "plain" if case.is_plain else "topology")


# ---- cycle and multi ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of one cycle with their ids; the engine's rows are named through their members."""

    ids: Mapping[int, str]
    needs: Sequence[Need]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Demand":
        needs = [need_of(entry) for entry in entries]
        return cls({id(need): entry.get("id", "") for need, entry in zip(needs, entries, strict=True)}, needs)

    def name(self, members: Sequence[Need], *, folded: bool) -> str:
        return row_name([self.ids[id(member)] for member in members], folded=folded)

    def rows(self, decision: Decision) -> dict[str, RowResult]:
        named = {self.name(row.members, folded=row.folded): row for row in decision.rows}
        assert len(named) == len(decision.rows), "row names repeat"
        return named


def vectors_of(expected: Mapping[str, Mapping[str, str]]) -> dict[str, Vector]:
    return {name: vector for name, quantities in expected.items() if (vector := vector_of(quantities))}


def check_actions(expected: Entry, actions: Sequence[str]) -> None:
    if "acts" in expected:
        assert sorted(expected["acts"]) == sorted(actions)
    if "acts_count" in expected:
        assert expected["acts_count"] == Counter(action.split()[0] for action in actions)
    if "emission" in expected:
        assert expected["emission"] == actions
    if "order" in expected:
        later = [action for action in actions if action.split()[0] in ("Preempt", "Reclaim", "Delete")]
        assert expected["order"] == later


def check_rows(expected: Entry, rows: Mapping[str, RowResult]) -> None:
    for name, claims in expected.get("claims", {}).items():
        assert set(claims) == set(rows[name].claimed), name
    short = {name: row.deficit for name, row in rows.items() if row.deficit}
    assert vectors_of(expected.get("unsat", {})) == short
    unresolved = {name: row.unresolved for name, row in rows.items() if row.unresolved}
    assert vectors_of(expected.get("unres", expected.get("unsat", {}))) == unresolved
    for name, domain in expected.get("domain", {}).items():
        assert domain == rows[name].domain, name
    for name, satisfiable in expected.get("satisfiable", {}).items():
        assert satisfiable == rows[name].satisfiable, name
    if "parked" in expected:
        assert expected["parked"] == [name for name, row in rows.items() if row.need.parked]


@cases_of("cycle")
def test_one_cycle_decides_what_the_case_says(case: Case) -> None:
    fleet, demand = fleet_of(case.data), Demand.of(case.data["needs"])

    decision = decide(fleet.snapshot(), demand.needs, fleet.options(demand.needs, case.data))

    check_actions(case.data["expect"], [action_text(action) for action in decision.actions])
    check_rows(case.data["expect"], demand.rows(decision))


@cases_of("multi")
def test_several_cycles_decide_what_the_case_says(case: Case) -> None:
    data = case.data
    fleet = fleet_of({**data, "needs": [*data["needs"], *(n for s in data["cycles"] for n in s.get("needs", ()))]})
    ages: Mapping[ParkingKey, int] = {}
    for step in data["cycles"]:
        entries = step.get("needs", data["needs"])
        prepare(fleet, step, entries)
        for _ in range(step.get("repeat", 1)):
            demand = Demand.of(entries)
            options = fleet.options(demand.needs, data, parking_ages=ages)
            decision = decide(fleet.snapshot(), demand.needs, options)
            actions = decision.actions
            if "reclaim_fraction" in data:
                actions = cap_reclaims(
                    actions,
                    fraction=data["reclaim_fraction"],
                    configured_by_cluster=configured_machines(fleet),
                    spent={},
                ).kept
            check_actions(step, [action_text(action) for action in actions])
            check_rows(step, demand.rows(decision))
            if data.get("park"):
                ages = next_ages(ages, decision.rows, advance=True)
            fleet.apply(actions, step.get("apply", data.get("apply", "instant")))


def prepare(fleet: Fleet, step: Entry, entries: Sequence[Entry]) -> None:
    fleet.now_seconds += step.get("advance_s", 0)
    for machine_id in step.get("remove", ()):
        fleet.remove(machine_id)
    fleet.add(step.get("add", ()), fingerprints_of(entries))
    for edit in step.get("edit", ()):
        fleet.edit(edit)


def configured_machines(fleet: Fleet) -> Counter[str]:
    return Counter(m.cluster for m in fleet.machines.values() if m.state is MachineState.CONFIGURED)


# ---- folding and identity ----------------------------------------------------------------------------------------


@cases_of("fold")
def test_folding_gives_the_rows_of_the_case(case: Case) -> None:
    fleet, demand = fleet_of(case.data), Demand.of(case.data["needs"])

    folded = fold(demand.needs, Pool(fleet.snapshot(), fleet.options(demand.needs, case.data)))

    expected = case.data["expect"]["rows"]
    assert len(expected) == len(folded)
    for want, row in zip(expected, folded, strict=True):
        assert want["cluster"] == row.need.cluster
        assert want["same"] == (row.need.profile.same_key is not None)
        assert vector_of(want["agg"]) == row.need.aggregate
        assert vector_of(want["min"]) == row.need.min_unit
        assert want.get("arrival", row.need.arrival_unix_nanos) == row.need.arrival_unix_nanos
        assert want.get("id") in (None, demand.name(row.members, folded=row.folded))


@cases_of("identity")
def test_profiles_are_equal_within_a_class_and_differ_between_classes(case: Case) -> None:
    classes = [{need_of(entry).fingerprint for entry in entries} for entries in case.data["classes"]]

    assert [1] * len(classes) == [len(fingerprints) for fingerprints in classes]
    assert len(classes) == len(set.union(*classes))


@cases_of("aggregate")
def test_rows_of_one_class_merge_in_order(case: Case) -> None:
    merged = merge_rows([need_of(entry) for entry in case.data["in"]])

    assert [need_of(entry) for entry in case.data["out"]] == merged


@cases_of("metadata")
def test_metadata_is_read_key_by_key(case: Case) -> None:
    for row in case.data["decode"]:
        before = machine_of({"st": "Configured", **row.get("machine", {})}, "m", {})
        machine, malformed = decode_metadata(before, row["in"])
        assert row.get("malformed", []) == malformed
        check_stamps(row["out"], machine)
    for row in case.data.get("encode", ()):
        assert row["out"] == encode_metadata(machine_of({"st": "Configured", **row["in"]}, "m", {}))


def check_stamps(expected: Entry, machine: Machine) -> None:
    stamps = {
        "aprio": machine.assigned_priority,
        "aint": machine.assigned_interruption_penalty_dollars,
        "arec": machine.assigned_reclamation_penalty_dollars,
        "afp": machine.assigned_need_fingerprint,
        "agroup": machine.assigned_group,
    }
    for name, want in expected.items():
        assert (dollars(want) if name in ("aint", "arec") else want) == stamps[name], name


# ---- parking and shortfalls --------------------------------------------------------------------------------------


def unsatisfied(need: Need, *, acquired: int = 0, satisfiable: bool = False) -> RowResult:
    """Return the result of a row that Phase 1 left short."""
    bootstraps = tuple(machine_of({"st": "Idle"}, f"m{n}", {}).id for n in range(acquired))
    deficit = need.aggregate or parse_vector({"gpu": "8"})
    return RowResult(
        need=need,
        members=(need,),
        bootstraps=bootstraps,
        deficit=deficit,
        satisfiable=satisfiable,
        unresolved=deficit,
    )


@cases_of("parking")
def test_a_gang_is_parked_in_the_cycles_of_the_case(case: Case) -> None:
    gang = need_of({"t": "SR", "group": "g", "agg": {"gpu": "64"}})
    ages: Mapping[ParkingKey, int] = {}
    parked: list[bool] = []
    for step in case.data["cycles"]:
        for _ in range(step.get("repeat", 1)):
            parked.append(stamp_parked([gang], ages)[0].parked)
            results = [unsatisfied(gang)] if step["stalled"] else []
            ages = next_ages(ages, results, advance=True)

    expected = {n for first, last in case.data["expect"]["parked_cycles"] for n in range(first, last + 1)}
    assert expected == {cycle for cycle, is_parked in enumerate(parked, start=1) if is_parked}


@cases_of("parking_ages")
def test_ages_after_each_cycle_are_those_of_the_case(case: Case) -> None:
    ages: Mapping[ParkingKey, int] = {}
    for step in case.data["cycles"]:
        results = [
            unsatisfied(need_of(entry), acquired=entry.get("acquired", 0), satisfiable=entry.get("satisfiable", False))
            for entry in step["unsatisfied"]
        ]
        ages = next_ages(ages, results, advance=True)
        assert step["ages"] == [[key.cluster, key.group, age] for key, age in ages.items()]


@cases_of("shortfalls")
def test_the_ledger_after_each_cycle_is_that_of_the_case(case: Case) -> None:
    profiles: dict[str, Profile] = {}
    ledger: Ledger = {}

    def shown(shortfalls: Sequence[Shortfall]) -> list[tuple[str, int, Vector]]:
        names = {profile.fingerprint: name for name, profile in profiles.items()}
        return [(names[s.fingerprint], s.age, s.deficit) for s in shortfalls]

    def written(entries: Sequence[Entry]) -> list[tuple[str, int, Vector]]:
        return [(entry["fp"], entry["age"], vector_of(entry["deficit"])) for entry in entries]

    for step in case.data["cycles"]:
        results = []
        for entry in step["unresolved"]:
            requirement = Requirement(entry["fp"], Operator.EXISTS)
            profile = profiles.setdefault(entry["fp"], Profile((requirement,), priority=entry.get("prio", 100)))
            results.append(unsatisfied(Need(need_of({}).cluster, profile, vector_of(entry["deficit"]))))
        ledger = record(ledger, results, advance=True)
        assert sorted(written(step["ledger"])) == sorted(shown(list(ledger.values())))
        if "report" in step:
            assert written(step["report"]) == shown(report(ledger))


# ---- tables ------------------------------------------------------------------------------------------------------


def cost_of(row: Entry) -> float:
    machine = machine_of({"st": "Speculative", "price": row["price"], "iprob": row["iprob"]}, "m", {})
    return machine.cost_for_bucket_usd_per_hour(row["ipb"])


def quantity_milli(text: str) -> int | str:
    try:
        return parse_quantity(text)
    except QuantityError:
        return "unparsable"


def invariant_of(row: Entry) -> str:
    fault = invariant_fault(machine_of({"host": False, **row}, "m", {}))
    return fault[0].value if fault else "ok"


def best_domain(row: Entry) -> str:
    domains = [
        Domain(
            value=bucket["v"],
            members=bucket["n"],
            total=bucket["total"],
            creditable=bucket.get("cred", {}),
            own=bucket.get("own", {}),
        )
        for bucket in row["buckets"]
    ]
    ranked = rank_domains(row["deficit"], domains)
    return ranked[0].value if ranked else ""


def victim_score(row: Entry) -> float:
    terms = score_terms(
        row_priority=row["preemptor"],
        assigned_priority=row["victim"],
        interruption_dollars=dollars(row["int"]),
        reclamation_dollars=dollars(row["rec"]),
        drain_seconds=row["drain_s"],
        weights=Weights(),
    )
    return round(terms[0] + terms[1] + terms[2] + terms[3], 6)


def states_after(state: str) -> set[str]:
    return {name for name, target in STATES.items() if name != state and is_legal_transition(STATES[state], target)}


TABLES: Mapping[str, Callable[[Any], object]] = {
    "bucket_for_dollars": bucket_for_dollars,
    "bucket_upper_dollars": bucket_upper_dollars,
    "quantity_milli": quantity_milli,
    "quantity_text": lambda row: format_quantity(row[0], Family(row[1])),
    "vector": parse_vector,
    "effective_cost": cost_of,
    "fingerprint": lambda row: need_of(row).fingerprint,
    "transition": states_after,
    "invariant": invariant_of,
    "choose_domain": best_domain,
    "victim_score": victim_score,
    "drain_grace_s": lambda row: grace_seconds(row[0] - row[1]),
    "reclaim_cap": lambda row: reclaim_cap(row[0], row[1]),
}


@cases_of("table")
def test_a_function_gives_the_values_of_its_table(case: Case) -> None:
    function = TABLES[case.data["fn"]]
    for row in case.data["rows"]:
        expected = set(row["out"]) if case.data["fn"] == "transition" else row["out"]
        assert (dollars(expected) if expected == "+Inf" else expected) == function(row["in"]), row
