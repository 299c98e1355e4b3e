"""The rules that run faster are the project's rules: every duration is divided, and nothing else is changed."""

import re
from pathlib import Path

import pytest
import yaml

from tests.alerts.rule_time import durations, faster, faster_expression, shorter

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "bigfleet-alerts.yaml"


@pytest.mark.parametrize(
    ("duration", "expected"),
    [("5m", "5000ms"), ("1h", "60000ms"), ("30s", "500ms"), ("1d", "1440000ms"), ("1h30m", "90000ms")],
)
def test_a_duration_is_divided(duration: str, expected: str) -> None:
    assert shorter(duration, 60) == expected


@pytest.mark.parametrize("duration", ["5", "m", "5 m", "", "1m-", "-1m", "1ms"])
def test_what_is_no_duration_or_cannot_be_divided_is_refused(duration: str) -> None:
    with pytest.raises(ValueError, match=r"duration|divided"):
        shorter(duration, 60)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("increase(x_total[15m]) > 2", "increase(x_total[15000ms]) > 2"),
        ("max_over_time(count(x)[1h:1m])", "max_over_time(count(x)[60000ms:1000ms])"),
        ("x unless x offset 15m", "x unless x offset 15000ms"),
        ("max_over_time(x[1h:])", "max_over_time(x[60000ms:])"),
        ("time() - (x_timestamp_seconds > 0) > 600", "time() - (x_timestamp_seconds > 0) > 10"),
        ("x_expires_timestamp_seconds - time() < 7 * 86400", "x_expires_timestamp_seconds - time() < 0.116667 * 86400"),
        ("x_oldest_seconds > 3600", "x_oldest_seconds > 60"),
        ('x_oldest_seconds{a="b"} > 3600', 'x_oldest_seconds{a="b"} > 60'),
        ("changes(process_start_time_seconds[30m]) > 2", "changes(process_start_time_seconds[30000ms]) > 2"),
        ('x_seconds_count{phase="p"} == 0', 'x_seconds_count{phase="p"} == 0'),
        ('x{bucket="300+"} > 0 and y < 0.5 * z', 'x{bucket="300+"} > 0 and y < 0.5 * z'),
    ],
)
def test_ranges_and_ages_are_divided_and_counts_are_not(expression: str, expected: str) -> None:
    assert faster_expression(expression, 60) == expected


def test_no_number_of_a_rule_is_overlooked() -> None:
    """Every number of every rule is a duration that is divided, or one of the counts and shares below."""
    undivided = set()
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            text = f"{rule['expr']} {rule.get('for', '')}"
            for duration in durations(rule):
                text = text.replace(duration, "", 1)
            text = re.sub(r'"[^"]*"', "", text)
            undivided |= set(re.findall(r"(?<![\w.])\d[\w.]*", text))

    assert undivided == {"0", "0.25", "0.5", "1", "2", "5", "10", "86400"}


def test_the_file_stays_what_it_is_apart_from_its_durations() -> None:
    rules = RULES.read_text(encoding="utf-8")
    before, after = yaml.safe_load(rules), yaml.safe_load(faster(rules))
    for document in (before, after):
        for rule in (rule for group in document["groups"] for rule in group["rules"]):
            rule.pop("expr")
            rule.pop("for", None)

    assert before == after
    assert yaml.safe_load(faster(rules, 1)) != yaml.safe_load(faster(rules))
