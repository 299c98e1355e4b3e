"""Finds instances: all of this provider, those of an operation, and the hosts that the state has.

docs/spec/aws-provider.md §8. An instance that the state has as a host is looked for by its id as well, so that it stays
the host when its tags were removed or changed; they are written again. It must never end an instance.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import HostsLookup, MachineLookup, MachineView
from bigfleet.provider.backends.aws.api import IDS_MAX, AwsError, Ec2, Ec2Instance
from bigfleet.provider.backends.aws.inventory import (
    instance_of,
    is_known_host,
    is_known_orphan,
    orphan_instance,
)
from bigfleet.provider.backends.aws.launch import NAME, TAG_CLUSTER, TAG_MACHINE, TAG_OPERATION, TAG_OWNER, TAG_PROVIDER
from bigfleet.provider.backends.aws.removed_tags import RemovedTags
from bigfleet.provider.operations.dispatch import TokenBucket

_log = structlog.get_logger("bigfleet.provider.backends.aws.instance_finder")

#: Instances whose tags are written again in one pass of the inventory.
RESTORED_MAX: Final = 20
#: Instances of another provider that a log line names.
_LISTED_MAX: Final = 5
#: States in which no operation changes tags.
_RESTING: Final = frozenset({MachineState.IDLE, MachineState.CONFIGURED, MachineState.FAILED})
_ADVICE: Final = (
    "the instance stays the machine's host, and the provider writes the tags again; find out what changes tags in this "
    "account, and exempt instances with the tag bigfleet:provider"
)


class InstanceFinder:
    """Asks EC2 for instances, within the rate of DescribeInstances."""

    def __init__(self, ec2: Ec2, describes: TokenBucket, removed: RemovedTags, *, provider: str) -> None:
        self._ec2 = ec2
        self._describes = describes
        self._removed = removed
        self._provider = provider
        #: Id of the state file, "" for none.
        self.owner = ""
        self._lookup: MachineLookup = lambda _machine_id: None
        self._hosts: HostsLookup = tuple
        #: Instances whose tags are not as they were written, and are logged.
        self._changed: set[str] = set()
        #: Owners of foreign instances that are logged.
        self._owners: set[str] = set()

    def consult(self, lookup: MachineLookup) -> None:
        """Take what returns the state's view of a machine."""
        self._lookup = lookup

    def consult_hosts(self, hosts: HostsLookup) -> None:
        """Take what returns the machines that have a host."""
        self._hosts = hosts

    def is_foreign(self, instance: Ec2Instance) -> bool:
        """Return whether the provider of another state file launched an instance."""
        return bool(self.owner) and instance.tags.get(TAG_OWNER, self.owner) != self.owner

    async def described(self, filters: Mapping[str, Sequence[str]]) -> list[Ec2Instance]:
        """Return the instances that match every filter. Raises AwsError."""
        await self._describes.take()
        return [self._removed.current(each) for each in await self._ec2.describe(filters)]

    async def of_operations(self, ids: Sequence[str]) -> dict[str, Ec2Instance]:
        """Return instances by the operation that launched them. Raises AwsError."""
        found = await self.described({f"tag:{TAG_OPERATION}": ids})
        return {each.tags[TAG_OPERATION]: each for each in found}

    async def by_id(self, ids: Sequence[str]) -> dict[str, Ec2Instance]:
        """Return instances by id. Raises AwsError."""
        return {each.id: each for each in await self.described({"instance-id": ids})}

    async def all(self) -> list[Ec2Instance]:
        """Return every instance of this provider, and every one that the state has as a host.

        A host has the tags of its machine, also if EC2 shows others. Instances of another state file that are no hosts
        are left out, and logged once. Raises AwsError.
        """
        found = {each.id: each for each in await self.described({f"tag:{TAG_PROVIDER}": [self._provider]})}
        hosts = self._hosts_by_instance()
        unseen = [each for each in hosts if each not in found]
        for start in range(0, len(unseen), IDS_MAX):
            found.update(await self.by_id(unseen[start : start + IDS_MAX]))
        changed = []
        for instance_id, machine in hosts.items():
            instance = found.get(instance_id)
            if instance is None or instance.is_ending:
                continue
            found[instance_id] = shown = self.as_host(instance, machine)
            if shown.tags != instance.tags:
                changed.append((instance, machine, shown))
        await self._restore(changed)
        foreign = [each for each in found.values() if self.is_foreign(each) and not each.is_ending]
        self._log_foreign(foreign)
        return [each for each in found.values() if each.id in hosts or not self.is_foreign(each)]

    def _log_foreign(self, foreign: Iterable[Ec2Instance]) -> None:
        by_owner: dict[str, list[str]] = {}
        for instance in foreign:
            by_owner.setdefault(instance.tags[TAG_OWNER], []).append(instance.id)
        for owner, ids in by_owner.items():
            if owner not in self._owners:
                self._owners.add(owner)
                _log.error(
                    "aws.instances_of_another_provider",
                    owner=owner,
                    count=len(ids),
                    instances=sorted(ids)[:_LISTED_MAX],
                    advice=f"another provider of the name {self._provider} runs in this account and region; give each "
                    "its own --provider name. If it is this one, and its state file was lost: start it with a new "
                    f"state file and --owner {owner}",
                )

    def _hosts_by_instance(self) -> dict[str, MachineView]:
        hosts: dict[str, MachineView] = {}
        for machine in self._hosts():
            # A machine of its tag comes before an orphan's id.
            if machine.host.ref not in hosts or not orphan_instance(self._provider, machine.id):
                hosts[machine.host.ref] = machine
        return hosts

    def as_host(self, instance: Ec2Instance, machine: MachineView) -> Ec2Instance:
        """Return the host of a machine with the tags that tie it to the machine.

        If it has lost the tag of the provider, all were removed: then it has the machine's cluster as well.
        """
        tags = {TAG_PROVIDER: self._provider}
        if not orphan_instance(self._provider, machine.id):
            tags |= {TAG_MACHINE: machine.id}
        if TAG_PROVIDER not in instance.tags:
            tags |= {NAME: machine.id}
            if self.owner:
                tags |= {TAG_OWNER: instance.tags.get(TAG_OWNER, self.owner)}
            if machine.cluster and TAG_CLUSTER not in instance.tags:
                tags |= {TAG_CLUSTER: machine.cluster}
        return replace(instance, tags={**instance.tags, **tags})

    async def _restore(self, changed: Iterable[tuple[Ec2Instance, MachineView, Ec2Instance]]) -> None:
        """Log hosts whose tags were changed, once each, and write their tags again."""
        logged, self._changed = self._changed, set()
        restored = 0
        for instance, machine, shown in changed:
            self._changed.add(instance.id)
            missing = {key: value for key, value in shown.tags.items() if instance.tags.get(key) != value}
            if instance.id not in logged:
                _log.error(
                    "aws.instance_tags_changed",
                    instance=instance.id,
                    machine=machine.id,
                    tags=sorted(missing),
                    advice=_ADVICE,
                )
            known = self._lookup(machine.id)
            is_resting = known is not None and known.machine == machine and machine.state in _RESTING
            if not is_resting or restored >= RESTORED_MAX:
                continue
            restored += 1
            try:
                await self._ec2.add_tags(instance.id, missing)
            except AwsError as error:
                if instance.id not in logged:
                    _log.warning("aws.instance_tags_not_restored", instance=instance.id, error=str(error))

    async def host_of(self, machine: MachineView) -> Ec2Instance | None:
        """Return the instance that the state has as a machine's host, else one with its tag that is no known orphan.

        Raises AwsError.
        """
        if machine.host.ref:
            instance = (await self.by_id([machine.host.ref])).get(machine.host.ref)
            if instance is not None and not instance.is_ending:
                return instance
        found = await self.described({f"tag:{TAG_MACHINE}": [machine.id]})
        own = (each for each in found if not self.is_foreign(each))
        free = [each for each in own if not is_known_orphan(each, self._provider, self._lookup)]
        return instance_of(machine.id, free, self._lookup(machine.id))

    async def orphan(self, instance_id: str) -> Ec2Instance | None:
        """Return the instance of an orphan, None when it ends, or is the host of its tag's machine. Raises AwsError."""
        instance = (await self.by_id([instance_id])).get(instance_id)
        if instance is None or instance.is_ending or is_known_host(instance, self._lookup):
            return None
        return instance
