"""Defines the calls to AWS that the provider makes, as Protocols and values.

`boto` makes them with boto3; tests make them in memory. Each call is made once: retries are the kit's. No method knows
a machine's state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

_EMPTY: Mapping[str, str] = MappingProxyType({})

#: Filter values of one DescribeInstances call, and ids of one TerminateInstances call, that we send at most.
IDS_MAX: Final = 100
#: Instances of one page.
PAGE_MAX: Final = 1000

PENDING: Final = "pending"
RUNNING: Final = "running"
STOPPED: Final = "stopped"
#: Nothing comes back from these.
ENDING: Final = frozenset({"shutting-down", "terminated"})
_STOPPED: Final = frozenset({"stopping", STOPPED})


class AwsError(Exception):
    """A call that failed: AWS's code and text, or `Connection` when no answer came."""

    def __init__(self, action: str, code: str, message: str, *, request_id: str = "", status: int = 0) -> None:
        super().__init__(action, code, message)
        #: Such as ec2:RunInstances.
        self.action = action
        self.code = code
        self.message = message
        self.request_id = request_id
        #: HTTP status, 0 when no answer came.
        self.status = status

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.action}: {self.code}: {self.message}{request}"


#: The code of an error without an answer: it may have come before or after the effect.
CONNECTION: Final = "Connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Instance:
    """An instance as EC2 describes it."""

    id: str
    #: pending, running, stopping, stopped, shutting-down or terminated.
    state: str
    instance_type: str = ""
    zone: str = ""
    is_spot: bool = False
    #: Code and text of why it changed its state, "" when EC2 gives none.
    state_reason: str = ""
    state_reason_text: str = ""
    #: Its private DNS name, "" for none.
    private_dns: str = ""
    launched_unix_seconds: float = 0.0
    tags: Mapping[str, str] = field(default_factory=lambda: _EMPTY)

    @property
    def is_ending(self) -> bool:
        """Whether it is terminated or about to be."""
        return self.state in ENDING

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, or is about to be: it has a disk and runs nothing."""
        return self.state in _STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a queue."""

    body: str
    receipt: str
    #: How often it was received, this time included.
    receipts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrice:
    """The newest spot price of a type in a zone."""

    instance_type: str
    zone: str
    usd_per_hour: float
    at_unix_seconds: float


class Ec2(Protocol):
    """The calls to EC2. Each raises AwsError."""

    def require_account(self, account: str) -> None:
        """Make no further call before AWS said that the credentials belong to this account."""
        ...

    async def run_instance(self, request: Mapping[str, Any]) -> Ec2Instance:
        """RunInstances with these parameters, for one instance. A known ClientToken returns the first instance."""
        ...

    async def describe(self, filters: Mapping[str, Sequence[str]]) -> Sequence[Ec2Instance]:
        """DescribeInstances, all pages: the instances that match every filter, terminated ones included."""
        ...

    async def terminate(self, ids: Sequence[str]) -> None:
        """TerminateInstances: all of these, or an error."""
        ...

    async def add_tags(self, instance_id: str, tags: Mapping[str, str]) -> None:
        """CreateTags."""
        ...

    async def remove_tags(self, instance_id: str, keys: Sequence[str]) -> None:
        """DeleteTags, with any value; an absent tag is a success."""
        ...

    async def replace_root(self, instance_id: str, token: str) -> str:
        """CreateReplaceRootVolumeTask from the instance's image; return the task's id. Idempotent by token."""
        ...

    async def root_replacements(self, ids: Sequence[str]) -> Mapping[str, str]:
        """DescribeReplaceRootVolumeTasks: the state of each task."""
        ...

    async def spot_prices(self, instance_types: Sequence[str], since_unix_seconds: float) -> Sequence[SpotPrice]:
        """DescribeSpotPriceHistory for Linux, all pages."""
        ...


class BucketObjects(Protocol):
    """The calls to S3, in one bucket. Each raises AwsError."""

    async def put(self, key: str, content: bytes) -> None:
        """PutObject, encrypted at rest."""
        ...

    async def get(self, key: str, bytes_max: int) -> bytes | None:
        """GetObject, its first bytes; None when there is none."""
        ...

    async def delete(self, key: str) -> None:
        """DeleteObject; an absent one is a success."""
        ...


class Queue(Protocol):
    """The calls to SQS, on one queue. Each raises AwsError."""

    async def receive(self) -> Sequence[Message]:
        """ReceiveMessage: wait for up to 20 s, and return up to 10."""
        ...

    async def delete(self, receipt: str) -> None:
        """DeleteMessage."""
        ...


class PriceList(Protocol):
    """The calls to the Price List. Each raises AwsError."""

    async def on_demand(self, instance_type: str) -> float | None:
        """GetProducts: USD per hour for Linux on shared tenancy in the region; None when it lists none."""
        ...
