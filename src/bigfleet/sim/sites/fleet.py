"""Runs the shards of a world with their coordinator: replicas, store, links, and zones for shards.

They have a network of their own, so that a call without an answer moves no draw of the others. The administrator goes
by the real calls, again and again until the tables say what is wanted. This module must not write a table or a disk.
"""

from collections.abc import Callable

from bigfleet.model import labels
from bigfleet.model.clock import NANOS_PER_SECOND, Clock
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Domain
from bigfleet.rpc.wire.gen import coordinator_pb2 as pb
from bigfleet.shard.ownership.handover import COOLDOWN_REPORT_CYCLES
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.observations import Event, Observations, OwnershipChanged
from bigfleet.sim.plan_generator import GONE, LIVE, NONE, WorldPlan
from bigfleet.sim.sites.coordinator import ADMIN, CoordinatorSite, asked, assigned
from bigfleet.sim.sites.etcd import DurableEtcd
from bigfleet.sim.sites.link import ShardLink
from bigfleet.sim.sites.ownership import OwnershipRecord, ShardDisk

#: Between two looks of the administrator at the tables.
_ADMIN_SECONDS = 7.0


def shard_name(number: int) -> ShardId:
    """Return the name of the so many-th shard of a world."""
    return ShardId(f"shard-{number}")


def zone_domain(zone: str) -> Domain:
    """Return the domain that is a zone."""
    return Domain(labels.ZONE, zone)


class ShardFleet:
    """What stands between the shards of one world; of one shard alone it is empty."""

    def __init__(
        self,
        plan: WorldPlan,
        *,
        clock: Clock,
        make_rng: Callable[[str], Random],
        observations: Observations,
        on_event: Callable[[Event], None],
    ) -> None:
        self.plan = plan
        self.network = Network(clock, make_rng("network of the coordinator"))
        self.store = DurableEtcd(clock)
        #: The shard that each zone is to have.
        self.wanted = {zone: shard_name(number) for zone, number in plan.zones}
        #: What happens to reports and answers on their way, by the name of the fault.
        self.faults: set[str] = set()
        self._clock = clock
        self._observations = observations
        self._on_event = on_event
        self._admin = Process(ADMIN)
        names = [shard_name(number) for number in range(plan.shards)]
        self.disks = {name: self._disk(name) for name in names} if plan.shards > 1 else {}
        observations.moves.ownerships = {name: disk.ownership for name, disk in self.disks.items()}
        observations.moves.cooldown_nanos = int(COOLDOWN_REPORT_CYCLES * plan.report_seconds * NANOS_PER_SECOND)
        rng = make_rng("store of the coordinator")
        self.replicas = [
            CoordinatorSite(
                f"replica-{number}",
                store=self.store,
                network=self.network,
                clock=clock,
                rng=rng,
                observations=observations,
            )
            for number in range(plan.replicas)
        ]
        #: By shard; none where no shard knows of a coordinator.
        self.links = {
            name: ShardLink(
                shard_id=name,
                sites=self.replicas,
                clock=clock,
                rng=make_rng(f"link {name}"),
                faults=self.faults,
                interval_seconds=plan.report_seconds,
                observations=observations,
                is_aside=plan.coordinator == GONE,
            )
            for name in names
            if plan.coordinator != NONE
        }

    def _disk(self, name: ShardId) -> ShardDisk:
        own = [zone_domain(zone) for zone, shard in self.wanted.items() if shard == name and self.plan.is_settled]

        def changed(before: OwnershipRecord, after: OwnershipRecord) -> None:
            self._observations.moves.ownerships[name] = after
            self._on_event(OwnershipChanged(name, before, after))

        return ShardDisk(
            name,
            domains=own,
            clock=self._clock,
            on_change=changed,
            on_full=lambda: self._observations.mark("a shard's disk took nothing"),
        )

    def start(self) -> None:
        """Start store, replicas and administrator, where there is a coordinator that lives."""
        if self.plan.coordinator != LIVE:
            return
        self.store.start()
        for site in self.replicas:
            site.start(self.plan.coordinator_settings())
        self._admin.spawn(self._administer(), name=ADMIN)

    def heal(self) -> None:
        """End every fault and start dead processes again."""
        self.network.heal()
        self.faults.clear()
        self.store.is_down = self.store.misses_events = False
        for disk in self.disks.values():
            disk.is_full = False
        for link in self.links.values():
            link.on_instruction.clear()
        if self.plan.coordinator != LIVE:
            return
        for site in self.replicas:
            site.loses_answers = False
            site.process.dies_at_step = None
            site.process.resume()
            if not site.process.is_alive:
                site.start(self.plan.coordinator_settings())

    async def _administer(self) -> None:
        while True:
            await self._clock.sleep(_ADMIN_SECONDS)
            content = await asked(self.replicas, "ListDomainAssignments", pb.ListDomainAssignmentsRequest())
            if content is None:
                continue
            listed = pb.ListDomainAssignmentsResponse.FromString(content).assignments
            rows = {Domain(row.topology_key, row.topology_value): row for row in listed}
            for zone, shard in sorted(self.wanted.items()):
                await self._reassign(zone_domain(zone), shard, rows.get(zone_domain(zone)))

    async def _reassign(self, domain: Domain, wanted: ShardId, row: "pb.DomainAssignment | None") -> None:
        key, value = domain
        if row is None:
            await assigned(self.replicas, domain, wanted)
        elif row.shard_id != wanted and not row.releasing:
            taken = pb.UnassignDomainRequest(topology_key=key, topology_value=value)
            await asked(self.replicas, "UnassignDomain", taken)
