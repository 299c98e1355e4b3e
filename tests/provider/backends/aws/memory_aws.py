"""Plays EC2, S3 and the Price List in memory, on the loop's virtual time, with faults on demand.

What it does is what AWS's documents say; the strict shim (tests/aws) says it over HTTP.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from bigfleet.provider.backends.aws.api import CONNECTION, AwsError, Ec2Instance, Message, SpotPrice
from bigfleet.provider.backends.aws.backend import AwsBackend, AwsSettings
from bigfleet.provider.backends.aws.channel import Channel
from bigfleet.provider.backends.aws.identity import Place
from bigfleet.provider.backends.aws.interruptions import Interruptions
from bigfleet.provider.backends.aws.launch import TAG_CONFIGURE, TAG_DRAIN
from bigfleet.provider.backends.aws.offerings import read_aws_offerings
from bigfleet.provider.backends.aws.prices import AwsPrices
from bigfleet.sim.kernel.virtual_time import LoopClock

TYPE, ZONE = "m6i.large", "us-east-1a"
OFFERING = {
    "instance_type": TYPE,
    "zone": ZONE,
    "count": 4,
    "ami": "ami-1",
    "subnet": "subnet-1",
    "allocatable": {"cpu": "1900m", "memory": "7Gi"},
}
SPOT_OFFERING = {**OFFERING, "capacity_type": "spot"}
MACHINE = f"aws/on-demand/{TYPE}/{ZONE}/000"
SPOT_MACHINE = f"aws/spot/{TYPE}/{ZONE}/000"
#: An error that comes after the effect of its call.
AFTER = "after"


@dataclass
class Fault:
    """An error of one call."""

    error: AwsError
    is_after: bool = False


def refused(action: str, code: str, text: str = "no", status: int = 400) -> Fault:
    """Return an answer with an error."""
    return Fault(AwsError(f"ec2:{action}", code, text, request_id="r-1", status=status))


def dropped(action: str, *, is_after: bool) -> Fault:
    """Return a connection that breaks before or after the effect."""
    return Fault(AwsError(f"ec2:{action}", CONNECTION, "closed"), is_after)


@dataclass
class MemoryEc2:
    """The calls of `api.Ec2`, and who answers as the agents of its instances."""

    clock: LoopClock
    instances: dict[str, Ec2Instance] = field(default_factory=dict)
    tokens: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Errors to come by action, first first.
    faults: defaultdict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    #: When each call came.
    calls: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    #: Looks until a new instance is visible, and until it runs.
    invisible_looks: int = 0
    pending_looks: int = 1
    #: What instances that start become in place of running: state and reason.
    ends_as: tuple[str, str] | None = None
    prices: dict[str, float] = field(default_factory=dict)
    spot: list[SpotPrice] = field(default_factory=list)
    objects: "MemoryObjects | None" = None
    #: Exit code of the agents, None while they do not answer.
    exit_code: int | None = 0
    roots: dict[str, str] = field(default_factory=dict)
    root_state: str = "succeeded"
    #: Orders to drain, as they came.
    drains: list[str] = field(default_factory=list)
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    #: For so long after a removal DescribeInstances shows the tags as they were before.
    tag_lag_seconds: float = 0.0
    #: Until when, and the tags that are shown.
    #: The account that calls have to wait for.
    account_required: str = ""
    _former_tags: dict[str, tuple[float, Mapping[str, str]]] = field(default_factory=dict)
    _looks: Counter[str] = field(default_factory=Counter)

    def live(self) -> list[Ec2Instance]:
        """Return the instances that cost money."""
        return [each for each in self.instances.values() if not each.is_ending]

    async def _begin(self, action: str) -> Fault | None:
        self.calls[action].append(self.clock.monotonic_seconds())
        await self.clock.sleep(0.01)
        fault = self.faults[action].pop(0) if self.faults[action] else None
        if fault is not None and not fault.is_after:
            raise fault.error
        return fault

    def require_account(self, account: str) -> None:
        self.account_required = account

    async def run_instance(self, request: Mapping[str, Any]) -> Ec2Instance:
        fault = await self._begin("RunInstances")
        self.requests.append(request)
        token = request["ClientToken"]
        digest = msgspec.json.encode(request, order="deterministic").decode()
        if token in self.tokens:
            if self.tokens[token][1] != digest:
                raise AwsError("ec2:RunInstances", "IdempotentParameterMismatch", "other parameters", status=400)
        else:
            instance_id = f"i-{len(self.instances):017x}"
            tags = {each["Key"]: each["Value"] for each in request["TagSpecifications"][0]["Tags"]}
            self.instances[instance_id] = Ec2Instance(
                id=instance_id,
                state="pending",
                instance_type=request["InstanceType"],
                zone=ZONE,
                is_spot="InstanceMarketOptions" in request,
                private_dns=f"ip-{len(self.instances)}.ec2.internal",
                launched_unix_seconds=self.clock.monotonic_seconds(),
                tags=tags,
            )
            self.tokens[token] = (instance_id, digest)
        if fault is not None:
            raise fault.error
        return self.instances[self.tokens[token][0]]

    async def describe(self, filters: Mapping[str, Sequence[str]]) -> Sequence[Ec2Instance]:
        await self._begin("DescribeInstances")
        found = []
        for instance in list(self.instances.values()):
            if not all(_value(instance, name) in values for name, values in filters.items()):
                continue
            self._looks[instance.id] += 1
            if self._looks[instance.id] <= self.invisible_looks:
                continue
            if instance.state == "pending" and self._looks[instance.id] > self.invisible_looks + self.pending_looks:
                state, reason = self.ends_as or ("running", "")
                self.instances[instance.id] = replace(instance, state=state, state_reason=reason)
            until_seconds, tags = self._former_tags.get(instance.id, (0.0, {}))
            is_stale = until_seconds > self.clock.monotonic_seconds()
            shown = self.instances[instance.id]
            found.append(replace(shown, tags=tags) if is_stale else shown)
        return found

    async def terminate(self, ids: Sequence[str]) -> None:
        fault = await self._begin("TerminateInstances")
        unknown = [each for each in ids if each not in self.instances]
        if unknown:
            raise AwsError("ec2:TerminateInstances", "InvalidInstanceID.NotFound", str(unknown), status=400)
        for each in ids:
            self.instances[each] = replace(self.instances[each], state="shutting-down")
        if fault is not None:
            raise fault.error

    async def add_tags(self, instance_id: str, tags: Mapping[str, str]) -> None:
        fault = await self._begin("CreateTags")
        instance = self.instances[instance_id]
        self.drains += [tags[TAG_DRAIN]] if TAG_DRAIN in tags else []
        self.instances[instance_id] = replace(instance, tags={**instance.tags, **tags})
        if self.objects is not None and self.exit_code is not None:
            for key in (TAG_CONFIGURE, TAG_DRAIN):
                if key in tags:
                    operation = tags[key].partition(" ")[0]
                    self.objects.answer(instance_id, operation, self.exit_code)
        if fault is not None:
            raise fault.error

    async def remove_tags(self, instance_id: str, keys: Sequence[str]) -> None:
        fault = await self._begin("DeleteTags")
        instance = self.instances[instance_id]
        rest = {key: value for key, value in instance.tags.items() if key not in keys}
        if self.tag_lag_seconds:
            self._former_tags[instance_id] = (self.clock.monotonic_seconds() + self.tag_lag_seconds, instance.tags)
        self.instances[instance_id] = replace(instance, tags=rest)
        if fault is not None:
            raise fault.error

    async def replace_root(self, instance_id: str, token: str) -> str:
        fault = await self._begin("CreateReplaceRootVolumeTask")
        self.roots[f"replacevol-{token}"] = instance_id
        if fault is not None:
            raise fault.error
        return f"replacevol-{token}"

    async def root_replacements(self, ids: Sequence[str]) -> Mapping[str, str]:
        await self._begin("DescribeReplaceRootVolumeTasks")
        return {each: self.root_state for each in ids if each in self.roots}

    async def spot_prices(self, instance_types: Sequence[str], since_unix_seconds: float) -> Sequence[SpotPrice]:
        await self._begin("DescribeSpotPriceHistory")
        return [each for each in self.spot if each.instance_type in instance_types]

    async def on_demand(self, instance_type: str) -> float | None:
        await self._begin("GetProducts")
        return self.prices.get(instance_type)


def _value(instance: Ec2Instance, name: str) -> str:
    if name == "instance-id":
        return instance.id
    return instance.tags.get(name.removeprefix("tag:"), "")


@dataclass
class MemoryObjects:
    """The calls of `api.BucketObjects`."""

    content: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    faults: list[AwsError] = field(default_factory=list)

    def answer(self, instance_id: str, operation: str, exit_code: int) -> None:
        """AgentAnswer as the instance's agent."""
        self.content[f"p/{instance_id}/{operation}.result"] = f"{exit_code}\nnode-{instance_id}\n".encode()

    async def put(self, key: str, content: bytes) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.content[key] = content

    async def get(self, key: str, bytes_max: int) -> bytes | None:
        content = self.content.get(key)
        return None if content is None else content[:bytes_max]

    async def delete(self, key: str) -> None:
        self.content.pop(key, None)
        self.deleted.append(key)


@dataclass
class MemoryQueue:
    """The calls of `api.Queue`: what is not deleted comes again at the next receipt."""

    clock: LoopClock
    messages: list[Message] = field(default_factory=list)

    async def receive(self) -> Sequence[Message]:
        await self.clock.sleep(1.0)
        self.messages = [replace(each, receipts=each.receipts + 1) for each in self.messages]
        return list(self.messages)

    async def delete(self, receipt: str) -> None:
        self.messages = [each for each in self.messages if each.receipt != receipt]


def make_backend(
    folder: Path,
    ec2: MemoryEc2,
    *offerings: Mapping[str, object],
    objects: MemoryObjects | None = None,
    advised: dict[str, float] | None = None,
    queue: MemoryQueue | None = None,
    place: Place | None = None,
    **settings: Any,
) -> AwsBackend:
    """Return a backend over memory, with these offerings or one of four machines."""
    path = folder / "offerings.json"
    path.write_bytes(msgspec.json.encode(offerings or (OFFERING,)))
    ec2.objects = ec2.objects or objects or MemoryObjects()
    ec2.prices.setdefault(TYPE, 0.096)
    backend = AwsBackend(
        ec2,
        Channel(ec2, ec2.objects, ec2.clock, prefix="p", interval_seconds=5.0),
        AwsPrices(ec2, ec2, ec2.clock, region="us-east-1", path=None),
        Interruptions(ec2.clock, advised),
        settings=AwsSettings(
            provider="aws", node_role="nodes", user_data="#!/bin/sh\n", place=place or Place(), **settings
        ),
        clock=ec2.clock,
        queue=queue,
    )
    backend.set_offerings(read_aws_offerings(path, "aws"))
    return backend
