"""Reads what a shard reports through `ShardRead`, and sums it up for the view and the report.

Every figure is the shard's own: demand and shortfall from InspectNeeds, machines from ListMachines, actions from
ListActions. While the shard cannot be reached, the last answer is shown and marked. Clusters are not asked, so that the
view shows any difference between their demand and what the shard knows.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from grpc import aio

from bigfleet.model import labels, vector
from bigfleet.model.clock import Clock
from bigfleet.model.frames import UnmetReason
from bigfleet.model.states import BOUND_STATES, CapacityType, MachineState
from bigfleet.model.vector import Vector
from bigfleet.rpc.wire.gen import capacity_pb2, provider_pb2, shardread_pb2, shardread_pb2_grpc

READ_SECONDS_MAX: Final = 10.0
MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
POLL_SECONDS: Final = 0.05
ACTIONS_PER_POLL_MAX: Final = 10_000
RECENT_ACTIONS_MAX: Final = 40
#: Ids of actions that were counted already; more than a shard keeps.
COUNTED_MAX: Final = 50_000
RUNNING: Final = "running"
#: The kind of an action that creates a machine.
PROVISION: Final = "Provision"
#: An action whose shard died before it reported how it ended.
LOST: Final = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFigures:
    """One cluster in the shard's eyes."""

    #: Sum of its rows.
    demand: Vector = field(default_factory=dict)
    #: Sum of what its rows are short of after the last cycle.
    shortfall: Vector = field(default_factory=dict)
    #: Sum of what its Configured machines offer.
    bound: Vector = field(default_factory=dict)
    bound_machines: int = 0
    #: Machines that are being created or configured for it.
    pending_machines: int = 0
    #: Of every machine that is bound to it.
    cost_usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTotals:
    """One of several shards."""

    #: That report to it.
    clusters: tuple[str, ...]
    #: That it owns, in any state.
    machines: int
    bound_machines: int
    demand: Vector
    bound: Vector
    shortfall: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """The fleet at one moment."""

    #: 0: the shard has not decided yet, and nothing else here means anything.
    cycle: int = 0
    #: When the shard took the view of demand that the figures show.
    computed_at_unix_nanos: int = 0
    #: Every cluster of the run, in its order, with or without demand.
    clusters: Mapping[str, ClusterFigures] = field(default_factory=dict)
    machines: Mapping[tuple[MachineState, CapacityType], int] = field(default_factory=dict)
    #: Shortfall by the GPU models that would do, "any" for any of them, "" for demand without GPUs.
    shortfall_by_model: Mapping[str, Vector] = field(default_factory=dict)
    #: Needs that are short, by why.
    unmet: Mapping[UnmetReason, int] = field(default_factory=dict)
    #: Configured machines whose node never became Ready.
    unjoined_machines: int = 0
    #: Every machine as the shard listed it, and the ids of the unjoined ones.
    inventory: Sequence[provider_pb2.Machine] = ()
    unjoined_ids: frozenset[str] = frozenset()
    #: The cluster of each machine that is being created, by machine id.
    provisioning: Mapping[str, str] = field(default_factory=dict)
    #: By shard id; empty where there is one.
    shards: Mapping[str, ShardTotals] = field(default_factory=dict)
    #: Machines moved between shards so far, over resumed runs.
    moved_machines: int = 0

    @property
    def demand(self) -> Vector:
        """Of all clusters."""
        return _total(figures.demand for figures in self.clusters.values())

    @property
    def shortfall(self) -> Vector:
        """Of all clusters."""
        return _total(figures.shortfall for figures in self.clusters.values())

    @property
    def bound(self) -> Vector:
        """Of all clusters."""
        return _total(figures.bound for figures in self.clusters.values())

    @property
    def bound_machines(self) -> int:
        """Of all clusters."""
        return sum(figures.bound_machines for figures in self.clusters.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAction:
    """One action of the shard as it was last seen."""

    action_id: str
    kind: str
    machine_id: str
    cluster_id: str
    reason: str
    #: `running` until it ended.
    outcome: str
    decided_unix_nanos: int


class ActionTally:
    """Every action that was seen, counted once by kind and outcome."""

    def __init__(self) -> None:
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.recent: deque[SeenAction] = deque(maxlen=RECENT_ACTIONS_MAX)
        #: Decision time of the newest action seen.
        self.newest_unix_nanos = 0
        self._running: dict[str, SeenAction] = {}
        self._ended: dict[str, None] = {}

    @property
    def total(self) -> int:
        """Actions seen so far, running ones included."""
        return sum(self.by_kind.values()) + len(self._running)

    @property
    def provisioning(self) -> dict[str, str]:
        """The cluster of each machine that a running action creates, by machine id."""
        return {action.machine_id: action.cluster_id for action in self._running.values() if action.kind == PROVISION}

    @property
    def since_unix_nanos(self) -> int:
        """Decision time from which actions may still change."""
        return min((action.decided_unix_nanos for action in self._running.values()), default=self.newest_unix_nanos)

    def take(self, action: SeenAction) -> None:
        """Note an action, or how one that was running ended; actions come oldest first."""
        if action.action_id in self._ended:
            return
        if action.action_id not in self._running:
            self.recent.append(action)
        self.newest_unix_nanos = max(self.newest_unix_nanos, action.decided_unix_nanos)
        if action.outcome == RUNNING:
            self._running[action.action_id] = action
            return
        self._running.pop(action.action_id, None)
        self._end(action.action_id, action.kind, action.outcome)

    def shard_restarted(self) -> None:
        """Count what was running as lost: the new process does not know it, and decides afresh."""
        for action in self._running.values():
            self._end(action.action_id, action.kind, LOST)
        self._running.clear()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the actions by kind and outcome, running ones included, in name order."""
        totals = self.by_kind + Counter((action.kind, RUNNING) for action in self._running.values())
        counts: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(totals.items()):
            counts.setdefault(kind, {})[outcome] = count
        return counts

    def _end(self, action_id: str, kind: str, outcome: str) -> None:
        self.by_kind[(kind, outcome)] += 1
        self._ended[action_id] = None
        while len(self._ended) > COUNTED_MAX:
            del self._ended[next(iter(self._ended))]


class Actions(Protocol):
    """Actions as they are shown and counted."""

    @property
    def total(self) -> int:
        """Actions seen so far, running ones included."""
        ...

    @property
    def recent(self) -> Sequence[SeenAction]:
        """The last decided ones, oldest first."""
        ...

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the actions by kind and outcome, in name order."""
        ...


class Watcher(Protocol):
    """What a run sees of its shard, or of its shards."""

    @property
    def figures(self) -> FleetFigures:
        """The last answer."""
        ...

    @property
    def actions(self) -> Actions:
        """Every action that was seen."""
        ...

    @property
    def answers(self) -> bool:
        """False while the last read failed."""
        ...

    @property
    def cycles_total(self) -> int:
        """Cycles as far as they were seen."""
        ...

    async def close(self) -> None:
        """Close the connection to the shard."""
        ...

    async def look(self) -> FleetFigures:
        """Read everything once and return it; the former answer when a shard is away."""
        ...

    async def look_after(self, unix_nanos: int) -> FleetFigures:
        """Return figures whose view of demand is later than a wall-clock time; wait as long as that takes."""
        ...


def child_channel(address: str) -> aio.Channel:
    """Return a channel to a child process of this run."""
    return aio.insecure_channel(
        address,
        options=(
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            # A child that is restarted answers within the second; waiting longer would only blind the view.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        ),
    )


class ShardObserver:
    """Reads one shard; the last good answer is stored."""

    def __init__(self, shard_address: str, clusters: Sequence[str], clock: Clock) -> None:
        self._clock = clock
        self._clusters = tuple(clusters)
        self._channel = child_channel(shard_address)
        self._stub = shardread_pb2_grpc.ShardReadStub(self._channel)
        self.figures = FleetFigures()
        self.actions = ActionTally()
        #: False while the last read failed.
        self.answers = False
        #: One read at a time: an answer that overtakes another would look like a shard that went back.
        self._reading = asyncio.Lock()
        #: Cycles of all shard processes that were seen.
        self._cycles_before = 0

    @property
    def cycles_total(self) -> int:
        """Cycles over the lives of the shard, as far as they were seen."""
        return self._cycles_before + self.figures.cycle

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def look(self) -> FleetFigures:
        """Read everything once and return it; the former answer when the shard is away."""
        async with self._reading:
            try:
                header, needs, machines = await self._read_state()
                await self._read_actions()
            except (aio.AioRpcError, TimeoutError):
                self.answers = False
                return self.figures
            self._keep(_add_up(self._clusters, header, needs, machines, self.actions.provisioning))
            return self.figures

    async def look_after(self, unix_nanos: int) -> FleetFigures:
        """Return figures whose view of demand is later than a wall-clock time; wait as long as that takes."""
        while True:
            figures = await self.look()
            if self.answers and figures.computed_at_unix_nanos > unix_nanos:
                return figures
            await self._clock.sleep(POLL_SECONDS)

    def _keep(self, figures: FleetFigures) -> None:
        if figures.cycle == 0:
            # A fresh shard that has not decided yet: that is no answer about demand.
            self.answers = False
            return
        self.answers = True
        if figures.cycle < self.figures.cycle:
            self._cycles_before += self.figures.cycle
            self.actions.shard_restarted()
        self.figures = figures

    async def _read_state(
        self,
    ) -> tuple[shardread_pb2.InspectNeedsHeader, list[shardread_pb2.NeedView], list[shardread_pb2.MachineView]]:
        async with asyncio.timeout(READ_SECONDS_MAX):
            header = shardread_pb2.InspectNeedsHeader()
            needs: list[shardread_pb2.NeedView] = []
            async for frame in self._stub.InspectNeeds(shardread_pb2.InspectNeedsRequest()):
                if frame.HasField("header"):
                    header = frame.header
                else:
                    needs.append(frame.need)
            machines = await self._read_machines()
        return header, needs, machines

    async def _read_machines(self) -> list[shardread_pb2.MachineView]:
        machines: list[shardread_pb2.MachineView] = []
        page_token = ""
        while True:
            request = shardread_pb2.ListMachinesRequest(page_token=page_token)
            page_token = ""
            async for frame in self._stub.ListMachines(request):
                if frame.HasField("machine"):
                    machines.append(frame.machine)
                elif frame.HasField("end"):
                    page_token = frame.end.next_page_token
            if not page_token:
                return machines

    async def _read_actions(self) -> None:
        request = shardread_pb2.ListActionsRequest(
            since_unix_nanos=self.actions.since_unix_nanos, limit=ACTIONS_PER_POLL_MAX
        )
        async with asyncio.timeout(READ_SECONDS_MAX):
            records = [frame.action async for frame in self._stub.ListActions(request)]
        for record in reversed(records):
            self.actions.take(
                SeenAction(
                    action_id=record.action_id,
                    kind=record.kind,
                    machine_id=record.machine_id,
                    cluster_id=record.cluster_id,
                    reason=record.reason,
                    outcome=record.outcome or RUNNING,
                    decided_unix_nanos=record.decided_unix_nanos,
                )
            )


def _add_up(
    cluster_ids: Sequence[str],
    header: shardread_pb2.InspectNeedsHeader,
    needs: list[shardread_pb2.NeedView],
    machines: list[shardread_pb2.MachineView],
    provisioning: Mapping[str, str],
) -> FleetFigures:
    demand: defaultdict[str, Vector] = defaultdict(dict)
    shortfall: defaultdict[str, Vector] = defaultdict(dict)
    bound: defaultdict[str, Vector] = defaultdict(dict)
    by_model: defaultdict[str, Vector] = defaultdict(dict)
    pending: Counter[str] = Counter()
    configured: Counter[str] = Counter()
    cost: defaultdict[str, float] = defaultdict(float)
    states: Counter[tuple[MachineState, CapacityType]] = Counter()
    unmet: Counter[UnmetReason] = Counter()
    for view in needs:
        cluster = view.cluster_id
        demand[cluster] = vector.add(demand[cluster], vector.parse_vector(view.need.aggregate_resources))
        residual = vector.parse_vector(view.residual_deficit.resources)
        if residual:
            unmet[UnmetReason(view.unmet_reason)] += 1
            shortfall[cluster] = vector.add(shortfall[cluster], residual)
            model = gpu_models(view.need)
            by_model[model] = vector.add(by_model[model], residual)
    for entry in machines:
        machine = entry.machine
        state = MachineState(machine.state)
        states[(state, CapacityType(machine.capacity_type))] += 1
        if machine.cluster and state in BOUND_STATES:
            cost[machine.cluster] += machine.price_per_hour
        if state is MachineState.CONFIGURING:
            pending[machine.cluster] += 1
        elif state is MachineState.CREATING and machine.id in provisioning:
            pending[provisioning[machine.id]] += 1
        if machine.cluster and state is MachineState.CONFIGURED:
            configured[machine.cluster] += 1
            supply = vector.parse_vector(machine.allocatable.resources or machine.resources.resources)
            bound[machine.cluster] = vector.add(bound[machine.cluster], supply)
    clusters = {
        cluster: ClusterFigures(
            demand=demand[cluster],
            shortfall=shortfall[cluster],
            bound=bound[cluster],
            bound_machines=configured[cluster],
            pending_machines=pending[cluster],
            cost_usd_per_hour=cost[cluster],
        )
        for cluster in dict.fromkeys((*cluster_ids, *sorted(demand.keys() | cost.keys())))
    }
    return FleetFigures(
        cycle=header.cycle,
        computed_at_unix_nanos=header.computed_at_unix_nanos,
        clusters=clusters,
        machines=states,
        shortfall_by_model=dict(sorted(by_model.items())),
        unmet=unmet,
        unjoined_machines=sum(entry.unjoined for entry in machines),
        inventory=[entry.machine for entry in machines],
        provisioning=provisioning,
        unjoined_ids=frozenset(entry.machine.id for entry in machines if entry.unjoined),
    )


def gpu_models(need: capacity_pb2.CapacityNeed) -> str:
    """Return the GPU models that would do, joined by |; `any` when one is required, "" when none is."""
    for requirement in need.requirements:
        if requirement.key != labels.GPU_PRODUCT:
            continue
        if requirement.operator == capacity_pb2.NodeSelectorRequirement.OPERATOR_IN:
            return "|".join(requirement.values)
        if requirement.operator == capacity_pb2.NodeSelectorRequirement.OPERATOR_EXISTS:
            return "any"
    return ""


def _total(vectors: Iterable[Vector]) -> Vector:
    total: Vector = vector.ZERO
    for each in vectors:
        total = vector.add(total, each)
    return total
