"""Talks to the strict shim: faults to come, what was called, what is there."""

import json
import urllib.request
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config

REGION = "us-east-1"
#: What moto takes; the shim's process has them as well, because moto asks itself.
CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
BUCKET = "bootstrap"


class ShimClient:
    """One running shim."""

    def __init__(self, url: str, url_ipv6: str = "") -> None:
        """`url_ipv6` reaches it as well; "" on a host without IPv6."""
        self.url, self.url_ipv6 = url, url_ipv6

    def control(self, what: str, **asked: object) -> Any:
        """Ask the shim itself."""
        request = urllib.request.Request(f"{self.url}/_shim/{what}", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def reset(self) -> None:
        """End every instance, and forget faults, calls and tokens."""
        self.control("reset")

    def fault(self, action: str, code: str = "", **more: object) -> None:
        """Arm a fault of a call to come."""
        self.control("fault", action=action, code=code, **more)

    def calls(self, action: str) -> int:
        """How often an action was called since the last reset."""
        return int(self.control("calls").count(action))

    @cached_property
    def place(self) -> Any:
        """An image and the subnet of each zone that there are."""
        return self.control("place")

    def client(self, service: str) -> Any:
        """Return a client of boto3 that makes each call once."""
        config = Config(retries={"mode": "standard", "total_max_attempts": 1}, s3={"addressing_style": "path"})
        return boto3.client(service, region_name=REGION, endpoint_url=self.url, config=config)

    def live(self) -> list[Any]:
        """Return the instances that cost money."""
        # After a certification there are more instances than one page has.
        pages = self.client("ec2").get_paginator("describe_instances").paginate()
        found = [reservation for page in pages for reservation in page["Reservations"]]
        instances = [each for reservation in found for each in reservation["Instances"]]
        return [each for each in instances if each["State"]["Name"] not in ("shutting-down", "terminated")]

    def bucket(self) -> None:
        """Make the bucket, empty."""
        s3 = self.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
            s3.delete_object(Bucket=BUCKET, Key=each["Key"])

    def offering(self, **more: object) -> dict[str, object]:
        """Return an offering of four machines in a zone of the shim."""
        zone = str(more.get("zone", "us-east-1a"))
        return {
            "instance_type": "m6i.large",
            "zone": zone,
            "count": 4,
            "ami": self.place["ami"],
            "subnet": self.place["subnets"][zone],
            "allocatable": {"cpu": "1900m", "memory": "7Gi"},
            **more,
        }
