"""Defines the operator world: one shard and its provider as in the fault world, and clusters of Kubernetes.

`bigfleet.sim.operator_world.run` runs it.
"""

from collections.abc import Iterable

from bigfleet.model.machine import Machine
from bigfleet.sim.kernel.loop import KernelLoop
from bigfleet.sim.kernel.streams import Streams
from bigfleet.sim.kubernetes.store import StoredChange
from bigfleet.sim.observations import Event, RolledUp
from bigfleet.sim.operator_world.invariants import CHANGES, no_demand_that_was_never_true
from bigfleet.sim.operator_world.plan import OperatorPlan
from bigfleet.sim.operator_world.site import KubernetesSite
from bigfleet.sim.world.world import World


class OperatorWorld(World):
    """Everything of one run; the clusters of the fault world are absent."""

    def __init__(self, plan: OperatorPlan, loop: KernelLoop, streams: Streams) -> None:
        super().__init__(plan.world, loop, streams)
        self.operator_plan = plan
        self.sites = [
            KubernetesSite(
                number,
                plan,
                network=self.network,
                shard=self.shards[0],
                machines=self.machines,
                clock=self.clock,
                make_rng=streams.of,
                make_ids=streams.ids,
                observations=self.observations,
                on_event=self.observe,
                on_change=self._object_changed,
            )
            for number in range(len(plan.clusters))
        ]

    def machines(self) -> Iterable[Machine]:
        """Return all machines as the provider's disk has them, by id."""
        records = self.provider.store.records
        return [records[machine_id].machine for machine_id in sorted(records)]

    # ---- what is seen -----------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Hold an event against the invariants of shard and provider, and a roll-up against what was true (K1)."""
        super().observe(event)
        if isinstance(event, RolledUp):
            self.observations.checks["K1"] += 1
            for site in self.sites:
                for text in no_demand_that_was_never_true(event, site):
                    self.observations.breach("K1", text)

    def _object_changed(self, site: KubernetesSite, plural: str, change: StoredChange) -> None:
        for name, check in CHANGES[plural]:
            self.observations.checks[name] += 1
            for text in check(change, site):
                self.observations.breach(name, text)
