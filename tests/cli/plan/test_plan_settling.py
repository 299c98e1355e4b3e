"""`bigfleet plan --until-settled`: what every cluster holds when nothing is left to do."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.plan.inputs import read_demand, read_machines
from bigfleet.cli.plan.planning import plan_input
from bigfleet.cli.plan.settling import settle
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.model.states import MachineState
from tests.cli.plan.test_plan_command import CPU, MACHINES, NEEDS, Files
from tests.processes import run_bigfleet


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def settled(files: Files) -> Any:
    return json.loads(files.text("--until-settled", "--output", "json"))


def held(document: Any) -> dict[str, list[tuple[str, str]]]:
    """Return (machine, row) of every machine that each cluster holds."""
    return {
        cluster: [(machine["id"], ", ".join(machine["rows"])) for machine in found["machines"]]
        for cluster, found in document["clusters"].items()
    }


_RACK: Final = "topology.example/rack"


def _machine(
    name: str,
    cpu: int,
    gib: int,
    capacity_type: str,
    price: float,
    rack: str,
    *,
    pods: int = 110,
    gpus: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Return a machine of an inventory file; Idle, or Configured where a cluster is given."""
    allocatable = {"cpu": str(cpu), "memory": f"{gib}Gi", "pods": str(pods)}
    if gpus:
        allocatable["nvidia.com/gpu"] = str(gpus)
    return {
        "id": name,
        "state": "Configured" if "cluster" in more else "Idle",
        "instance_type": f"t{cpu}",
        "zone": rack[0],
        "capacity_type": capacity_type,
        "price_per_hour": price,
        "labels": {_RACK: rack},
        "allocatable": allocatable,
        **more,
    }


def _row(name: str, cluster: str, priority: int, cpu: str, memory: str, count: int, **more: Any) -> dict[str, Any]:
    """Return a row of a demand file with pods of one shape."""
    shapes = [{"resources": {"cpu": cpu, "memory": memory}, "count": count}]
    return {"id": name, "cluster": cluster, "priority": priority, "shapes": shapes, **more}


def test_every_machine_that_a_cluster_holds_at_rest_is_named(files: Files) -> None:
    """What is reclaimed from one cluster goes to another, and unneeded machines are released."""
    document = settled(files)

    assert held(document) == {"lab": [("i1", "jobs"), ("n1", "jobs")], "shop": [("s1", "web")]}
    assert document["cost_usd_per_hour"] == 0.5 + 2.0 + 0.5
    assert (document["idle_usd_per_hour"], document["idle_machines"]) == (0.0, 0)
    assert document["cycles"] == 2
    assert document["actions"] == {"Bootstrap": 1, "Provision": 1, "Reclaim": 1, "Preempt": 0, "Delete": 1}
    assert document["shortfalls"] == []


def test_a_gang_that_no_domain_hosts_whole_keeps_its_machine(files: Files) -> None:
    """One of its four pods runs on a machine that another gang, of equal priority, would take from a lower row."""
    zone = {"zone": "a", "capacity_type": "BareMetal"}
    large = {"cpu": "8", "memory": "16Gi", "pods": "3"}
    files.write_machines(
        [
            {"id": "m0", "state": "Configured", "cluster": "c1", "allocatable": large, **zone},
            {"id": "m1", "allocatable": {"cpu": "4", "memory": "8Gi"}, **zone},
            {"id": "m2", "state": "Speculative", "allocatable": {"cpu": "8", "memory": "32Gi"}, **zone},
        ]
    )

    def row(name: str, cluster: str, priority: int, cpu: str, memory: str, count: int, **more: Any) -> dict[str, Any]:
        shapes = [{"resources": {"cpu": cpu, "memory": memory}, "count": count}]
        return {"id": name, "cluster": cluster, "priority": priority, "shapes": shapes, **more}

    same = {"requirements": [["topology.kubernetes.io/zone", "Same"]]}
    files.write_needs(
        [
            row("low", "c0", 0, "1", "2Gi", 4),
            row("high", "c1", 1000, "500m", "6Gi", 2),
            row("other", "c1", 100, "2", "6Gi", 4, group="other", **same),
            row("gang", "c0", 100, "5", "6Gi", 4, group="gang", **same),
        ]
    )

    document = settled(files)

    assert document["actions"] == {"Bootstrap": 1, "Provision": 1, "Reclaim": 0, "Preempt": 0, "Delete": 0}
    (machine,) = document["clusters"]["c0"]["machines"]
    assert [(claim["row"], claim["count"]) for claim in machine["claims"]] == [("gang", 1), ("low", 3)]


def test_a_machine_that_a_higher_row_leaves_to_lower_ones_goes_to_the_row_between(files: Files) -> None:
    """The third row gets m1: the second one has room on m0, where the plan has pods of the lowest row."""
    files.write_machines(
        [
            _machine("m0", 8, 16, "Reserved", 0.8, "a-0"),
            _machine("m1", 8, 32, "BareMetal", 0.8, "a-1"),
            _machine("m2", 16, 64, "OnDemand", 0.4, "a-2", state="Speculative"),
        ]
    )
    files.write_needs(
        [
            _row("first", "c1", 1000, "1", "512Mi", 1, interruption_bucket=3, requirements=[[_RACK, "Same"]]),
            _row("second", "c1", 1000, "3", "6Gi", 1),
            _row("third", "c2", 1000, "3", "6Gi", 1),
            _row("low", "c1", 100, "3", "2Gi", 8),
            _row("large", "c0", 1000, "4", "512Mi", 3),
        ]
    )

    document = settled(files)

    assert document["actions"]["Preempt"] <= 1
    claims = [claim for cluster in document["clusters"].values() for m in cluster["machines"] for claim in m["claims"]]
    served = {name: sum(claim["count"] for claim in claims if claim["row"] == name) for name in ("third", "low")}
    assert served == {"third": 1, "low": 1}


def test_a_row_does_not_wait_for_a_machine_that_lower_pods_of_another_cluster_could_free(files: Files) -> None:
    """Pods of `high` are planned on three machines, and fit on two, where the plan has lower pods: m1 is another's."""
    held: dict[str, Any] = {"cluster": "c0", "assigned_priority": 1000}
    files.write_machines(
        [
            _machine("m0", 16, 64, "BareMetal", 0.4, "a-0", pods=10, **held),
            _machine("m1", 4, 16, "BareMetal", 0.1, "a-1", cluster="c0", assigned_priority=0),
            _machine("m2", 8, 16, "Spot", 0.2, "b-0", state="Speculative", interruption_probability=0.001),
        ]
    )
    files.write_needs(
        [
            _row("high", "c0", 1000, "3", "512Mi", 5),
            _row("between", "c1", 100, "4", "2Gi", 1),
            _row("low", "c0", 0, "4", "6Gi", 3),
            _row("lowest", "c0", 0, "3", "2Gi", 3),
        ]
    )

    document = settled(files)

    (machine,) = document["clusters"]["c1"]["machines"]
    assert [claim["row"] for claim in machine["claims"]] == ["between"]
    claims = [claim for machine in document["clusters"]["c0"]["machines"] for claim in machine["claims"]]
    assert sum(claim["count"] for claim in claims if claim["row"] == "high") == 5
    assert document["actions"]["Preempt"] <= 1


def test_pods_of_a_lower_gang_that_is_not_whole_free_a_machine_as_well(files: Files) -> None:
    """Pods of `high` take the room of pods of the gang, so that `three` gets its third machine."""
    files.write_machines(
        [
            _machine("m0", 4, 8, "Reserved", 0.4, "a-0"),
            _machine("m1", 8, 16, "BareMetal", 0.8, "a-0", cluster="c0", assigned_priority=1000),
            _machine("m2", 8, 32, "Reserved", 0.8, "a-2", pods=10, gpus=4),
            _machine("m3", 8, 16, "Reserved", 0.4, "a-0", pods=10),
        ]
    )
    zone = {"requirements": [["topology.kubernetes.io/zone", "Same"]]}
    three = _row("three", "c1", 1000, "1", "512Mi", 3, **zone)
    three["shapes"][0]["max_per_machine"] = 1
    gang = _row("gang", "c0", 0, "4", "512Mi", 3, **zone)
    gang["shapes"].append({"resources": {"cpu": "1", "memory": "1Gi"}, "count": 2})
    gpu = _row("gpu", "c2", 100, "500m", "6Gi", 1)
    gpu["shapes"][0]["resources"]["nvidia.com/gpu"] = "1"
    files.write_needs(
        [_row("high", "c0", 1000, "2", "512Mi", 4), three, _row("middle", "c0", 100, "3", "2Gi", 1), gpu, gang]
    )

    document = settled(files)

    claims = [claim for cluster in document["clusters"].values() for m in cluster["machines"] for claim in m["claims"]]
    served = {name: sum(claim["count"] for claim in claims if claim["row"] == name) for name in ("high", "three")}
    assert served == {"high": 4, "three": 3}


def test_a_gang_preempts_in_the_domain_that_can_then_host_all_of_it(files: Files) -> None:
    """Rack a has room for three of its four pods and nothing to preempt; the pods of rack b find their place there."""
    files.write_machines(
        [
            _machine("a0", 12, 48, "Reserved", 0.4, "a-0"),
            _machine("b0", 8, 32, "Reserved", 0.4, "b-0", cluster="c1", assigned_priority=0),
            _machine("b1", 8, 32, "Reserved", 0.4, "b-0", cluster="c1", assigned_priority=0),
            _machine("d0", 16, 64, "Reserved", 0.4, "d-0", cluster="c2", assigned_priority=2000),
        ]
    )
    files.write_needs(
        [
            _row("gang", "c0", 1000, "4", "6Gi", 4, group="gang", requirements=[[_RACK, "Same"]]),
            _row("service", "c1", 0, "3", "6Gi", 4),
            _row("above", "c2", 2000, "8", "6Gi", 2),
        ]
    )

    document = settled(files)

    assert {machine["id"] for machine in document["clusters"]["c0"]["machines"]} == {"b0", "b1"}
    assert {machine["id"] for machine in document["clusters"]["c1"]["machines"]} == {"a0"}
    assert document["shortfalls"] == []


def test_a_gang_keeps_the_larger_of_its_domains_though_a_plan_has_lower_pods_there(files: Files) -> None:
    """Six of its seven pods run on m1, on which a row of another cluster may not preempt them."""
    files.write_machines(
        [
            _machine("m0", 8, 32, "Reserved", 0.2, "c-0", cluster="c1", assigned_priority=100),
            _machine("m1", 16, 64, "Spot", 0.8, "b-0", state="Speculative", interruption_probability=0.001),
        ]
    )
    gang = _row("gang", "c2", 1000, "3", "512Mi", 5, interruption_bucket=3, requirements=[[_RACK, "Same"]])
    gang["shapes"].append({"resources": {"cpu": "1", "memory": "1Gi"}, "count": 2})
    files.write_needs(
        [
            _row("other", "c1", 1000, "4", "512Mi", 1, requirements=[["topology.kubernetes.io/zone", "In", ["b"]]]),
            gang,
            _row("low", "c2", 0, "2", "6Gi", 5),
        ]
    )

    machines = settled(files)["clusters"]["c2"]["machines"]

    claims = {machine["id"]: [(claim["row"], claim["count"]) for claim in machine["claims"]] for machine in machines}
    assert claims == {"m0": [("low", 4)], "m1": [("gang", 5), ("gang", 1)]}


def test_a_machine_planned_for_a_gang_is_not_acquired_if_the_gang_finds_no_domain(files: Files) -> None:
    """Other clusters take what the gangs' target counts on; no row is left for which a machine of it could be bound."""
    cloud: dict[str, Any] = {"state": "Speculative"}
    files.write_machines(
        [
            _machine("m00", 8, 32, "Reserved", 0.4, "a-r0", pods=10),
            _machine("m01", 8, 32, "OnDemand", 0.4, "a-r1", **cloud),
            _machine("m03", 8, 32, "BareMetal", 0.4, "b-r3"),
            _machine("m04", 16, 64, "BareMetal", 0.8, "b-r0", gpus=4, cluster="c0", assigned_priority=1000),
            _machine("m05", 16, 64, "OnDemand", 0.4, "a-r2", **cloud),
            _machine("m06", 16, 64, "Reserved", 1.6, "a-r0"),
            _machine("m07", 8, 16, "Reserved", 0.4, "a-r1"),
            _machine("m12", 8, 32, "Reserved", 0.8, "b-r0", gpus=4),
            _machine("m13", 8, 32, "Reserved", 0.4, "a-r1", pods=10),
        ]
    )
    same = {"requirements": [[_RACK, "Same"]]}
    files.write_needs(
        [
            _row("r1", "c2", 100, "4", "6Gi", 1),
            _row("r2", "c0", 0, "1", "6Gi", 6, **same),
            _row("r3", "c0", 1000, "4", "6Gi", 5, **same),
            _row("r5", "c2", 100, "4", "512Mi", 8),
        ]
    )

    document = settled(files)

    machines = [machine for cluster in document["clusters"].values() for machine in cluster["machines"]]
    assert all(machine["claims"] for machine in machines)


def test_preemption_takes_its_way_until_rest(files: Files) -> None:
    """The victim drains, goes to the higher priority, and its row stays short."""
    files.write_machines(MACHINES[:2])
    urgent = {"id": "urgent", "cluster": "lab", "priority": 900, "aggregate": {"cpu": "16"}}
    files.write_needs([{**NEEDS[0], "aggregate": {"cpu": "32"}}, urgent])
    document = settled(files)

    assert document["actions"] == {"Bootstrap": 1, "Provision": 0, "Reclaim": 0, "Preempt": 1, "Delete": 0}
    assert document["cycles"] == 2
    assert len(document["clusters"]["lab"]["machines"]) == len(document["clusters"]["shop"]["machines"]) == 1
    assert [(short["row"], short["lacks"]) for short in document["shortfalls"]] == [("web", {"cpu": "16"})]


def test_unneeded_bare_metal_stays_idle_and_is_no_cost_of_a_cluster(files: Files) -> None:
    files.write_machines([{**CPU, "id": "bm", "capacity_type": "BareMetal"}, MACHINES[0]])
    files.write_needs([NEEDS[0]])
    document = settled(files)

    assert held(document) == {"shop": [("s1", "web")]}
    assert (document["cost_usd_per_hour"], document["idle_usd_per_hour"], document["idle_machines"]) == (0.5, 0.5, 1)
    assert document["cycles"] == 0


def test_transitions_under_way_end_first(files: Files) -> None:
    """A machine in creation is idle by then; one that drains is free; a silent cluster keeps what it has."""
    files.write_machines(
        [
            {**CPU, "id": "creating", "state": "Creating", "intended_cluster": "shop"},
            {**CPU, "id": "draining", "state": "Draining", "cluster": "lab"},
            {**CPU, "id": "deleting", "state": "Deleting"},
            {**CPU, "id": "silent", "state": "Configuring", "cluster": "quiet"},
        ]
    )
    files.write_needs([{**NEEDS[0], "aggregate": {"cpu": "16"}}])
    machines, demand = read_machines(files.inventory), read_demand(files.demand)
    rest = settle(plan_input(machines, demand.needs)).plan.snapshot.machines

    assert {name: machine.state for name, machine in rest.items()} == {
        "creating": MachineState.CONFIGURED,
        "draining": MachineState.SPECULATIVE,
        "deleting": MachineState.SPECULATIVE,
        "silent": MachineState.CONFIGURED,
    }
    assert held(settled(files)) == {"quiet": [("silent", "")], "shop": [("creating", "web")]}


def test_a_machine_that_never_joined_is_drained_and_used_again(files: Files) -> None:
    files.write_machines([{**MACHINES[0], "unjoined": True}])
    files.write_needs([NEEDS[0]])
    document = settled(files)

    assert held(document) == {"shop": [("s1", "web")]}
    assert document["actions"]["Reclaim"] == document["actions"]["Bootstrap"] == 1


def test_a_fleet_that_is_at_rest_stays_as_it_is(files: Files) -> None:
    """Settling what was settled does nothing."""
    machines, demand = read_machines(files.inventory), read_demand(files.demand)
    first = settle(plan_input(machines, demand.needs))
    again = settle(first.plan.given)

    assert (again.cycles, again.actions) == (0, {})
    assert again.clusters == first.clusters


def test_a_person_sees_it_in_80_columns(files: Files) -> None:
    lines = files.text("--until-settled").splitlines()

    assert max(map(len, lines)) <= 80
    assert [line.rstrip() for line in lines] == [
        "At rest",
        "cluster  rows  n  instance type  zone  paid as     $/h",
        "lab      jobs  1  c.16           a     OnDemand  $0.50",
        "lab      jobs  1  c.16           b     OnDemand  $2.00",
        "shop     web   1  c.16                 OnDemand  $0.50",
        "2 cycles with actions until rest: 1 Bootstrap, 1 Provision, 1 Reclaim, 1 Delete.",
        "The clusters hold 3 machines for $3.00/h; 0 machines for $0.00/h idle.",
        "",
        "Nothing stays short.",
    ]


def test_a_fleet_that_finds_no_rest_is_an_error_that_says_what_it_still_does(files: Files) -> None:
    machines, demand = read_machines(files.inventory), read_demand(files.demand)

    with pytest.raises(RunFault, match=r"--until-settled: no rest after 1 cycles, the next would have 1 Delete"):
        settle(plan_input(machines, demand.needs), cycles_max=1)


@pytest.mark.parametrize("more", [["--bound"], ["--explain", "web"], ["--what-if", "x.yaml"]])
def test_what_explains_one_cycle_is_refused_beside_it(files: Files, more: list[str]) -> None:
    assert "--until-settled shows a fleet at rest; leave out" in files.refusal("--until-settled", *more)


def test_the_real_command_says_the_same(files: Files) -> None:
    done = run_bigfleet(*files.arguments("--until-settled", "--output", "json"))

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == settled(files)


def test_the_flag_is_in_the_help() -> None:
    assert "--until-settled" in CliRunner().invoke(app, ["plan", "--help"]).output
