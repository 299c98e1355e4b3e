"""What the client of AWS makes of answers: values, pages, errors.

The answers are written by hand after the examples of AWS's API references; none was recorded from AWS.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.stub import Stubber

from bigfleet.provider.backends.aws.api import AwsError, Ec2Instance, Message, SpotPrice
from bigfleet.provider.backends.aws.boto import (
    AwsSession,
    BotoEc2,
    BotoObjects,
    BotoPrices,
    BotoQueue,
    BotoStart,
)
from tests.aws.client import CREDENTIALS, REGION

Stub = Callable[[str], Stubber]

#: docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html, shortened.
PRODUCT = {
    "product": {"productFamily": "Compute Instance", "attributes": {"instanceType": "m6i.large", "tenancy": "Shared"}},
    "serviceCode": "AmazonEC2",
    "terms": {
        "OnDemand": {
            "3DG6WFZ5QW4JAAHJ.JRTCKXETXF": {
                "priceDimensions": {
                    "3DG6WFZ5QW4JAAHJ.JRTCKXETXF.6YS6EN2CT7": {
                        "unit": "Hrs",
                        "endRange": "Inf",
                        "description": "$0.096 per On Demand Linux m6i.large Instance Hour",
                        "pricePerUnit": {"USD": "0.0960000000"},
                    }
                },
                "sku": "3DG6WFZ5QW4JAAHJ",
            }
        },
        "Reserved": {
            "3DG6WFZ5QW4JAAHJ.4NA7Y494T4": {
                "priceDimensions": {"x": {"unit": "Hrs", "pricePerUnit": {"USD": "0.0605000000"}}}
            }
        },
    },
    "publicationDate": "2026-01-30T20:23:33Z",
}


@pytest.fixture(scope="module")
def session() -> AwsSession:
    """Return one session for the module: a client of EC2 takes half a second of processor time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        session = AwsSession(region=REGION)
        for service in ("ec2", "pricing", "s3", "sqs", "sts"):
            session.client(service)
        return session


@pytest.fixture
def stubbed(session: AwsSession) -> Iterator[Stub]:
    """Yield what replaces the answers of a service for this test."""
    with ExitStack() as stack:
        yield lambda service: stack.enter_context(Stubber(session.client(service)))


def instance(number: int, **more: Any) -> dict[str, Any]:
    return {"InstanceId": f"i-{number:017x}", "State": {"Code": 16, "Name": "running"}, **more}


async def test_no_call_to_ec2_is_made_before_the_account_is_the_one_of_the_machines(
    session: AwsSession, stubbed: Stub
) -> None:
    ec2, instances, who = BotoEc2(session), stubbed("ec2"), stubbed("sts")
    ec2.require_account("111111111111")
    for account in ("222222222222", "111111111111"):
        who.add_response("get_caller_identity", {"Account": account, "Arn": f"arn:aws:iam::{account}:user/a"})
    with pytest.raises(AwsError, match="the credentials are of account 222222222222, and the machines of account 1111"):
        await ec2.terminate(["i-1"])
    for _ in range(2):
        instances.add_response("terminate_instances", {}, {"InstanceIds": ["i-1"]})
        await ec2.terminate(["i-1"])
    who.assert_no_pending_responses()


async def test_all_pages_of_instances_are_read(session: AwsSession, stubbed: Stub) -> None:
    ec2, stubber = BotoEc2(session), stubbed("ec2")
    launched = datetime(2026, 1, 31, 12, tzinfo=UTC)
    first = instance(
        1,
        State={"Code": 48, "Name": "terminated"},
        StateReason={"Code": "Server.InsufficientInstanceCapacity", "Message": "Server.Insufficient…: no capacity"},
        InstanceType="m6i.large",
        InstanceLifecycle="spot",
        Placement={"AvailabilityZone": "us-east-1a"},
        PrivateDnsName="ip-10-0-0-1.ec2.internal",
        LaunchTime=launched,
        Tags=[{"Key": "bigfleet:operation", "Value": "op-1"}],
    )
    asked = {"Filters": [{"Name": "instance-id", "Values": ["i-1", "i-2"]}], "MaxResults": 1000}
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": [first]}], "NextToken": "2"}, asked)
    second = {"Reservations": [{"Instances": [instance(2)]}, {"Instances": [instance(3)]}]}
    stubber.add_response("describe_instances", second, {**asked, "NextToken": "2"})

    found = await ec2.describe({"instance-id": ["i-1", "i-2"]})
    assert [each.id[-1] for each in found] == ["1", "2", "3"]
    assert found[0] == Ec2Instance(
        id="i-00000000000000001",
        state="terminated",
        instance_type="m6i.large",
        zone="us-east-1a",
        is_spot=True,
        state_reason="Server.InsufficientInstanceCapacity",
        state_reason_text="Server.Insufficient…: no capacity",
        private_dns="ip-10-0-0-1.ec2.internal",
        launched_unix_seconds=launched.timestamp(),
        tags={"bigfleet:operation": "op-1"},
    )


async def test_a_page_that_fails_fails_the_whole(session: AwsSession, stubbed: Stub) -> None:
    ec2, stubber = BotoEc2(session), stubbed("ec2")
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": [instance(1)]}], "NextToken": "2"})
    stubber.add_client_error("describe_instances", "RequestLimitExceeded", "Request limit exceeded.", 503)
    with pytest.raises(AwsError, match=r"ec2:DescribeInstances: RequestLimitExceeded: Request limit exceeded\."):
        await ec2.describe({"instance-id": ["i-1"]})


@pytest.mark.parametrize(
    ("products", "usd"),
    [
        ([PRODUCT], 0.096),
        # A free or zero entry is no price.
        ([json.loads(json.dumps(PRODUCT).replace("0.0960000000", "0.0000000000"))], None),
        ([{"terms": {}}], None),
        ([], None),
    ],
)
async def test_the_on_demand_price_is_found_in_the_price_list(
    products: list[Any], usd: float | None, session: AwsSession, stubbed: Stub
) -> None:
    prices, stubber = BotoPrices(session), stubbed("pricing")
    stubber.add_response(
        "get_products", {"FormatVersion": "aws_v1", "PriceList": [json.dumps(each) for each in products]}
    )
    assert await prices.on_demand("m6i.large") == usd


async def test_a_spot_price_is_read(session: AwsSession, stubbed: Stub) -> None:
    ec2, stubber = BotoEc2(session), stubbed("ec2")
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    entry = {
        "AvailabilityZone": "us-east-1a",
        "InstanceType": "m6i.large",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": "0.035200",
        "Timestamp": at,
    }
    stubber.add_response("describe_spot_price_history", {"SpotPriceHistory": [entry], "NextToken": ""})
    expected = SpotPrice(
        instance_type="m6i.large", zone="us-east-1a", usd_per_hour=0.0352, at_unix_seconds=at.timestamp()
    )
    assert await ec2.spot_prices(["m6i.large"], 0.0) == [expected]


async def test_messages_have_their_receipts_and_an_empty_queue_has_none(session: AwsSession, stubbed: Stub) -> None:
    queue, stubber = BotoQueue(session, "https://sqs/1/q"), stubbed("sqs")
    body = {"Body": "{}", "ReceiptHandle": "r", "Attributes": {"ApproximateReceiveCount": "3"}}
    stubber.add_response("receive_message", {"Messages": [body]})
    stubber.add_response("receive_message", {})
    assert await queue.receive() == [Message(body="{}", receipt="r", receipts=3)]
    assert await queue.receive() == []


@pytest.mark.parametrize(("code", "status", "is_absent"), [("NoSuchKey", 404, True), ("AccessDenied", 403, False)])
async def test_an_object_that_is_not_there_is_none(
    code: str, status: int, is_absent: bool, session: AwsSession, stubbed: Stub
) -> None:
    objects, stubber = BotoObjects(session, "bucket"), stubbed("s3")
    stubber.add_client_error("get_object", code, "no", status)
    if is_absent:
        assert await objects.get("key", 100) is None
    else:
        with pytest.raises(AwsError, match="s3:GetObject: AccessDenied: no"):
            await objects.get("key", 100)


@pytest.mark.parametrize(("region", "asked"), [("eu-central-1", "eu-central-1"), ("eu-north-1", "us-east-1")])
def test_the_price_list_is_asked_in_a_region_that_has_one(region: str, asked: str) -> None:
    assert AwsSession(region=region).client("pricing").meta.region_name == asked


def test_a_dry_run_that_would_succeed_is_no_error(session: AwsSession, stubbed: Stub) -> None:
    start, stubber = BotoStart(session), stubbed("ec2")
    stubber.add_client_error("run_instances", "DryRunOperation", "Request would have succeeded", 412)
    start.dry_run_launch({"MinCount": 1, "MaxCount": 1})
    stubber.add_client_error("terminate_instances", "UnauthorizedOperation", "no", 403)
    with pytest.raises(AwsError, match="ec2:TerminateInstances: UnauthorizedOperation: no"):
        start.dry_run_terminate()


async def test_calls_of_one_session_run_side_by_side(session: AwsSession) -> None:
    """The queue is waited on for 20 s; other calls must not wait for it."""
    both = asyncio.Barrier(2)
    loop = asyncio.get_running_loop()

    def meet(_client: object) -> None:
        asyncio.run_coroutine_threadsafe(both.wait(), loop).result()

    await asyncio.gather(session.call("sqs", "ReceiveMessage", meet), session.call("ec2", "RunInstances", meet))
