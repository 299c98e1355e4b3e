"""Writes the reports of a run: report.json for programs, junit.xml for CI (docs/spec/provider.md §23).

This module must not turn a skip into a pass.
"""

from pathlib import Path

import junitparser
import msgspec

import bigfleet
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, Result

JSON_NAME = "report.json"
JUNIT_NAME = "junit.xml"


def prepare(out: Path) -> None:
    """Make the folder. Raises UsageFault when it cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / JSON_NAME
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageFault(f"--out {out}: {error.strerror}; name a folder that can be written") from error


def write_reports(report: ConformanceReport, out: Path) -> None:
    """Write both files into a folder that exists."""
    (out / JSON_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(record_of(report))) + b"\n")
    junit_of(report).write(str(out / JUNIT_NAME), pretty=True)


def record_of(report: ConformanceReport) -> dict[str, object]:
    """Return the run as report.json shows it."""
    return {
        "verdict": report.verdict.value,
        "verdicts": {profile.value: verdict.value for profile, verdict in report.verdicts.items()},
        "target": next(iter(report.targets.values()), ""),
        "targets": {lane.value: address for lane, address in report.targets.items()},
        "version": bigfleet.installed_version(),
        "seed": report.plan.seed,
        "faults": {lane.value: fault for lane, fault in report.faults.items()},
        "profiles": sorted(profile.value for profile in report.plan.profiles),
        "counts": {outcome.value: report.count(outcome) for outcome in BehaviourOutcome},
        "behaviours": [_behaviour_record(result) for result in report.results],
    }


def _behaviour_record(result: Result) -> dict[str, object]:
    return {
        "id": result.behaviour.id,
        "profile": result.behaviour.profile.value,
        "title": result.behaviour.title,
        "outcome": result.outcome.value,
        "seconds": round(result.seconds, 3),
        "reason": result.reason,
        "calls": list(result.calls),
    }


def junit_of(report: ConformanceReport) -> junitparser.JUnitXml:
    """Return one case a behaviour; whatever did not pass is a failure."""
    suite = junitparser.TestSuite("bigfleet conformance")
    suite.add_property("seed", str(report.plan.seed))
    suite.add_property("verdict", report.verdict.value)
    for result in report.results:
        case = junitparser.TestCase(
            f"{result.behaviour.id} {result.behaviour.title}", f"conformance.{result.behaviour.profile.value}"
        )
        case.time = round(result.seconds, 3)
        if result.outcome is not BehaviourOutcome.PASSED:
            failure = junitparser.Failure(_xml_text(result.reason), result.outcome.value)
            failure.text = _xml_text("\n".join((f"seed {report.plan.seed}", result.reason, *result.calls)))
            case.result = [failure]
        suite.add_testcase(case)
    page = junitparser.JUnitXml()
    page.add_testsuite(suite)
    page.update_statistics()
    return page


def _xml_text(text: str) -> str:
    """Return text without the characters that XML cannot hold."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
