"""`bigfleet plan --exchange`: what cheaper machines would save, and nothing else changes."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bigfleet.cli.plan.exchanging import exchange_until_rest
from bigfleet.cli.plan.inputs import read_demand, read_machines
from bigfleet.cli.plan.planning import plan_input
from bigfleet.cli.plan.settling import settle
from bigfleet.cli.runtime.failures import RunFault
from tests.cli.plan.test_plan_command import Files

RESOURCES = {"cpu": "4", "memory": "16Gi", "pods": "110"}
LARGER = {"cpu": "8", "memory": "32Gi", "pods": "110"}
NEEDS = [
    {"id": "web", "cluster": "shop", "priority": 100, "shapes": [{"resources": {"cpu": "500m"}, "count": 10}]},
]


def dear(name: str) -> dict[str, Any]:
    """Return a machine at $3.00 that serves."""
    return {
        "id": name,
        "state": "Configured",
        "cluster": "shop",
        "instance_type": "dear",
        "capacity_type": "OnDemand",
        "price_per_hour": 3.0,
        "resources": RESOURCES,
    }


def spot(name: str) -> dict[str, Any]:
    """Return a machine at $0.10 on offer."""
    return {
        "id": name,
        "state": "Speculative",
        "instance_type": "cheap",
        "capacity_type": "Spot",
        "price_per_hour": 0.1,
        "interruption_probability": 0.0001,
        "resources": LARGER,
    }


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Write a fleet: two machines at $3.00 serve 5 cpu, and spot at $0.10 is on offer."""
    found = Files(tmp_path)
    found.write_machines([dear("d1"), dear("d2"), spot("s1"), spot("s2")])
    found.write_needs(NEEDS)
    return found


def test_a_proposal_has_its_arithmetic_term_by_term(files: Files) -> None:
    """Every number that decides is in the document."""
    found = json.loads(files.text("--exchange", "propose", "--output", "json"))["exchanges"]

    assert found["promised_usd_per_hour"] == pytest.approx(5.9)
    cluster = found["clusters"]["shop"]
    assert (cluster["machines"], cluster["cost_usd_per_hour"], cluster["blocked"]) == (2, 6.0, None)
    (proposal,) = cluster["proposals"]
    assert proposal["machine_ids"] == ["d1", "d2"]
    assert (proposal["kind"], proposal["waits_for"]) == ("many-for-fewer", None)
    terms = proposal["terms"]
    assert terms["double_running_usd"] + terms["boot_usd"] + terms["reclamation_usd"] == pytest.approx(
        proposal["required_usd"] / proposal["settings"]["margin"]
    )
    assert proposal["gain_usd"] == pytest.approx(4 * proposal["saving_usd_per_hour"])


def test_the_table_says_it_in_sentences(files: Files) -> None:
    """What goes, what comes, the saving, the gate and when it has paid for itself."""
    text = " ".join(files.text("--exchange", "propose").split())

    assert "2 × dear OnDemand ($3.00/h each) go, 1 × cheap Spot ($0.10/h each) come" in text
    assert "$5.90/h less, 98% of what goes." in text
    assert "this saves $23.60. Required are 1.25 × ($2.50 of double running" in text
    assert "it has paid for itself after 26 min." in text
    assert "Nothing of this is carried out" in text


def test_propose_changes_nothing_of_the_plan(files: Files) -> None:
    """The plan's part is equal byte by byte, also at rest."""
    off, propose = (json.loads(files.text("--exchange", mode, "--output", "json")) for mode in ("off", "propose"))
    assert "exchanges" not in off
    assert json.dumps(propose["plan"]) == json.dumps(off["plan"])

    rest, asked = (
        json.loads(files.text("--until-settled", "--exchange", mode, "--output", "json")) for mode in ("off", "propose")
    )
    assert asked.pop("exchanges")["clusters"]["shop"]["proposals"]
    assert json.dumps(asked) == json.dumps(rest)


def test_off_is_the_default(files: Files) -> None:
    """A plan is made of files; who wants proposals asks for them."""
    assert files.text() == files.text("--exchange", "off")


def test_an_unknown_mode_is_refused(files: Files) -> None:
    """One cycle carries no exchange out, and says what does."""
    assert files.refusal("--exchange", "on").endswith("add --until-settled, or use propose")
    assert "--exchange: 'auto' is unknown" in files.refusal("--exchange", "auto")


def test_demand_without_pods_has_no_exchanges(files: Files) -> None:
    """An aggregate does not say where its pods fit."""
    files.write_needs([{"id": "web", "cluster": "shop", "priority": 100, "aggregate": {"cpu": "5"}}])

    assert json.loads(files.text("--exchange", "propose", "--output", "json"))["exchanges"]["clusters"] == {}
    assert "No cluster with pods holds machines." in files.text("--exchange", "propose")


def reserved(name: str) -> dict[str, Any]:
    """Return a Reserved machine that serves another cluster."""
    return {
        **dear(name),
        "cluster": "batch",
        "instance_type": "own",
        "capacity_type": "Reserved",
        "price_per_hour": 0.5,
    }


def on_type(*names: str) -> list[list[Any]]:
    """Return that pods run on these instance types only."""
    return [["node.kubernetes.io/instance-type", "In", list(names)]]


def test_a_machine_that_another_cluster_could_spare_is_named(files: Files) -> None:
    """The batch cluster rents a spot machine for $0.10, the shop one fewer at $3.00: $2.90 an hour."""
    files.write_machines([reserved("r1"), dear("d1"), spot("s1"), spot("s2")])
    shapes = [{"resources": {"cpu": "3500m"}, "count": 1}]
    shop = {"id": "web", "cluster": "shop", "priority": 100, "shapes": shapes, "requirements": on_type("own", "dear")}
    files.write_needs([shop, {"id": "jobs", "cluster": "batch", "priority": 100, "shapes": shapes}])
    found = json.loads(files.text("--exchange", "propose", "--output", "json"))["exchanges"]

    assert found["promised_usd_per_hour"] == pytest.approx(2.9)
    assert found["clusters"]["shop"]["proposals"] == []
    (move,) = found["clusters"]["batch"]["proposals"]
    assert (move["kind"], move["taker"], move["machine_ids"]) == ("between-clusters", "shop", ["r1"])
    assert (move["taker_machine_ids"], move["waits_for"]) == (["d1"], None)
    assert [each["instance_type"] for each in move["taker_goes"]] == ["dear"]
    text = " ".join(files.text("--exchange", "propose").split())
    assert (
        "1. 1 × own Reserved ($0.50/h each) move to shop, 1 × cheap Spot ($0.10/h each) come in their place, "
        "and 1 × dear OnDemand ($3.00/h each) of shop go: $2.90/h less, 97% of what goes." in text
    )


def test_a_row_without_shapes_beside_others_is_the_reason(files: Files) -> None:
    """Its machines are not excess, although no pod is placed on them."""
    files.write_machines([dear("d1"), dear("d2"), dear("d3"), spot("s1")])
    files.write_needs([*NEEDS, {"id": "batch", "cluster": "shop", "aggregate": {"cpu": "5"}, "min_unit": {"cpu": "1"}}])

    found = json.loads(files.text("--exchange", "propose", "--output", "json"))

    assert found["plan"]["actions"] == []
    assert found["exchanges"]["clusters"]["shop"]["blocked"] == "demand-without-pods"


# ---- carried out -----------------------------------------------------------------------------------------------------


def exchanged(files: Files) -> dict[str, Any]:
    """Return the document of the fleet in which no exchange is ready any more."""
    found: dict[str, Any] = json.loads(files.text("--until-settled", "--exchange", "on", "--output", "json"))
    return found


def test_exchanges_are_carried_out_until_none_is_ready(files: Files) -> None:
    """The spot machine comes, both dear ones go, and every pod has its place."""
    found = exchanged(files)

    assert (found["cost_usd_per_hour"], found["exchanges"]["cost_before_usd_per_hour"]) == (0.1, 6.0)
    assert (found["cycles"], found["shortfalls"]) == (2, [])
    assert found["actions"] == {"Bootstrap": 0, "Provision": 1, "Reclaim": 2, "Preempt": 0, "Delete": 2}
    (machine,) = found["clusters"]["shop"]["machines"]
    assert machine["claims"] == [{"row": "web", "resources": {"cpu": "500m"}, "count": 10}]
    (done,) = found["exchanges"]["carried_out"]
    assert (done["cluster"], done["machine_ids"]) == ("shop", ["d1", "d2"])
    assert found["exchanges"]["clusters"]["shop"]["proposals"] == []


def test_the_text_says_what_was_exchanged(files: Files) -> None:
    text = " ".join(files.text("--until-settled", "--exchange", "on").split())

    assert "Exchanged shop: 2 × dear OnDemand ($3.00/h each) go, 1 × cheap Spot ($0.10/h each) come" in text
    assert "Before, the clusters' machines cost $6.00/h." in text
    assert text.endswith("Not exchanged shop: 1 machine for $0.10/h No exchange saves money.")


def test_a_fleet_without_anything_to_exchange_is_that_without_exchanges(files: Files) -> None:
    files.write_machines([dear("d1"), dear("d2")])

    found = exchanged(files)

    assert found.pop("exchanges")["carried_out"] == []
    assert found == json.loads(files.text("--until-settled", "--output", "json"))


def test_a_machine_that_is_paid_for_anyway_moves(files: Files) -> None:
    """The giver rents one at $0.10 in its place; the taker lets one at $3.00 go."""
    own = dear("own") | {"instance_type": "own", "capacity_type": "Reserved", "cluster": "batch", "price_per_hour": 0.5}
    files.write_machines([own, dear("d1"), spot("s1")])
    only_there = [["node.kubernetes.io/instance-type", "In", ["dear", "own"]]]
    shop = {**NEEDS[0], "shapes": [{"resources": {"cpu": "3"}, "count": 1}], "requirements": only_there}
    files.write_needs([shop, {**shop, "id": "jobs", "cluster": "batch", "requirements": []}])

    found = exchanged(files)

    assert {name: [m["id"] for m in one["machines"]] for name, one in found["clusters"].items()} == {
        "batch": ["s1"],
        "shop": ["own"],
    }
    (move,) = found["exchanges"]["carried_out"]
    assert (move["kind"], move["cluster"], move["taker"]) == ("between-clusters", "batch", "shop")
    assert found["actions"] == {"Bootstrap": 1, "Provision": 1, "Reclaim": 2, "Preempt": 0, "Delete": 1}


def test_the_last_machine_on_offer_comes_once(files: Files) -> None:
    """Two clusters want it; the other one keeps what it has."""
    other = [dear(name) | {"cluster": "lab"} for name in ("e1", "e2")]
    files.write_machines([dear("d1"), dear("d2"), *other, spot("s1")])
    files.write_needs([*NEEDS, {**NEEDS[0], "id": "lab", "cluster": "lab"}])

    found = exchanged(files)

    assert found["cost_usd_per_hour"] == pytest.approx(6.1)
    assert len(found["exchanges"]["carried_out"]) == 1
    assert found["shortfalls"] == []


def test_an_idle_machine_of_another_shard_does_not_come(files: Files) -> None:
    taken = {**spot("s1"), "state": "Idle", "reserved": True}
    files.write_machines([dear("d1"), dear("d2"), taken])

    assert exchanged(files)["exchanges"]["carried_out"] == []


def test_exchanges_that_never_end_are_a_failure(files: Files) -> None:
    settled = settle(plan_input(read_machines(files.inventory), read_demand(files.demand).needs))

    with pytest.raises(RunFault, match="no rest within 1 rounds of exchanges"):
        exchange_until_rest(settled, rounds_max=1)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))])
def test_any_fleet_becomes_no_dearer_and_then_rests(files: Files, seed: int) -> None:
    """Every pod keeps its place, each exchange saves what it says, and of the result nothing is exchanged."""
    random = Random(seed)
    machines, needs = [], []
    for cluster in ("a", "b", "c")[: random.randint(1, 3)]:
        held = [dear(f"{cluster}{n}") | {"cluster": cluster} for n in range(random.randint(1, 6))]
        machines += [one | {"price_per_hour": random.choice((0.4, 1.5, 3.0))} for one in held]
        for row in range(random.randint(1, 3)):
            shape = {"resources": {"cpu": f"{random.choice((250, 500, 900))}m"}, "count": random.randint(1, 3)}
            needs.append({"id": f"{cluster}-{row}", "cluster": cluster, "priority": 1, "shapes": [shape]})
    machines += [spot(f"s{n}") for n in range(random.randint(0, 4))]
    machines += [spot(f"l{n}") | {"instance_type": "large", "price_per_hour": 0.7} for n in range(3)]
    files.write_machines(machines)
    files.write_needs(needs)
    before = json.loads(files.text("--until-settled", "--output", "json"))

    found = exchanged(files)

    saved = sum(one["saving_usd_per_hour"] for one in found["exchanges"]["carried_out"])
    assert found["shortfalls"] == before["shortfalls"] == []
    assert found["cost_usd_per_hour"] <= before["cost_usd_per_hour"] - saved + 1e-9
    held_by = {m["id"]: name for name, one in found["clusters"].items() for m in one["machines"]}
    free = {"state": "Speculative", "cluster": ""}
    files.write_machines(
        [m | ({"state": "Configured", "cluster": held_by[m["id"]]} if m["id"] in held_by else free) for m in machines]
    )
    assert exchanged(files)["exchanges"]["carried_out"] == []
