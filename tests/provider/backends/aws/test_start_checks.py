"""What the start says of rights that are missing: refusals, and warnings with what they cost."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from bigfleet.provider.backends.aws.api import CONNECTION, AwsError
from bigfleet.provider.backends.aws.offerings import read_aws_offerings
from bigfleet.provider.backends.aws.start_checks import check_start
from tests.provider.backends.aws.memory_aws import OFFERING


class Calls:
    """Answers with these errors, by call."""

    def __init__(self, **errors: AwsError) -> None:
        self._errors = errors
        self.launches: list[Mapping[str, Any]] = []
        self.probed: list[tuple[str, str]] = []
        self.xen: set[str] = set()

    def _answer(self, call: str) -> None:
        if call in self._errors:
            raise self._errors[call]

    def identity(self) -> str:
        self._answer("identity")
        return "arn:aws:iam::123456789012:user/someone"

    def dry_run_launch(self, request: Mapping[str, Any]) -> None:
        self.launches.append(request)
        self._answer("launch")

    def dry_run_terminate(self) -> None:
        self._answer("terminate")

    def find_xen_types(self, instance_types: Iterable[str]) -> set[str]:
        self._answer("types")
        return self.xen & set(instance_types)

    def find_bucket(self, bucket: str) -> None:
        self._answer("bucket")

    def find_object(self, bucket: str, key: str) -> None:
        self.probed.append((bucket, key))
        self._answer("object")


def denied(action: str, code: str = "403", status: int = 403) -> AwsError:
    return AwsError(action, code, "Forbidden", status=status)


def check(calls: Calls, folder: Path, *offerings: Mapping[str, object]) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the refusals, and what was logged as a warning."""
    path = folder / "offerings.json"
    path.write_bytes(msgspec.json.encode(offerings or (OFFERING,)))
    with capture_logs() as logs:
        refusals = check_start(
            calls,
            read_aws_offerings(path, "aws"),
            provider="aws",
            node_role="",
            user_data="#!/bin/sh\n",
            bucket="bucket",
            prefix="machines",
        )
    return refusals, [each for each in logs if each["log_level"] == "warning"]


def test_without_the_right_to_list_the_bucket_the_start_says_what_that_costs(tmp_path: Path) -> None:
    calls = Calls(bucket=denied("s3:HeadBucket"), object=denied("s3:GetObject", "AccessDenied"))
    refusals, warnings = check(calls, tmp_path)
    assert refusals == []
    (warning,) = warnings
    assert warning["event"] == "aws.bucket_not_listed"
    assert warning["bucket"] == "bucket"
    assert warning["advice"] == (
        "grant s3:ListBucket: without it S3 answers 403 in place of 404 for a result that is not there yet, and every "
        "Configure and Drain fails"
    )
    # It is what S3 says of an object that no machine has.
    assert calls.probed == [("bucket", "machines/start-check")]


def test_a_right_to_list_that_is_restricted_to_the_prefix_is_enough(tmp_path: Path) -> None:
    absent = AwsError("s3:GetObject", "NoSuchKey", "no", status=404)
    assert check(Calls(bucket=denied("s3:HeadBucket"), object=absent), tmp_path) == ([], [])


def test_with_the_right_to_list_nothing_more_is_asked(tmp_path: Path) -> None:
    calls = Calls()
    assert check(calls, tmp_path) == ([], [])
    assert calls.probed == []


def test_a_bucket_that_is_not_there_is_a_refusal(tmp_path: Path) -> None:
    refusals, _warnings = check(Calls(bucket=AwsError("s3:HeadBucket", "404", "Not Found", status=404)), tmp_path)
    assert refusals == ["aws: s3:HeadBucket refused for bucket bucket: 404: Not Found"]


@pytest.mark.parametrize("call", ["launch", "terminate", "bucket", "object", "types"])
def test_an_aws_that_does_not_answer_prevents_no_start(call: str, tmp_path: Path) -> None:
    errors = {call: AwsError("ec2:X", CONNECTION, "closed")}
    if call == "object":
        errors["bucket"] = denied("s3:HeadBucket")
    refusals, warnings = check(Calls(**errors), tmp_path)
    assert refusals == []
    unanswered = "aws.instance_types_unchecked" if call == "types" else "aws.start_check_unanswered"
    assert [each["event"] for each in warnings] == [unanswered]


@pytest.mark.parametrize("call", ["identity", "launch", "terminate"])
@pytest.mark.parametrize("code", ["AuthFailure", "ExpiredToken", "NoCredentialsError"])
def test_wrong_credentials_prevent_a_start(code: str, call: str, tmp_path: Path) -> None:
    refusals, _warnings = check(Calls(**{call: AwsError("ec2:X", code, "no", status=401)}), tmp_path)
    assert [f": {code}: no" in each for each in refusals] == [True]


def test_a_type_whose_instances_never_see_their_orders_is_refused(tmp_path: Path) -> None:
    calls = Calls()
    calls.xen = {"t2.large", "c4.large"}
    refusals, _warnings = check(calls, tmp_path, OFFERING, {**OFFERING, "instance_type": "t2.large"})
    assert refusals == [
        "aws: t2.large is not built on the Nitro System: tags that come later do not reach its metadata service, so "
        "that no agent gets an order; take another type"
    ]


def test_without_the_right_to_describe_types_the_start_goes_on_with_a_warning(tmp_path: Path) -> None:
    refusals, warnings = check(Calls(types=denied("ec2:DescribeInstanceTypes", "UnauthorizedOperation")), tmp_path)
    assert refusals == []
    assert [each["event"] for each in warnings] == ["aws.instance_types_unchecked"]


def test_launches_that_are_the_same_are_tried_once(tmp_path: Path) -> None:
    calls = Calls(launch=denied("ec2:RunInstances", "UnauthorizedOperation"))
    other = {**OFFERING, "zone": "us-east-1b", "subnet": "subnet-2"}
    refusals, _warnings = check(calls, tmp_path, OFFERING, other, {**OFFERING, "capacity_type": "spot"})
    assert len(calls.launches) == 3
    assert all("ClientToken" not in each for each in calls.launches)
    assert refusals[0] == "aws: ec2:RunInstances refused for m6i.large in subnet-1: UnauthorizedOperation: Forbidden"
