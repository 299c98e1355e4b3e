"""Replaces root volumes of instances and waits for the end of each replacement.

docs/spec/aws-provider.md §5. It decides nothing about a machine.
"""

from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import AwsError, Ec2
from bigfleet.provider.backends.aws.batches import VISIBLE_SECONDS_MAX
from bigfleet.provider.backends.aws.errors import AwsRefused, Meaning, is_not_found, meaning_of

_log = structlog.get_logger("bigfleet.provider.backends.aws.root_volumes")

_TASK_PENDING: Final = "pending"
_TASK_RUNS: Final = frozenset({_TASK_PENDING, "in-progress", "failing"})
_TASK_SUCCEEDED: Final = "succeeded"


class RootVolumes:
    """The root volumes of this provider's instances."""

    def __init__(self, ec2: Ec2, clock: Clock, *, poll_seconds: float) -> None:
        self._ec2 = ec2
        self._clock = clock
        self._poll_seconds = poll_seconds

    async def replace(self, instance_id: str, operation_id: str) -> bool:
        """Give the instance a new root volume from its image; return once it is there, False if EC2 refuses.

        Raises AwsRefused if the replacement fails, and AwsError.
        """
        try:
            task = await self._ec2.replace_root(instance_id, operation_id)
        except AwsError as error:
            if meaning_of(error) is Meaning.TRANSIENT:
                raise
            _log.error("aws.root_not_replaced", instance=instance_id, error=str(error), advice="it has to be deleted")
            return False
        begun_seconds = self._clock.monotonic_seconds()
        while True:
            state = await self._state(task, begun_seconds)
            if state == _TASK_SUCCEEDED:
                return True
            if state not in _TASK_RUNS:
                raise AwsRefused(f"the root volume of {instance_id} was not replaced: {task} is {state}")
            await self._clock.sleep(self._poll_seconds)

    async def _state(self, task: str, begun_seconds: float) -> str:
        """Return the state of a replacement; one that began a moment ago may not be visible yet."""
        try:
            return (await self._ec2.root_replacements([task])).get(task, _TASK_PENDING)
        except AwsError as error:
            seconds = self._clock.monotonic_seconds() - begun_seconds
            if is_not_found(error) and seconds < VISIBLE_SECONDS_MAX:
                return _TASK_PENDING
            raise
