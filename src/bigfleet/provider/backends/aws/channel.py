"""Sends an instance its orders by tag and S3, and reads the answers of its agent.

docs/spec/aws-provider.md §4. Nothing connects to an instance: its agent reads a tag from the metadata service and the
bootstrap data from S3. The data is in no tag, log or error, and is deleted once the agent answered.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import AwsError, BucketObjects, Ec2
from bigfleet.provider.backends.aws.errors import AwsRefused, Meaning, meaning_of
from bigfleet.provider.backends.aws.launch import TAG_CLUSTER, TAG_CONFIGURE, TAG_DRAIN, check_tags

_log = structlog.get_logger("bigfleet.provider.backends.aws.channel")

_NODE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_EXIT_CODE: Final = re.compile(r"[0-9]{1,3}")
#: An answer is an exit code and a node name; what is longer is none.
ANSWER_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What the agent says of one order."""

    exit_code: int
    #: "" when the agent gave none.
    node_name: str


class Channel:
    """The orders to instances, through one bucket."""

    def __init__(self, ec2: Ec2, objects: BucketObjects, clock: Clock, *, prefix: str, interval_seconds: float) -> None:
        """`prefix` begins every key, without a slash at its end; "" for none."""
        self._ec2 = ec2
        self._objects = objects
        self._clock = clock
        self._prefix = f"{prefix}/" if prefix else ""
        self._interval_seconds = interval_seconds

    async def configure(self, instance_id: str, cluster: str, blob: bytes, operation_id: str) -> AgentAnswer:
        """Order a bootstrap and return its answer, however long that takes. Raises AwsError."""
        order = f"{operation_id} {hashlib.sha256(blob).hexdigest()}"
        tags = {TAG_CONFIGURE: order, TAG_CLUSTER: cluster}
        check_tags(tags)
        key = self._key(instance_id, operation_id)
        answer = await self.answer(instance_id, operation_id)
        try:
            if answer is None:
                await self._objects.put(key, blob)
                await self._ec2.add_tags(instance_id, tags)
            while answer is None:
                answer = await self._wait(instance_id, operation_id)
        finally:
            await self.forget(instance_id, operation_id)
        return answer

    async def drain(self, instance_id: str, grace_seconds: int, operation_id: str, *, seconds_max: float) -> bool:
        """Order a drain; return whether the agent did it within `seconds_max`. Raises AwsError."""
        until_seconds = self._clock.monotonic_seconds() + seconds_max
        if await self.answer(instance_id, operation_id) is None:
            await self._ec2.add_tags(instance_id, {TAG_DRAIN: f"{operation_id} {grace_seconds}"})
        answer = await self._wait(instance_id, operation_id, until_seconds=until_seconds)
        return answer is not None and answer.exit_code == 0

    async def forget(self, instance_id: str, operation_id: str) -> None:
        """Delete the bootstrap data of an operation; a failure is logged, and the lifecycle rule deletes it."""
        try:
            await self._objects.delete(self._key(instance_id, operation_id))
        except AwsError as error:
            _log.warning("aws.data_not_deleted", instance=instance_id, operation_id=operation_id, error=str(error))

    async def answer(self, instance_id: str, operation_id: str) -> AgentAnswer | None:
        """Return the agent's answer to an operation; None if there is none yet. Raises AwsError, AwsRefused."""
        content = await self._objects.get(f"{self._key(instance_id, operation_id)}.result", ANSWER_BYTES_MAX)
        if content is None:
            return None
        lines = content.decode("utf-8", "replace").split("\n")
        if not _EXIT_CODE.fullmatch(lines[0]) or int(lines[0]) > 255:
            raise AwsRefused(f"the answer of {instance_id} does not begin with an exit code")
        name = lines[1] if len(lines) > 1 else ""
        return AgentAnswer(int(lines[0]), name if _NODE_NAME.fullmatch(name) else "")

    async def _wait(
        self, instance_id: str, operation_id: str, *, until_seconds: float = float("inf")
    ) -> AgentAnswer | None:
        while True:
            try:
                answer = await self.answer(instance_id, operation_id)
            except AwsError as error:
                if meaning_of(error) is not Meaning.TRANSIENT:
                    raise
                answer = None
            if answer is not None:
                return answer
            left_seconds = until_seconds - self._clock.monotonic_seconds()
            if left_seconds <= 0:
                return None
            await self._clock.sleep(min(self._interval_seconds, left_seconds))

    def _key(self, instance_id: str, operation_id: str) -> str:
        return f"{self._prefix}{instance_id}/{operation_id}"
