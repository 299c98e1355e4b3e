"""What a scenario file may say, and how a wrong one is told: file, place, what is wrong there."""

from pathlib import Path

import pytest

from bigfleet.sim.scenarios.runner import FOLDER, run, scenarios
from bigfleet.sim.scenarios.scenario_file import Measure, ScenarioFault, read_scenario

SOUND = """
about: a world
clusters: [a, b]
shapes:
  box: {instance_type: t, allocatable: {cpu: "4"}}
machines:
  - {shape: box, count: 2, state: idle}
workloads:
  - {name: work, pods: 1, resources: {cpu: "1"}, cluster: a}
events:
  - {at: 2, resize: {workload: work, pods: 2, cluster: a}}
cycles: 4
must_hold:
  - {measure: machines, state: configured, exactly: 1}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "world.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_sound_file_is_read_and_runs(tmp_path: Path) -> None:
    written(tmp_path, SOUND)

    outcome = run("world", folder=tmp_path)

    assert scenarios(tmp_path) == ["world"]
    assert outcome.is_met, outcome.faults
    assert len(outcome.journal) == 4


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("about: a world", "about: [", "not YAML"),
        ("cycles: 4", "cycles: many", "$.cycles: Expected `int`, got `str`"),
        ("cycles: 4", "cycles: 0", "$.cycles: 0 is not from 1 to"),
        ("cycles: 4", "cycles: 4\ncycle: 5", "$.cycle: unknown key; did you mean cycles?"),
        ("clusters: [a, b]", "clusters: [a, each]", "$.clusters: names must differ"),
        ("count: 2", "count: -2", "$.machines[0].count: -2 is not from 0 to"),
        ("shape: box", "shape: ball", "$.machines[0].shape: there is no shape 'ball'"),
        ("state: idle", "state: tired", "$.machines[0].state: 'tired' is none of speculative, idle, configured"),
        ("state: idle", "state: configured", "$.machines[0].cluster: configured machines, and they alone"),
        ("state: idle", "for: play", "$.machines[0].for: there is no workload 'play'"),
        ('{cpu: "4"}', '{cpu: "4 x"}', "$.shapes.box.allocatable.cpu:"),
        ('{cpu: "1"}', '{cpu: "one"}', "$.workloads[0].resources.cpu:"),
        ("cluster: a}\nevents", "cluster: c}\nevents", "$.workloads[0].cluster: there is no cluster 'c'"),
        ("{at: 2, resize: {workload: work, pods: 2, cluster: a}}", "{at: 2}", "$.events[0]: exactly one of"),
        ("{at: 2, resize", "{at: 9, resize", "$.events[0]: at must be a cycle"),
        ("resize: {workload: work, pods: 2, cluster: a}", "store_cut_for_cycles: 1", "there is no coordinator"),
        ("cycles: 4", "cycles: 4\nshards: {s: {zones: [z], clusters: [a]}}", "$.shards: several shards need a"),
        (
            "cycles: 4",
            "cycles: 4\ncoordinator: true\nshards: {s: {zones: [z], clusters: [a]}}",
            "$.shards: every cluster must be bound to exactly one shard",
        ),
        (
            "cycles: 4",
            "cycles: 4\ncrashes: [{processes: [s], from_second: 1, to_second: 2}]",
            "$.crashes[0].processes: there is no process 's'",
        ),
        (
            "cycles: 4",
            "cycles: 4\ncoordinator: true\ncrashes: [{processes: [coordinator], from_second: 1, to_second: .inf}]",
            "$.crashes[0]: these are more than 1000 arms",
        ),
        ("cycles: 4", "cycles: 4\ncycle_seconds: .nan", "$.cycle_seconds: nan is not above 0"),
        ("pods: 2, cluster: a}", "pods: -2, cluster: a}", "$.events[0].resize.pods: -2 is not from 0 to"),
        (
            "resize: {workload: work, pods: 2, cluster: a}",
            "lose: {workload: work, cluster: a, machines: 0}",
            "$.events[0].lose.machines: 0 is not above 0",
        ),
        (
            "resize: {workload: work, pods: 2, cluster: a}",
            "fail: {call: boot}",
            "$.events[0].fail.call: 'boot' is none of create, configure, drain, delete",
        ),
        (
            "resize: {workload: work, pods: 2, cluster: a}",
            "fail: {call: create, calls: 0}",
            "$.events[0].fail.calls: 0 is not from 1 to",
        ),
        (
            "resize: {workload: work, pods: 2, cluster: a}",
            "shard_dies_for_cycles: 0",
            "$.events[0].shard_dies_for_cycles: 0 is not above 0",
        ),
        ("exactly: 1", "wanted: 1", "$.must_hold[0].wanted: unknown key; there are measure"),
        (", exactly: 1", "", "$.must_hold[0]: one of exactly, at_least, at_most is wanted"),
        ("measure: machines", "measure: happiness", "$.must_hold[0].measure: Invalid enum value 'happiness'"),
        ("measure: machines", "measure: churn", "$.must_hold[0]: churn cannot be narrowed by state"),
        ("state: configured, exactly", "state: tired, exactly", "$.must_hold[0].state: there is no state 'tired'"),
    ],
)
def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, before: str, after: str, told: str) -> None:
    """The message begins with the file and has the path of what is wrong."""
    assert before in SOUND
    path = written(tmp_path, SOUND.replace(before, after, 1))

    with pytest.raises(ScenarioFault) as caught:
        read_scenario(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


def test_growth_over_less_than_two_cycles_is_refused(tmp_path: Path) -> None:
    """It is the growth from the middle of the run to its end."""
    text = SOUND.replace("at: 2", "at: 1").replace("cycles: 4", "cycles: 1")
    path = written(tmp_path, text.replace("machines, state: configured, exactly", "growth_percent, at_most"))

    with pytest.raises(ScenarioFault, match=r"\$\.must_hold\[0\]: growth is from the middle to the end"):
        read_scenario(path)


def test_an_unknown_name_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    written(tmp_path, SOUND)

    with pytest.raises(ScenarioFault, match="there is no scenario 'moon'; there are world"):
        run("moon", folder=tmp_path)


def test_a_folder_without_scenarios_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioFault, match="there is no scenario file"):
        scenarios(tmp_path)


def test_every_measure_is_told_in_the_pages_of_the_cases() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")

    assert [m.value for m in Measure if f"`{m.value}`" not in page] == []
