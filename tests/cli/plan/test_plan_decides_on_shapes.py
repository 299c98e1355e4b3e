"""`bigfleet plan` with demand shapes: what is called covered runs, at the lowest cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from bigfleet.cli.main import app
from bigfleet.cli.runtime.failures import UsageFault

CPU_MACHINE = {"cpu": "16", "memory": "32Gi", "pods": "110"}


def machine(
    name: str, cpu: int, memory_gib: int, price: float, state: str = "Speculative", **fields: Any
) -> dict[str, Any]:
    """Return a machine of a file."""
    return {
        "id": name,
        "state": state,
        "instance_type": fields.pop("instance_type", f"t{cpu}.{memory_gib}"),
        "capacity_type": fields.pop("capacity_type", "OnDemand"),
        "allocatable": {"cpu": str(cpu), "memory": f"{memory_gib}Gi", "pods": "110", **fields.pop("more", {})},
        "price_per_hour": price,
        **fields,
    }


def shape(cpu: str, memory: str, count: int, **fields: Any) -> dict[str, Any]:
    """Return a shape of a file."""
    return {"resources": {"cpu": cpu, "memory": memory}, "count": count, **fields}


def row(
    name: str, *shapes: dict[str, Any], cluster: str = "shop", priority: int = 1000, **fields: Any
) -> dict[str, Any]:
    """Return a row of a file."""
    return {"id": name, "cluster": cluster, "priority": priority, "shapes": list(shapes), **fields}


class Files:
    """Writes a fleet and a demand, and runs the command on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, machines: list[dict[str, Any]], demand: Any, *arguments: str) -> Result:
        """Return what the command printed."""
        inventory, needs = self._folder / "fleet.jsonl", self._folder / "demand.yaml"
        inventory.write_text("".join(json.dumps(one) + "\n" for one in machines))
        needs.write_text(yaml.safe_dump(demand))
        return CliRunner().invoke(app, ["plan", "--inventory", str(inventory), "--demand", str(needs), *arguments])

    def document(self, machines: list[dict[str, Any]], demand: Any, *arguments: str) -> dict[str, Any]:
        """Return the JSON document; the command must succeed."""
        result = self.run(machines, demand, *arguments, "--output", "json")
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.output)
        return found

    def at_rest(self, machines: list[dict[str, Any]], demand: Any, *arguments: str) -> dict[str, Any]:
        """Return the fleet at rest."""
        return self.document(machines, demand, "--until-settled", *arguments)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return a folder for the files of a test."""
    return Files(tmp_path)


def pods_on(settled: dict[str, Any], cluster: str = "shop") -> dict[str, int]:
    """Return the pods that run, by row."""
    counts: dict[str, int] = {}
    for one in settled["clusters"].get(cluster, {"machines": []})["machines"]:
        for claim in one["claims"]:
            counts[claim["row"]] = counts.get(claim["row"], 0) + claim["count"]
    return counts


def test_one_impossible_pod_costs_nobody_a_place(files: Files) -> None:
    """A pod that asks for 1000 cpu joins 200 running ones: 13 machines stay, 200 pods run, the size is named."""
    held = [machine(f"m{n:02}", 16, 64, 0.8, "Configured", cluster="shop") for n in range(13)]
    demand = [row("web", shape("1", "2Gi", 200), shape("1000", "2Gi", 1))]

    plan = files.document(held, demand)["plan"]

    (short,) = plan["shortfalls"]
    assert [action for action in plan["actions"] if action["kind"] == "Reclaim"] == []
    assert short["impossible"] == [
        {
            "reason": "request_too_large",
            "resources": {"cpu": "1k", "memory": "2Gi"},
            "count": 1,
            "dimension": "cpu",
            "wanted": "1k",
            "largest": "16",
        }
    ]
    assert pods_on(files.at_rest(held, demand)) == {"web": 200}


def test_opposite_shapes_of_one_row_use_two_kinds_of_machines(files: Files) -> None:
    """A pod of 60 cpu and a pod of 400 GiB run on a machine rich in cpu and on one rich in memory."""
    offers = [machine(f"c{n}", 64, 128, 2.4) for n in range(3)] + [machine(f"r{n}", 16, 512, 4.0) for n in range(3)]

    settled = files.at_rest(offers, [row("both", shape("60", "8Gi", 1), shape("2", "400Gi", 1))])

    assert pods_on(settled) == {"both": 2}
    assert settled["shortfalls"] == []


def test_ten_rows_share_one_machine(files: Files) -> None:
    """Ten rows of half a cpu run on one machine of eight."""
    offers = [machine(f"m{n:02}", 8, 32, 0.4) for n in range(20)]
    rows = [row(f"row-{n}", shape("500m", "1Gi", 1), priority=100 + n) for n in range(10)]

    settled = files.at_rest(offers, rows)

    assert len(settled["clusters"]["shop"]["machines"]) == 1
    assert settled["cost_usd_per_hour"] == pytest.approx(0.4)
    assert sum(pods_on(settled).values()) == 10


def test_the_cheaper_fleet_wins_not_the_cheaper_machine(files: Files) -> None:
    """One machine of 64 cpu at $1.60 beats 64 machines of one cpu at $0.05."""
    offers = [machine(f"small-{n:02}", 1, 2, 0.05) for n in range(80)] + [machine("large", 64, 128, 1.6)]

    settled = files.at_rest(offers, [row("web", shape("1", "1Gi", 62))])

    assert settled["cost_usd_per_hour"] == pytest.approx(1.6)


def test_a_dear_idle_machine_is_not_taken_before_a_cheap_offer(files: Files) -> None:
    """Two cpu are made at $0.20 while an idle on-demand machine costs $55."""
    fleet = [machine("idle", 2, 4, 55.0, "Idle"), machine("offer", 2, 4, 0.2)]

    actions = files.document(fleet, [row("web", shape("1", "1Gi", 2))])["plan"]["actions"]

    assert [(action["kind"], action["machine"]) for action in actions if action["kind"] != "Delete"] == [
        ("Provision", "offer")
    ]


def test_a_gpu_machine_that_is_paid_for_goes_to_the_row_that_wants_its_gpu(files: Files) -> None:
    """Of two idle bare metal machines the cpu row takes the one without GPUs, whatever their ids."""
    fleet = [
        machine("a-gpu", 16, 64, 0.0, "Idle", capacity_type="BareMetal", more={"nvidia.com/gpu": "8"}),
        machine("b-cpu", 16, 64, 0.0, "Idle", capacity_type="BareMetal"),
    ]
    gpu = {"resources": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "8"}, "count": 1}

    settled = files.at_rest(fleet, [row("web", shape("14", "8Gi", 1), priority=2000), row("train", gpu, priority=10)])

    assert pods_on(settled) == {"web": 1, "train": 1}


def test_room_in_the_own_cluster_is_used_before_anything_is_preempted(files: Files) -> None:
    """A row of 2 cpu runs beside a lower row that leaves 62 free, and the other cluster keeps its machine."""
    fleet = [
        machine("own", 64, 128, 2.0, "Configured", cluster="shop", assigned_priority=10),
        machine("other", 60, 128, 2.0, "Configured", cluster="lab", assigned_priority=10),
    ]
    demand = [
        row("low", shape("1", "1Gi", 2), priority=10),
        row("lab", shape("30", "1Gi", 2), cluster="lab", priority=10),
        row("high", shape("2", "1Gi", 1), priority=1000),
    ]

    plan = files.document(fleet, demand)["plan"]

    assert plan["actions"] == []
    assert plan["shortfalls"] == []


def test_a_victim_is_chosen_for_what_is_lost(files: Files) -> None:
    """Of two machines the one without a reclamation penalty goes, though its priority is a little higher."""
    fleet = [
        machine("dear", 4, 8, 0.2, "Configured", cluster="lab", assigned_priority=100),
        machine("cheap", 4, 8, 0.2, "Configured", cluster="dev", assigned_priority=120),
    ]
    demand = [
        row("lab", shape("4", "1Gi", 1), cluster="lab", priority=100, reclamation_bucket=26),
        row("dev", shape("4", "1Gi", 1), cluster="dev", priority=120),
        row("high", shape("3", "1Gi", 1), priority=900),
    ]

    actions = files.document(fleet, demand)["plan"]["actions"]

    assert [(action["kind"], action["machine"]) for action in actions] == [("Preempt", "cheap")]


def test_the_smaller_of_two_equal_victims_goes(files: Files) -> None:
    """One cpu lacks: the machine of 2 cpu is preempted, not the one of 192."""
    fleet = [
        machine("a-large", 192, 384, 8.0, "Configured", cluster="lab", assigned_priority=100),
        machine("b-small", 2, 4, 0.1, "Configured", cluster="dev", assigned_priority=100),
    ]
    demand = [
        row("lab", shape("190", "1Gi", 1), cluster="lab", priority=100),
        row("dev", shape("2", "1Gi", 1), cluster="dev", priority=100),
        row("high", shape("1", "1Gi", 1), priority=900),
    ]

    actions = files.document(fleet, demand)["plan"]["actions"]

    assert [action["machine"] for action in actions if action["kind"] == "Preempt"] == ["b-small"]


def test_pods_that_exclude_each_other_get_a_machine_each(files: Files) -> None:
    """Three pods with at most one on a machine run on three machines."""
    offers = [machine(f"m{n}", 16, 64, 0.5) for n in range(5)]

    settled = files.at_rest(offers, [row("web", shape("1", "1Gi", 3, max_per_machine=1))])

    assert [len(one["claims"]) for one in settled["clusters"]["shop"]["machines"]] == [1, 1, 1]


def test_daemonsets_take_their_part_of_every_machine(files: Files) -> None:
    """With 2 cpu of overhead a machine of 16 hosts 14 pods of one cpu, and the fifteenth needs another machine."""
    offers = [machine(f"m{n}", 16, 64, 0.5) for n in range(3)]
    overheads = [{"cluster": "shop", "resources": {"cpu": "2"}}]

    fits = files.at_rest(offers, {"rows": [row("web", shape("1", "1Gi", 14))], "overheads": overheads})
    more = files.at_rest(offers, {"rows": [row("web", shape("1", "1Gi", 15))], "overheads": overheads})

    assert len(fits["clusters"]["shop"]["machines"]) == 1
    assert len(more["clusters"]["shop"]["machines"]) == 2


def test_a_fleet_at_rest_stays_at_rest(files: Files) -> None:
    """The fleet that --until-settled shows, planned again, leads to no action."""
    offers = [machine(f"m{n:02}", 8, 32, 0.4) for n in range(9)] + [machine(f"r{n}", 8, 64, 0.5) for n in range(9)]
    demand = [row("web", shape("1", "2Gi", 20), shape("3", "20Gi", 3)), row("batch", shape("2", "4Gi", 9), priority=10)]
    settled = files.at_rest(offers, demand)
    held = {one["id"] for one in settled["clusters"]["shop"]["machines"]}
    fleet = [one | ({"state": "Configured", "cluster": "shop"} if one["id"] in held else {}) for one in offers]

    again = files.document(fleet, demand)["plan"]

    assert again["actions"] == []
    assert again["shortfalls"] == []


def test_an_explanation_says_who_shares_a_machine_and_what_came_second(files: Files) -> None:
    """--explain of a row names the machine, the rows beside it, the runner-up and the price that decides."""
    offers = [machine("m1", 8, 32, 0.4), machine("r1", 8, 64, 0.5)]
    demand = [row("web", shape("1", "2Gi", 4)), row("cache", shape("1", "2Gi", 2), priority=10)]

    result = files.run(offers, demand, "--explain", "web")

    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "4 of its 4 pods run on m1, which also serves cache." in text
    assert "The target composition of shop is 1 × t8.32" in text
    assert "m1 is acquired at $0.40/h, because the target composition has it" in text
    assert "next best was r1, $0.10/h dearer for the same pods." in text
    assert "r1 would be taken in its place if m1 cost $0.50/h." in text


def test_the_price_that_an_explanation_names_turns_the_choice(files: Files) -> None:
    """A little below the named price m1 is taken, a little above it r1."""
    demand = [row("web", shape("1", "2Gi", 4))]

    for price, taken in ((0.499, "m1"), (0.501, "r1")):
        offers = [machine("m1", 8, 32, price), machine("r1", 8, 64, 0.5)]
        actions = files.document(offers, demand)["plan"]["actions"]
        assert [action["machine"] for action in actions] == [taken]


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        ([row("web", shape("1", "1Gi", 0))], "shapes[0].count: 0 is not a number of pods"),
        ([row("web", shape("x", "1Gi", 1))], "shapes[0].resources.cpu"),
        ([row("web", shape("1", "1Gi", 1, max_per_machine=-1))], "max_per_machine: -1 is not a limit"),
        ({"rows": [], "overhead": []}, "overhead"),
        ({"rows": [row("web", shape("1", "1Gi", 1))], "overheads": [{"cluster": "", "resources": {}}]}, "overheads[0]"),
    ],
)
def test_a_wrong_demand_is_named(files: Files, demand: Any, said: str) -> None:
    """A mistake in a demand file is one line with the file, the place and the value; exit 2."""
    result = files.run([machine("m", 8, 32, 0.4)], demand)

    assert isinstance(result.exception, UsageFault)
    assert said in str(result.exception)


def test_an_unknown_scheduler_is_refused(files: Files) -> None:
    """--scheduler takes one of two orders."""
    result = files.run([machine("m", 8, 32, 0.4)], [row("web", shape("1", "1Gi", 1))], "--scheduler", "random")

    assert isinstance(result.exception, UsageFault)
    assert "least-allocated, most-allocated" in str(result.exception)


def spot_fleet() -> list[dict[str, Any]]:
    """Return offers of two Spot pools; zone b costs twice as much as zone a."""
    return [
        machine(f"{zone}{n:02}", 4, 16, price, capacity_type="Spot", zone=zone, interruption_probability=0.0001)
        for zone, price in (("a", 0.1), ("b", 0.2))
        for n in range(30)
    ]


@pytest.mark.parametrize(("arguments", "most"), [((), 0.5), (("--spot-pool-max", "80%"), 0.8)])
def test_one_spot_pool_has_a_limited_share_of_a_cluster(files: Files, arguments: tuple[str, ...], most: float) -> None:
    """Machines of one Spot pool are interrupted together; the explanation names the pool that is limited."""
    demand = [row("web", shape("1", "4Gi", 60), interruption_bucket=4)]

    held = [one["id"] for one in files.at_rest(spot_fleet(), demand, *arguments)["clusters"]["shop"]["machines"]]

    cheap = sum(name.startswith("a") for name in held)
    assert most - 0.1 <= cheap / len(held) <= most
    explained = " ".join(files.run(spot_fleet(), demand, *arguments, "--explain", "web").output.split())
    assert "The limit on one Spot pool's share (spot_pool_max) allows fewer machines of t4.16/a" in explained


def test_without_a_limit_the_cheapest_pool_has_all(files: Files) -> None:
    """--spot-pool-max 0% is no limit; a row without an interruption penalty has none, either."""
    for bucket, arguments in ((4, ("--spot-pool-max", "0%")), (0, ())):
        demand = [row("web", shape("1", "4Gi", 60), interruption_bucket=bucket)]

        held = files.at_rest(spot_fleet(), demand, *arguments)["clusters"]["shop"]["machines"]

        assert {one["id"][0] for one in held} == {"a"}


@pytest.mark.parametrize("share", ["-1%", "101%", "50", "half"])
def test_what_is_no_share_is_refused(files: Files, share: str) -> None:
    """The message says what to write."""
    result = files.run([machine("m", 8, 32, 0.4)], [row("web", shape("1", "1Gi", 1))], f"--spot-pool-max={share}")

    assert isinstance(result.exception, UsageFault)
    assert f"--spot-pool-max: {share!r} is not a share; write a share from 0% to 100%, as 50%" in str(result.exception)


def test_rows_of_one_profile_are_explained_apart(files: Files) -> None:
    """Each row is explained by what it got, and machines and rows name the others by their ids."""
    machines = [machine(f"m{n}", 32, 128, 1.4) for n in range(3)] + [machine(f"s{n}", 16, 32, 0.8) for n in range(3)]
    demand = [
        row("web", shape("500m", "1Gi", 30)),
        row("cache", shape("2", "14Gi", 6)),
        row("huge", shape("1000", "1Gi", 2)),
    ]

    web, cache, huge, taken = (
        " ".join(files.run(machines, demand, "--explain", asked).output.partition("Why ")[2].split())
        for asked in ("need:web", "need:cache", "need:huge", "machine:m0")
    )

    assert web.startswith("web web wants 30 pods")
    assert "30 of its 30 pods run on m0, which also serves cache." in web
    assert "the best fleet led by t16.32 OnDemand costs" in web
    assert cache.startswith("cache cache wants 6 pods")
    assert "6 of its 6 pods run on m0, which also serves web." in cache
    assert huge.startswith("huge huge wants 2 pods")
    assert "are set aside: request too large" in huge
    assert "run on" not in huge
    assert "It hosts 6 pods of cache, 30 pods of web;" in taken


def test_a_row_that_its_spread_leaves_without_a_place_says_so(files: Files) -> None:
    """Machines of a file have no hostname: a spread over it allows none of them."""
    key = "kubernetes.io/hostname"
    demand = [row("web", shape("1", "1Gi", 4), spreads=[[key, 1, "DoNotSchedule"]])]

    result = files.run([machine("m0", 32, 128, 1.4)], demand)

    assert f"no machine that the row may take and the spread over {key} allows has room for more" in " ".join(
        result.output.split()
    )
