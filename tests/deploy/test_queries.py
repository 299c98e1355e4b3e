"""Dashboard and alerts speak of what is exported: every name and label in a query exists, and so does every runbook."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.exported import exported, registries

ROOT = Path(__file__).parent.parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "bigfleet-shard.json"
ALERTS = ROOT / "deploy" / "prometheus" / "bigfleet-alerts.yaml"
OPERATING = ROOT / "docs" / "operating.md"

#: A selector: a name of ours, a process's or Prometheus's own, and its matchers if it has any.
SELECTOR = re.compile(r"\b((?:bigfleet|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
IN_TEXT = re.compile(r"\{\{\s*\$labels\.(\w+)|^\{\{(\w+)\}\}|\s\{\{(\w+)\}\}")
SEVERITIES = {"critical", "warning"}
#: External label of Prometheus with the address of the documentation.
DOCUMENTATION = "{{ $externalLabels.bigfleet_docs }}"


class Query(NamedTuple):
    """One expression, and the texts that show its labels."""

    where: str
    expression: str
    texts: tuple[str, ...] = ()


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@cache
def rules() -> list[dict[str, Any]]:
    document = yaml.load(ALERTS.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> Iterator[Query]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(f"panel {panel['title']}", target["expr"], (target["legendFormat"],))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield Query(f"variable {variable['name']}", variable["definition"])
    for annotation in dashboard()["annotations"]["list"]:
        yield Query(f"annotation {annotation['name']}", annotation["expr"], (annotation["titleFormat"],))
    for rule in rules():
        yield Query(f"alert {rule['alert']}", rule["expr"], tuple(rule["annotations"].values()))


@cache
def series() -> Mapping[str, frozenset[str]]:
    return exported()


def id_of(query: Query) -> str:
    return f"{query.where}-{query.expression[:40]}"


@pytest.mark.parametrize("query", list(queries()), ids=id_of)
def test_a_query_speaks_of_series_that_are_exported(query: Query) -> None:
    """Every metric name in an expression is one that a program of ours or any process exports."""
    names = {name for name, _matchers in SELECTOR.findall(query.expression)}

    assert names
    assert names - series().keys() == set()


@pytest.mark.parametrize("query", list(queries()), ids=id_of)
def test_a_query_uses_labels_that_its_series_have(query: Query) -> None:
    """Matchers name labels of their series; groupings and texts those of a series in the expression."""
    of_all: set[str] = set()
    for name, matchers in SELECTOR.findall(query.expression):
        labels = series()[name]
        assert {label for label, _value in MATCHER.findall(matchers)} - labels == set(), name
        of_all |= labels
    grouped = {label.strip() for given in GROUPING.findall(query.expression) for label in given.split(",")}
    shown = {label for text in query.texts for groups in IN_TEXT.findall(text) for label in groups if label}

    assert grouped - of_all == set()
    assert shown - (grouped or of_all) == set()


@pytest.mark.rule("shard 14/2")
def test_matchers_ask_for_values_that_are_exported() -> None:
    """Values of bounded labels exist: they are exported from the start, at 0."""
    known: dict[tuple[str, str], set[str]] = {}
    for family in (family for registry in registries().values() for family in registry.collect()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                known.setdefault((sample.name, label), set()).add(value)
    asked = {
        (name, label, value)
        for query in queries()
        for name, matchers in SELECTOR.findall(query.expression)
        for label, given in MATCHER.findall(matchers)
        if "$" not in given
        for value in given.split("|")
    }

    assert {
        (name, label, value) for name, label, value in asked if value not in known.get((name, label), set())
    } == set()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_where_to_read_on(rule: dict[str, Any]) -> None:
    """It has a severity, a summary, a description, and a runbook that is a heading of the page."""
    headings = {heading.strip().lower() for heading in re.findall(r"^### (.+)$", OPERATING.read_text(), re.MULTILINE)}
    page, anchor = rule["annotations"]["runbook_url"].removeprefix(DOCUMENTATION).split("#")

    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert (ROOT / page, anchor) == (OPERATING, rule["alert"].lower())
    assert anchor in headings


def test_every_runbook_is_an_alert() -> None:
    """The page explains no alert that does not exist."""
    explained = set(re.findall(r"^### (BigFleet\w+)$", OPERATING.read_text(), re.MULTILINE))

    assert explained == {rule["alert"] for rule in rules()}


def test_panels_have_a_place_and_ids_of_their_own() -> None:
    """No two panels share an id or a spot of the grid, and none reaches beyond its 24 columns."""
    panels = dashboard()["panels"]
    spots = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(spots)) == len(spots)
    assert max(x for x, _y in spots) < 24
