"""Holds the certification tests to the verdicts that docs/certified.md states.

`certifications.json` has them, by test. `python -m tests.conformance.certifications` prints the table of the page.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, verdict_of

DATA = Path(__file__).with_name("certifications.json")


class ProfileVerdict(NamedTuple):
    """What a run said of one profile."""

    verdict: str
    #: Behaviours of the profile that passed.
    passed: int


Verdicts = Mapping[ConformanceProfile, ProfileVerdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """The verdicts that one test expects for a provider."""

    provider: str
    #: On what the provider runs in the test.
    runs_on: str
    #: The test's id, without the parameters that all share these verdicts.
    test: str
    #: The Make target that runs the test.
    target: str
    verdicts: Verdicts
    #: Profiles that test what the provider does not have.
    not_applicable: frozenset[ConformanceProfile]

    @property
    def profiles(self) -> frozenset[ConformanceProfile]:
        """The profiles that the test must ask for."""
        return frozenset(self.verdicts)

    @property
    def flag(self) -> str:
        """The value of `--profile`."""
        return flag_of(self.profiles)

    def expect_report(self, folder: Path, profiles: Collection[ConformanceProfile] | None = None) -> None:
        """Assert that report.json in a folder says what is expected, of all profiles or of some."""
        report = json.loads((folder / "report.json").read_text())
        passed = [each["profile"] for each in report["behaviours"] if each["outcome"] == BehaviourOutcome.PASSED.value]
        self._expect(
            {
                ConformanceProfile(name): ProfileVerdict(verdict, passed.count(name))
                for name, verdict in report["verdicts"].items()
            },
            profiles,
        )

    def expect(self, report: ConformanceReport, profiles: Collection[ConformanceProfile] | None = None) -> None:
        """Assert that a report says what is expected, of all profiles or of some."""
        by_profile = {
            profile: [result for result in report.results if result.behaviour.profile is profile]
            for profile in report.plan.profiles
        }
        self._expect(
            {
                profile: ProfileVerdict(
                    verdict_of(frozenset({profile}), results).value,
                    sum(result.outcome is BehaviourOutcome.PASSED for result in results),
                )
                for profile, results in by_profile.items()
            },
            profiles,
        )

    def _expect(self, found: Verdicts, profiles: Collection[ConformanceProfile] | None) -> None:
        asked = self.profiles if profiles is None else profiles
        expected = {profile: self.verdicts[profile] for profile in asked}
        assert found == expected, f"other verdicts than {DATA.name} has for {self.test}"


def flag_of(profiles: Collection[ConformanceProfile]) -> str:
    """Return the value of `--profile` that asks for some profiles."""
    return ",".join(profile.value for profile in ConformanceProfile if profile in profiles)


def certifications() -> list[Certification]:
    """Return what each certification test expects, in the order of the page."""
    return [
        Certification(
            provider=entry["provider"],
            runs_on=entry["runs_on"],
            test=entry["test"],
            target=entry["target"],
            verdicts={
                ConformanceProfile(name): ProfileVerdict(each["verdict"], each["passed"])
                for name, each in entry["verdicts"].items()
            },
            not_applicable=frozenset(map(ConformanceProfile, entry["not_applicable"])),
        )
        for entry in json.loads(DATA.read_text())
    ]


def certification_of(request: pytest.FixtureRequest) -> Certification:
    """Return what the test that runs expects: the entry with its id, with or without its parameters."""
    node_id = request.node.nodeid
    by_test = {each.test: each for each in certifications()}
    found = by_test.get(node_id) or by_test.get(node_id.partition("[")[0])
    assert found is not None, f"{DATA.name} has no entry for {node_id}"
    return found


def page_table() -> str:
    """Return the table of docs/certified.md."""
    profiles = list(ConformanceProfile)
    head = ["#", "provider", "runs on", *(profile.value for profile in profiles)]
    rows = [
        [str(number), each.provider, each.runs_on, *(_cell(each, profile) for profile in profiles)]
        for number, each in enumerate(certifications(), 1)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def page_tests() -> str:
    """Return the list of docs/certified.md: by row of the table, the test that runs it and its target."""
    return "\n".join(
        f"{number}. `{each.test}` (`make {each.target}`)" for number, each in enumerate(certifications(), 1)
    )


def _cell(certification: Certification, profile: ConformanceProfile) -> str:
    if profile in certification.not_applicable:
        return "n/a"
    found = certification.verdicts.get(profile)
    if found is None:
        return "–"
    return f"{found.verdict} {found.passed} of {len(behaviours_of({profile}))}"


if __name__ == "__main__":
    print(page_table(), page_tests(), sep="\n\n")
