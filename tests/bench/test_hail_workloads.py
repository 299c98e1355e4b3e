"""W15's clusters are what they say, and its figures are of equal answers (docs/spec/benchmarks.md)."""

import json
from pathlib import Path

import pytest

from bench.workloads import hail as hail_workloads
from bench.workloads.hail import HAIL_QUESTIONS, cluster, measure_question, message
from bigfleet.partition.answer import answer
from bigfleet.partition.cluster import read_cluster
from tests.partition.real_hail import need_hail


@pytest.mark.parametrize("template", ["plain", "drbd"])
def test_a_cluster_has_what_its_size_says(template: str) -> None:
    read = read_cluster(cluster(64, 4, template))

    assert (len(read.hosts), len(read.groups), len(read.instances)) == (64, 4, 88)
    assert all(host.is_candidate and host.is_exclusive for host in read.hosts)
    mirrors = [each for each in read.instances if each.secondary is not None]
    assert len(mirrors) == (88 if template == "drbd" else 0)
    assert all(read.hosts[each.primary].group is read.hosts[each.secondary or 0].group for each in mirrors)


@pytest.mark.parametrize("template", ["plain", "drbd"])
def test_the_question_has_an_answer_that_places_it(template: str) -> None:
    said = answer(message(80, 4, template)).line

    assert said is not None
    assert len(json.loads(said)["result"]) == (2 if template == "drbd" else 1)


def test_the_wanted_ratios_are_held_against_the_large_clusters() -> None:
    assert [(each.name, each.is_slow) for each in HAIL_QUESTIONS[:2]] == [("W15 hail", False), ("W15 hail", True)]


@pytest.mark.parametrize("template", ["plain", "drbd"])
def test_both_programs_are_asked_and_compared(template: str) -> None:
    need_hail()
    measured = measure_question(16, 2, template, 1)

    assert len(measured.readings) == 6
    assert all(reading.value > 0 for reading in measured.readings)


def test_without_hail_the_figures_say_that_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hail_workloads, "HAIL", Path("/nowhere/hail"))
    measured = measure_question(16, 2, "plain", 1)

    assert all("nothing to compare with" in reading.what for reading in measured.readings)
