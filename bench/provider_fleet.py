"""A provider's fleet on disk, made by arithmetic on indices: realistic records of about 600 bytes on the wire.

docs/spec/provider.md §24. Written by `bench.workloads.provider`, served by `bench.processes.provider`. No two runs may
write different fleets.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.engine_fleets import fleet_machines
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ClusterId
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.provider.backend import ExistingHost, Slot
from bigfleet.provider.records.lifecycle import new_record
from bigfleet.provider.records.record import Record
from bigfleet.provider.storage.sqlite import SqliteProviderStore
from bigfleet.provider.storage.store import Batch

PROVIDER = "bench"
_START_UNIX_NANOS = 1_800_000_000 * NANOS_PER_SECOND
_BATCH = 10_000
_TYPES = 40
_ZONES = ("eu-west-1a", "eu-west-1b", "eu-west-1c")
_CLUSTERS = 100


def slot(number: int) -> Slot:
    """Return slot `number`: 40 types in 3 zones, every third one SPOT, in racks of 48."""
    kind, zone, is_spot = number % _TYPES, _ZONES[number % len(_ZONES)], number % 3 == 2
    cores = 4 * (1 + kind % 16)
    shape = {"cpu": f"{cores * 960}m", "memory": f"{cores * 4}Gi", "ephemeral-storage": "100Gi"}
    capacity = "spot" if is_spot else "on-demand"
    return Slot(
        id=f"{PROVIDER}/{capacity}/m{kind}.xlarge/{zone}/{number:06d}",
        instance_type=f"m{kind}.xlarge",
        zone=zone,
        capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
        resources=shape,
        allocatable=shape,
        labels={
            "topology.kubernetes.io/region": "eu-west-1",
            "kubernetes.io/arch": "amd64",
            "topology.bigfleet/rack": f"{zone}-m{kind}-rack-{number // (48 * _TYPES)}",
            "bigfleet.lucy.sh/capacity-type": capacity,
        },
        price_usd_per_hour=0.05 * cores * (0.3 if is_spot else 1.0),
        interruption_probability=0.05 if is_spot else 0.0,
    )


def is_hosted(number: int) -> bool:
    """Return whether a machine has a host and is bound: six of ten."""
    return number % 10 < 6


def host(offered: Slot, number: int) -> ExistingHost:
    """Return the host of a slot."""
    return ExistingHost(
        id=offered.id,
        instance_type=offered.instance_type,
        zone=offered.zone,
        capacity_type=offered.capacity_type,
        resources=offered.resources,
        allocatable=offered.allocatable,
        labels=offered.labels,
        price_usd_per_hour=offered.price_usd_per_hour,
        interruption_probability=offered.interruption_probability,
        host_ref=f"i-{number:017x}",
        node_name=f"ip-10-{number >> 16 & 255}-{number >> 8 & 255}-{number & 255}.internal",
    )


def records(machines: int) -> Iterator[Record]:
    """Yield the records in the order of their revisions: six of ten bound, the others free slots."""
    for number in range(machines):
        offered = slot(number)
        if not is_hosted(number):
            yield replace(new_record(offered, PROVIDER, _START_UNIX_NANOS), revision=number + 1, state_revision=1)
            continue
        record = new_record(host(offered, number), PROVIDER, _START_UNIX_NANOS)
        machine = replace(
            record.machine, state=MachineState.CONFIGURED, cluster=ClusterId(f"cluster-{number % _CLUSTERS}")
        )
        metadata = {
            "bigfleet.lucy.sh/priority": str(number % 1000),
            "bigfleet.lucy.sh/penalty-bucket": str(number % 8),
            "bigfleet.lucy.sh/need": f"{number % 5000:016x}",
        }
        yield replace(record, machine=machine, metadata=metadata, revision=number + 1, state_revision=1)


def recovery_records(machines: int, clusters: int) -> Iterator[Record]:
    """Yield W8's machines (docs/spec/benchmarks.md) as a provider holds them, with the stamps of a shard."""
    for number, machine in enumerate(fleet_machines(machines, clusters)):
        offered = Slot(
            id=machine.id,
            instance_type=machine.instance_type,
            zone=machine.zone,
            capacity_type=machine.capacity_type,
            allocatable=machine.allocatable,
            labels=machine.labels,
            price_usd_per_hour=machine.price_usd_per_hour,
            interruption_probability=machine.interruption_probability,
        )
        metadata = encode_metadata(machine) if machine.cluster else {}
        made = replace(new_record(offered, PROVIDER, _START_UNIX_NANOS), revision=number + 1, state_revision=1)
        yield replace(made, machine=machine, metadata=metadata)


def write_fleet(path: Path, machines: int) -> None:
    """Write a state file with that many machines."""
    write_records(path, records(machines), machines)


def write_records(path: Path, made: Iterator[Record], machines: int) -> None:
    """Write a state file with these records."""
    store = SqliteProviderStore(path, is_power_safe=False)
    store.load(b"benchmrk")
    written = 0
    while chunk := tuple(islice(made, _BATCH)):
        written += len(chunk)
        store.commit(Batch(head=written, floor=0, records=chunk))
    assert written == machines
    store.close()
