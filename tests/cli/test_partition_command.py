"""`bigfleet partition`: the picture shows what is there, and the dedicated order places at least as many as others."""

import json
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from bench.workloads.hail import cluster
from bigfleet.cli.partition.command import app
from bigfleet.cli.partition.orders import ALL_PERCENT, Comparison, compare_orders, table_of
from bigfleet.cli.partition.picture import picture_of
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.partition.cluster import read_cluster
from bigfleet.partition.document import decode
from tests.commands import run_here

CASES = Path(__file__).parent.parent / "cases" / "hail"
FILLED = CASES / "017-drbd-fill.json"


def run(*arguments: str) -> str:
    """Run a command and return what it printed."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


def mirrored(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the cluster part of a message with instances on two hosts each; return its path and content."""
    message = cluster(8, 1, "drbd")
    names = list(message["instances"])
    message["instances"] = {"<i & j>": message["instances"].pop(names[0]), **message["instances"]}
    path = folder / "hosts.json"
    path.write_text(json.dumps(message), encoding="utf-8")
    return path, message


def cluster_part(path: Path) -> dict[str, Any]:
    """Return a message without its request."""
    message: dict[str, Any] = json.loads(path.read_bytes())
    del message["request"]
    return message


# ---- show ------------------------------------------------------------------------------------------------------------


def test_each_host_is_a_line_with_its_bar_its_room_and_what_fits() -> None:
    lines = run("show", str(FILLED)).splitlines()
    rows = {line.split()[0]: line.split()[-5:] for line in lines if line[:2] in ("e ", "q ", "h ", "t ", "f ")}

    assert rows == {
        "e": ["32,000", "200,000", "1", "2", "4"],
        "q": ["24,000", "150,000", "0", "1", "3"],
        "h": ["16,000", "100,000", "0", "1", "2"],
        "t": ["8,000", "50,000", "0", "0", "1"],
        "f": ["0", "0", "0", "0", "0"],
    }
    (half,) = [line for line in lines if line.startswith("h ")]
    assert (half.count("░"), half.count("·")) == (20, 20)


def test_no_request_is_needed_and_instances_and_mirrors_are_named(tmp_path: Path) -> None:
    path, _ = mirrored(tmp_path)
    shown = run("show", str(path))

    assert (shown.count("[<i ]"), shown.count("(<i )")) == (1, 1)
    assert "group-0 (preferred)" in shown


def test_a_host_that_takes_nothing_says_so() -> None:
    shown = run("show", str(CASES / "041-offline-drained-notvm.json"))

    assert shown.count("takes nothing") == 3


def test_one_group_can_be_shown_alone() -> None:
    both = CASES / "085-multi-two-groups.json"

    assert "A (preferred)" in run("show", str(both))
    assert "A (preferred)" not in run("show", str(both), "--group", "B")
    with pytest.raises(UsageFault, match=r"--group: .* has no group 'C'"):
        run("show", str(both), "--group", "C")


def test_the_svg_has_a_box_for_each_instance_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    hosts, message = mirrored(tmp_path)
    said = run("show", str(hosts), "--svg", str(tmp_path / "hosts.svg"))
    text = (tmp_path / "hosts.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    boxes = [each.get("fill") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    read = read_cluster(decode(hosts.read_bytes()))
    picture = picture_of(read, read.groups)

    assert said == f"{tmp_path / 'hosts.svg'}: {len(message['nodes'])} hosts\n"
    assert "&lt;i &amp; j" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    # The page, a frame for each host, a box for each block, and three in the legend.
    assert len(boxes) == 1 + sum(1 + len(host.blocks) for group in picture for host in group.hosts) + 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[1", "Malformed JSON"),
        (b"{}", "key 'nodegroups' not found"),
        (b'{"nodegroups":{"u":{}}}', "invalid data for group 'u': key 'name' not found"),
    ],
)
def test_a_wrong_file_is_named_with_owner_and_key(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_bytes(content)

    with pytest.raises(UsageFault) as caught:
        run("show", str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


def test_a_missing_file_and_a_place_that_takes_no_picture_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="nowhere"):
        run("show", str(tmp_path / "nowhere"))
    with pytest.raises(RunFault, match="--svg"):
        run("show", str(FILLED), "--svg", str(tmp_path / "no" / "folder"))
    finished = run_here("partition", "show", str(tmp_path / "nowhere"))
    assert (finished.returncode, finished.stdout) == (2, "")


def test_an_interval_that_nothing_limits_is_shown_as_endless(tmp_path: Path) -> None:
    message = cluster_part(FILLED)
    least = message["nodegroups"]["u1"]["ipolicy"]["minmax"][0]["min"]
    least.update({"memory-size": 0, "disk-size": 0, "cpu-count": 0})
    (tmp_path / "hosts.json").write_text(json.dumps(message), encoding="utf-8")

    assert "∞" in run("show", str(tmp_path / "hosts.json"))


# ---- compare ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    """40 sequences for each start and load on twelve hosts."""
    return compare_orders(12, 40, random.Random(7))


def test_from_empty_hosts_the_dedicated_order_refuses_nothing_that_there_is_room_for(
    comparisons: list[Comparison],
) -> None:
    for comparison in comparisons:
        if comparison.start == "empty" and comparison.load_percent <= ALL_PERCENT:
            placed = [each.placed for each in comparison.outcomes["dedicated"]]

            assert placed == [len(each.arrivals) for each in comparison.sequences]


def test_no_other_order_places_more_before_it_refuses_in_any_sequence(comparisons: list[Comparison]) -> None:
    for comparison in comparisons:
        for name, outcomes in comparison.outcomes.items():
            for ours, theirs in zip(comparison.outcomes["dedicated"], outcomes, strict=True):
                assert ours.before_refusal >= theirs.before_refusal, (comparison.start, name)


def test_no_other_order_places_more_in_all(comparisons: list[Comparison]) -> None:
    for comparison in comparisons:
        if comparison.load_percent <= ALL_PERCENT:
            placed = {name: sum(each.placed for each in several) for name, several in comparison.outcomes.items()}

            assert placed["dedicated"] == max(placed.values()), (comparison.start, placed)


def test_the_balanced_order_splits_hosts_and_places_fewer(comparisons: list[Comparison]) -> None:
    full = [each for each in comparisons if each.load_percent == ALL_PERCENT]

    for comparison in full:
        placed = {name: sum(each.placed for each in several) for name, several in comparison.outcomes.items()}
        assert placed["balanced"] < placed["dedicated"]


def test_the_table_is_the_same_for_the_same_seed() -> None:
    call = ("compare", "--hosts", "4", "--sequences", "3", "--seed", "5")

    assert run(*call) == run(*call)
    assert run(*call) != run(*call[:-1], "6")
    assert table_of(compare_orders(2, 1, random.Random(1)), hosts=2, sequences=1).row_count == 24


# ---- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parent.parent.parent / "docs" / "partitioned-hosts.md"
EXAMPLES = re.compile(r"```console\n\$ bigfleet ([^\n]*)\n(.*?)```\n", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), EXAMPLES.findall(PAGE.read_text(encoding="utf-8")))
def test_an_example_of_the_page_prints_what_the_page_shows(tmp_path: Path, command: str, shown: str) -> None:
    (tmp_path / "message.json").write_bytes((CASES / "001-design-quarter.json").read_bytes())
    finished = run_here(*command.split(), cwd=tmp_path)
    printed = [line.rstrip() for line in (finished.stderr + finished.stdout).splitlines()]

    assert shown.rstrip("\n").splitlines() == printed
