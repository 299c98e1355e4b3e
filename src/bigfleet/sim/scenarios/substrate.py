"""Simulates the machines of a scenario, with the delays and faults that it configures.

docs/spec/provider.md §16. A host that is booted into a cluster becomes a Ready node there; one that is drained, deleted
or lost is a node no more. It is idempotent by operation, as the kit demands, and knows nothing of the kit's records. It
must never make or lose a host without a call.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.model.machine import Machine
from bigfleet.provider.backend import ExistingHost, Feed, Found, Host, Limits, MachineView, Op, Slot, Stockout
from bigfleet.provider.backends.fake import found_in_memory
from bigfleet.provider.records.kinds import Kind
from bigfleet.sim.scenarios.scenario_file import Takes

#: What a call takes in any case: less than a cycle, more than nothing.
CALL_SECONDS: Final = 0.1


class SubstrateFailure(Exception):
    """A call failed because the scenario says so."""


class ScenarioSubstrate:
    """Implements `bigfleet.provider.backend.Backend`, `Deletes`, `Adopts` and `Feeds`."""

    provider = "substrate"

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        hosts: Sequence[str],
        sold_out: Collection[str] = (),
        takes: Takes,
        cycle_seconds: float,
        clock: Clock,
        joined: Callable[[Machine, str], None],
        left: Callable[[str, str, bool], None],
    ) -> None:
        """`joined` takes a new node and its cluster; `left` a machine, its cluster, and whether the host is lost."""
        self.limits = Limits(resumable=frozenset(Kind))
        self.slots = {slot.id: slot for slot in slots}
        #: Host refs and clusters by machine id.
        self.hosts = {machine_id: f"host-{machine_id}" for machine_id in hosts}
        self.clusters: dict[str, str] = {}
        #: Instance types without capacity.
        self.sold_out = sold_out
        #: Texts of calls that are to fail, by kind, once each.
        self.failures: dict[str, deque[str]] = {kind.value: deque() for kind in Kind}
        self.calls: Counter[str] = Counter()
        #: While it is off nothing takes time, for what was there before the world began.
        self.is_slow = False
        self._takes = takes
        self._cycle_seconds = cycle_seconds
        self._clock = clock
        self._joined = joined
        self._left = left
        self._feed: Feed | None = None

    async def inventory(self) -> Sequence[Slot]:
        """Return every slot, and the host of those that have one."""
        hosts = (ExistingHost.of(self.slots[i], host_ref=ref) for i, ref in sorted(self.hosts.items()))
        return [*self.slots.values(), *hosts]

    async def _begin(self, op: Op) -> None:
        self.calls[op.kind.value] += 1
        if self.is_slow:
            cycles: int = getattr(self._takes, op.kind.value)
            await self._clock.sleep(CALL_SECONDS + cycles * self._cycle_seconds)
        failures = self.failures[op.kind.value]
        if failures and self.is_slow:
            raise SubstrateFailure(failures.popleft())

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Make the host."""
        await self._begin(op)
        if self.slots[machine.id].instance_type in self.sold_out:
            raise Stockout("no capacity")
        return Host(ref=self.hosts.setdefault(machine.id, f"host-{machine.id}"))

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Boot the host into a cluster and return when its node is Ready."""
        await self._begin(op)
        if machine.id not in self.hosts:
            raise SubstrateFailure("the host is gone")
        if self.clusters.get(machine.id) != cluster:
            self._leave(machine.id)
            self.clusters[machine.id] = cluster
            self._joined(machine, cluster)
        return f"node-{machine.id}"

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Take the node out of its cluster."""
        await self._begin(op)
        self._leave(machine.id)

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Give the host back."""
        await self._begin(op)
        self._leave(machine.id)
        self.hosts.pop(machine.id, None)

    async def adopt(self, machine: MachineView) -> Found:
        """Say what is there: a host that serves, a clean one, or none."""
        return found_in_memory(machine, self.hosts, self.clusters)

    async def feed(self, feed: Feed) -> None:
        """Push losses for as long as the provider runs."""
        self._feed = feed
        await asyncio.Event().wait()

    async def lose(self, machine_id: str) -> None:
        """Take a host away, with everything on it."""
        assert self._feed is not None, "losses happen while the provider runs"
        self.hosts.pop(machine_id, None)
        self._leave(machine_id)
        await self._feed.report_lost(machine_id, "the host is gone")

    def _leave(self, machine_id: str) -> None:
        cluster = self.clusters.pop(machine_id, None)
        if cluster is not None:
            self._left(machine_id, cluster, machine_id not in self.hosts)
