"""Turns offerings and instances into the facts that the kit reconciles: slots, hosts, orphans.

docs/spec/aws-provider.md §8. An instance is ours by its tag. Of two instances for one machine the one that the state
knows is its host; the other is listed as an orphan and never terminated unasked. An orphan that the state knows must
never become the host of another machine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import ExistingHost, KnownMachine, MachineLookup, Slot
from bigfleet.provider.backends.aws.api import Ec2Instance
from bigfleet.provider.backends.aws.launch import TAG_CLUSTER, TAG_FORMER_CLUSTER, TAG_MACHINE, TAG_OPERATION
from bigfleet.provider.records.reset import RESET_LABEL

ORPHAN: Final = "orphan"
#: What a Drain leaves on a machine: nothing, or everything.
REIMAGE: Final = "reimage"
LEFT_AS_IT_IS: Final = "none"


def orphan_id(provider: str, instance_id: str) -> str:
    """Return the machine id of an instance that is no machine's host."""
    return f"{provider}/{ORPHAN}/{instance_id}"


def orphan_instance(provider: str, machine_id: str) -> str:
    """Return the instance of an orphan's machine id, "" for the id of any other machine."""
    prefix = orphan_id(provider, "")
    return machine_id.removeprefix(prefix) if machine_id.startswith(prefix) else ""


def is_known_orphan(instance: Ec2Instance, provider: str, lookup: MachineLookup) -> bool:
    """Return whether the state has an instance as the host of its orphan's id, and not as that of its tag's machine."""
    return _has(lookup(orphan_id(provider, instance.id)), instance) and not is_known_host(instance, lookup)


def is_known_host(instance: Ec2Instance, lookup: MachineLookup) -> bool:
    """Return whether the state has an instance as the host of the machine that its tag names."""
    return _has(lookup(instance.tags.get(TAG_MACHINE, "")), instance)


def _has(known: KnownMachine | None, instance: Ec2Instance) -> bool:
    return known is not None and known.machine.host.ref == instance.id


def instance_of(machine_id: str, instances: Iterable[Ec2Instance], known: KnownMachine | None) -> Ec2Instance | None:
    """Return the instance that is a machine's host: the one that the state knows, else the oldest; None without any."""
    live = [each for each in instances if not each.is_ending and each.tags.get(TAG_MACHINE) == machine_id]
    return min(live, key=lambda each: _rank(each, known), default=None)


def _rank(instance: Ec2Instance, known: KnownMachine | None) -> tuple[bool, bool, float, str]:
    is_current = known is not None and known.operation_id == instance.tags.get(TAG_OPERATION, "-")
    return (not _has(known, instance), not is_current, instance.launched_unix_seconds, instance.id)


def facts(
    slots: Iterable[Slot],
    instances: Sequence[Ec2Instance],
    *,
    provider: str,
    lookup: MachineLookup,
    describe_unoffered: Callable[[Ec2Instance], Slot],
) -> list[Slot]:
    """Return every slot and host. `describe_unoffered` gives the facts of an instance whose slot is not on offer."""
    offered = {slot.id: slot for slot in slots}
    of_machine: defaultdict[str, list[Ec2Instance]] = defaultdict(list)
    for instance in instances:
        # A stopped instance hosts nothing: its machine is lost, and it is not ended for that.
        if not instance.is_ending and not instance.is_stopped:
            of_machine[instance.tags.get(TAG_MACHINE, "")].append(instance)
    found: list[Slot] = list(offered.values())
    for machine_id, candidates in of_machine.items():
        free = [each for each in candidates if not is_known_orphan(each, provider, lookup)]
        host = instance_of(machine_id, free, lookup(machine_id)) if machine_id else None
        for instance in candidates:
            slot = offered.get(machine_id) or describe_unoffered(instance)
            is_host = instance is host
            if TAG_FORMER_CLUSTER in instance.tags:
                slot = replace(slot, labels={**slot.labels, RESET_LABEL: LEFT_AS_IT_IS})
            fact_id = machine_id if is_host else orphan_id(provider, instance.id)
            found.append(
                ExistingHost.of(
                    replace(slot, id=fact_id),
                    host_ref=instance.id,
                    node_name=instance.private_dns,
                    in_cluster=instance.tags.get(TAG_CLUSTER, ""),
                )
            )
    return found


def capacity_type_of_instance(instance: Ec2Instance) -> CapacityType:
    """Return what an instance shows of its capacity type; a reservation does not show."""
    return CapacityType.SPOT if instance.is_spot else CapacityType.ON_DEMAND
