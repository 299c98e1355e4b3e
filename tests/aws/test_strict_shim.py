"""The strict shim does what AWS's pages say, where moto does not.

The expected codes are from AWS's documents, written down by hand; no answer was recorded from AWS.
"""

from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.aws.client import ShimClient

pytestmark = pytest.mark.slow


def launch(shim: ShimClient, **more: object) -> Any:
    offering = shim.offering()
    request = {
        "MinCount": 1,
        "MaxCount": 1,
        "InstanceType": "m6i.large",
        "ImageId": offering["ami"],
        "SubnetId": offering["subnet"],
        **more,
    }
    return shim.client("ec2").run_instances(**request)["Instances"][0]


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_a_token_answers_its_first_instance_with_the_state_of_now(shim: ShimClient) -> None:
    first = launch(shim, ClientToken="op-1")
    assert launch(shim, ClientToken="op-1")["InstanceId"] == first["InstanceId"]
    assert len(shim.live()) == 1

    shim.client("ec2").terminate_instances(InstanceIds=[first["InstanceId"]])
    again = launch(shim, ClientToken="op-1")
    assert again["InstanceId"] == first["InstanceId"]
    assert again["State"]["Name"] in ("shutting-down", "terminated")
    assert shim.live() == []


def test_a_token_with_other_parameters_is_a_mismatch(shim: ShimClient) -> None:
    launch(shim, ClientToken="op-1")
    with pytest.raises(ClientError) as error:
        launch(shim, ClientToken="op-1", InstanceType="c6i.xlarge")
    assert code_of(error) == "IdempotentParameterMismatch"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"InstanceType": "m6i.tiny"}, "InvalidParameterValue"),
        ({"ImageId": "ami-00000000000000000"}, "InvalidAMIID.NotFound"),
        ({"UserData": "x" * 16_385}, "InvalidParameterValue"),
        (
            {"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "k", "Value": "v" * 257}]}]},
            "InvalidPa",
        ),
        ({"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "aws:k", "Value": ""}]}]}, "InvalidPa"),
        ({"InstanceType": "mac2.metal"}, "Unsupported"),
    ],
)
def test_what_ec2_refuses_is_refused(more: dict[str, object], code: str, shim: ShimClient) -> None:
    if code == "Unsupported":
        more = {**more, "SubnetId": shim.place["subnets"]["us-east-1e"]}
    with pytest.raises(ClientError) as error:
        launch(shim, **more)
    assert code_of(error).startswith(code)
    assert shim.live() == []


def test_user_data_and_tags_at_the_limit_are_taken(shim: ShimClient) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "k", "Value": "v" * 256}]}]
    assert launch(shim, UserData="x" * 16_384, TagSpecifications=tags)["InstanceId"]


@pytest.mark.parametrize(("drop", "instances"), [("before", 0), ("after", 1)])
def test_a_connection_is_dropped_before_or_after_the_effect(drop: str, instances: int, shim: ShimClient) -> None:
    shim.fault("ec2:RunInstances", drop=drop)
    with pytest.raises(ConnectionClosedError):
        launch(shim, ClientToken="op-1")
    assert len(shim.live()) == instances
    launch(shim, ClientToken="op-1")
    assert len(shim.live()) == 1


def test_a_fault_is_for_its_type_and_zone_and_passes(shim: ShimClient) -> None:
    shim.fault("ec2:RunInstances", "InsufficientInstanceCapacity", zone="us-east-1b")
    shim.fault("ec2:RunInstances", "RequestLimitExceeded", status=503, instance_type="m6i.large", skip=1)
    launch(shim)
    with pytest.raises(ClientError) as error:
        launch(shim)
    assert code_of(error) == "RequestLimitExceeded"
    launch(shim)
    with pytest.raises(ClientError) as error:
        launch(shim, SubnetId=shim.place["subnets"]["us-east-1b"])
    assert code_of(error) == "InsufficientInstanceCapacity"


def test_a_new_instance_is_invisible_for_some_looks(shim: ShimClient) -> None:
    shim.control("invisible", looks=2)
    instance_id, ec2 = launch(shim)["InstanceId"], shim.client("ec2")
    with pytest.raises(ClientError) as error:
        ec2.describe_instances(InstanceIds=[instance_id])
    assert code_of(error) == "InvalidInstanceID.NotFound"
    by_filter = [{"Name": "instance-id", "Values": [instance_id]}]
    assert not any(each["Instances"] for each in ec2.describe_instances(Filters=by_filter)["Reservations"])
    assert ec2.describe_instances(Filters=by_filter)["Reservations"][0]["Instances"][0]["InstanceId"] == instance_id
