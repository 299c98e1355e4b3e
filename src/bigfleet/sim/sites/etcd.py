"""Simulates etcd: a linearisable key-value store with leases, in the messages of its wire.

The real `EtcdStore` runs over `EtcdWire`, which stands where its gRPC client does (docs/spec/coordinator.md §3).
Faults: no member leads, a commit whose answer is lost, leases that end at once, watches that miss what happened. What
was committed must never be lost or take effect twice.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

from bigfleet.model.clock import Clock
from bigfleet.rpc.etcd.client import CALL_SECONDS, EtcdClient, EtcdUnavailable, NoAnswer, Range
from bigfleet.rpc.wire.gen import etcd_pb2
from bigfleet.sim.kernel.network import ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random

T = TypeVar("T")

ETCD = "etcd"
#: A watch that saw nothing ends after it, as a keepalive ends one whose peer is gone.
WATCH_SECONDS_MAX = 20.0
_LOOK_SECONDS = 0.5
#: Of the answers to commits that are lost while that fault lasts.
_LOST_SHARE = 0.4


class LeaseNotFound(Exception):
    """A key was to hang on a lease that has ended."""


class DurableEtcd:
    """One etcd cluster; its process never dies, its leader may be away."""

    def __init__(self, clock: Clock) -> None:
        self.process = Process(ETCD)
        #: No member leads.
        self.is_down = False
        #: Watches miss what happens.
        self.misses_events = False
        self._clock = clock
        self._revision = 1
        self._items: dict[bytes, etcd_pb2.KeyValue] = {}
        #: The last change of each key, deletions included.
        self._changed_at: dict[bytes, int] = {}
        #: Leases: time to live, and when each ends.
        self._leases: dict[int, tuple[int, float]] = {}
        self._granted = 0

    def start(self) -> None:
        """Let leases end from now on."""
        self.process.spawn(self._expire(), name="leases")

    async def _expire(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            now_seconds = self._clock.monotonic_seconds()
            for lease, (_ttl, until_seconds) in sorted(self._leases.items()):
                # Leases do not end while there is no leader; the next leader goes on from there.
                if now_seconds >= until_seconds and not self.is_down:
                    self._end(lease)

    def end_leases(self) -> None:
        """End every lease at once."""
        for lease in sorted(self._leases):
            self._end(lease)

    def _end(self, lease: int) -> None:
        self._leases.pop(lease, None)
        gone = sorted(key for key, item in self._items.items() if item.lease == lease)
        if gone:
            self._revision += 1
        for key in gone:
            del self._items[key]
            self._changed_at[key] = self._revision

    # ---- requests ------------------------------------------------------------------------------------------------

    def range(self, request: etcd_pb2.RangeRequest) -> etcd_pb2.RangeResponse:
        """Return one key, or all of a range."""
        start, end = request.key, request.range_end
        keys = sorted(key for key in self._items if (key == start if not end else start <= key < end))
        found = [self._items[key] for key in keys]
        return etcd_pb2.RangeResponse(header=self._header(), kvs=found, count=len(found))

    def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Run one transaction, whole or not at all. Raises LeaseNotFound for a key on a lease that is none."""
        holds = all(self._holds(compare) for compare in request.compare)
        operations = request.success if holds else request.failure
        writes = [each for each in operations if not each.HasField("request_range")]
        leases = {each.request_put.lease for each in writes if each.HasField("request_put")}
        if not leases <= {0, *self._leases}:
            raise LeaseNotFound("etcdserver: requested lease not found")
        if writes:
            self._revision += 1
        for operation in writes:
            if operation.HasField("request_put"):
                self._put(operation.request_put)
            elif self._items.pop(operation.request_delete_range.key, None) is not None:
                self._changed_at[operation.request_delete_range.key] = self._revision
        answers = [
            etcd_pb2.ResponseOp(response_range=self.range(each.request_range))
            for each in operations
            if each.HasField("request_range")
        ]
        return etcd_pb2.TxnResponse(header=self._header(), succeeded=holds, responses=answers)

    def _holds(self, compare: etcd_pb2.Compare) -> bool:
        item = self._items.get(compare.key)
        if compare.target == etcd_pb2.Compare.CREATE:
            return (item.create_revision if item is not None else 0) == compare.create_revision
        assert compare.target == etcd_pb2.Compare.MOD, "no other condition is asked for"
        return (item.mod_revision if item is not None else 0) == compare.mod_revision

    def _put(self, request: etcd_pb2.PutRequest) -> None:
        before = self._items.get(request.key)
        self._items[request.key] = etcd_pb2.KeyValue(
            key=request.key,
            value=request.value,
            lease=request.lease,
            create_revision=before.create_revision if before is not None else self._revision,
            mod_revision=self._revision,
            version=before.version + 1 if before is not None else 1,
        )
        self._changed_at[request.key] = self._revision

    def grant(self, ttl_seconds: int) -> int:
        """Return the id of a new lease."""
        self._granted += 1
        self._leases[self._granted] = (ttl_seconds, self._clock.monotonic_seconds() + ttl_seconds)
        return self._granted

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False when there is none."""
        if lease not in self._leases:
            return False
        ttl_seconds, _until = self._leases[lease]
        self._leases[lease] = (ttl_seconds, self._clock.monotonic_seconds() + ttl_seconds)
        return True

    def revoke(self, lease: int) -> None:
        """End a lease."""
        self._end(lease)

    async def watch(self, key: bytes, revision: int) -> None:
        """Return when a key changes after a revision, or after a while."""
        until_seconds = self._clock.monotonic_seconds() + WATCH_SECONDS_MAX
        while self._clock.monotonic_seconds() < until_seconds:
            if not self.misses_events and self._changed_at.get(key, 0) > revision:
                return
            await self._clock.sleep(_LOOK_SECONDS)

    def _header(self) -> etcd_pb2.ResponseHeader:
        return etcd_pb2.ResponseHeader(revision=self._revision)


class EtcdWire(EtcdClient):
    """A replica's client of that store, over the simulated network."""

    def __init__(
        self,
        store: DurableEtcd,
        *,
        network: Network,
        caller: str,
        rng: Random,
        on_lost: Callable[[], None],
        loses_answers: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_lost` is called for each commit whose answer was lost; `loses_answers`: some answers are lost."""
        self._store = store
        self._network = network
        self._caller = caller
        self._rng = rng
        self._on_lost = on_lost
        self._loses_answers = loses_answers

    async def close(self) -> None:
        """There is nothing to close."""

    async def range(self, start: bytes, end: bytes = b"", *, revision: int = 0) -> Range:
        """Return one key, or all from `start` up to `end`. Raises EtcdUnavailable."""
        content = etcd_pb2.RangeRequest(key=start, range_end=end, revision=revision).SerializeToString()

        async def work() -> bytes:
            return self._store.range(etcd_pb2.RangeRequest.FromString(content)).SerializeToString()

        answer = etcd_pb2.RangeResponse.FromString(await self._asked(work))
        return Range(answer.header.revision, tuple(answer.kvs))

    async def txn(
        self,
        compare: Iterable[etcd_pb2.Compare],
        success: Iterable[etcd_pb2.RequestOp],
        failure: Iterable[etcd_pb2.RequestOp] = (),
    ) -> etcd_pb2.TxnResponse:
        """Run one transaction. Raises NoAnswer."""
        content = etcd_pb2.TxnRequest(compare=compare, success=success, failure=failure).SerializeToString()

        async def work() -> bytes | str:
            try:
                return self._store.txn(etcd_pb2.TxnRequest.FromString(content)).SerializeToString()
            except LeaseNotFound as error:
                return str(error)

        is_lost = self._loses_answers() and self._rng.random() < _LOST_SHARE
        try:
            answer = await self._asked(work)
        except EtcdUnavailable as error:
            raise NoAnswer(str(error)) from error
        if is_lost:
            self._on_lost()
            raise NoAnswer("etcd: the answer was lost")
        if isinstance(answer, str):
            raise NoAnswer(f"etcd: {answer}")
        return etcd_pb2.TxnResponse.FromString(answer)

    async def grant(self, ttl_seconds: int) -> int:
        """Return the id of a new lease. Raises EtcdUnavailable."""

        async def work() -> int:
            return self._store.grant(ttl_seconds)

        return await self._asked(work)

    async def revoke(self, lease: int) -> None:
        """End a lease. Raises EtcdUnavailable."""

        async def work() -> None:
            self._store.revoke(lease)

        await self._asked(work)

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False when there is none any more. Raises EtcdUnavailable."""

        async def work() -> bool:
            return self._store.keep_alive(lease)

        return await self._asked(work)

    async def wait_until_changed(self, key: bytes, revision: int) -> None:
        """Return when the key changes after a revision, or when the watch ends. Raises EtcdUnavailable."""

        async def work() -> None:
            await self._store.watch(key, revision)

        await self._asked(work, seconds_max=2 * WATCH_SECONDS_MAX)

    async def _asked(self, work: Callable[[], Coroutine[None, None, T]], seconds_max: float = CALL_SECONDS) -> T:
        async def guarded() -> tuple[T] | None:
            return None if self._store.is_down else (await work(),)

        try:
            async with asyncio.timeout(seconds_max):
                answer = await self._network.call(self._caller, self._store.process, guarded)
        except ConnectionLost as error:
            raise EtcdUnavailable(f"etcd: {error}") from error
        except TimeoutError as error:
            raise EtcdUnavailable("etcd: no answer in time") from error
        if answer is None:
            raise EtcdUnavailable("etcd: no member leads")
        return answer[0]
