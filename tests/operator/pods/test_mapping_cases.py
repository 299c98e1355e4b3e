"""Each case of tests/cases/pods: a pod becomes the request that the case states, and no finding is missing."""

from pathlib import Path

import pytest

from bigfleet.operator.pods.mapping import map_pod
from tests.operator.pods.pod_cases import PodCase, pod_cases
from tests.operator.pods.request_schema import schema_faults, spec_schema


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.file}: {case.name}") for case in pod_cases()])
def test_a_pod_becomes_the_request_of_its_case(case: PodCase, tmp_path: Path) -> None:
    mapping = map_pod(case.pod, volumes=case.volumes, defaults=case.defaults(tmp_path))
    found = [(finding.reason.value, finding.message) for finding in mapping.findings]

    if "none" in case.fields:
        assert mapping.spec is None
        assert case.fields["none"] in mapping.why_none
    else:
        assert mapping.spec == case.request
        assert mapping.why_none == ""
    assert [reason for reason, _ in found] == [reason for reason, _ in case.findings]
    for (_, message), (_, part) in zip(found, case.findings, strict=True):
        assert part in message


@pytest.mark.parametrize(
    "case", [case for case in pod_cases() if "none" not in case.fields], ids=lambda case: case.name
)
def test_every_request_obeys_the_schema(case: PodCase, tmp_path: Path) -> None:
    """No field is unknown to deploy/crds, which would drop it silently, and no value is refused."""
    spec = map_pod(case.pod, volumes=case.volumes, defaults=case.defaults(tmp_path)).spec

    assert list(schema_faults(spec, spec_schema())) == []


def test_there_are_cases_of_every_file() -> None:
    assert len(pod_cases()) >= 60
    assert {case.file for case in pod_cases()} == {
        "affinity", "penalties", "requirements", "resources", "spreads", "volumes",
    }  # fmt: skip
