"""Implements the provider's backend over EC2: launches, waits, bootstraps, drains and terminates instances.

docs/spec/aws-provider.md. All kinds are resumable: each step looks before it acts, by the operation's id. It must never
write the state, and never terminate an instance that no call named.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import structlog

from bigfleet.model.clock import Clock
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import (
    Admission,
    Found,
    FoundKind,
    Host,
    HostsLookup,
    KindLimits,
    LateResult,
    Limits,
    MachineLookup,
    MachineView,
    Op,
    PartialFacts,
    Refusal,
    Slot,
    Stockout,
    Transient,
)
from bigfleet.provider.backends.aws.api import PENDING, RUNNING, AwsError, Ec2, Ec2Instance, Queue
from bigfleet.provider.backends.aws.batches import (
    Batches,
    InstanceGone,
    InstanceWatch,
    terminate_each,
)
from bigfleet.provider.backends.aws.channel import AgentAnswer, Channel
from bigfleet.provider.backends.aws.errors import (
    STOCKOUT_MEMORY_SECONDS,
    STOCKOUT_RETRY_SECONDS,
    AwsRefused,
    Meaning,
    is_stockout_reason,
    is_unknown_instance,
    meaning_of,
    raised,
    text_of,
)
from bigfleet.provider.backends.aws.identity import ACCOUNT, OWNER, Place, checked_identity
from bigfleet.provider.backends.aws.instance_finder import InstanceFinder
from bigfleet.provider.backends.aws.interruptions import Interruptions
from bigfleet.provider.backends.aws.inventory import (
    LEFT_AS_IT_IS,
    REIMAGE,
    capacity_type_of_instance,
    facts,
    orphan_id,
    orphan_instance,
)
from bigfleet.provider.backends.aws.launch import (
    TAG_CLUSTER,
    TAG_CONFIGURE,
    TAG_DRAIN,
    TAG_FORMER_CLUSTER,
    TAG_MACHINE,
    TAG_OWNER,
    TAG_PROVIDER,
    LaunchFault,
    run_request,
)
from bigfleet.provider.backends.aws.offerings import AwsOffering, slots_of
from bigfleet.provider.backends.aws.prices import AwsPrices
from bigfleet.provider.backends.aws.reclaim_queue import HostOfMachine, ReclaimQueue
from bigfleet.provider.backends.aws.removed_tags import SERVICE_TAGS, RemovedTags
from bigfleet.provider.backends.aws.root_volumes import RootVolumes
from bigfleet.provider.backends.aws.stockouts import StockoutMemory
from bigfleet.provider.operations.dispatch import TokenBucket
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind
from bigfleet.provider.records.reset import RESET_LABEL

_log = structlog.get_logger("bigfleet.provider.backends.aws")

#: DescribeInstances calls a second, over all that the provider does.
DESCRIBES_PER_SECOND: Final = 10.0
LAUNCHES_PER_SECOND: Final = 2.0
LAUNCHES_BURST: Final = 5
#: Between two looks at instances that start, and at the answers of agents.
POLL_SECONDS: Final = 5.0
#: How long after its grace a Drain waits for the agent, and what it leaves for the reset.
DRAIN_EXTRA_SECONDS: Final = 60.0
RESET_SECONDS: Final = 180.0
RESERVE_SECONDS: Final = 5.0

REPLACE_ROOT: Final = "replace-root"
NONE: Final = "none"
DELETE_ONLY: Final = "delete-only"
RESETS: Final = (REPLACE_ROOT, NONE, DELETE_ONLY)
_CLOUD_CONFIG: Final = b"#cloud-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """How the provider runs instances."""

    provider: str
    #: Name or ARN of the instance profile, "" for none.
    node_role: str
    #: The agent, as a script.
    user_data: str
    place: Place = field(default_factory=Place)
    reset: str = REPLACE_ROOT
    launches_per_second: float = LAUNCHES_PER_SECOND
    launches_burst: int = LAUNCHES_BURST
    poll_seconds: float = POLL_SECONDS


class AwsBackend:
    """What the kit calls."""

    def __init__(
        self,
        ec2: Ec2,
        channel: Channel,
        prices: AwsPrices,
        interruptions: Interruptions,
        *,
        settings: AwsSettings,
        clock: Clock,
        queue: Queue | None = None,
    ) -> None:
        """`set_offerings` completes it. Without a queue there is no push."""
        self.provider = settings.provider
        self.limits = _limits(settings)
        self.settings = settings
        self.stockouts = StockoutMemory(clock)
        bucket = TokenBucket(DESCRIBES_PER_SECOND, int(DESCRIBES_PER_SECOND), clock)
        self.watch = InstanceWatch(
            ec2,
            clock,
            bucket,
            interval_seconds=settings.poll_seconds,
        )
        self._ec2 = ec2
        self._channel = channel
        self._prices = prices
        self._interruptions = interruptions
        self._clock = clock
        self._tags = RemovedTags(ec2, clock)
        self._root_volumes = RootVolumes(ec2, clock, poll_seconds=settings.poll_seconds)
        self._finder = InstanceFinder(ec2, bucket, self._tags, provider=settings.provider)
        self._operations: Batches[Ec2Instance] = Batches(self._finder.of_operations, clock)
        self._instances: Batches[Ec2Instance] = Batches(self._finder.by_id, clock)
        self._terminations: Batches[Exception] = Batches(self._terminate, clock)
        self._offerings: tuple[AwsOffering, ...] = ()
        #: USD per hour by type, zone and capacity type, as the offerings say.
        self._written_prices: dict[tuple[str, str, CapacityType], float] = {}
        self._lookup: MachineLookup = lambda _machine_id: None
        #: Operations that this process has launched for.
        self._asked: set[str] = set()
        #: Set by the first inventory: from here on an instance that was not seen is none of ours.
        self._first_read = asyncio.Event()
        #: Instances by id, as they were seen last, ended ones included.
        self._seen: dict[str, Ec2Instance] = {}
        #: Those that a call has made or changed since the last inventory began: it may not show them so.
        self._changed: dict[str, Ec2Instance] = {}
        #: Instances that a call ended: news of their end is none.
        self._ended: set[str] = set()
        #: Events of the queue by what became of them.
        self.event_counts: Counter[str] = Counter()
        if queue is not None:
            events = ReclaimQueue(
                queue,
                clock,
                host=self._host_of,
                note_reclaim=interruptions.note_reclaim,
                counts=self.event_counts,
                begin=self._first_read.wait,
            )
            # The kit detects the method.
            self.feed = events.run

    def consult(self, lookup: MachineLookup) -> None:
        """Take what returns the state's view of a machine."""
        self._lookup = lookup
        self._finder.consult(lookup)

    def consult_hosts(self, hosts: HostsLookup) -> None:
        """Take what returns the machines that have a host."""
        self._finder.consult_hosts(hosts)

    def identify(self, stored: Mapping[str, str]) -> Mapping[str, str]:
        """Return account, region and owner, for the state to store. Raises StartRefused for a state of others."""
        identity = checked_identity(stored, self.settings.place)
        self._finder.owner = identity.get(OWNER, "")
        if not self.settings.place.account:
            self._ec2.require_account(identity.get(ACCOUNT, ""))
        return identity

    def set_offerings(self, offerings: Sequence[AwsOffering]) -> None:
        """Replace the offerings, from the next inventory and Create on."""
        self._offerings = tuple(offerings)
        self._written_prices = {
            (each.instance_type, each.zone, each.capacity_type): each.price_usd_per_hour
            for each in self._offerings
            if each.price_usd_per_hour is not None
        }

    # ---- facts ---------------------------------------------------------------------------------------------------

    async def inventory(self) -> PartialFacts:
        """Read every instance of this provider or that the state has as a host, and the prices that are due."""
        self._changed = {}
        try:
            instances = await self._finder.all()
        except AwsError as error:
            raise raised(error) from error
        live = [each for each in instances if not each.is_ending]
        self._interruptions.look(live)
        self._ended &= {each.id for each in instances}
        # Those that end too: the message about it may come after this look.
        self._seen = {each.id: each for each in instances} | self._changed
        self._first_read.set()
        await self._refresh_prices(live)
        used = [each.tags[TAG_MACHINE] for each in live if TAG_MACHINE in each.tags]
        slots = slots_of(self._offerings, used, self._template)
        found = facts(
            slots, live, provider=self.provider, lookup=self._lookup, describe_unoffered=self._describe_unoffered
        )
        # Of what has no price now, nothing is known.
        unpriced = [each.offering.prefix for each in self._offerings if self._template(each) is None]
        return PartialFacts(facts=tuple(found), unread_prefixes=tuple(unpriced))

    async def _refresh_prices(self, live: Sequence[Ec2Instance]) -> None:
        """Fetch the prices that the offerings do not have."""
        asked = {
            (each.instance_type, each.capacity_type) for each in self._offerings if each.price_usd_per_hour is None
        }
        for instance in live:
            kind = self._capacity_type(instance)
            if (instance.instance_type, instance.zone, kind) not in self._written_prices:
                asked.add((instance.instance_type, kind))
        types = {instance_type for instance_type, _kind in asked}
        await self._prices.refresh(types, {each for each, kind in asked if kind is CapacityType.SPOT})

    def _capacity_type(self, instance: Ec2Instance) -> CapacityType:
        known = self._lookup(instance.tags.get(TAG_MACHINE, ""))
        return capacity_type_of_instance(instance) if known is None else known.machine.capacity_type

    def _template(self, offering: AwsOffering) -> Slot | None:
        """Return the facts of an offering's slots; None while it has no price."""
        usd = offering.price_usd_per_hour
        if usd is None:
            usd = self._prices.price(offering.instance_type, offering.zone, offering.capacity_type)
        if usd is None:
            return None
        return self._with_risk(
            replace(
                offering.offering.template,
                price_usd_per_hour=usd,
                labels={**offering.offering.template.labels, RESET_LABEL: self._leaves()},
            ),
            offering.interruption_probability,
        )

    def _with_risk(self, slot: Slot, declared: float | None) -> Slot:
        if slot.capacity_type is not CapacityType.SPOT:
            return replace(slot, interruption_probability=declared or 0.0)
        learned = self._interruptions.probability(slot.instance_type, slot.zone)
        return replace(slot, interruption_probability=learned if declared is None else declared)

    def _leaves(self) -> str:
        return REIMAGE if self.settings.reset == REPLACE_ROOT else LEFT_AS_IT_IS

    def _describe_unoffered(self, instance: Ec2Instance) -> Slot:
        """Return the facts of an instance whose slot is no longer on offer, or never was."""
        known = self._lookup(instance.tags.get(TAG_MACHINE, ""))
        capacity_type = self._capacity_type(instance)
        usd = self._written_prices.get((instance.instance_type, instance.zone, capacity_type))
        if usd is None:
            usd = self._prices.price(instance.instance_type, instance.zone, capacity_type)
        if usd is None:
            # Without a price the kit shows it in `admin quarantine`.
            usd = 0.0 if known is None else known.machine.price_usd_per_hour
        slot = Slot(
            id="",
            instance_type=instance.instance_type,
            zone=instance.zone,
            capacity_type=capacity_type,
            resources=MappingProxyType({}) if known is None else known.machine.resources,
            allocatable=MappingProxyType({}) if known is None else known.machine.allocatable,
            labels={RESET_LABEL: self._leaves()} if known is None else known.machine.labels,
            price_usd_per_hour=usd,
        )
        return self._with_risk(slot, None)

    def _see(self, instance: Ec2Instance) -> None:
        self._seen[instance.id] = self._changed[instance.id] = instance

    def _host_of(self, instance_id: str) -> HostOfMachine | None:
        """Return the machine whose host an instance is now; None also for an instance that a call ended."""
        instance = self._seen.get(instance_id)
        if instance is None or instance_id in self._ended:
            return None
        for machine_id in (instance.tags.get(TAG_MACHINE, ""), orphan_id(self.provider, instance_id)):
            known = self._lookup(machine_id)
            if known is not None and known.machine.host.ref == instance_id:
                return HostOfMachine(machine_id, instance)
        return None

    # ---- create --------------------------------------------------------------------------------------------------

    async def create(self, machine: MachineView, op: Op) -> Host:
        """Launch one instance for the operation, or find the one that was launched for it, and wait until it runs."""
        is_first = op.attempt == 1 and op.id not in self._asked
        self._asked.add(op.id)
        try:
            host = await self._create(machine, op, is_first=is_first)
        except Transient:
            # It comes again.
            raise
        except BaseException:
            self._asked.discard(op.id)
            raise
        self._asked.discard(op.id)
        return host

    async def _create(self, machine: MachineView, op: Op, *, is_first: bool) -> Host:
        # The kit mints an id once: before the first launch there is nothing to find.
        instance = None if is_first else await self._translated(self._operations.ask(op.id))
        if instance is None:
            if is_first:
                # Later the instance may be there already: only the token says so.
                self.stockouts.check(machine)
            instance = await self._launch(machine, op)
        if instance.state == PENDING:
            instance = await self._started(instance.id)
        if instance.state != RUNNING:
            self._raise_ended(machine, instance)
        self._see(instance)
        return Host(ref=instance.id, node_name=instance.private_dns)

    async def _launch(self, machine: MachineView, op: Op) -> Ec2Instance:
        offering = self._offering_of(machine)
        if offering is None:
            prefix = machine.id.rpartition("/")[0]
            raise AwsRefused(f"{prefix} is no longer in the offerings file: its image is not known")
        try:
            request = run_request(
                machine,
                operation_id=op.id,
                provider=self.provider,
                settings=offering.settings,
                node_role=self.settings.node_role,
                user_data=self.settings.user_data,
                owner=self._finder.owner,
            )
        except LaunchFault as fault:
            raise AwsRefused(f"{fault}; nothing was launched") from fault
        try:
            return await self._ec2.run_instance(request)
        except AwsError as error:
            if meaning_of(error) is Meaning.STOCKOUT:
                self.stockouts.note(machine, error)
            raise raised(error, may_lack_capacity=True) from error

    def _offering_of(self, machine: MachineView) -> AwsOffering | None:
        prefix = machine.id[: machine.id.rfind("/") + 1]
        return next((each for each in self._offerings if each.offering.prefix == prefix), None)

    async def _started(self, instance_id: str) -> Ec2Instance:
        try:
            return await self.watch.left(instance_id, PENDING)
        except InstanceGone as gone:
            raise AwsRefused(str(gone)) from gone
        except AwsError as error:
            raise raised(error) from error

    def _raise_ended(self, machine: MachineView, instance: Ec2Instance) -> None:
        reason = f"{instance.state_reason} {instance.state_reason_text}".strip() or "EC2 gives no reason"
        text = f"{instance.id} is {instance.state}: {reason}"
        if is_stockout_reason(instance.state_reason):
            self.stockouts.note_text(machine, text, STOCKOUT_MEMORY_SECONDS)
            raise Stockout(text, STOCKOUT_RETRY_SECONDS)
        raise AwsRefused(text)

    # ---- configure and drain -------------------------------------------------------------------------------------

    async def configure(self, machine: MachineView, cluster: str, blob: bytes, op: Op) -> str | None:
        """Order the bootstrap and return the node name that the instance's agent gave, once it is done."""
        if blob.startswith(_CLOUD_CONFIG):
            raise AwsRefused("the bootstrap data is #cloud-config; use a template that is a script, such as *.sh.j2")
        instance = await self._host(machine)
        if refusal := self._reuse_fault(instance, cluster):
            raise AwsRefused(refusal)
        self._tags.forget(instance.id)
        try:
            answer = await self._channel.configure(instance.id, cluster, blob, op.id)
        except LaunchFault as fault:
            raise AwsRefused(str(fault)) from fault
        except AwsError as error:
            raise raised(error) from error
        _check(answer, instance.id)
        return answer.node_name or None

    async def is_ready(self, machine: MachineView, op: Op) -> bool:
        """Return whether the agent answered that the bootstrap is done. Raises AwsRefused when it failed."""
        try:
            answer = await self._channel.answer(machine.host.ref, op.id)
        except AwsError as error:
            raise raised(error) from error
        if answer is None:
            return False
        # Configure deletes the data itself, unless the provider was restarted meanwhile.
        await self._channel.forget(machine.host.ref, op.id)
        _check(answer, machine.host.ref)
        return True

    async def drain(self, machine: MachineView, grace_seconds: int, op: Op) -> None:
        """Order the drain, then reset the instance as `--reset` says; the cluster's tag goes last."""
        instance = await self._host(machine)
        left_seconds = op.deadline_monotonic_seconds - self._clock.monotonic_seconds()
        replaces_root = self.settings.reset == REPLACE_ROOT
        reserve_seconds = min(RESET_SECONDS if replaces_root else RESERVE_SECONDS, left_seconds / 2)
        wait_seconds = min(grace_seconds + DRAIN_EXTRA_SECONDS, left_seconds - reserve_seconds)
        try:
            # What the reset needs is taken off a grace that leaves no room for it.
            grace_seconds = min(grace_seconds, int(wait_seconds))
            is_done = TAG_CLUSTER not in instance.tags or await self._channel.drain(
                instance.id, grace_seconds, op.id, seconds_max=wait_seconds
            )
            if not is_done and self.settings.reset == NONE:
                raise AwsRefused(f"the agent of {instance.id} did not drain it in {wait_seconds:.0f} s")
            if not is_done:
                _log.warning("aws.drain_not_answered", machine=machine.id, instance=instance.id)
            if replaces_root:
                # Its agent starts again and must find no order of the former cluster.
                instance = await self._tags.remove(instance, [TAG_CONFIGURE, TAG_DRAIN])
            if not (replaces_root and await self._root_volumes.replace(instance.id, op.id)):
                instance = await self._with_former_cluster(instance, machine.cluster)
            # An order without an answer stays: the instance may still be in its cluster.
            orders = [TAG_CONFIGURE, TAG_DRAIN] if is_done or replaces_root else [TAG_CONFIGURE]
            instance = await self._tags.remove(instance, orders)
            self._see(await self._tags.remove(instance, [TAG_CLUSTER]))
        except AwsError as error:
            raise raised(error) from error

    async def _with_former_cluster(self, instance: Ec2Instance, cluster: str) -> Ec2Instance:
        """Tag an instance that serves a cluster with what it will still have of it; return it so."""
        if TAG_CLUSTER not in instance.tags:
            return instance
        await self._ec2.add_tags(instance.id, {TAG_FORMER_CLUSTER: cluster})
        return replace(instance, tags={**instance.tags, TAG_FORMER_CLUSTER: cluster})

    async def mark_out_of_service(self, machine: MachineView) -> None:
        """Remove the tags by which an instance shows that it serves a cluster. Raises AwsRefused with the remedy."""
        ref = machine.host.ref
        try:
            for instance in await self._finder.described({"instance-id": [ref]}):
                if instance.is_ending or not instance.tags.keys() & set(SERVICE_TAGS):
                    continue
                if self.settings.reset != REPLACE_ROOT:
                    instance = await self._with_former_cluster(instance, instance.tags.get(TAG_CLUSTER, ""))
                self._see(await self._tags.remove(instance, SERVICE_TAGS))
        except AwsError as error:
            if is_unknown_instance(error):
                return
            advice = f"if this persists, delete the tags {', '.join(SERVICE_TAGS)} of {ref} in EC2"
            raise AwsRefused(f"{text_of(error)} ({advice})") from error

    def _reuse_fault(self, instance: Ec2Instance, cluster: str | None) -> str:
        """Return why an instance cannot be configured for a cluster, "" when it can; None is any cluster."""
        # A restored state may call an instance IDLE that was configured since.
        serving = instance.tags.get(TAG_CLUSTER, "")
        if cluster is not None and serving not in ("", cluster):
            return f"{instance.id} serves {serving}: its tag {TAG_CLUSTER} says so"
        former = instance.tags.get(TAG_FORMER_CLUSTER, "")
        if not former or (self.settings.reset == NONE and cluster in (former, None)):
            return ""
        advice = f"it can only return to {former}" if self.settings.reset == NONE else "delete the machine"
        return f"{instance.id} served {former} and was not reset: {advice}"

    def admit(self, machine: MachineView, kind: Kind) -> Admission | Refusal:
        """Refuse to configure an instance that no cluster may have any more; it stays IDLE and can be deleted."""
        instance = self._seen.get(machine.host.ref)
        fault = self._reuse_fault(instance, None) if instance is not None and kind is Kind.CONFIGURE else ""
        return Refusal(fault) if fault else Admission()

    def settle(self, machine: MachineView, reached: MachineState) -> Admission:
        """Add nothing: slots do not share room."""
        return Admission()

    async def _host(self, machine: MachineView) -> Ec2Instance:
        instance = await self._translated(self._instances.ask(machine.host.ref))
        if instance is None or instance.state != RUNNING:
            state = "not there" if instance is None else instance.state
            raise AwsRefused(f"{machine.host.ref} is {state}")
        self._check_owner(instance)
        return self._finder.as_host(instance, machine)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def delete(self, machine: MachineView, op: Op) -> None:
        """Terminate the instance; EC2 takes nothing back that it accepted."""
        ref = machine.host.ref
        if ref:
            instance = self._seen.get(ref) or await self._translated(self._instances.ask(ref))
            if instance is not None:
                self._check_owner(instance)
            await self._end(ref)

    def _check_owner(self, instance: Ec2Instance) -> None:
        if self._finder.is_foreign(instance):
            raise AwsRefused(
                f"{instance.id} belongs to the provider of another state file: its tag {TAG_OWNER} says so"
            )

    async def compensate(self, machine: MachineView, late: LateResult) -> None:
        """Terminate an instance that came after its Create had failed."""
        if late.op.kind is Kind.CREATE and late.host is not None and late.host.ref != machine.host.ref:
            await self._end(late.host.ref)

    async def _end(self, instance_id: str) -> None:
        self._ended.add(instance_id)
        error = await self._terminations.ask(instance_id)
        if isinstance(error, AwsError):
            if meaning_of(error) is not Meaning.TRANSIENT:
                # It goes on running.
                self._ended.discard(instance_id)
            raise raised(error) from error

    async def adopt(self, machine: MachineView) -> Found:
        """Say what instance a failed machine has. It is clean without an order that a cluster's agent may have seen.

        Raises AwsRefused for an instance that is bound to no cluster and not clean, if it is an orphan or has lost its
        tags: it is never terminated unasked.
        """
        orphan = orphan_instance(self.provider, machine.id)
        instance = await self._translated(self._finder.orphan(orphan) if orphan else self._finder.host_of(machine))
        if instance is None:
            return Found(kind=FoundKind.NO_HOST)
        self._check_owner(instance)
        host = Host(ref=instance.id, node_name=instance.private_dns)
        # Without its tags nothing says that it is in no cluster.
        has_tags = TAG_PROVIDER in instance.tags
        is_clean = instance.state == RUNNING and has_tags and not set(SERVICE_TAGS) & instance.tags.keys()
        if not is_clean and not machine.cluster and (orphan or not has_tags):
            why = "" if has_tags else ", has lost its tags"
            raise AwsRefused(
                f"{instance.id} is {instance.state}{why} and may serve a cluster: check it, then recover it"
            )
        return Found(kind=FoundKind.CLEAN if is_clean else FoundKind.DIRTY, host=host)

    # ---- shared calls --------------------------------------------------------------------------------------------

    async def _translated(self, question: Awaitable[Ec2Instance | None]) -> Ec2Instance | None:
        try:
            return await question
        except AwsError as error:
            raise raised(error) from error

    async def _terminate(self, ids: Sequence[str]) -> dict[str, Exception]:
        results = await terminate_each(self._ec2, ids)
        return {instance_id: error for instance_id, error in results.items() if error is not None}


class AgentReady:
    """Says that a node is Ready when the agent answered that its bootstrap is done."""

    def __init__(self, backend: AwsBackend) -> None:
        self.interval_seconds = backend.settings.poll_seconds
        self._backend = backend

    async def ready(self, machine: MachineView, cluster: str, op: Op) -> bool:
        """Look at the agent's answer."""
        return await self._backend.is_ready(machine, op)


def _check(answer: AgentAnswer, instance_id: str) -> None:
    if answer.exit_code != 0:
        raise AwsRefused(f"the bootstrap on {instance_id} ended with exit code {answer.exit_code}; see its log there")


def _limits(settings: AwsSettings) -> Limits:
    kinds = {kind: KindLimits(timeout_seconds=TIMEOUT_SECONDS[kind]) for kind in Kind}
    kinds[Kind.CREATE] = KindLimits(
        timeout_seconds=TIMEOUT_SECONDS[Kind.CREATE],
        rate_per_second=settings.launches_per_second,
        burst=settings.launches_burst,
    )
    return Limits(kinds=MappingProxyType(kinds), resumable=frozenset(Kind))
