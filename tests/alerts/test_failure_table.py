"""Each failure of docs/operating.md has an alert or says why not, and each alert has a runbook entry that helps."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
RULES_OF_THE_SHARD = (ROOT / "docs" / "shard.md").read_text(encoding="utf-8")
RULES = yaml.load(
    (ROOT / "deploy" / "prometheus" / "bigfleet-alerts.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader
)
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
#: What a person needs who was woken up, in this order.
PARTS = ("Cause", "Check", "Remedy")


def failures() -> list[tuple[str, str, str]]:
    """Return failure, alerts and rules of each row of the table."""
    section = OPERATING.partition("## Failures and their alerts\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(failure, alerts, rules) for failure, _continues, alerts, rules in rows]


@pytest.mark.parametrize("row", failures(), ids=lambda row: row[0])
def test_a_failure_names_alerts_that_exist_or_why_there_is_none(row: tuple[str, str, str]) -> None:
    _failure, alerts, _rules = row
    named = re.findall(r"BigFleet\w+", alerts)

    assert set(named) <= set(ALERTS)
    assert named or re.fullmatch(r"none: .{10,}", alerts)


def test_every_alert_is_about_a_failure_of_the_table() -> None:
    assert {name for _, alerts, _ in failures() for name in re.findall(r"BigFleet\w+", alerts)} == set(ALERTS)


def test_every_failure_of_the_shards_specification_is_in_the_table() -> None:
    """By its rule, `15/5` of docs/shard.md."""
    specified = set(re.findall(r"^\| (15/\d+) \|", RULES_OF_THE_SHARD, re.MULTILINE))

    assert len(specified) > 20
    assert {rule for _, _, rules in failures() for rule in re.findall(r"15/\d+", rules)} == specified


@pytest.mark.parametrize("alert", ALERTS)
def test_a_runbook_entry_has_cause_check_and_remedy(alert: str) -> None:
    entry = OPERATING.partition(f"### {alert}\n")[2].partition("\n### ")[0]
    meaning, _, _ = entry.partition("- **")

    assert meaning.strip()
    assert tuple(re.findall(r"^- \*\*(\w+)\*\*: \S", entry, re.MULTILINE)) == PARTS
