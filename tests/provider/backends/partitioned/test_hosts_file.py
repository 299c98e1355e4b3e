"""Hosts files that are refused, and what each refusal names (docs/spec/provider.md §22)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.provider.allocator import make_allocator
from bigfleet.provider.backends.partitioned.hosts_file import HostsFault, read_hosts
from bigfleet.provider.backends.partitioned.ports import Carved, CarveSize
from bigfleet.provider.backends.partitioned.seeds import seed_document
from tests.provider.backends.partitioned.hosts import bounds, document, fleet, group, node

Body = dict[str, Any]


def plain() -> Body:
    return document({"n": node("g"), "m": node("g")})


def _shared(body: Body) -> None:
    body["nodes"]["m"]["ndparams"] = {"exclusive_storage": False, "spindle_count": 4}


def _no_zone(body: Body) -> None:
    del body["bigfleet"]["nodes"]["m"]


def _too_few(body: Body) -> None:
    body["bigfleet"]["groups"]["g"]["intervals"].pop()


def _unlimited(body: Body) -> None:
    least = body["nodegroups"]["g"]["ipolicy"]["minmax"][0]["min"]
    least.update({"memory-size": 0, "disk-size": 0, "cpu-count": 0})


def _two_bounds(body: Body) -> None:
    other = group("h", ("quarter",))
    other["ipolicy"]["minmax"][0]["min"]["memory-size"] += 10
    body["nodegroups"]["h"] = other
    body["bigfleet"]["groups"]["h"] = {"intervals": [{"name": "quarter", "price_usd_per_hour": 1}]}


def _set(*path: str, value: Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


BAD = [
    (_shared, "nodes.m.ndparams.exclusive_storage: is false"),
    (_no_zone, "bigfleet.nodes.m.zone: is missing"),
    (_set("bigfleet", "nodes", "m", "zone", value=""), "bigfleet.nodes.m.zone: is missing"),
    (_set("bigfleet", "nodes", "m", value={}), "bigfleet.nodes.m.zone: is missing"),
    (_too_few, "bigfleet.groups.g.intervals: has 2 entries, the policy of the group 3 intervals"),
    (_set("bigfleet", "groups", value={}), "bigfleet.groups.g.intervals: has 0 entries"),
    (_two_bounds, "bigfleet.groups.h.intervals: 'quarter' has other lower bounds than in group g"),
    (_unlimited, "bigfleet.groups.g.intervals: 'quarter' fits without end"),
    (_set("bigfleet", "groups", "g", "capacity_type", value="gold"), "bigfleet.groups.g.capacity_type: 'gold' is none"),
    (_set("bigfleet", "groups", "g", "capacity_type", value="spot"), "bigfleet.groups.g.capacity_type: spot needs"),
    (_set("bigfleet", "groups", "x", value={"intervals": []}), "bigfleet.groups.x: there is no such node group"),
    (_set("bigfleet", "nodes", "x", value={"zone": "z"}), "bigfleet.nodes.x: there is no such node"),
    (_set("bigfleet", "zones", value={}), "bigfleet.zones: unknown key; there are groups, nodes"),
    (_set("bigfleet", value=None), "bigfleet: is missing"),
    (_set("bigfleet", "nodes", "m", "labels", value={"zone": "a"}), "bigfleet.nodes.m.labels: label 'zone' shadows"),
    (_set("nodes", "m", "free_disk", value="much"), "invalid data for node 'm': key 'free_disk': Unable to read Int"),
    (_set("nodes", "m", "group", value="x"), "Unknown group 'x' for node m"),
    (_set("nodegroups", value=[]), "invalid iallocator message: key 'nodegroups': Unable to read JSObject"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_a_bad_file_is_refused_naming_owner_and_key(change: Callable[[Body], None], text: str) -> None:
    body = plain()
    change(body)
    with pytest.raises(HostsFault) as refused:
        fleet(body)
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


def test_a_price_below_zero_or_none_where_it_would_win_everything_is_refused() -> None:
    body = plain()
    body["bigfleet"]["groups"]["g"]["intervals"][1]["price_usd_per_hour"] = -1
    with pytest.raises(HostsFault, match=r"^bigfleet\.groups\.g\.intervals\[1\]: price_usd_per_hour is -1"):
        fleet(body)
    body = plain()
    body["bigfleet"]["groups"]["g"]["capacity_type"] = "reserved"
    body["bigfleet"]["groups"]["g"]["intervals"][0]["price_usd_per_hour"] = 0
    with pytest.raises(HostsFault, match="only bare metal may have"):
        fleet(body)


def test_slots_whose_instances_would_have_one_name_are_refused() -> None:
    body = document(
        {"a": node("g"), "b": node("g-z")},
        [group("g", ("quarter",)), group("g-z", ("quarter",))],
        {"a": "z-y", "b": "y"},
    )
    with pytest.raises(HostsFault, match="have the same names; rename one"):
        fleet(body)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not JSON: "),
        ("[]", "not an object, but list"),
        ('{"nodes": {"a": {}, "a": {}}}', "not JSON: key 'a' occurs twice in one object"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_object_is_refused_by_name(content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(HostsFault) as refused:
        read_hosts(path, "p", make_allocator, {})
    assert str(refused.value).startswith(f"{path}: {text}")


def test_an_instance_of_ours_that_is_said_to_be_elsewhere_is_refused(tmp_path: Path) -> None:
    body = plain()
    body["instances"] = {"g-z-half-000": {"nodes": ["m"]}}
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(body))
    ours = {"g-z-half-000": Carved("n", "g-z-half-000", CarveSize(1, 1, 1, 1, 1))}
    with pytest.raises(HostsFault, match=r"instances\.g-z-half-000: is said to be on \['m'\], but it was carved on n"):
        read_hosts(path, "p", make_allocator, ours)


def test_a_size_that_not_even_an_empty_host_takes_is_warned_of() -> None:
    body = document({"n": node("g", filled=2), "m": node("g", 3, filled=1)})
    exact = {**bounds(4), "memory-size": 32_000}
    next(each for each in body["nodegroups"]["g"]["ipolicy"]["minmax"] if each["min"]["cpu-count"] == 4).update(
        min=exact, max=exact
    )
    (warning,) = fleet(body).warnings
    assert warning.startswith("'full' of group g does not fit on an empty host: n, m; memory and disk must stay above")
    full = document({"n": node("g", filled=3)})
    full["nodes"]["n"]["reserved_cpus"] = 0
    assert fleet(full).warnings == ()


@pytest.mark.parametrize(("count", "offered"), [(1, 4), (4, 4), (64, 64), (65, 68)])
def test_a_number_of_seeds_is_that_many_slots_rounded_up_to_whole_hosts(count: int, offered: int) -> None:
    seeded = fleet(seed_document(count))
    assert seeded.warnings == ()
    assert sum(seeded.allocator.vector(host)[0] for host in seeded.hosts) == offered
