"""Runs one engine case through an engine and says where the answer differs (tests/cases/engine/README.md).

Every stage that the engine itself answers is here; those of the shard are in `bigfleet.cli.engine.shard_checks`.
A check compares and never corrects: the first difference ends it with `Mismatch`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bigfleet.cli.engine.case_fleet import CaseFleet, fleet_of
from bigfleet.cli.engine.cases import (
    STATES,
    Case,
    Entry,
    action_text,
    dollars,
    fingerprints_of,
    machine_of,
    need_of,
    row_name,
    vector_of,
)
from bigfleet.cli.engine.fleets import decide_fleet, decision_record
from bigfleet.cli.engine.registry import Decide
from bigfleet.engine.decision import Decision, ParkingKey, RowResult, Weights
from bigfleet.engine.folding import fold
from bigfleet.engine.parking import next_ages, stamp_parked
from bigfleet.engine.reference.gang_domains import DomainOffer, rank_domains
from bigfleet.engine.reference.pool import CandidatePool
from bigfleet.engine.reference.preempt import grace_seconds, score_terms
from bigfleet.engine.shortfalls import Ledger, record, report
from bigfleet.model.machine import Machine, invariant_fault
from bigfleet.model.metadata import decode_metadata, encode_metadata
from bigfleet.model.need import Need, merge_rows
from bigfleet.model.penalty import bucket_for_dollars, bucket_upper_dollars
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.quantity import Family, QuantityError, format_quantity, parse_quantity
from bigfleet.model.shard_report import Shortfall
from bigfleet.model.states import MachineState, is_legal_transition
from bigfleet.model.vector import Vector, parse_vector
from bigfleet.shard.safety_limits import cap_reclaims, reclaim_cap

Check = Callable[[Case, Decide], None]


class Mismatch(AssertionError):
    """An answer that is not the one of the case."""


def expect_equal(expected: object, actual: object, what: str) -> None:
    """Raise Mismatch when the two differ."""
    if expected != actual:
        raise Mismatch(f"{what}: expected {expected!r}, got {actual!r}")


# ---- cycle and multi ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Demand:
    """The needs of one cycle with their ids; the engine's rows are named through their members."""

    ids: Mapping[int, str]
    needs: Sequence[Need]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "_Demand":
        needs = [need_of(entry) for entry in entries]
        return cls({id(need): entry.get("id", "") for need, entry in zip(needs, entries, strict=True)}, needs)

    def name(self, members: Sequence[Need], *, folded: bool) -> str:
        return row_name([self.ids[id(member)] for member in members], folded=folded)

    def rows(self, decision: Decision) -> dict[str, RowResult]:
        named = {self.name(row.members, folded=row.folded): row for row in decision.rows}
        expect_equal(len(decision.rows), len(named), "rows with a name of their own")
        return named


def _vectors_of(expected: Mapping[str, Mapping[str, str]]) -> dict[str, Vector]:
    return {name: vector for name, quantities in expected.items() if (vector := vector_of(quantities))}


def _check_actions(expected: Entry, actions: Sequence[str]) -> None:
    if "acts" in expected:
        expect_equal(sorted(expected["acts"]), sorted(actions), "acts")
    if "acts_count" in expected:
        expect_equal(expected["acts_count"], dict(Counter(action.split()[0] for action in actions)), "acts_count")
    if "emission" in expected:
        expect_equal(expected["emission"], actions, "emission")
    if "order" in expected:
        later = [action for action in actions if action.split()[0] in ("Preempt", "Reclaim", "Delete")]
        expect_equal(expected["order"], later, "order")


def _check_rows(expected: Entry, rows: Mapping[str, RowResult]) -> None:
    for name, claims in expected.get("claims", {}).items():
        expect_equal(sorted(claims), sorted(rows[name].claimed), f"claims of {name}")
    short = {name: dict(row.deficit) for name, row in rows.items() if row.deficit}
    expect_equal(_vectors_of(expected.get("unsat", {})), short, "unsat")
    unresolved = {name: dict(row.unresolved) for name, row in rows.items() if row.unresolved}
    expect_equal(_vectors_of(expected.get("unres", expected.get("unsat", {}))), unresolved, "unres")
    for name, domain in expected.get("domain", {}).items():
        expect_equal(domain, rows[name].domain, f"domain of {name}")
    for name, satisfiable in expected.get("satisfiable", {}).items():
        expect_equal(satisfiable, rows[name].satisfiable, f"satisfiable of {name}")
    if "parked" in expected:
        expect_equal(expected["parked"], [name for name, row in rows.items() if row.need.parked], "parked")


def _cycle(case: Case, decide: Decide) -> None:
    fleet, demand = fleet_of(case.data), _Demand.of(case.data["needs"])
    decision = decide(fleet.snapshot(), demand.needs, fleet.options(demand.needs, case.data))
    _check_actions(case.data["expect"], [action_text(action) for action in decision.actions])
    _check_rows(case.data["expect"], demand.rows(decision))


def _multi(case: Case, decide: Decide) -> None:
    data = case.data
    fleet = fleet_of({**data, "needs": [*data["needs"], *(n for s in data["cycles"] for n in s.get("needs", ()))]})
    ages: Mapping[ParkingKey, int] = {}
    for step in data["cycles"]:
        entries = step.get("needs", data["needs"])
        _prepare(fleet, step, entries)
        for _ in range(step.get("repeat", 1)):
            demand = _Demand.of(entries)
            options = fleet.options(demand.needs, data, parking_ages=ages)
            decision = decide(fleet.snapshot(), demand.needs, options)
            actions = decision.actions
            if "reclaim_fraction" in data:
                configured = Counter(
                    str(m.cluster) for m in fleet.machines.values() if m.state is MachineState.CONFIGURED
                )
                actions = cap_reclaims(
                    actions, fraction=data["reclaim_fraction"], configured_by_cluster=configured, spent={}
                ).admitted
            _check_actions(step, [action_text(action) for action in actions])
            _check_rows(step, demand.rows(decision))
            if data.get("park"):
                ages = next_ages(ages, decision.rows, advance=True)
            fleet.apply(actions, step.get("apply", data.get("apply", "instant")))


def _prepare(fleet: CaseFleet, step: Entry, entries: Sequence[Entry]) -> None:
    fleet.now_seconds += step.get("advance_s", 0)
    for machine_id in step.get("remove", ()):
        fleet.remove(machine_id)
    fleet.add(step.get("add", ()), fingerprints_of(entries))
    for edit in step.get("edit", ()):
        fleet.edit(edit)


# ---- folding and identity ----------------------------------------------------------------------------------------


def _fold(case: Case, decide: Decide) -> None:
    fleet, demand = fleet_of(case.data), _Demand.of(case.data["needs"])
    folded = fold(demand.needs, CandidatePool(fleet.snapshot(), fleet.options(demand.needs, case.data)))
    expected = case.data["expect"]["rows"]
    expect_equal(len(expected), len(folded), "number of rows")
    for number, (want, row) in enumerate(zip(expected, folded, strict=True)):
        place = f"of row {number}"
        expect_equal(want["cluster"], row.need.cluster, f"cluster {place}")
        expect_equal(want["same"], row.need.profile.same_key is not None, f"same {place}")
        expect_equal(vector_of(want["agg"]), row.need.aggregate, f"agg {place}")
        expect_equal(vector_of(want["min"]), row.need.min_unit, f"min {place}")
        expect_equal(want.get("arrival", row.need.arrival_unix_nanos), row.need.arrival_unix_nanos, f"arrival {place}")
        name = demand.name(row.members, folded=row.folded)
        expect_equal(want.get("id", name), name, f"id {place}")


def _identity(case: Case, decide: Decide) -> None:
    classes = [{need_of(entry).fingerprint for entry in entries} for entries in case.data["classes"]]
    expect_equal([1] * len(classes), [len(fingerprints) for fingerprints in classes], "fingerprints within each class")
    expect_equal(len(classes), len(set().union(*classes)), "fingerprints of all classes")


def _aggregate(case: Case, decide: Decide) -> None:
    merged = merge_rows([need_of(entry) for entry in case.data["in"]])
    expect_equal([need_of(entry) for entry in case.data["out"]], merged, "merged rows")


def _metadata(case: Case, decide: Decide) -> None:
    for row in case.data["decode"]:
        before = machine_of({"st": "Configured", **row.get("machine", {})}, "m", {})
        machine, malformed = decode_metadata(before, row["in"])
        expect_equal(row.get("malformed", []), malformed, "malformed keys")
        _check_stamps(row["out"], machine)
    for row in case.data.get("encode", ()):
        expect_equal(row["out"], encode_metadata(machine_of({"st": "Configured", **row["in"]}, "m", {})), "metadata")


def _check_stamps(expected: Entry, machine: Machine) -> None:
    stamps = {
        "aprio": machine.assigned_priority,
        "aint": machine.assigned_interruption_penalty_dollars,
        "arec": machine.assigned_reclamation_penalty_dollars,
        "afp": machine.assigned_need_fingerprint,
        "agroup": machine.assigned_group,
    }
    for name, want in expected.items():
        expect_equal(dollars(want) if name in ("aint", "arec") else want, stamps[name], name)


# ---- parking and shortfalls --------------------------------------------------------------------------------------


def _unsatisfied(need: Need, *, acquired: int = 0, satisfiable: bool = False) -> RowResult:
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


def _parking(case: Case, decide: Decide) -> None:
    gang = need_of({"t": "SR", "group": "g", "agg": {"gpu": "64"}})
    ages: Mapping[ParkingKey, int] = {}
    parked: list[bool] = []
    for step in case.data["cycles"]:
        for _ in range(step.get("repeat", 1)):
            parked.append(stamp_parked([gang], ages)[0].parked)
            results = [_unsatisfied(gang)] if step["stalled"] else []
            ages = next_ages(ages, results, advance=True)
    expected = {n for first, last in case.data["expect"]["parked_cycles"] for n in range(first, last + 1)}
    found = [cycle for cycle, is_parked in enumerate(parked, start=1) if is_parked]
    expect_equal(sorted(expected), found, "parked cycles")


def _parking_ages(case: Case, decide: Decide) -> None:
    ages: Mapping[ParkingKey, int] = {}
    for step in case.data["cycles"]:
        results = [
            _unsatisfied(need_of(entry), acquired=entry.get("acquired", 0), satisfiable=entry.get("satisfiable", False))
            for entry in step["unsatisfied"]
        ]
        ages = next_ages(ages, results, advance=True)
        expect_equal(step["ages"], [[key.cluster, key.group, age] for key, age in ages.items()], "ages")


def _shortfalls(case: Case, decide: Decide) -> None:
    profiles: dict[str, Profile] = {}
    ledger: Ledger = {}

    def shown(shortfalls: Sequence[Shortfall]) -> list[tuple[str, int, dict[str, int]]]:
        names = {profile.fingerprint: name for name, profile in profiles.items()}
        return [(names[s.fingerprint], s.age_cycles, dict(s.deficit)) for s in shortfalls]

    def written(entries: Sequence[Entry]) -> list[tuple[str, int, dict[str, int]]]:
        return [(entry["fp"], entry["age"], dict(vector_of(entry["deficit"]))) for entry in entries]

    for step in case.data["cycles"]:
        results = []
        for entry in step["unresolved"]:
            requirement = Requirement(entry["fp"], Operator.EXISTS)
            profile = profiles.setdefault(entry["fp"], Profile((requirement,), priority=entry.get("prio", 100)))
            results.append(_unsatisfied(Need(need_of({}).cluster, profile, vector_of(entry["deficit"]))))
        ledger = record(ledger, results, advance=True)
        current = sorted(shown([*ledger.values()]), key=lambda entry: entry[:2])
        expect_equal(sorted(written(step["ledger"]), key=lambda entry: entry[:2]), current, "ledger")
        if "report" in step:
            expect_equal(written(step["report"]), shown(report(ledger)), "report")


# ---- tables ------------------------------------------------------------------------------------------------------


def _cost_of(row: Entry) -> float:
    machine = machine_of({"st": "Speculative", "price": row["price"], "iprob": row["iprob"]}, "m", {})
    return machine.cost_for_bucket_usd_per_hour(row["ipb"])


def _quantity_milli(text: str) -> int | str:
    try:
        return parse_quantity(text)
    except QuantityError:
        return "unparsable"


def _invariant_of(row: Entry) -> str:
    fault = invariant_fault(machine_of({"host": False, **row}, "m", {}))
    return fault[0].value if fault else "ok"


def _best_domain(row: Entry) -> str:
    domains = [
        DomainOffer(
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


def _victim_score(row: Entry) -> float:
    terms = score_terms(
        row_priority=row["preemptor"],
        assigned_priority=row["victim"],
        interruption_dollars=dollars(row["int"]),
        reclamation_dollars=dollars(row["rec"]),
        drain_seconds=row["drain_s"],
        weights=Weights(),
    )
    return round(terms[0] + terms[1] + terms[2] + terms[3], 6)


def _states_after(state: str) -> set[str]:
    return {name for name, target in STATES.items() if name != state and is_legal_transition(STATES[state], target)}


_TABLES: Final[Mapping[str, Callable[[Any], object]]] = {
    "bucket_for_dollars": bucket_for_dollars,
    "bucket_upper_dollars": bucket_upper_dollars,
    "quantity_milli": _quantity_milli,
    "quantity_text": lambda row: format_quantity(row[0], Family(row[1])),
    "vector": lambda row: dict(parse_vector(row)),
    "effective_cost": _cost_of,
    "fingerprint": lambda row: need_of(row).fingerprint,
    "transition": _states_after,
    "invariant": _invariant_of,
    "choose_domain": _best_domain,
    "victim_score": _victim_score,
    "drain_grace_s": lambda row: grace_seconds(row[0] - row[1]),
    "reclaim_cap": lambda row: reclaim_cap(row[0], row[1]),
}


def _table(case: Case, decide: Decide) -> None:
    name = case.data["fn"]
    if name not in _TABLES:
        raise Mismatch(f"fn {name!r} is unknown; there are {', '.join(_TABLES)}")
    for row in case.data["rows"]:
        expected = set(row["out"]) if name == "transition" else row["out"]
        expect_equal(dollars(expected) if expected == "+Inf" else expected, _TABLES[name](row["in"]), f"{row['in']}")


#: The stages that the engine answers.
ENGINE_CHECKS: Final[Mapping[str, Check]] = {
    "cycle": _cycle,
    "multi": _multi,
    "fold": _fold,
    "identity": _identity,
    "aggregate": _aggregate,
    "metadata": _metadata,
    "parking": _parking,
    "parking_ages": _parking_ages,
    "shortfalls": _shortfalls,
    "table": _table,
}


def check_fleet(fleet: Entry, decide: Decide) -> None:
    """Compare a decision with the recorded one, field by field. Raises Mismatch."""
    found = decision_record(decide_fleet(fleet, decide))
    for name, expected in fleet["decision"].items():
        if name not in found:
            raise Mismatch(f"decision.{name} is no field of a decision")
        expect_equal(expected, found[name], f"decision.{name}")
