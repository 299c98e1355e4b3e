"""Runs a coordinator beside a closed world: the replica and the store of the fault world, on links that can be cut.

docs/spec/coordinator.md §3, §8. The replica's process can die, and its store can be partitioned from it. What it
learned is lost with its process, what it wrote stays. Neither may change a shard's decisions. This module must not
reach a shard except through its link.
"""

from collections import Counter
from typing import Final

from bigfleet.coordinator.leader_term import CoordinatorSettings
from bigfleet.link.reporter import CoordinatorLink, ReportOutcome
from bigfleet.model import labels
from bigfleet.model.clock import Clock
from bigfleet.model.ids import ShardId
from bigfleet.model.ownership import Domain
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.ownership.ownership_file import OwnershipFile
from bigfleet.sim.kernel.network import Network
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.sites.coordinator import CoordinatorSite, assigned
from bigfleet.sim.sites.etcd import ETCD, DurableEtcd
from bigfleet.sim.sites.link import coordinator_link

REPORT_SECONDS: Final = 30.0
_REPLICA: Final = "replica-0"
#: Between two attempts of the administrator, and how many there are.
_ADMIN_SECONDS: Final = 1.0
_ATTEMPTS_MAX: Final = 120


class BrokenReplica(Exception):
    """The replica ended by itself."""


class _Observer:
    """Sees to it that a replica that breaks breaks the run; implements `ReplicaObserver`."""

    def __init__(self) -> None:
        self.breaches: list[str] = []

    def note(self, kind: str, subject: str, text: str = "") -> None:
        """Do nothing: a scenario's journal is about its shards."""

    def mark(self, name: str) -> None:
        """Do nothing."""

    def led(self, term: int) -> None:
        """Do nothing."""

    def breach(self, invariant: str, text: str) -> None:
        """Remember what must not happen."""
        self.breaches.append(f"{invariant}: {text}")


class Coordinator:
    """One replica with its store, and the links of shards to it."""

    def __init__(self, clock: Clock, network: Network, rng: Random) -> None:
        #: How each report ended.
        self.reports: Counter[ReportOutcome] = Counter()
        self._clock = clock
        self._network = network
        self._rng = rng
        self._observer = _Observer()
        self._store = DurableEtcd(clock)
        self._site = CoordinatorSite(
            _REPLICA, store=self._store, network=network, clock=clock, rng=rng, observations=self._observer
        )

    def open_store(self) -> None:
        """Let the store run from now on."""
        self._store.start()

    def start(self) -> None:
        """Bring a process up, which knows nothing but what is written."""
        self._site.start(CoordinatorSettings(report_interval_seconds=REPORT_SECONDS))

    def stop(self) -> None:
        """Take the process away."""
        self._site.process.kill()

    def cut_store(self, *, is_cut: bool) -> None:
        """Let nothing pass between the replica and its store, or everything again."""
        for link in self._network.links_of(ETCD):
            link.is_cut = is_cut

    def check(self) -> None:
        """Raise BrokenReplica when the replica has ended by itself."""
        if self._observer.breaches:
            raise BrokenReplica("; ".join(self._observer.breaches))

    async def assign(self, zone: str, shard: ShardId) -> None:
        """Give a zone to a shard, as an administrator does; waits until the shard has reported."""
        for _attempt in range(_ATTEMPTS_MAX):
            if await assigned([self._site], Domain(labels.ZONE, zone), shard):
                return
            await self._clock.sleep(_ADMIN_SECONDS)
        raise RuntimeError(f"the coordinator did not take zone {zone} for {shard}")

    def link(self, shard: Shard, file: OwnershipFile) -> CoordinatorLink:
        """Return the link of one process of the shard. Raises ValueError for a shard that has no file."""
        if shard.ownership is None:
            raise ValueError("a shard without a file of what it owns has no link")
        return coordinator_link(
            shard,
            file,
            sites=[self._site],
            interval_seconds=REPORT_SECONDS,
            handler=shard.ownership.handover,
            clock=self._clock,
            rng=self._rng,
            on_report=self._reported,
        )

    def _reported(self, outcome: ReportOutcome) -> None:
        self.reports[outcome] += 1
