"""`bigfleet plan --exchange`: what cheaper machines would save, and nothing else changes."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    """A plan carries nothing out, and says what does."""
    assert files.refusal("--exchange", "on").endswith("use propose, or bigfleet shard --exchange on")
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
