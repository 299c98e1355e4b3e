"""Shares calls between machines: one DescribeInstances for all that wait, one TerminateInstances for many.

docs/spec/aws-provider.md §2, §7. A caller that is cancelled leaves its batch; the others are served. It decides
nothing about a machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.api import IDS_MAX, AwsError, Ec2, Ec2Instance
from bigfleet.provider.backends.aws.errors import Meaning, is_unknown_instance, meaning_of
from bigfleet.provider.operations.dispatch import TokenBucket

T = TypeVar("T")

#: How long the first item of a batch waits for others.
GATHER_SECONDS: Final = 0.25
#: Not in an answer for so long after its launch, an instance is only not visible yet.
VISIBLE_SECONDS_MAX: Final = 60.0


class InstanceGone(Exception):
    """EC2 does not know the instance, long after its launch."""


class Batches(Generic[T]):
    """Gathers items for 250 ms, or 100 of them, and gives them to one call."""

    def __init__(self, call: Callable[[Sequence[str]], Awaitable[dict[str, T]]], clock: Clock) -> None:
        """`call` returns a result for each item that has one."""
        self._call = call
        self._clock = clock
        self._waiting: dict[str, list[asyncio.Future[T | None]]] = {}
        #: Ends when the batch that gathers now is due.
        self._timer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: str) -> T | None:
        """Return the item's result, None if the call has none. Raises the exception of the call."""
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._timer = self._started(self._send_after(GATHER_SECONDS))
        self._waiting.setdefault(item, []).append(future)
        if len(self._waiting) >= IDS_MAX:
            # At once, so that no further item comes into this batch before its request is made.
            if self._timer is not None:
                self._timer.cancel()
            self._started(self._send(self._taken()))
        return await future

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _taken(self) -> dict[str, list["asyncio.Future[T | None]"]]:
        batch, self._waiting = self._waiting, {}
        return batch

    async def _send_after(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        # The request is a task of its own: a full batch that comes next cancels the timer only.
        self._started(self._send(self._taken()))

    async def _send(self, batch: dict[str, list["asyncio.Future[T | None]"]]) -> None:
        items = [item for item, futures in batch.items() if not all(each.done() for each in futures)]
        if not items:
            return
        try:
            results = await self._call(items)
        except Exception as error:
            for _item, future in _open(batch):
                future.set_exception(error)
            return
        for item, future in _open(batch):
            future.set_result(results.get(item))


def _open(batch: dict[str, list["asyncio.Future[T | None]"]]) -> Iterator[tuple[str, "asyncio.Future[T | None]"]]:
    """Yield the futures whose callers still wait."""
    for item, futures in batch.items():
        for future in futures:
            if not future.done():
                yield item, future


class InstanceWatch:
    """Waits for instances to leave a state: all that wait share one look, and its interval grows with their number."""

    def __init__(self, ec2: Ec2, clock: Clock, bucket: TokenBucket, *, interval_seconds: float) -> None:
        self._ec2 = ec2
        self._clock = clock
        self._bucket = bucket
        self._interval_seconds = interval_seconds
        self._waiting: dict[str, list[asyncio.Future[Ec2Instance]]] = {}
        #: Since when each is waited for without having been seen.
        self._since_seconds: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many instances are waited for."""
        return len(self._waiting)

    async def left(self, instance_id: str, state: str) -> Ec2Instance:
        """Return the instance once it is in another state than this one.

        Raises InstanceGone when EC2 does not show it for 60 s, and AwsError for a final error. A transient one is
        passed over.
        """
        while True:
            instance = await self._next_look(instance_id)
            if instance.state != state:
                return instance

    async def _next_look(self, instance_id: str) -> Ec2Instance:
        future: asyncio.Future[Ec2Instance] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(instance_id, []).append(future)
        self._since_seconds.setdefault(instance_id, self._clock.monotonic_seconds())
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._look_until_empty())
        try:
            return await future
        except asyncio.CancelledError:
            waiting = self._waiting.get(instance_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(instance_id, None)
                self._since_seconds.pop(instance_id, None)
            raise

    async def _look_until_empty(self) -> None:
        while self._waiting:
            # One call a second at most, however many wait.
            calls = -(-len(self._waiting) // IDS_MAX)
            await self._clock.sleep(max(self._interval_seconds, float(calls) if calls > 1 else 0.0))
            ids = sorted(self._waiting)
            for start in range(0, len(ids), IDS_MAX):
                await self._look(ids[start : start + IDS_MAX])
            # Those that wait on ask again before the next look.
            await self._clock.sleep(0)

    async def _look(self, ids: Sequence[str]) -> None:
        await self._bucket.take()
        try:
            found = {each.id: each for each in await self._ec2.describe({"instance-id": ids})}
        except Exception as error:
            if isinstance(error, AwsError) and meaning_of(error) is Meaning.TRANSIENT:
                return
            for instance_id in ids:
                self._resolve(instance_id, error)
            return
        now_seconds = self._clock.monotonic_seconds()
        for instance_id in ids:
            instance = found.get(instance_id)
            if instance is not None:
                self._resolve(instance_id, instance)
            elif now_seconds - self._since_seconds.get(instance_id, now_seconds) >= VISIBLE_SECONDS_MAX:
                text = f"EC2 does not show {instance_id}, {VISIBLE_SECONDS_MAX:.0f} s after its launch"
                self._resolve(instance_id, InstanceGone(text))

    def _resolve(self, instance_id: str, result: Ec2Instance | Exception) -> None:
        self._since_seconds.pop(instance_id, None)
        for future in self._waiting.pop(instance_id, []):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


async def terminate_each(ec2: Ec2, ids: Sequence[str]) -> dict[str, Exception | None]:
    """Terminate instances by one call, and halve the batch at an error until it is clear whose it is.

    Returns for each id the error that concerns it, None when EC2 ends it or does not know it.
    """
    try:
        await ec2.terminate(ids)
    except AwsError as error:
        if meaning_of(error) is Meaning.TRANSIENT or len(ids) == 1:
            return dict.fromkeys(ids, None if is_unknown_instance(error) else error)
        half = len(ids) // 2
        # EC2 refuses a whole batch for one id that it does not know.
        return {**await terminate_each(ec2, ids[:half]), **await terminate_each(ec2, ids[half:])}
    return dict.fromkeys(ids)
