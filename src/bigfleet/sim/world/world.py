"""Defines the fault world: shards, coordinator, provider and clusters on the kernel, and what is known of them.

`bigfleet.sim.world.run` runs it.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from bigfleet.provider.backends.simulated.book import SimulatedHost
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record
from bigfleet.sim.checkers import marks
from bigfleet.sim.checkers.handovers import by_event, remember
from bigfleet.sim.kernel.journal import Journal
from bigfleet.sim.kernel.loop import KernelClock, KernelLoop
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.observations import Committed, Event, Hosted, Marked, Observations, OwnershipChanged
from bigfleet.sim.plan_generator import SHORT_QUEUES, WorldPlan
from bigfleet.sim.sites.cluster import ClusterSite
from bigfleet.sim.sites.fleet import ShardFleet, shard_name
from bigfleet.sim.sites.provider import ProviderSite
from bigfleet.sim.sites.shard import ShardSite


class Sample(NamedTuple):
    """The world at one moment, for the timeline."""

    at_seconds: float
    #: Machines by state, as the provider's disk has them.
    machines: dict[str, int]
    #: Rows of the last decision that lack something.
    short_rows: int
    actions: int


class World:
    """Everything of one run."""

    def __init__(self, plan: WorldPlan, loop: KernelLoop, streams: Streams) -> None:
        self.plan = plan
        self.loop = loop
        self.clock = KernelClock(loop)
        self.journal = Journal()
        self.observations = Observations(self.journal, lambda: loop.now_nanos)
        self.rng = streams.of("faults")
        self.network = Network(self.clock, streams.of("network"))
        self.demand_rng = streams.of("workload")
        self._invariants = by_event()
        self.samples: list[Sample] = []
        self.zombies: list[Process] = []
        #: When faults ended; 0 before.
        self.healed_unix_nanos = 0
        self.faults_running: list[asyncio.Task[None]] = []
        if "net-reset" in plan.faults:
            self.network.usual.reset_share = 0.01
        if "net-slow" in plan.faults:
            self.network.usual.delay_seconds_max = 2.0
        self.provider = ProviderSite(
            cloud_world=plan.cloud(),
            has_short_queues=SHORT_QUEUES in plan.faults,
            seed=plan.seed,
            clock=self.clock,
            ids=streams.ids("provider"),
            rng=streams.of("provider"),
            observations=self.observations,
            on_record=self._recorded,
            on_mark=self._marked,
            on_host=self._hosted,
        )
        fixed = {offer.slot.id for offer in self.provider.offers if offer.slot.fixed}
        self.observations.fixed.update(fixed)
        self.observations.records = self.provider.store.records
        self.fleet = ShardFleet(
            plan, clock=self.clock, make_rng=streams.of, observations=self.observations, on_event=self.observe
        )
        names = [shard_name(number) for number in range(plan.shards)]
        self.shards = [
            ShardSite(
                name,
                network=self.network,
                provider=self.provider,
                clock=self.clock,
                make_ids=streams.ids,
                observations=self.observations,
                on_event=self.observe,
                disk=self.fleet.disks.get(name),
                link=self.fleet.links.get(name),
            )
            for name in names
        ]
        self.clusters = [
            ClusterSite(
                name=f"c{number}",
                network=self.network,
                shard=self.shards[plan.home(number)],
                clock=self.clock,
                make_rng=streams.of,
                observations=self.observations,
                on_event=self.observe,
                hidden_cpu_milli=plan.hidden_cpu_milli,
            )
            for number in range(len(plan.clusters))
        ]

    # ---- what is seen -------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Hold an event against every invariant that looks at its kind."""
        observations = self.observations
        marks.observe(event, observations)
        for name, _event, check in self._invariants.get(type(event), ()):
            observations.checks[name] += 1
            for text in check(event, observations):
                observations.breach(name, text)
        if isinstance(event, OwnershipChanged):
            remember(event, observations)

    def _recorded(self, before: Record | None, after: Record | None) -> None:
        known = after or before
        assert known is not None, "a change is about a machine"
        self.observations.machines.add(known.id)
        if before is None or after is None or before.state is not after.state:
            state = after.state.label if after is not None else "gone"
            self.observations.note(
                "state", known.id, f"{state} {known.machine.cluster} {known.machine.last_error[:60]}"
            )
        for site in self.clusters:
            site.follow(before, after)
        self.observe(Committed(before, after))

    def _marked(self, mark: Mark) -> None:
        key = (mark.machine_id, mark.shard_id)
        self.observe(Marked(mark, self.observations.marks.get(key)))
        self.observations.marks[key] = mark

    def _hosted(self, machine_id: str, before: SimulatedHost | None, after: SimulatedHost | None) -> None:
        self.observe(Hosted(machine_id, before, after, machine_id in self.observations.fixed, self.clock.unix_nanos()))

    def sample(self) -> None:
        """Note how the world is, for the timeline; gangs that are stuck start over."""
        for site in self.clusters:
            site.pods.restart_gangs()
        machines = Counter(record.state.label for record in self.provider.store.records.values())
        decisions = [site.shard.last_decision for site in self.shards if site.shard is not None]
        short = sum(bool(row.unresolved) for decision in decisions if decision is not None for row in decision.rows)
        actions = sum(self.observations.actions.values())
        self.samples.append(Sample(self.clock.monotonic_seconds(), dict(sorted(machines.items())), short, actions))
