"""The alerts fire when they should: Prometheus' own tool evaluates them over series that are written down."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "bigfleet-alerts.yaml"
CASES = Path(__file__).with_name("alert_rules.yaml")
COURSES = Path(__file__).with_name("every_alert.yaml")
PROMTOOL = shutil.which("promtool")
#: Values of a series that is sound, broken after ten minutes, and sound again after forty.
VALUES = {
    "GAUGE": "0x9 1x29 0x120",
    "COUNTER": "0x9 1+1x29 30x120",
    "GONE": "1x9 stale _x29 1x120",
    "STOPPED": "0+60x9 540x29 2400+60x120",
}
MINUTES = {"before": 9, "fires": 39, "after": 150}
NEEDED = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: Debian's package prometheus has it")


def run_promtool(*cases: Path) -> None:
    """Evaluate the cases of files. Raises AssertionError with what promtool says."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", *map(str, cases)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> dict[str, Any]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def case_of(alert: str, course: Mapping[str, Any]) -> dict[str, Any]:
    """Return promtool's case: one series of ALERTS while it is broken, none before and after."""
    minutes = {name: course.get(name, usual) for name, usual in MINUTES.items()}
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    samples = {"before": [], "fires": [{"labels": "{}", "value": 1}], "after": []}
    return {
        "name": alert,
        "interval": "1m",
        "input_series": [
            {"series": with_target(name), "values": VALUES.get(values, values)}
            for name, values in course.items()
            if name not in MINUTES
        ],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{minutes[name]}m", "exp_samples": samples[name]} for name in MINUTES
        ],
    }


def with_target(series: str) -> str:
    """Return a series with the labels of a target that it does not have yet."""
    name, _, labels = series.partition("{")
    given = re.findall(r'\w+="[^"]*"', labels)
    target = [f'{label}="{value}"' for label, value in (("job", "j"), ("instance", "a")) if f"{label}=" not in labels]
    return f"{name}{{{', '.join([*target, *given])}}}"


@NEEDED
@pytest.mark.slow
def test_alerts_fire_when_a_process_dies_restarts_or_is_open_to_all(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    cases.write_text(CASES.read_text(encoding="utf-8").replace("RULES", str(RULES)), encoding="utf-8")

    run_promtool(cases)


@NEEDED
def test_each_alert_fires_while_something_is_broken_and_at_no_other_time(tmp_path: Path) -> None:
    """Each with the rule file reduced to its own rule: all rules over all courses would take minutes."""
    rules, files = alerts(), []
    for alert, course in yaml.safe_load(COURSES.read_text(encoding="utf-8")).items():
        rule, cases = tmp_path / f"{alert}.rule.yaml", tmp_path / f"{alert}.cases.yaml"
        rule.write_text(yaml.safe_dump({"groups": [{"name": alert, "rules": [rules[alert]]}]}), encoding="utf-8")
        document = {"rule_files": [str(rule)], "evaluation_interval": "1m", "tests": [case_of(alert, course)]}
        cases.write_text(yaml.safe_dump(document), encoding="utf-8")
        files.append(cases)

    run_promtool(*files)


def test_each_alert_has_a_course() -> None:
    assert yaml.safe_load(COURSES.read_text(encoding="utf-8")).keys() == alerts().keys()
