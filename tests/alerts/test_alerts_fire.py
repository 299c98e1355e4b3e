"""Real processes are broken, and a real Prometheus that scrapes them fires the alerts of the project.

Each alert is silent before its fault, fires while the fault lasts, and is silent after it is mended. The rules are the
project's, with every duration divided by 60 (docs/adr/0176-alerts-in-fast-time.md).
"""

from pathlib import Path

import pytest
import yaml

from tests.alerts.courses import COURSES
from tests.alerts.faults import Fault
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired, Prometheus, program, prometheus
from tests.alerts.rule_time import faster
from tests.patience import wait_until

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "bigfleet-alerts.yaml"
#: Rules about a cluster, which fire in a Prometheus that scrapes none.
OF_CLUSTERS = "bigfleet-cluster"

#: The shortest course; the others take up to minutes.
QUICK = ("lost etcd",)


def rules(*, has_cluster: bool) -> str:
    """Return the rules for what is scraped, faster."""
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    groups = [group for group in document["groups"] if has_cluster or group["name"] != OF_CLUSTERS]
    return faster(yaml.safe_dump({"groups": groups}))


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in QUICK else pytest.mark.long) for each in COURSES]
)
def test_an_alert_fires_while_its_fault_lasts_and_at_no_other_time(name: str, tmp_path: Path) -> None:
    """Every alert of every stage, about what is broken and about nothing else."""
    program()
    course = COURSES[name]
    with prometheus(tmp_path / "prometheus", rules(has_cluster=course.has_cluster)) as server:
        fleet = Fleet(server, tmp_path)
        try:
            course.build(fleet)
            wait_until(lambda: server.up() == set(fleet.programs), lambda: f"only {server.up()} are scraped")
            wait_until(lambda: not server.alerts("pending", "firing"), lambda: f"at rest: {server.alerts('firing')}")
            ready_seconds = server.now()
            for stage in course.stages:
                _run(server, fleet, stage)
            surplus = server.fired_since(ready_seconds, server.now()) - course.expected
            missed = server.missed()
        finally:
            fleet.close()

    # On a host that lacks processor time a process answers a scrape too late: what is said of it then is true.
    assert {each for each in surplus if each.subject not in missed} == set()


def _run(server: Prometheus, fleet: Fleet, stage: tuple[Fault, ...]) -> None:
    """Make the faults of a stage, wait for their alerts, and mend them."""
    wanted = {each for fault in stage for each in fault.fired}
    assert server.alerts("pending", "firing") & wanted == set()
    seen: set[Fired] = set()

    def is_seen() -> bool:
        nonlocal seen
        seen |= server.alerts("firing") & wanted
        for fault in stage:
            if not fault.fired <= seen:
                fault.again(fleet)
        return seen == wanted

    for fault in stage:
        fault.make(fleet)
    wait_until(is_seen, lambda: f"silent while broken: {wanted - seen}", poll_seconds=0.5)
    for fault in stage:
        fault.mend(fleet)
    wait_until(
        lambda: not server.alerts("pending", "firing") & wanted,
        lambda: f"not silent after the mend: {server.alerts('firing') & wanted}",
        poll_seconds=0.5,
    )
