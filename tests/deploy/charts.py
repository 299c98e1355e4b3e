"""Renders the charts of deploy/charts with helm, and reads what comes out."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_SECONDS
from tools.fetch_helm import program_path

ROOT = Path(__file__).parent.parent.parent
#: Those of the checkout, or of a release that was unpacked (`make release-check`).
CHARTS = Path(os.environ.get("BIGFLEET_CHARTS") or ROOT / "deploy" / "charts")
NAMES = sorted(path.name for path in CHARTS.iterdir())
#: A folder for each set of values: values.yaml and what the chart makes of it, expected.yaml.
CASES = ROOT / "tests" / "cases" / "charts"
CASE_NAMES = sorted(str(path.parent.relative_to(CASES)) for path in CASES.rglob("values.yaml"))
#: A longer text is one of a file, which a test compares with the file.
_TEXT_MAX = 1000
NAMESPACE = "bigfleet-system"

needs_helm = pytest.mark.skipif(
    not os.access(program_path(os.environ), os.X_OK) and os.environ.get("BIGFLEET_REQUIRE_HELM") != "1",
    reason="helm is not fetched: make helm",
)


def run_program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run helm or kubectl to its end, away from the settings of this user."""
    return subprocess.run(
        [str(program_path(os.environ, name)), *words],
        env={"HOME": "/nonexistent", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@cache
def _template(chart: str, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return run_program("helm", "template", "fleet", str(CHARTS / chart), "--namespace", NAMESPACE, *words)


def rendered(chart: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects of a chart with values that `words` set."""
    done = _template(chart, tuple(words))
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def case_objects(case: str) -> list[dict[str, Any]]:
    """Return the objects of a case."""
    return rendered(case.partition("/")[0], ("--values", str(CASES / case / "values.yaml")))


def golden_text(case: str) -> str:
    """Return the objects of a case as its file has them: without definitions, and with long texts cut."""
    found = by_name([each for each in case_objects(case) if each["kind"] != "CustomResourceDefinition"])
    for each in found.values():
        if each["kind"] == "ConfigMap":
            each["data"].update({key: "…" for key, text in each["data"].items() if len(text) > _TEXT_MAX})
    # A copy without shared parts, which YAML would write as anchors.
    plain = json.loads(json.dumps([found[key] for key in sorted(found)]))
    return str(yaml.safe_dump_all(plain, allow_unicode=True, width=120))


def refusal(chart: str, words: Sequence[str]) -> str:
    """Return why helm refuses the values."""
    done = _template(chart, tuple(words))
    assert done.returncode != 0, "the values are accepted"
    return done.stderr


def by_name(objects: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return objects by kind, namespace and name; none has the identity of another."""
    found = {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def pod_templates(objects: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and pod of each workload."""
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            yield found["metadata"]["name"], found["spec"]["template"]["spec"]


def command_of(pod: Mapping[str, Any]) -> list[str]:
    """Return the words after `bigfleet` of a pod, with the names of variables as their values."""
    (container,) = pod["containers"]
    words = [str(word) for word in (*container["command"], *container["args"])]
    assert words[0] == "bigfleet"
    return [word.replace("$(", "").replace(")", "") for word in words[1:]]


if __name__ == "__main__":
    # Writes every expected.yaml; look at the difference before it is committed.
    for name in CASE_NAMES:
        (CASES / name / "expected.yaml").write_text(golden_text(name), encoding="utf-8")
