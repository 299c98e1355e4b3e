"""Operates machines as libvirt domains: queues steps on hosts and waits for guests in between.

docs/spec/libvirt-provider.md §3 to §7. Calls to a host that cannot be reached are retried here until the operation's
deadline. The kit does not retry them, because its breaker would stop the work on other hosts. It decides nothing about
a machine.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog

from bigfleet.model.clock import Clock
from bigfleet.provider.backend import FoundKind, MachineView, Op, Stockout, Transient
from bigfleet.provider.backends.libvirt import domain_steps
from bigfleet.provider.backends.libvirt.connections import HostCalls, Job
from bigfleet.provider.backends.libvirt.domain_steps import Guest
from bigfleet.provider.backends.libvirt.fleet import ForeignUse, host_of
from bigfleet.provider.backends.libvirt.guest_agent import GuestAgent
from bigfleet.provider.backends.libvirt.hosts_file import KvmHost, KvmHosts
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
from bigfleet.provider.backends.libvirt.names import domain_name, domain_uuid, node_name
from bigfleet.provider.backends.partitioned.ports import Carved, Standing

_log = structlog.get_logger("bigfleet.provider.backends.libvirt.driver")

T = TypeVar("T")

#: A host that is asked for its domains answers by then, or counts as unread.
LOOK_SECONDS_MAX: Final = 10.0
#: Between two looks at a domain, and two attempts on a host that is down.
POLL_SECONDS: Final = 1.0
DOWN_POLL_SECONDS: Final = 5.0
#: A Create on a host that is down or full fails, and its machine is created again after that time at the earliest.
STOCKOUT_SECONDS: Final = 300.0
#: Left of an operation's time for the steps after a guest was waited for.
_RESERVE_SECONDS: Final = 30.0
_READY_INTERVAL_SECONDS: Final = 2.0


class NodeReadiness(Protocol):
    """Says whether a node is Ready in a cluster."""

    async def is_ready(self, cluster: str, node_name: str) -> bool:
        """Return False for a cluster that cannot be asked."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapPlan:
    """How machines join a cluster."""

    #: Through the guest agent; else by a new seed and a first boot.
    by_agent: bool
    #: What cloud-init gets before a machine is bound.
    base_user_data: bytes = b""
    #: None: the exit code of the agent's program says it.
    nodes: NodeReadiness | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLook:
    """The domains of one host, ours and those of others."""

    #: By machine id.
    ours: Mapping[str, DomainFacts]
    foreign: ForeignUse


class LibvirtDriver:
    """Drives the hosts of a file. Used on one event loop."""

    ready_interval_seconds = _READY_INTERVAL_SECONDS

    def __init__(
        self,
        hosts: KvmHosts,
        *,
        provider: str,
        bootstrap: BootstrapPlan,
        open_host: Callable[[KvmHost], HostCalls],
        clock: Clock,
    ) -> None:
        """`open_host` returns the calls to a host; it connects when it is first called."""
        self.hosts = hosts
        self._provider = provider
        self._bootstrap = bootstrap
        self._open_host = open_host
        self._clock = clock
        self._calls: dict[str, tuple[str, HostCalls]] = {}
        #: Hosts that did not answer when they were last asked for their domains, and why.
        self.unread: dict[str, str] = {}

    # ---- hosts -------------------------------------------------------------------------------------------------------

    def _host(self, name: str) -> HostCalls:
        """Return the calls to a host; one that left the file is known until the next start."""
        host = self.hosts.hosts.get(name)
        known = self._calls.get(name)
        if host is None:
            if known is None:
                raise LookupError(f"host {name!r} is not in the hosts file")
            return known[1]
        if known is not None and known[0] == host.uri:
            return known[1]
        if known is not None:
            known[1].close()
        calls = self._open_host(host)
        self._calls[name] = (host.uri, calls)
        return calls

    async def close_clusters(self) -> None:
        """Close the connections to clusters."""
        if self._bootstrap.nodes is not None:
            await self._bootstrap.nodes.aclose()

    def close(self) -> None:
        """Close the connections to hosts."""
        for _uri, calls in self._calls.values():
            calls.close()

    async def _step(self, host: str, job: Job[T], op: Op) -> T:
        """Run a job; while the host is down, again until little is left of the operation's time."""
        while True:
            try:
                return await self._host(host).call(job)
            except HostDown:
                if self._seconds_left(op) < _RESERVE_SECONDS:
                    raise
                await self._clock.sleep(DOWN_POLL_SECONDS)

    def _seconds_left(self, op: Op) -> float:
        return op.deadline_monotonic_seconds - self._clock.monotonic_seconds()

    def guest(self, machine_id: str, disk_mib: int = 0) -> Guest:
        """Return what the steps need to know of a machine."""
        defaults = self.hosts.defaults
        return Guest(
            machine_id=machine_id,
            provider=self._provider,
            pool=defaults.pool,
            image=defaults.image,
            disk_mib=disk_mib,
        )

    def _plan(self, machine: MachineView, carved: Carved, op: Op) -> DomainPlan:
        guest, defaults = self.guest(machine.id), self.hosts.defaults
        return DomainPlan(
            name=guest.domain,
            uuid=domain_uuid(machine.id, op.id),
            record=DomainRecord(machine_id=machine.id, operation_id=op.id, provider=self._provider),
            vcpus=carved.size.vcpus,
            memory_mib=carved.size.memory_mib,
            pool=defaults.pool,
            overlay=guest.overlay,
            seed=guest.seed,
            network=defaults.network,
            firmware=defaults.firmware,
            virtualisation=defaults.virtualisation,
            console_log_dir=defaults.console_log_dir,
        )

    # ---- operations --------------------------------------------------------------------------------------------------

    async def create(self, machine: MachineView, carved: Carved, op: Op) -> str:
        """Define and start the domain; by agent, wait until it answers. Raises Stockout for a host that cannot."""
        guest, plan = self.guest(machine.id, carved.size.disk_mib), self._plan(machine, carved, op)
        try:
            await self._host(carved.host).call(
                lambda hypervisor: domain_steps.create(hypervisor, guest, plan, self._bootstrap.base_user_data)
            )
            await self._until_running(carved.host, guest, op)
        except (HostDown, HostFull) as error:
            # What was made is found again: by the next Create of this machine's operation, or by `adopt`.
            raise Stockout(f"host {carved.host}: {error}", STOCKOUT_SECONDS) from error
        if self._bootstrap.by_agent:
            await self._agent(carved.host, guest).wait()
        return ""

    async def _until_running(self, host: str, guest: Guest, op: Op) -> None:
        while True:
            if await self._is_active(host, guest, op):
                return
            await self._clock.sleep(POLL_SECONDS)

    async def _is_active(self, host: str, guest: Guest, op: Op) -> bool:
        return await self._step(host, lambda hypervisor: domain_steps.is_active(hypervisor, guest), op)

    def _agent(self, host: str, guest: Guest) -> GuestAgent:
        return GuestAgent(lambda: self._host(host), guest.domain, self._clock)

    async def configure(self, machine: MachineView, carved: Carved, cluster: str, blob: bytes, op: Op) -> str:
        """Boot the machine into a cluster, and return the name that its node will have."""
        guest = self.guest(machine.id, carved.size.disk_mib)
        if self._bootstrap.by_agent:
            await self._configure_by_agent(guest, carved.host, cluster, blob, op)
            return guest.domain

        def begin(hypervisor: Hypervisor) -> None:
            domain_steps.begin_binding(
                hypervisor,
                guest,
                operation_id=op.id,
                cluster=cluster,
                host_name=node_name(guest.domain, op.id),
                user_data=blob,
                by_agent=False,
            )

        await self._step(carved.host, begin, op)
        return node_name(guest.domain, op.id)

    async def _configure_by_agent(self, guest: Guest, host: str, cluster: str, blob: bytes, op: Op) -> None:
        def begin(hypervisor: Hypervisor) -> None:
            domain_steps.begin_binding(
                hypervisor,
                guest,
                operation_id=op.id,
                cluster=cluster,
                host_name=guest.domain,
                user_data=self._bootstrap.base_user_data,
                by_agent=True,
            )

        await self._step(host, begin, op)
        agent = self._agent(host, guest)
        await agent.wait()
        await agent.bootstrap(cluster, blob)

    def _node_name(self, guest: Guest, record: DomainRecord) -> str:
        """Return the name of the node of a bound machine."""
        return guest.domain if self._bootstrap.by_agent else node_name(guest.domain, record.configured_by)

    async def ready(self, machine: MachineView, carved: Carved, cluster: str, op: Op) -> bool:
        """Return whether the node is Ready, after the bootstrap data was removed from the host."""
        nodes = self._bootstrap.nodes
        if nodes is None:
            return True
        guest = self.guest(machine.id)
        name = guest.domain if self._bootstrap.by_agent else node_name(guest.domain, op.id)
        if not await nodes.is_ready(cluster, name):
            return False
        try:
            await self.remove_secret(machine.id)
        except HostError as error:
            _log.warning("domain.seed_kept", machine=machine.id, error=str(error))
            return False
        return True

    async def remove_secret(self, machine_id: str) -> bool:
        """Overwrite the bootstrap data of a machine's seed, and return whether there was any."""
        guest = self.guest(machine_id)

        return await self._host(host_of(machine_id)).call(
            lambda hypervisor: domain_steps.remove_secret(
                hypervisor, guest, lambda record: self._node_name(guest, record)
            )
        )

    async def drain(self, machine: MachineView, carved: Carved, grace_seconds: int, op: Op) -> None:
        """Shut the guest down within the grace, and remove its disk. A grace of 0 switches it off at once."""
        guest = self.guest(machine.id)
        if grace_seconds > 0:
            seconds = min(float(grace_seconds), self._seconds_left(op) - _RESERVE_SECONDS)
            try:
                async with asyncio.timeout(max(seconds, 0.0)):
                    await self._shut_down(guest, carved.host, machine.cluster, grace_seconds, op)
            except TimeoutError:
                _log.info("domain.grace_ended", machine=machine.id, seconds=grace_seconds)
        await self._step(carved.host, lambda hypervisor: domain_steps.reset(hypervisor, guest), op)

    async def _shut_down(self, guest: Guest, host: str, cluster: str, grace_seconds: int, op: Op) -> None:
        """Return once the guest is off; the caller bounds the wait."""
        if self._bootstrap.by_agent:
            try:
                await self._agent(host, guest).drain(cluster, grace_seconds)
            except (AgentSilent, HostDown) as error:
                _log.warning("domain.not_drained", machine=guest.machine_id, error=str(error))
        await self._step(host, lambda hypervisor: domain_steps.request_shutdown(hypervisor, guest), op)
        while await self._is_active(host, guest, op):
            await self._clock.sleep(POLL_SECONDS)

    async def delete(self, machine: MachineView, carved: Carved, op: Op) -> None:
        """Remove domain, disk and seed."""
        guest = self.guest(machine.id)
        await self._step(carved.host, lambda hypervisor: domain_steps.delete(hypervisor, guest), op)

    async def discard_leftovers(self, machine_id: str, is_wanted: Callable[[], bool]) -> None:
        """Remove the volumes of a machine that has no domain, unless one is being created."""
        guest = self.guest(machine_id)
        await self._host(host_of(machine_id)).call(
            lambda hypervisor: domain_steps.discard_leftovers(hypervisor, guest, is_wanted)
        )

    async def is_off(self, machine_id: str) -> bool:
        """Return whether the domain of a machine is off. Raises DomainGone, NotOurs, HostError."""
        guest = self.guest(machine_id)
        return not await self._host(host_of(machine_id)).call(
            lambda hypervisor: domain_steps.is_active(hypervisor, guest)
        )

    async def start_again(self, machine_id: str) -> None:
        """Start a machine whose domain is off. Raises DomainGone, NotOurs, HostError."""
        guest = self.guest(machine_id)
        await self._host(host_of(machine_id)).call(lambda hypervisor: domain_steps.start_again(hypervisor, guest))

    # ---- facts -------------------------------------------------------------------------------------------------------

    async def adopt(self, machine: MachineView, carved: Carved) -> FoundKind:
        """Return what is there; a running machine is clean only after a drain. Raises Transient for a silent host."""
        facts = await self._found(self.guest(machine.id), carved.host)
        if facts is None or facts.record is None:
            return FoundKind.NO_HOST
        if not facts.is_active and not facts.record.cluster:
            return FoundKind.CLEAN
        is_bound = bool(machine.cluster) and facts.record.cluster == machine.cluster
        nodes = self._bootstrap.nodes
        if not facts.is_active or not is_bound or nodes is None:
            return FoundKind.DIRTY
        is_ready = await nodes.is_ready(machine.cluster, self._node_name(self.guest(machine.id), facts.record))
        return FoundKind.SERVING if is_ready else FoundKind.DIRTY

    async def _found(self, guest: Guest, host: str) -> DomainFacts | None:
        """Return the domain of a machine. Raises Transient when its host does not answer: it is asked again later."""
        if host in self.unread:
            raise Transient(f"host {host}: {self.unread[host]}")
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                facts = await self._host(host).call(lambda hypervisor: domain_steps.find(hypervisor, guest))
        except TimeoutError as error:
            raise Transient(f"host {host}: no answer within {LOOK_SECONDS_MAX:.0f} s") from error
        except HostDown as error:
            raise Transient(f"host {host}: {error}") from error
        return facts

    async def inventory(self) -> Sequence[Standing]:
        """Return every domain of ours on the hosts that answer."""
        return self.standing(await self.look())

    async def look(self) -> Mapping[str, HostLook]:
        """Return the domains of each host that answers, and note the hosts that do not."""
        names = list(self.hosts.hosts)
        answers = await asyncio.gather(*(self._look(name) for name in names))
        looks: dict[str, HostLook] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                if name not in self.unread:
                    _log.warning("host.unread", host=name, error=answer)
                self.unread[name] = answer
            else:
                looks[name] = answer
                if self.unread.pop(name, None) is not None:
                    _log.info("host.read_again", host=name)
        for name in self.unread.keys() - self.hosts.hosts.keys():
            del self.unread[name]
        return looks

    def standing(self, looks: Mapping[str, HostLook]) -> Sequence[Standing]:
        """Return the domains of ours among those of the hosts."""
        return [
            Standing(
                host=name,
                instance=facts.name,
                node_name=self._standing_node(machine_id, facts),
                machine_id=machine_id,
            )
            for name, look in looks.items()
            for machine_id, facts in look.ours.items()
        ]

    def _standing_node(self, machine_id: str, facts: DomainFacts) -> str:
        record = facts.record
        return self._node_name(self.guest(machine_id), record) if record is not None and record.configured_by else ""

    async def _look(self, name: str) -> HostLook | str:
        """Return what a host says, or why it says nothing."""
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                domains = await self._host(name).call(lambda hypervisor: hypervisor.domains())
        except TimeoutError:
            return f"no answer within {LOOK_SECONDS_MAX:.0f} s"
        except HostError as error:
            return str(error)
        ours = {
            facts.record.machine_id: facts
            for facts in domains
            if facts.record is not None and self._is_ours(name, facts, facts.record)
        }
        foreign = [facts for facts in domains if facts.record is None or not self._is_ours(name, facts, facts.record)]
        return HostLook(
            ours=ours,
            foreign=ForeignUse(
                vcpus=sum(facts.vcpus for facts in foreign), memory_mib=sum(facts.memory_mib for facts in foreign)
            ),
        )

    def _is_ours(self, host: str, facts: DomainFacts, record: DomainRecord) -> bool:
        """Return whether a domain is a machine of this provider: on the right host, with the name of its machine."""
        return (
            record.provider == self._provider
            and host_of(record.machine_id) == host
            and facts.name == domain_name(record.machine_id)
        )
