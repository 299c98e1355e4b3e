"""Calls AWS with boto3: each call in a thread, once, with its errors as AwsError.

docs/spec/aws-provider.md §1. Credentials come from botocore's own chain. botocore's retries are off, because those of
the kit know the operation. It must never log a parameter.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import boto3
import msgspec
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, IncompleteReadError
from botocore.parsers import ResponseParserError

from bigfleet.provider.backends.aws.api import CONNECTION, IDS_MAX, PAGE_MAX, AwsError, Ec2Instance, Message, SpotPrice
from bigfleet.provider.backends.aws.errors import OTHER_ACCOUNT, is_absent_object, is_permitted_dry_run
from bigfleet.provider.operations.invoke import BACKEND_THREADS

T = TypeVar("T")

CONNECT_SECONDS_MAX: Final = 5.0
READ_SECONDS_MAX: Final = 60.0
_THREADS: Final = 32
_QUEUE_WAIT_SECONDS: Final = 20
#: Regions that serve the Price List; others ask the first.
_PRICING_REGIONS: Final = ("us-east-1", "eu-central-1", "ap-south-1")


class AwsSession:
    """One region of one account. `close` it in the end."""

    def __init__(self, *, region: str, endpoint_url: str | None = None) -> None:
        """Connect to nothing yet. `endpoint_url` replaces the address of each service."""
        self.region = region
        self._endpoint_url = endpoint_url
        self._session = boto3.session.Session(region_name=region)
        # A queue is waited on for 20 s in a thread of its own.
        #: The account that has to be that of the credentials before the next call to EC2, "" for any.
        self.account_required = ""
        self._threads = ThreadPoolExecutor(_THREADS, f"{BACKEND_THREADS}-aws")
        self._clients: dict[str, Any] = {}

    def close(self) -> None:
        """Take no more calls; those that run are left."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def client(self, service: str) -> Any:
        """Return the client of a service, made once.

        The first call takes 100 ms, so it comes before the loop has work; and two threads must not make one.
        """
        client = self._clients.get(service)
        if client is None:
            region = self.region
            if service == "pricing" and region not in _PRICING_REGIONS:
                region = _PRICING_REGIONS[0]
            config = Config(
                connect_timeout=CONNECT_SECONDS_MAX,
                read_timeout=READ_SECONDS_MAX,
                # `total_max_attempts` counts the first one.
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=_THREADS,
                s3={"addressing_style": "path" if self._endpoint_url else "auto"},
            )
            client = self._session.client(service, region_name=region, endpoint_url=self._endpoint_url, config=config)
            self._clients[service] = client
        return client

    async def call(self, service: str, action: str, method: Callable[[Any], T]) -> T:
        """Run a method on a client in a thread. Raises AwsError."""
        client = self.client(service)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call_once(client, f"{service}:{action}", method))


def call_once(client: Any, action: str, method: Callable[[Any], T]) -> T:
    """Run a method on a client. Raises AwsError."""
    try:
        return method(client)
    except ClientError as error:
        described = error.response.get("Error", {})
        about = error.response.get("ResponseMetadata", {})
        raise AwsError(
            action,
            str(described.get("Code", "Unknown")),
            str(described.get("Message", "")),
            request_id=str(about.get("RequestId", "")),
            status=int(about.get("HTTPStatusCode", 0)),
        ) from None
    except (ConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError) as error:
        # No connection, a time-out, an answer that breaks off: the effect may or may not be there.
        raise AwsError(action, CONNECTION, str(error)) from None
    except BotoCoreError as error:
        # Of our own side: no credentials, a wrong endpoint, a parameter of the wrong type.
        raise AwsError(action, type(error).__name__, str(error)) from None


class BotoEc2:
    """Makes the calls of `api.Ec2`."""

    def __init__(self, session: AwsSession) -> None:
        self._session = session
        session.client("ec2")

    def require_account(self, account: str) -> None:
        """GetCallerIdentity, before the next call and until it says this account."""
        self._session.account_required = account

    async def run_instance(self, request: Mapping[str, Any]) -> Ec2Instance:
        """RunInstances."""
        answer = await self._call("RunInstances", lambda client: client.run_instances(**request))
        return _instance(answer["Instances"][0])

    async def describe(self, filters: Mapping[str, Sequence[str]]) -> Sequence[Ec2Instance]:
        """DescribeInstances, all pages."""
        listed = [{"Name": name, "Values": list(values)} for name, values in filters.items()]

        def read(client: Any) -> list[Ec2Instance]:
            pages = client.get_paginator("describe_instances").paginate(
                Filters=listed, PaginationConfig={"PageSize": PAGE_MAX}
            )
            return [
                _instance(each)
                for page in pages
                for reservation in page["Reservations"]
                for each in reservation["Instances"]
            ]

        return await self._call("DescribeInstances", read)

    async def terminate(self, ids: Sequence[str]) -> None:
        """TerminateInstances."""
        await self._call("TerminateInstances", lambda client: client.terminate_instances(InstanceIds=list(ids)))

    async def add_tags(self, instance_id: str, tags: Mapping[str, str]) -> None:
        """CreateTags."""
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        await self._call("CreateTags", lambda client: client.create_tags(Resources=[instance_id], Tags=listed))

    async def remove_tags(self, instance_id: str, keys: Sequence[str]) -> None:
        """DeleteTags."""
        listed = [{"Key": key} for key in keys]
        await self._call("DeleteTags", lambda client: client.delete_tags(Resources=[instance_id], Tags=listed))

    async def replace_root(self, instance_id: str, token: str) -> str:
        """CreateReplaceRootVolumeTask."""
        answer = await self._call(
            "CreateReplaceRootVolumeTask",
            lambda client: client.create_replace_root_volume_task(
                InstanceId=instance_id, ClientToken=token, DeleteReplacedRootVolume=True
            ),
        )
        return str(answer["ReplaceRootVolumeTask"]["ReplaceRootVolumeTaskId"])

    async def root_replacements(self, ids: Sequence[str]) -> Mapping[str, str]:
        """DescribeReplaceRootVolumeTasks."""
        answer = await self._call(
            "DescribeReplaceRootVolumeTasks",
            lambda client: client.describe_replace_root_volume_tasks(ReplaceRootVolumeTaskIds=list(ids)),
        )
        return {each["ReplaceRootVolumeTaskId"]: each["TaskState"] for each in answer["ReplaceRootVolumeTasks"]}

    async def spot_prices(self, instance_types: Sequence[str], since_unix_seconds: float) -> Sequence[SpotPrice]:
        """DescribeSpotPriceHistory, all pages."""

        def read(client: Any) -> list[SpotPrice]:
            pages = client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=list(instance_types),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=datetime.fromtimestamp(since_unix_seconds, UTC),
            )
            return [
                SpotPrice(
                    instance_type=each["InstanceType"],
                    zone=each["AvailabilityZone"],
                    usd_per_hour=float(each["SpotPrice"]),
                    at_unix_seconds=each["Timestamp"].timestamp(),
                )
                for page in pages
                for each in page["SpotPriceHistory"]
            ]

        return await self._call("DescribeSpotPriceHistory", read)

    async def _call(self, action: str, method: Callable[[Any], T]) -> T:
        required = self._session.account_required
        if required:
            who = await self._session.call("sts", "GetCallerIdentity", lambda client: client.get_caller_identity())
            if str(who["Account"]) != required:
                text = f"the credentials are of account {who['Account']}, and the machines of account {required}"
                raise AwsError(f"ec2:{action}", OTHER_ACCOUNT, f"{text}; restart the provider with its own")
            self._session.account_required = ""
        return await self._session.call("ec2", action, method)


class BotoObjects:
    """Makes the calls of `api.BucketObjects`."""

    def __init__(self, session: AwsSession, bucket: str) -> None:
        self._session = session
        self._bucket = bucket
        session.client("s3")

    async def put(self, key: str, content: bytes) -> None:
        """PutObject."""
        await self._session.call(
            "s3",
            "PutObject",
            lambda client: client.put_object(Bucket=self._bucket, Key=key, Body=content, ServerSideEncryption="AES256"),
        )

    async def get(self, key: str, bytes_max: int) -> bytes | None:
        """GetObject."""

        def read(client: Any) -> bytes:
            # An instance wrote it, and may have written anything.
            with client.get_object(Bucket=self._bucket, Key=key)["Body"] as body:
                return bytes(body.read(bytes_max))

        try:
            return await self._session.call("s3", "GetObject", read)
        except AwsError as error:
            if is_absent_object(error):
                return None
            raise

    async def delete(self, key: str) -> None:
        """DeleteObject."""
        await self._session.call(
            "s3", "DeleteObject", lambda client: client.delete_object(Bucket=self._bucket, Key=key)
        )


class BotoQueue:
    """Makes the calls of `api.Queue`."""

    def __init__(self, session: AwsSession, url: str) -> None:
        self._session = session
        self._url = url
        session.client("sqs")

    async def receive(self) -> Sequence[Message]:
        """ReceiveMessage."""
        answer = await self._session.call(
            "sqs",
            "ReceiveMessage",
            lambda client: client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=10,
                WaitTimeSeconds=_QUEUE_WAIT_SECONDS,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            ),
        )
        return [
            Message(
                body=each["Body"],
                receipt=each["ReceiptHandle"],
                receipts=int(each.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            )
            for each in answer.get("Messages", [])
        ]

    async def delete(self, receipt: str) -> None:
        """DeleteMessage."""
        await self._session.call(
            "sqs", "DeleteMessage", lambda client: client.delete_message(QueueUrl=self._url, ReceiptHandle=receipt)
        )


class BotoPrices:
    """Makes the calls of `api.PriceList`."""

    def __init__(self, session: AwsSession) -> None:
        self._session = session
        session.client("pricing")

    async def on_demand(self, instance_type: str) -> float | None:
        """GetProducts."""
        asked = {
            "instanceType": instance_type,
            "regionCode": self._session.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()]
        answer = await self._session.call(
            "pricing",
            "GetProducts",
            lambda client: client.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=100),
        )
        prices = [price for text in answer["PriceList"] for price in _usd_per_hour(text)]
        return min((price for price in prices if price > 0), default=None)


def _usd_per_hour(product: str) -> list[float]:
    """Return the hourly prices of a product of the Price List, which is JSON in a string."""
    terms = msgspec.json.decode(product).get("terms", {}).get("OnDemand", {})
    return [
        float(dimension["pricePerUnit"]["USD"])
        for term in terms.values()
        for dimension in term["priceDimensions"].values()
        if dimension.get("unit") == "Hrs" and "USD" in dimension["pricePerUnit"]
    ]


def _instance(described: Mapping[str, Any]) -> Ec2Instance:
    reason = described.get("StateReason", {})
    launched = described.get("LaunchTime")
    return Ec2Instance(
        id=described["InstanceId"],
        state=described["State"]["Name"],
        instance_type=described.get("InstanceType", ""),
        zone=described.get("Placement", {}).get("AvailabilityZone", ""),
        is_spot=described.get("InstanceLifecycle") == "spot",
        state_reason=reason.get("Code", ""),
        state_reason_text=reason.get("Message", ""),
        private_dns=described.get("PrivateDnsName", ""),
        launched_unix_seconds=0.0 if launched is None else launched.timestamp(),
        tags={each["Key"]: each["Value"] for each in described.get("Tags", [])},
    )


class BotoStart:
    """Makes the calls of `start_checks.StartCalls`; they block."""

    def __init__(self, session: AwsSession) -> None:
        self._session = session
        #: Of the credentials, "" until AWS said it.
        self.account = ""

    def identity(self) -> str:
        """GetCallerIdentity: the ARN of who calls."""
        answer = call_once(
            self._session.client("sts"), "sts:GetCallerIdentity", lambda client: client.get_caller_identity()
        )
        self.account = str(answer["Account"])
        return str(answer["Arn"])

    def dry_run_launch(self, request: Mapping[str, Any]) -> None:
        """RunInstances with DryRun."""
        self._dry_run("RunInstances", lambda client: client.run_instances(**request, DryRun=True))

    def dry_run_terminate(self) -> None:
        """TerminateInstances with DryRun, of an instance that there is not."""
        self._dry_run(
            "TerminateInstances",
            lambda client: client.terminate_instances(InstanceIds=["i-00000000000000000"], DryRun=True),
        )

    def find_xen_types(self, instance_types: Iterable[str]) -> set[str]:
        """DescribeInstanceTypes, 100 a call."""
        names = sorted(instance_types)
        described = [
            each
            for start in range(0, len(names), IDS_MAX)
            for each in self._described_types(names[start : start + IDS_MAX])
        ]
        return {each["InstanceType"] for each in described if each.get("Hypervisor") == "xen"}

    def _described_types(self, names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        answer = call_once(
            self._session.client("ec2"),
            "ec2:DescribeInstanceTypes",
            lambda client: client.describe_instance_types(InstanceTypes=names),
        )
        described: Sequence[Mapping[str, Any]] = answer["InstanceTypes"]
        return described

    def find_bucket(self, bucket: str) -> None:
        """HeadBucket."""
        call_once(self._session.client("s3"), "s3:HeadBucket", lambda client: client.head_bucket(Bucket=bucket))

    def find_object(self, bucket: str, key: str) -> None:
        """HeadObject, which answers as GetObject does."""
        call_once(
            self._session.client("s3"), "s3:HeadObject", lambda client: client.head_object(Bucket=bucket, Key=key)
        )

    def _dry_run(self, action: str, method: Callable[[Any], Any]) -> None:
        try:
            call_once(self._session.client("ec2"), f"ec2:{action}", method)
        except AwsError as error:
            if not is_permitted_dry_run(error):
                raise
