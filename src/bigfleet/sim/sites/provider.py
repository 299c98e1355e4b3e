"""Runs the real provider kit over the simulated cloud, in a process that dies and restarts.

Its store and the cloud's book outlive it. A shard reaches it through `RemoteProvider`. On the way an answer to List may
also become stale, partial, without its cursor or with records that no provider should send. This module must never
make the provider itself do what its own code would not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from bigfleet.model.clock import Clock
from bigfleet.model.ids import IdSource
from bigfleet.provider.backends.simulated.backend import SimulatedBackend, SimulatedReadiness
from bigfleet.provider.backends.simulated.cloud import SimulatedCloud
from bigfleet.provider.backends.simulated.draws import KeyedDraws
from bigfleet.provider.backends.simulated.fleet import SimulatedOffer, build_fleet
from bigfleet.provider.backends.simulated.world import CloudWorld
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.metrics import ProviderMetrics
from bigfleet.provider.records.fence import Mark
from bigfleet.provider.records.record import Record as CoreRecord
from bigfleet.rpc.servers.provider import encode_list_entry
from bigfleet.rpc.wire.convert_machine import machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.sim.kernel.processes import Process
from bigfleet.sim.kernel.streams import Random
from bigfleet.sim.observations import Observations
from bigfleet.sim.sites.places import ReachableProvider
from bigfleet.sim.sites.stores import DurableStore, HostListener, WatchedBook

PROVIDER = "provider"
#: Earlier answers that a stale List may repeat.
_STORED_MAX = 6


class ProviderSite(ReachableProvider):
    """One provider's disks and its process of the moment."""

    def __init__(
        self,
        *,
        cloud_world: CloudWorld,
        has_short_queues: bool,
        seed: int,
        clock: Clock,
        ids: IdSource,
        rng: Random,
        observations: Observations,
        on_record: Callable[[CoreRecord | None, CoreRecord | None], None],
        on_mark: Callable[[Mark], None],
        on_host: HostListener,
    ) -> None:
        """The listeners hear what the provider's store and the cloud's book take."""
        super().__init__(PROVIDER)
        self.process.kill()
        self.store = DurableStore(on_record=on_record, on_mark=on_mark)
        self.book = WatchedBook(on_host)
        self.offers: list[SimulatedOffer] = build_fleet(cloud_world, {}, PROVIDER)
        #: Faults of List, by name.
        self.faulty_responses: set[str] = set()
        #: Why the provider ended by itself.
        self.fault: BaseException | None = None
        self._cloud_world = cloud_world
        self._seed = seed
        self._has_short_queues = has_short_queues
        self._clock = clock
        self._ids = ids
        self._rng = rng
        self._observations = observations
        self._answers: list[bytes] = []

    def start(self, *, is_calm: bool = False) -> None:
        """Start a process over the disks; a calm one has a cloud without faults."""
        assert not self.process.is_alive, "one process at a time holds the store"
        self.process = Process(PROVIDER)
        self.core = None
        self._observations.note("start", PROVIDER, "calm" if is_calm else "")
        self.process.spawn(self._serve(is_calm=is_calm), name="provider")

    async def _serve(self, *, is_calm: bool) -> None:
        cloud = SimulatedCloud(
            world=self._cloud_world,
            offers=self.offers,
            draws=KeyedDraws(self._seed),
            book=self.book,
            clock=self._clock,
            is_calm=is_calm,
        )
        backend = SimulatedBackend(cloud, provider=PROVIDER, clock=self._clock)
        if self._has_short_queues and not is_calm:
            kinds = {
                kind: replace(limits, concurrency_max=1, queue_max=1) for kind, limits in backend.limits.kinds.items()
            }
            backend.limits = replace(backend.limits, kinds=kinds)
        core = CapacityCore(
            backend,
            readiness=SimulatedReadiness(cloud, time_scale=1.0),
            store=self.store,
            clock=self._clock,
            ids=self._ids,
            rng=self._rng,
            encode=encode_list_entry,
            metrics=ProviderMetrics(CollectorRegistry()),
            options=CoreOptions(
                is_inline=True,
                failed_hold_seconds=60.0,
                reconcile_interval_seconds=30.0,
                transition_timeout_seconds=300.0,
            ),
        )
        self.core = core
        try:
            await core.start()
            await core.loaded()
        except Exception as error:  # a start that is refused ends the process, and the world reports why
            self.fault = error
            self._observations.breach("S0", f"the provider did not start: {type(error).__name__}: {error}")

    async def listing(self, since: bytes) -> bytes:
        """Return the bytes of an answer to List, changed by the faulty responses that are on."""
        answer = await super().listing(since)
        if since:
            return self._without_cursor(answer) if "cursor-lost" in self.faulty_responses else answer
        self._answers = [*self._answers[-_STORED_MAX:], answer]
        if "list-stale" in self.faulty_responses and self._rng.random() < 0.5:
            self._observations.mark("a stale List")
            return self._rng.choice(self._answers)
        if self.faulty_responses & {"list-partial", "records-mangled"}:
            return self._bent(answer)
        return answer

    def _without_cursor(self, answer: bytes) -> bytes:
        """Return an answer as a server gives it to a cursor that it does not know: everything."""
        message = provider_pb2.MachineList.FromString(answer)
        message.ClearField("tombstones")
        del message.removed_ids[:]
        machines = [machine_to_wire(record.machine, record.metadata) for record in self.store.records.values()]
        del message.machines[:]
        message.machines.extend(machines)
        self._observations.mark("a lost cursor")
        return message.SerializeToString(deterministic=True)

    def _bent(self, answer: bytes) -> bytes:
        message = provider_pb2.MachineList.FromString(answer)
        if "list-partial" in self.faulty_responses and self._rng.random() < 0.5:
            retained = [machine for machine in message.machines if self._rng.random() < 0.6]
            del message.machines[:]
            message.machines.extend(retained)
            self._observations.mark("a partial List")
        if "records-mangled" in self.faulty_responses:
            for machine in message.machines:
                if self._rng.random() < 0.2:
                    self._mangle(machine)
        return message.SerializeToString(deterministic=True)

    def _mangle(self, machine: Any) -> None:
        self._observations.mark("a mangled record")
        match self._rng.randrange(6):
            case 0:
                machine.price_per_hour = float("nan")
            case 1:
                machine.price_per_hour = -1.0
            case 2:
                machine.interruption_probability = 1.5
            case 3:
                machine.ClearField("host")
            case 4:
                machine.state = 0
            case _:
                machine.price_per_hour *= 100
