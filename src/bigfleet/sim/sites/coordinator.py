"""Runs the real coordinator replicas over the simulated store, in processes that die and restart.

A shard's link reaches them through `RemoteCoordinators`, over the simulated network and in the bytes of the real wire;
there a report may arrive twice, and an answer may come a second time. What a replica knows beyond its store dies with
its process. This module must not decide anything, or reach into a shard.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.coordinator.leader_term import CoordinatorSettings, Term
from bigfleet.coordinator.metrics import CoordinatorMetrics
from bigfleet.coordinator.replica import Replica
from bigfleet.coordinator.stores.metered import MeteredStore
from bigfleet.coordinator.stores.protocol import LeaderInfo
from bigfleet.link.client import CALL_SECONDS, NotAnswered
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Domain
from bigfleet.model.shard_report import ShardReport
from bigfleet.rpc.clients.coordinator import LEADER_HINT
from bigfleet.rpc.etcd.store import EtcdStore
from bigfleet.rpc.servers.coordinator import CoordinatorServicer
from bigfleet.rpc.wire.convert_coordinator import answer_from_wire, report_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2
from bigfleet.sim.kernel.network import ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.sites.etcd import DurableEtcd, EtcdWire

LEASE_SECONDS: Final = 10
#: The caller of an administrator's calls.
ADMIN: Final = "admin"
#: Earlier answers of one process that may come again.
_STORED_MAX = 4
_TWICE_SHARE, _AGAIN_SHARE = 0.3, 0.3


class CoordinatorCallFailed(Exception):
    """A call ended with a status; `leader` is the address that a follower named, empty without one."""

    def __init__(self, code: str, details: str, leader: str = "") -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.leader = leader


class ReplicaObserver(Protocol):
    """What is shown of replicas, such as `bigfleet.sim.observations.Observations`."""

    def note(self, kind: str, subject: str, text: str = "") -> None:
        """Note what a replica does at this moment."""

    def mark(self, name: str) -> None:
        """Note that an interesting state was reached."""

    def led(self, term: int) -> None:
        """Note that a replica has begun to lead."""

    def breach(self, invariant: str, text: str) -> None:
        """Note what must not happen."""


class WatchedReplica(Replica):
    """One replica's process."""

    def __init__(self, *parts: Any, name: str, observations: ReplicaObserver, **more: Any) -> None:
        """The others are those of any replica."""
        super().__init__(*parts, **more)
        self._name, self._observations = name, observations

    async def _lead(self, term: Term) -> None:
        self._observations.note("leader", self._name, f"term {term.term}")
        self._observations.led(term.term)
        await super()._lead(term)


class CoordinatorSite:
    """One replica's place, and its process of the moment."""

    def __init__(
        self,
        name: str,
        *,
        store: DurableEtcd,
        network: Network,
        clock: Clock,
        rng: Random,
        observations: ReplicaObserver,
    ) -> None:
        self.name = name
        self.process = Process(name)
        self.process.kill()
        #: Answers of the store to commits are lost now and then.
        self.loses_answers = False
        self._store = store
        self._network = network
        self._clock = clock
        self._rng = rng
        self._observations = observations
        self._servicer: CoordinatorServicer | None = None
        self.replica: WatchedReplica | None = None

    def start(self, settings: CoordinatorSettings) -> None:
        """Start a process, which knows nothing but what is written."""
        self.process = Process(self.name)
        self._servicer = self.replica = None
        self._observations.note("start", self.name)
        self.process.spawn(self._run(settings), name=self.name)

    async def _run(self, settings: CoordinatorSettings) -> None:
        observations = self._observations
        wire = EtcdWire(
            self._store,
            network=self._network,
            caller=self.name,
            rng=self._rng,
            on_lost=lambda: observations.mark("a commit of unknown outcome"),
            loses_answers=lambda: self.loses_answers,
        )
        metrics = CoordinatorMetrics(CollectorRegistry())
        me = LeaderInfo(self.name, self.name)
        store = EtcdStore(wire, prefix="/bigfleet", me=me, lease_ttl_seconds=LEASE_SECONDS, clock=self._clock)
        metered = MeteredStore(store, metrics, self._clock)
        replica = self.replica = WatchedReplica(
            metered,
            clock=self._clock,
            settings=settings,
            metrics=metrics,
            name=self.name,
            observations=observations,
        )
        self._servicer = CoordinatorServicer(replica, self._clock)
        try:
            await replica.run()
        except Exception as error:
            observations.breach("S0", f"{self.name} ended by itself: {type(error).__name__}: {error}")

    async def serve(self, method: str, content: bytes) -> "bytes | CoordinatorCallFailed":
        """Answer one call, run in the replica's process; a status is an answer, even if its caller has gone."""
        if self._servicer is None:
            return CoordinatorCallFailed("UNAVAILABLE", "the replica is starting")
        handler = getattr(self._servicer, method)
        try:
            answer: Any = await handler(_REQUESTS[method](content), _Context())
        except CoordinatorCallFailed as failed:
            return failed
        return bytes(answer.SerializeToString(deterministic=True))

    async def call(self, caller: str, method: str, content: bytes) -> bytes:
        """Carry a call here and its answer back. Raises CoordinatorCallFailed."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await self._network.call(caller, self.process, lambda: self.serve(method, content))
        except ConnectionLost as lost:
            raise CoordinatorCallFailed("UNAVAILABLE", str(lost)) from lost
        except TimeoutError as late:
            raise CoordinatorCallFailed("DEADLINE_EXCEEDED", "no answer in time") from late
        if isinstance(answer, CoordinatorCallFailed):
            raise answer
        return answer


#: How a method's request is read; a report is read by the servicer itself.
_REQUESTS: dict[str, Callable[[bytes], Any]] = {
    "ReportShard": bytes,
    "AssignDomain": coordinator_pb2.AssignDomainRequest.FromString,
    "UnassignDomain": coordinator_pb2.UnassignDomainRequest.FromString,
    "ListDomainAssignments": coordinator_pb2.ListDomainAssignmentsRequest.FromString,
}


class _Context:
    """The part of gRPC's servicer context that unary calls use, in plain text."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what a connection without TLS shows."""
        return {"transport_security_type": [b"insecure"]}

    def peer(self) -> str:
        """Return a name without meaning."""
        return "simulated"

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with a status."""
        raise CoordinatorCallFailed(code.name, details, dict(trailing_metadata).get(LEADER_HINT, ""))


class RemoteCoordinators:
    """One shard process's way to the replicas; implements `bigfleet.link.client.Coordinators`."""

    def __init__(
        self,
        *,
        shard_id: ShardId,
        sites: Sequence[CoordinatorSite],
        clock: Clock,
        rng: Random,
        faults: Set[str],
        on_answer: Callable[[ReportAnswer, bool], None],
    ) -> None:
        """`faults` are those of the moment. `on_answer` is called for each answer, and whether it came before."""
        self._shard_id = shard_id
        self._sites = {site.name: site for site in sites}
        self._clock = clock
        self._rng = rng
        self._faults = faults
        self._on_answer = on_answer
        self._earlier: deque[bytes] = deque(maxlen=_STORED_MAX)

    async def addresses(self, name: str) -> Sequence[str]:
        """Return the name: there is no resolver."""
        return (name,)

    async def report(self, address: str, report: ShardReport) -> ReportAnswer:
        """Return the answer of the replica at an address. Raises NotAnswered."""
        site = self._sites.get(address)
        if site is None:
            raise NotAnswered(f"{address}: no replica is there")
        content = report_to_wire(report).SerializeToString(deterministic=True)
        if "report-twice" in self._faults and self._rng.random() < _TWICE_SHARE:
            self._send_again(site, content, self._rng.uniform(0.0, 20.0))
        try:
            answer = await site.call(self._shard_id, "ReportShard", content)
        except CoordinatorCallFailed as failed:
            is_follower = failed.code == "FAILED_PRECONDITION"
            raise NotAnswered(str(failed), leader=failed.leader if is_follower else "") from failed
        return self._heard(answer)

    def _heard(self, content: bytes) -> ReportAnswer:
        is_old = bool(self._earlier) and "answer-again" in self._faults and self._rng.random() < _AGAIN_SHARE
        chosen = self._rng.choice(list(self._earlier)) if is_old else content
        self._earlier.append(content)
        answer = answer_from_wire(coordinator_pb2.ReportAck.FromString(chosen))
        self._on_answer(answer, is_old)
        return answer

    def _send_again(self, site: CoordinatorSite, content: bytes, delay_seconds: float) -> None:
        """Let a report arrive once more, even if its sender has died; the answer is dropped."""

        async def late() -> None:
            await self._clock.sleep(delay_seconds)
            with suppress(CoordinatorCallFailed):
                await site.call(self._shard_id, "ReportShard", content)

        asyncio.get_running_loop().create_task(late(), context=Context())


async def assigned(sites: Sequence[CoordinatorSite], domain: Domain, shard: ShardId) -> bool:
    """Assign a domain to a shard, as an administrator does; return whether a leader took it."""
    key, value = domain
    request = coordinator_pb2.AssignDomainRequest(topology_key=key, topology_value=value, shard_id=shard)
    return await asked(sites, "AssignDomain", request) is not None


async def asked(sites: Sequence[CoordinatorSite], method: str, request: Any) -> bytes | None:
    """Return the leader's answer to an administrator's call; None when there is no leader, or it was refused."""
    content = request.SerializeToString(deterministic=True)
    for site in sites:
        try:
            return await site.call(ADMIN, method, content)
        except CoordinatorCallFailed:
            continue
    return None
