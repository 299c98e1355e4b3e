"""Checks SHAPE: the fields of every record, in every state (docs/spec/provider.md §9).

This module must not require a field that the contract leaves free.
"""

import math
import re

from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import broken, expect
from bigfleet.conformance.lab import Lab, Way
from bigfleet.conformance.ports import Configure, Create, Drain, MachineSeen
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.ids import identifier_fault, text_bytes
from bigfleet.model.limits.record_limits import (
    PRICE_USD_PER_HOUR_MAX,
    RECORD_BYTES_MAX,
    counts_fault,
    long_fault,
    texts_fault,
    texts_of,
)
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.model.states import CapacityType, MachineState

AREA = Area("SHAPE")

#: Facts that have a field of their own; as labels they could say something else.
_FORBIDDEN_LABELS = frozenset(
    {
        "instance-type",
        "instance_type",
        "instanceType",
        "zone",
        "availability-zone",
        "availability_zone",
        "capacity-type",
        "capacity_type",
        "capacityType",
    }
)
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|Ki|Mi|Gi)?", re.ASCII)
_S = MachineState
_HOSTLESS = frozenset({_S.SPECULATIVE, _S.CREATING})
_UNBOUND = frozenset({_S.SPECULATIVE, _S.CREATING, _S.IDLE, _S.DELETING})


async def various(lab: Lab) -> list[MachineSeen]:
    """Return what List and Get show while a lent machine rests in each of SPECULATIVE, IDLE and CONFIGURED."""
    lent = [await lab.slot(), await lab.idle(), (await lab.configured()).id]
    listed = (await lab.list_machines()).machines
    missing = sorted(set(lent) - {machine.id for machine in listed})
    expect(not missing, "List shows every machine", missing)
    return [*listed, *[await lab.get(machine_id) for machine_id in lent]]


def expect_named(machine: MachineSeen) -> None:
    """Raise Broken unless a record has a state and an instance type, and no label stands in for a field."""
    expect(machine.state is not _S.UNSPECIFIED, f"{machine.id} has a state", machine_text(machine))
    expect(machine.instance_type != "", f"{machine.id} has an instance_type", machine_text(machine))
    forbidden = sorted(_FORBIDDEN_LABELS & machine.labels.keys())
    expect(not forbidden, f"{machine.id} has no label in place of a field", forbidden)


def expect_priced(machine: MachineSeen) -> None:
    """Raise Broken unless price and probability are numbers that can be compared."""
    price, probability = machine.price_usd_per_hour, machine.interruption_probability
    is_price = math.isfinite(price) and price >= 0
    expect(is_price, f"{machine.id} has a price_per_hour that is finite and not negative", price)
    is_free = price == 0 and machine.capacity_type is not CapacityType.BARE_METAL
    expect(not is_free, f"{machine.id} is not BARE_METAL and has a price_per_hour above 0", machine_text(machine))
    expect(0.0 <= probability <= 1.0, f"{machine.id} has an interruption_probability in [0, 1]", probability)
    if machine.capacity_type is CapacityType.SPOT:
        expect(probability > 0, f"{machine.id} is SPOT and has an interruption_probability above 0", probability)


def expect_ratios(machine: MachineSeen) -> None:
    """Raise Broken unless allocatable / resources can be computed for every key that both have."""
    for key in sorted(machine.resources.keys() & machine.allocatable.keys()):
        replica_milli = _milli(machine, "resources", key, machine.resources[key])
        _milli(machine, "allocatable", key, machine.allocatable[key])
        expect(replica_milli > 0, f"{machine.id} has resources[{key}] above 0", machine.resources[key])


def _milli(machine: MachineSeen, field: str, key: str, text: str) -> int:
    expectation = f"{machine.id} has in {field}[{key}] a plain number, with m, k, M, G, Ki, Mi, Gi or nothing behind it"
    expect(_QUANTITY.fullmatch(text) is not None, expectation, text)
    try:
        return parse_quantity(text)
    except QuantityError as error:
        broken(expectation, str(error))


def expect_accepted(machine: MachineSeen) -> None:
    """Raise Broken unless a shard takes the record: its id, texts, counts, quantities and price are in the limits."""
    fault = (
        _named_fault("id", identifier_fault(machine.id))
        or (_named_fault("cluster", identifier_fault(machine.cluster)) if machine.cluster else None)
        or (long_fault("host.ref", machine.host.ref) if machine.host is not None else None)
        or long_fault("node_name", machine.node_name)
        or counts_fault(machine.resources, machine.allocatable, machine.labels)
        or _texts_fault(machine)
    )
    expect(fault is None, f"{machine.id} is a record that a shard takes", fault or "")
    price = machine.price_usd_per_hour
    is_price = 0 <= price <= PRICE_USD_PER_HOUR_MAX
    expect(is_price, f"{machine.id} has a price_per_hour of at most {PRICE_USD_PER_HOUR_MAX:,.0f}", price)


def _named_fault(name: str, fault: str | None) -> str | None:
    return None if fault is None else f"{name} {fault}"


def _texts_fault(machine: MachineSeen) -> str | None:
    texts = texts_of(machine.labels, machine.resources, machine.allocatable)
    size_bytes = sum(map(text_bytes, texts))
    if size_bytes > RECORD_BYTES_MAX:
        return f"labels and quantities have {size_bytes:,} bytes, a record has at most {RECORD_BYTES_MAX:,}"
    provider = "" if machine.host is None else machine.host.provider
    return texts_fault([provider, machine.instance_type, machine.zone, *texts])


def expect_sized(machine: MachineSeen) -> None:
    """Raise Broken unless a machine has something to give to pods: a shard buys none that has not."""
    supply = machine.allocatable or machine.resources
    field = "allocatable" if machine.allocatable else "resources"
    quantities_milli = [_milli(machine, field, key, text) for key, text in sorted(supply.items())]
    expectation = f"{machine.id} has allocatable or resources with a quantity above 0"
    expect(any(milli > 0 for milli in quantities_milli), expectation, dict(supply))


def expect_placed(machine: MachineSeen) -> None:
    """Raise Broken unless a record says where the machine is and how it is paid for."""
    expect(machine.zone != "", f"{machine.id} has a zone", machine_text(machine))
    is_typed = machine.capacity_type is not CapacityType.UNSPECIFIED
    expect(is_typed, f"{machine.id} has a capacity_type", machine_text(machine))


def expect_fitting(machine: MachineSeen) -> None:
    """Raise Broken unless host and cluster fit the state; FAILED keeps whatever there was."""
    if machine.state is _S.FAILED:
        return
    name, text = machine.state.name, machine_text(machine)
    if machine.state in _HOSTLESS:
        expect(machine.host is None, f"{name} has no host", text)
    else:
        is_hosted = machine.host is not None and bool(machine.host.provider and machine.host.ref)
        expect(is_hosted, f"{name} names provider and ref of a host", text)
    if machine.state in _UNBOUND:
        expect(not machine.cluster and not machine.metadata, f"{name} has no cluster and no metadata", text)
    else:
        expect(machine.cluster != "", f"{name} has a cluster", text)


@AREA.behaviour(1, ConformanceProfile.CORE)
async def state_and_type_everywhere(lab: Lab) -> None:
    """State and instance_type everywhere; forbidden label keys nowhere."""
    for machine in await various(lab):
        expect_named(machine)


@AREA.behaviour(2, ConformanceProfile.SPOT)
async def prices_and_probabilities(lab: Lab) -> None:
    """Price finite and ≥ 0, 0 on BARE_METAL only; probability in [0, 1], > 0 on SPOT."""
    for machine in await various(lab):
        expect_priced(machine)


@AREA.behaviour(3, ConformanceProfile.CORE)
async def host_and_cluster_fit(lab: Lab) -> None:
    """Host and cluster fit the state in every resting state."""
    machine_id = await lab.slot()
    for step in (None, lab.create, lab.configure, lab.drain):
        if step is not None:
            await step(machine_id)
        for reading in (await lab.get(machine_id), await lab.listed(machine_id)):
            expect_fitting(reading)
    for machine in await various(lab):
        expect_fitting(machine)


@AREA.behaviour(4, ConformanceProfile.CORE)
async def ratios_can_be_computed(lab: Lab) -> None:
    """Where resources and allocatable share a key, the ratio can be computed."""
    for machine in await various(lab):
        expect_ratios(machine)


@AREA.behaviour(5, ConformanceProfile.CORE)
async def provider_is_constant(lab: Lab) -> None:
    """Host.provider is constant through configure and drain."""
    machine_id = await lab.idle()
    machine = await lab.get(machine_id)
    provider = _provider_of(machine)
    for step in (lab.configure, lab.drain, lab.configure):
        machine = await step(machine_id)
        for reading in (machine, await lab.listed(machine_id)):
            expectation = f"{machine_id} keeps the host.provider {provider!r}"
            expect(_provider_of(reading) == provider, expectation, machine_text(reading))


def _provider_of(machine: MachineSeen) -> str:
    if machine.host is None or not machine.host.provider:
        broken(f"{machine.id}, {machine.state.name}, names the provider of its host", machine_text(machine))
    return machine.host.provider


@AREA.behaviour(6, ConformanceProfile.CORE)
async def hosted_machines_have_a_place(lab: Lab) -> None:
    """Hosted machines have zone and capacity type."""
    for machine in await various(lab):
        if machine.host is not None:
            expect_placed(machine)


@AREA.behaviour(7, ConformanceProfile.CLOUD)
async def delete_leaves_nothing(lab: Lab) -> None:
    """After Delete no host, node name, cluster or metadata."""
    machine_id = await lab.idle()
    await lab.configure(machine_id, metadata={"left": "behind"})
    await lab.drain(machine_id)
    for reading in (await lab.delete(machine_id), await lab.listed(machine_id)):
        expect(reading.host is None, "after Delete there is no host", machine_text(reading))
        expect(not reading.node_name, "after Delete there is no node_name", reading.node_name)
        expect_unbound(reading, "after Delete there is no cluster, metadata or error")


@AREA.behaviour(8, ConformanceProfile.CORE)
async def a_shard_takes_each_record(lab: Lab) -> None:
    """Each record is one that a shard takes: ids, texts, counts and price within its limits."""
    for machine in await various(lab):
        expect_accepted(machine)


@AREA.behaviour(9, ConformanceProfile.CORE)
async def each_machine_has_a_size(lab: Lab) -> None:
    """Every machine has a quantity above 0 to give to pods."""
    for machine in await various(lab):
        expect_sized(machine)


@AREA.behaviour(10, ConformanceProfile.CORE)
async def what_is_bought_is_what_was_offered(lab: Lab) -> None:
    """Create, configure and drain change no instance_type, zone or capacity_type, and no host.ref from IDLE on."""
    machine_id = await lab.slot()
    offered = await lab.get(machine_id)
    made = await lab.way(Create(machine_id), _S.IDLE)
    bound = await lab.way(
        Configure(machine_id, lab.next_cluster(machine_id), {"conformance": "x"}, lab.blob), _S.CONFIGURED
    )
    freed = await lab.way(Drain(machine_id), _S.IDLE)
    for way in (made, bound, freed):
        _expect_fixed(offered, way)
    ref = _ref_of(made.end)
    for way in (bound, freed):
        for reading in (*way.readings, await lab.listed(machine_id)):
            expect(_ref_of(reading) == ref, f"{machine_id} keeps the host.ref {ref!r}", machine_text(reading))


def _expect_fixed(offered: MachineSeen, way: Way) -> None:
    for reading in way.readings:
        for name in ("instance_type", "zone", "capacity_type"):
            was, now = getattr(offered, name), getattr(reading, name)
            expect(now == was, f"{offered.id} keeps its {name}, offered as {was!r}", f"{now!r}")


def _ref_of(machine: MachineSeen) -> str:
    return "" if machine.host is None else machine.host.ref


@AREA.behaviour(11, ConformanceProfile.CORE)
async def the_node_name_goes_with_the_binding(lab: Lab) -> None:
    """After a drain node_name is what it was before the Configure."""
    machine_id = await lab.idle()
    before = (await lab.get(machine_id)).node_name
    await lab.configure(machine_id)
    for reading in (await lab.drain(machine_id), await lab.listed(machine_id)):
        expect(reading.node_name == before, f"after the drain node_name is {before!r} again", reading.node_name)
