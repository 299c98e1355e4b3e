"""A cluster of the world: the real operator session over a cluster that can lie about its demand, fall silent or die.

The pods are Kubernetes' and outlive the operator. What a roll-up says in a faulty time is chosen by name (`LIES`); the
real demand stands in `pods`. A cluster must never lie outside of its faults.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from bigfleet.model.clock import Clock
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, OperatorFrame, RollUp, ShardFrame
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.states import MachineState
from bigfleet.operator.ports import EndKind, SessionEnded, SessionStream
from bigfleet.operator.requests import CapacityRequest
from bigfleet.operator.rollup import recount
from bigfleet.operator.session import SessionSettings
from bigfleet.rpc.convert_session import operator_frame_to_wire, shard_frame_from_wire
from bigfleet.rpc.gen import shard_pb2
from bigfleet.sim.cluster import SimulatedCluster
from bigfleet.sim.kernel.network import Connection, ConnectionLost, Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.world.evidence import Evidence
from bigfleet.sim.world.shard import ShardSite

#: What a roll-up may say instead of the truth.
LIES: Final = ("rollup-empty", "rollup-truncated", "rollup-stale", "rollup-replayed", "rollup-flapping")
SESSION = SessionSettings(rollup_interval_seconds=10.0, rollup_gap_seconds=0.5)
_END_KINDS = {"ABORTED": EndKind.REPLACED, "PERMISSION_DENIED": EndKind.DENIED}
#: Earlier roll-ups that a stale or replayed one repeats.
_KEPT_MAX = 5


class LyingCluster(SimulatedCluster):
    """The operator's view of the cluster, true or not."""

    site: "ClusterSite"

    def roll_up(self) -> RollUp:
        """Return the demand, or what the fault of the moment makes of it."""
        return self.site.told(super().roll_up())

    def configured(self) -> set[str]:
        """Return the machines that the cluster believes to be its own and in service."""
        return {machine_id for machine_id, state in self._machines.items() if state is MachineState.CONFIGURED}

    async def bootstrap(self, request: BootstrapRequest) -> BootstrapResponse:
        """Answer, refuse or keep silent."""
        if "bootstrap-refused" in self.site.lies:
            return BootstrapResponse(request_id=request.request_id, error="the join token could not be made")
        if "bootstrap-silent" in self.site.lies:
            await asyncio.Event().wait()
        return await super().bootstrap(request)


class ClusterSite:
    """One cluster: its pods, and its operator's process of the moment."""

    def __init__(
        self,
        *,
        name: str,
        network: Network,
        shard: ShardSite,
        clock: Clock,
        make_rng: Callable[[str], Random],
        evidence: Evidence,
    ) -> None:
        self.name = ClusterId(name)
        self.pods: dict[str, CapacityRequest] = {}
        self.lies: set[str] = set()
        self.process = Process(f"operator-{name}")
        self.process.kill()
        self.cluster: LyingCluster | None = None
        self._twin: Process | None = None
        #: To whom it reports.
        self.shard = shard
        self._network = network
        self._clock = clock
        self._make_rng = make_rng
        self._rng = make_rng(f"cluster {name}")
        self._evidence = evidence
        self._earlier: list[RollUp] = []

    def start(self) -> None:
        """Start an operator that reads the cluster anew."""
        self.process = Process(f"operator-{self.name}")
        self.cluster = self._spawn(self.process, "")

    def start_twin(self) -> None:
        """Start a second operator with this cluster's identity, as a botched upgrade does."""
        self._twin = Process(f"operator-{self.name}")
        self._spawn(self._twin, " twin")

    @property
    def has_twin(self) -> bool:
        """Say whether a second operator is about."""
        return self._twin is not None and self._twin.is_alive

    def stop_twin(self) -> None:
        """End the second operator."""
        if self._twin is not None:
            self._twin.kill()

    def _spawn(self, process: Process, which: str) -> LyingCluster:
        rng = self._make_rng(f"operator {self.name}{which}")
        cluster = LyingCluster(
            cluster=self.name,
            dialer=_Dialer(self._network, self.shard, process),
            clock=self._clock,
            rng=rng,
            settings=SESSION,
        )
        cluster.site = self
        cluster.apply(add=self.pods.values())
        self._evidence.note("start", process.name, which.strip())
        process.spawn(cluster.run(), name=process.name)
        return cluster

    def truth(self) -> tuple[Need, ...]:
        """Return the rows of the real demand."""
        return recount(self.name, self.pods.values())

    def believed(self) -> set[str]:
        """Return the machines that the operator of the moment believes to be in service."""
        return self.cluster.configured() if self.cluster is not None else set()

    def change(self, *, add: list[CapacityRequest], remove: list[str]) -> None:
        """Change the real demand."""
        for name in remove:
            self.pods.pop(name, None)
        self.pods.update({request.id: request for request in add})
        if self.cluster is not None:
            self.cluster.apply(add=add, remove=remove)

    def told(self, truth: RollUp) -> RollUp:
        """Return what is sent in the place of a true roll-up."""
        lie = next((lie for lie in LIES if lie in self.lies), "")
        self._earlier = [*self._earlier[-_KEPT_MAX:], truth]
        match lie:
            case "rollup-empty":
                return replace(truth, needs=())
            case "rollup-truncated":
                return replace(truth, needs=truth.needs[: len(truth.needs) // 12])
            case "rollup-stale":
                return replace(truth, needs=self._earlier[0].needs)
            case "rollup-replayed":
                return self._rng.choice(self._earlier)
            case "rollup-flapping" if self._rng.random() < 0.5:
                return replace(truth, needs=())
        return truth


class _Dialer:
    """Opens a cluster's streams to the shard of the moment."""

    def __init__(self, network: Network, shard: ShardSite, process: Process) -> None:
        self._network = network
        self._shard = shard
        self._process = process

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[SessionStream]:
        """Open a stream; entering it raises nothing, its first frame tells whether anybody is there."""
        server = self._shard.process
        connection = self._network.connect(self._process, server)
        if server.is_alive:
            server.spawn(self._shard.serve(connection), name=f"session-{self._process.name}")
        try:
            yield _Stream(connection)
        finally:
            connection.break_off("the operator closed the stream", ("CANCELLED", "closed"))


class _Stream:
    """The operator's end of a stream, in the bytes of the real wire."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._connection = connection

    async def send(self, frame: OperatorFrame) -> None:
        """Write one frame. Raises SessionEnded."""
        try:
            await self._connection.to_server.send(operator_frame_to_wire(frame).SerializeToString(deterministic=True))
        except ConnectionLost as lost:
            raise self._ended() from lost

    async def receive(self) -> ShardFrame | None:
        """Read one frame. Raises SessionEnded."""
        try:
            content: Any = await self._connection.to_client.receive()
        except ConnectionLost as lost:
            raise self._ended() from lost
        return shard_frame_from_wire(shard_pb2.ShardMessage.FromString(content))

    def _ended(self) -> SessionEnded:
        code, details = self._connection.status
        return SessionEnded(_END_KINDS.get(code, EndKind.LOST), f"{code}: {details}")
