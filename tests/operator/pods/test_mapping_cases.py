"""Each case of tests/cases/pods: a pod becomes the request that the case states, and no finding is missing."""

from pathlib import Path

import msgspec
import pytest

from bigfleet.operator.kubernetes.objects import CapacityRequestSpec
from bigfleet.operator.pods.mapping import map_pod
from tests.operator.pods.pod_cases import PodCase, pod_cases


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
def test_every_request_is_one_that_the_schema_can_hold(case: PodCase, tmp_path: Path) -> None:
    """What is written can be read back as the typed object, and is not empty where the schema wants an entry."""
    spec = map_pod(case.pod, volumes=case.volumes, defaults=case.defaults(tmp_path)).spec
    read = msgspec.convert(spec, CapacityRequestSpec)

    assert 1 <= len(read.resources) <= 32
    assert all((each.operator in ("In", "NotIn")) == bool(each.values) for each in read.requirements or ())


def test_there_are_cases_of_every_file() -> None:
    assert len(pod_cases()) >= 60
    assert {case.file for case in pod_cases()} == {
        "affinity", "penalties", "requirements", "resources", "spreads", "volumes",
    }  # fmt: skip
