"""Removes tags of instances, and remembers which: DescribeInstances may still show a tag for some seconds.

docs/spec/aws-provider.md §5. A tag that was set again, or that has another value, is never left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import Ec2, Ec2Instance
from bigfleet.provider.backends.aws.batches import VISIBLE_SECONDS_MAX
from bigfleet.provider.backends.aws.launch import TAG_CLUSTER, TAG_CONFIGURE, TAG_DRAIN

#: The tags by which an instance shows that it serves a cluster or has an order.
SERVICE_TAGS: Final = (TAG_CLUSTER, TAG_CONFIGURE, TAG_DRAIN)


@dataclass(frozen=True, slots=True)
class _Removal:
    until_seconds: float
    value: str


class RemovedTags:
    """The tags that this process has removed in the last minute."""

    def __init__(self, ec2: Ec2, clock: Clock) -> None:
        self._ec2 = ec2
        self._clock = clock
        self._removals: dict[tuple[str, str], _Removal] = {}

    async def remove(self, instance: Ec2Instance, keys: Sequence[str]) -> Ec2Instance:
        """Remove these tags of an instance, present or not; return it without them. Raises AwsError."""
        await self._ec2.remove_tags(instance.id, keys)
        now_seconds = self._clock.monotonic_seconds()
        self._removals = {tag: each for tag, each in self._removals.items() if each.until_seconds > now_seconds}
        for key in keys:
            if key in instance.tags:
                removal = _Removal(now_seconds + VISIBLE_SECONDS_MAX, instance.tags[key])
                self._removals[instance.id, key] = removal
        return _without(instance, keys)

    def forget(self, instance_id: str) -> None:
        """Forget the removals of an instance: its tags are about to be set again."""
        self._removals = {tag: each for tag, each in self._removals.items() if tag[0] != instance_id}

    def current(self, instance: Ec2Instance) -> Ec2Instance:
        """Return an instance as described, without tags that were removed a moment ago."""
        now_seconds = self._clock.monotonic_seconds()
        stale = []
        for key in SERVICE_TAGS:
            removal = self._removals.get((instance.id, key))
            if removal is not None and removal.until_seconds > now_seconds and instance.tags.get(key) == removal.value:
                stale.append(key)
        return _without(instance, stale) if stale else instance


def _without(instance: Ec2Instance, keys: Sequence[str]) -> Ec2Instance:
    return replace(instance, tags={key: value for key, value in instance.tags.items() if key not in keys})
