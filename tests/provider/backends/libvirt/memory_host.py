"""A host in memory that behaves as libvirt does, and a provider over such hosts on virtual time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bigfleet.provider.backends.libvirt.backend import LibvirtBackend, LibvirtReadiness
from bigfleet.provider.backends.libvirt.connections import Job
from bigfleet.provider.backends.libvirt.driver import BootstrapPlan, LibvirtDriver
from bigfleet.provider.backends.libvirt.hosts_file import KvmHost, parse_kvm_hosts
from bigfleet.provider.backends.libvirt.hypervisor import (
    AgentSilent,
    DomainFacts,
    DomainPlan,
    DomainRecord,
    HostDown,
    HostError,
    HostFull,
    Hypervisor,
)
from bigfleet.provider.backends.partitioned.book import MemoryInstanceBook, read_records
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import MemoryStore, Store
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.harness import make_core, settle, started

T = TypeVar("T")

IMAGE = "base.qcow2"
RECONCILE_SECONDS = 10.0


class Killed(BaseException):
    """The provider's process ended here."""


@dataclass(slots=True)
class MemoryDomain:
    """A domain and what it boots from."""

    uuid: str
    vcpus: int
    memory_mib: int
    record: DomainRecord | None
    plan: DomainPlan | None = None
    is_active: bool = False
    #: The seed that each boot found.
    boots: list[bytes] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.boots = []


class MemoryHost:
    """One host: domains, and volumes of one pool. Every change is an effect at which a test may kill the provider."""

    def __init__(self) -> None:
        self.domains_by_name: dict[str, MemoryDomain] = {}
        self.volumes: dict[str, bytes] = {IMAGE: b"image"}
        #: Keys of volumes that are not their paths.
        self.keys: dict[str, str] = {}
        self.on_change: Callable[[str], None] = lambda _name: None
        #: Effects so far, by method.
        self.effects: list[str] = []
        #: How often it was asked for a domain by name.
        self.looks = 0
        #: The effect with this number ends the provider: before it, or after it.
        self.kill_at: tuple[int, bool] | None = None
        self.is_down = False
        #: Cleared, no call returns.
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_full = False
        self.agent: Callable[[str, str, Mapping[str, Any]], Any] | None = None
        self.obeys_shutdown = True
        self.writes_fail = False

    def _effect(self, name: str, act: Callable[[], T]) -> T:
        number = len(self.effects)
        self.effects.append(name)
        if self.kill_at == (number, False):
            raise Killed
        done = act()
        if self.kill_at == (number, True):
            raise Killed
        return done

    def _facts(self, name: str) -> DomainFacts:
        domain = self.domains_by_name[name]
        return DomainFacts(
            name=name,
            uuid=domain.uuid,
            is_active=domain.is_active,
            vcpus=domain.vcpus,
            memory_mib=domain.memory_mib,
            record=domain.record,
        )

    def domains(self) -> Sequence[DomainFacts]:
        return [self._facts(name) for name in self.domains_by_name]

    def domain(self, name: str) -> DomainFacts | None:
        self.looks += 1
        return self._facts(name) if name in self.domains_by_name else None

    def define(self, plan: DomainPlan) -> None:
        def act() -> None:
            known = self.domains_by_name.get(plan.name)
            if known is not None and known.uuid != plan.uuid:
                raise HostError(f"domain '{plan.name}' already exists with uuid {known.uuid}")
            self.domains_by_name[plan.name] = MemoryDomain(plan.uuid, plan.vcpus, plan.memory_mib, plan.record, plan)

        self._effect("define", act)

    def start(self, name: str) -> None:
        def act() -> None:
            domain = self.domains_by_name[name]
            if domain.is_active:
                raise HostError("Domain is already active")
            assert domain.plan is not None
            if domain.plan.overlay not in self.volumes:
                raise HostError(f"Storage volume not found: {domain.plan.overlay}")
            domain.boots.append(self.volumes[domain.plan.seed])
            domain.is_active = True
            # What a guest writes on its disk.
            self.volumes[domain.plan.overlay] += b"written by " + (domain.record or _NONE).cluster.encode()

        self._effect("start", act)

    def request_shutdown(self, name: str) -> None:
        if self.obeys_shutdown:
            self.domains_by_name[name].is_active = False

    def destroy(self, name: str) -> None:
        def act() -> None:
            if name in self.domains_by_name:
                self.domains_by_name[name].is_active = False

        self._effect("destroy", act)

    def undefine(self, name: str) -> None:
        self._effect("undefine", lambda: self.domains_by_name.pop(name, None))

    def write_record(self, name: str, record: DomainRecord) -> None:
        def act() -> None:
            self.domains_by_name[name].record = record

        self._effect("write_record", act)

    def volume_key(self, pool: str, name: str) -> str | None:
        return self.keys.get(name, f"/{pool}/{name}") if name in self.volumes else None

    def make_overlay(self, pool: str, name: str, *, image: str, disk_mib: int) -> None:
        def act() -> None:
            if image not in self.volumes:
                raise HostError(f"pool {pool} has no volume {image}")
            assert name not in self.volumes, "libvirt refuses a volume that is there"
            self.volumes[name] = b""

        self._effect("make_overlay", act)

    def write_volume(self, pool: str, name: str, content: bytes) -> None:
        def act() -> None:
            if self.is_full and name not in self.volumes:
                raise HostFull("No space left on device")
            if self.writes_fail:
                raise HostError("Input/output error")
            self.volumes[name] = content

        self._effect("write_volume", act)

    def delete_volume(self, pool: str, name: str) -> None:
        self._effect("delete_volume", lambda: self.volumes.pop(name, None))

    def ask_agent(self, name: str, command: str, arguments: Mapping[str, Any], *, seconds: int) -> Any:
        if self.agent is None or not self.domains_by_name[name].is_active:
            raise AgentSilent("QEMU guest agent is not connected")
        return self.agent(name, command, arguments)

    def close(self) -> None:
        self.is_down = True

    # ---- what tests do and look at -----------------------------------------------------------------------------------

    def holds(self, content: bytes) -> bool:
        """Return whether any volume holds these bytes."""
        return any(content in volume for volume in self.volumes.values())

    @property
    def leftovers(self) -> list[str]:
        """Volumes except the image."""
        return sorted(self.volumes.keys() - {IMAGE})

    @property
    def only(self) -> MemoryDomain:
        """The one domain."""
        (domain,) = self.domains_by_name.values()
        return domain


_NONE = DomainRecord(machine_id="", operation_id="", provider="")


class InlineCalls:
    """The calls to a host, each at once."""

    def __init__(self, host: MemoryHost) -> None:
        self._host = host
        self._is_closed = False

    async def call(self, job: Job[T]) -> T:
        await asyncio.sleep(0)
        if self._is_closed:
            raise HostDown("this connection was closed")
        await self._host.answers.wait()
        if self._host.is_down:
            raise HostDown("connection refused")
        hypervisor: Hypervisor = self._host
        looks_before = self._host.looks
        try:
            done = job(hypervisor)
            # What a second look shows may differ from what the first one showed.
            assert self._host.looks <= looks_before + 1, "a step looks at its domain more than once"
            return done
        except Killed:
            # Nothing follows in a process that is gone.
            await asyncio.Event().wait()
            raise

    async def call_agent(self, job: Job[T]) -> T:
        return await self.call(job)

    def close(self) -> None:
        self._is_closed = True


class Nodes:
    """The nodes of all clusters."""

    def __init__(self) -> None:
        self.ready: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []
        #: Every node that is asked for is Ready.
        self.are_ready = True

    async def is_ready(self, cluster: str, node_name: str) -> bool:
        self.asked.append((cluster, node_name))
        return self.are_ready or (cluster, node_name) in self.ready

    async def aclose(self) -> None:
        pass


def document(**hosts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hosts file with types of one and two quarters of a host of 4 processors and 8 GiB."""
    base = {
        "zone": "z",
        "uri": "test:///default",
        "cpus": 4,
        "memory": "8Gi",
        "disk": "400Gi",
        "price_usd_per_vcpu_hour": 0.01,
        "price_usd_per_gib_hour": 0.005,
    }
    return {
        "defaults": {"image": IMAGE},
        "types": {
            "small": {"vcpus": 1, "memory": "2Gi", "disk": "40Gi"},
            "large": {"vcpus": 2, "memory": "4Gi", "disk": "40Gi"},
        },
        "hosts": [{"name": name, **base, **more} for name, more in (hosts or {"h": {}}).items()],
    }


class Provider:
    """A core over hosts in memory, with what a test wants to look at."""

    def __init__(
        self,
        body: Mapping[str, Any] | None = None,
        *,
        hosts: Mapping[str, MemoryHost] | None = None,
        by_agent: bool = False,
        nodes: Nodes | None = None,
        state: Path | None = None,
        options: CoreOptions | None = None,
        book: MemoryInstanceBook | None = None,
    ) -> None:
        self.body = body or document()
        self.hosts = dict(hosts or {each["name"]: MemoryHost() for each in self.body["hosts"]})
        self.nodes = nodes or Nodes()
        self.book = book or MemoryInstanceBook()
        clock = LoopClock()
        self.driver = LibvirtDriver(
            parse_kvm_hosts(self.body),
            provider="p",
            bootstrap=BootstrapPlan(by_agent=by_agent, nodes=None if by_agent and nodes is None else self.nodes),
            open_host=self._open,
            clock=clock,
        )
        self.backend = LibvirtBackend(
            self.driver,
            provider="p",
            book=self.book,
            records=() if state is None else read_records(state),
            clock=clock,
        )
        for host in self.hosts.values():
            host.on_change = self.backend.domain_changed
        store: Store = MemoryStore() if state is None else SqliteProviderStore(state, is_power_safe=False)
        options = options or CoreOptions(is_inline=True, failed_hold_seconds=0.0)
        self.core = make_core(
            self.backend,
            store=store,
            readiness=LibvirtReadiness(self.backend, self.driver),
            options=replace(options, reconcile_interval_seconds=RECONCILE_SECONDS),
        )

    def _open(self, host: KvmHost) -> InlineCalls:
        return InlineCalls(self.hosts[host.name])

    async def start(self) -> "Provider":
        await started(self.core)
        return self

    @property
    def host(self) -> MemoryHost:
        """The host, where there is one."""
        (host,) = self.hosts.values()
        return host

    async def ids(self, *states: Any) -> list[str]:
        """Return the ids in these states."""
        return sorted(record.id for record in (await self.core.list(states)).records)

    async def create(self, machine_id: str) -> None:
        await self.core.create(machine_id)
        await settle()

    async def configure(self, machine_id: str, cluster: str = "c-1", blob: bytes = b"blob") -> None:
        await self.core.configure(machine_id, cluster, blob, {})
        await asyncio.sleep(5)

    async def drain(self, machine_id: str, grace_seconds: int = 0) -> None:
        await self.core.drain(machine_id, grace_seconds)
        await asyncio.sleep(grace_seconds + 5)
