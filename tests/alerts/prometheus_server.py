"""A real Prometheus server on loopback that scrapes what a test lists and evaluates a rule file."""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port

#: Set to 1, a missing Prometheus is a failure instead of a skip.
REQUIRED_VARIABLE = "BIGFLEET_REQUIRE_PROMETHEUS"
MISSING = f"prometheus is not installed: Debian's package prometheus has it; {REQUIRED_VARIABLE}=1 makes this a failure"
#: Prometheus' own defaults, a minute and five minutes, in rules that run 60 times as fast.
_CONFIG = """\
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s, external_labels: {bigfleet_docs: docs/}}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: bigfleet
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
"""


class Fired(NamedTuple):
    """An alert and what it is about: the instance, else the job, else nothing."""

    alert: str
    subject: str


def program() -> str:
    """Return Prometheus' path; skips the test without one, or fails it where it is required."""
    found = shutil.which("prometheus")
    if found is None:
        if os.environ.get(REQUIRED_VARIABLE) == "1":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return found


class Prometheus:
    """A server that is running."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._targets: dict[str, dict[str, Any]] = {}

    def scrape(self, instance: str, job: str, address: str) -> None:
        """Scrape an address from now on, as an instance of a job."""
        self._targets[instance] = {"targets": [address], "labels": {"instance": instance, "job": job}}
        self._write_targets()

    def forget(self, instance: str) -> None:
        """Scrape an instance no more, as when service discovery does not list it any longer."""
        del self._targets[instance]
        self._write_targets()

    def up(self) -> set[str]:
        """Return the instances that answered their last scrape."""
        return {each["metric"]["instance"] for each in self._query("up == 1")}

    def alerts(self, *states: str) -> set[Fired]:
        """Return the alerts that are in one of the states, `pending` or `firing`, now."""
        answer = self._get("alerts")["alerts"]
        return {fired(each["labels"]) for each in answer if each["state"] in states}

    def fired_since(self, since_seconds: float, until_seconds: float) -> set[Fired]:
        """Return the alerts that fired at any evaluation between two times."""
        asked = {"start": str(since_seconds), "end": str(until_seconds), "step": "0.5"}
        answer = self._get("query_range", query='ALERTS{alertstate="firing"}', **asked)
        return {fired(each["metric"]) for each in answer["result"]}

    def now(self) -> float:
        """Return the server's time."""
        return float(self._get("query", query="time()")["result"][0])

    def values(self, expression: str) -> dict[str, float]:
        """Return the value of an expression by instance."""
        return {each["metric"].get("instance", ""): float(each["value"][1]) for each in self._query(expression)}

    def missed(self) -> set[str]:
        """Return the instances that did not answer a scrape in time at some moment, as a killed or starved process."""
        return {each["metric"]["instance"] for each in self._query("min_over_time(up[1h]) == 0")}

    def is_serving(self) -> bool:
        """Return whether it answers."""
        try:
            self.now()
        except OSError:
            return False
        return True

    def _write_targets(self) -> None:
        text = json.dumps(list(self._targets.values()))
        draft = self._folder / "targets.draft"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self._folder / "targets.json")

    def _query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def _get(self, path: str, **asked: str) -> Any:
        query = urllib.parse.urlencode(asked)
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)["data"]


def fired(labels: Mapping[str, str]) -> Fired:
    """Return which alert the labels are of, and its subject."""
    return Fired(labels["alertname"], labels.get("instance", labels.get("job", "")))


@contextmanager
def prometheus(folder: Path, rules: str) -> Iterator[Prometheus]:
    """Run a server with rules while the context lasts."""
    path, port = program(), free_port()
    folder.mkdir()
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    (folder / "prometheus.yaml").write_text(_CONFIG, encoding="utf-8")
    (folder / "targets.json").write_text("[]", encoding="utf-8")
    flags = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--query.lookback-delta=5s", "--log.level=warn"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([path, *flags], stdout=output, stderr=output)
    server = Prometheus(folder, port)
    try:
        wait_until(lambda: process.poll() is not None or server.is_serving(), log.read_text)
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
