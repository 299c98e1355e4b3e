"""Turns the stock and the workloads of a scenario into slots, templates and stamps.

docs/spec/simulation.md. Ids are the shape's name and a number in file order, so that equal files give equal worlds.
This module must not depend on anything but the scenario.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.metadata import encode_metadata
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.operator.requests import CapacityRequest, CoLocation, LabelSelector, penalty_bucket
from bigfleet.provider.backend import Slot
from bigfleet.sim.pods.scheduler import Template
from bigfleet.sim.scenarios.scenario_file import EACH, Scenario, Stock, Workload


class Stocked(NamedTuple):
    """One machine as it stands when the world begins."""

    slot: Slot
    shape: str
    state: MachineState
    cluster: str
    #: Workload and gang that it was bound for, None for an unknown one.
    bound_for: tuple[str, int] | None


def stocked(scenario: Scenario) -> Iterator[Stocked]:
    """Yield every machine of the scenario in file order."""
    numbers: Counter[str] = Counter()
    for stock in scenario.machines:
        clusters = scenario.clusters if stock.cluster == EACH else (stock.cluster,)
        for cluster in clusters:
            for place in range(stock.count):
                number = numbers[stock.shape]
                numbers[stock.shape] += 1
                yield Stocked(
                    slot=_slot(scenario, stock, cluster, place, number),
                    shape=stock.shape,
                    state=MachineState[stock.state.upper()],
                    cluster=cluster,
                    bound_for=_bound_for(scenario, stock, place),
                )


def _slot(scenario: Scenario, stock: Stock, cluster: str, place: int, number: int) -> Slot:
    shape = scenario.shapes[stock.shape]
    rack_number = place // stock.per_rack if stock.per_rack else place
    rack = stock.racks[rack_number % len(stock.racks)].replace("{cluster}", cluster)
    return Slot(
        id=f"{stock.shape}-{number:04d}",
        instance_type=shape.instance_type,
        zone=stock.zone,
        capacity_type=shape.capacity,
        resources=shape.allocatable,
        allocatable=shape.allocatable,
        labels={labels.RACK: rack},
        price_usd_per_hour=shape.price_per_hour,
        interruption_probability=shape.interruption_probability,
        fixed=shape.capacity is CapacityType.BARE_METAL,
    )


def _bound_for(scenario: Scenario, stock: Stock, place: int) -> tuple[str, int] | None:
    workload = next((each for each in scenario.workloads if each.name == stock.workload), None)
    if workload is None:
        return None
    if not workload.gangs:
        return workload.name, 0
    gang = place // (stock.per_gang or workload.pods)
    return (workload.name, gang) if gang < workload.gangs else None


def clusters_of(scenario: Scenario, cluster: str) -> tuple[str, ...]:
    """Return the clusters that a name stands for."""
    return scenario.clusters if cluster == EACH else (cluster,)


def templates_of(workload: Workload) -> Mapping[tuple[str, int], Template]:
    """Return the templates of a workload, by its name and the gang's number. Raises UnmappableRequest."""
    return {
        (workload.name, gang): Template.of(
            workload.name,
            f"{workload.name}-{gang}" if workload.gangs else workload.name,
            _request(workload, gang),
        )
        for gang in range(max(1, workload.gangs))
    }


def _request(workload: Workload, gang: int) -> CapacityRequest:
    requirement = (
        Requirement(labels.INSTANCE_TYPE, Operator.IN, workload.instance_types)
        if workload.instance_types
        # What asks for nothing in particular (docs/spec/operator.md §11).
        else Requirement(labels.INSTANCE_TYPE, Operator.EXISTS)
    )
    together = CoLocation(
        topology_key=workload.topology_key,
        namespace="default",
        selector=LabelSelector(match_labels={"gang": f"{workload.name}-{gang}"}),
    )
    return CapacityRequest(
        id="",
        resources=workload.resources,
        requirements=(requirement,),
        priority=workload.priority,
        interruption_bucket=penalty_bucket(workload.interruption_penalty),
        reclamation_bucket=penalty_bucket(workload.reclamation_penalty),
        co_location=together if workload.gangs else None,
    )


def stamps_of(template: Template | None, shard: str) -> dict[str, str]:
    """Return what a provider remembers of a machine that a shard bound for a template."""
    if template is None:
        return {}
    profile = template.profile
    machine = Machine(
        id=MachineId("stamps"),
        state=MachineState.CONFIGURED,
        host=HostRef("stamps", "stamps"),
        cluster=ClusterId("stamps"),
        assigned_need_fingerprint=profile.fingerprint,
        assigned_group=template.group,
    )
    return encode_metadata(machine.assigned(profile)) | {labels.ASSIGNED_SHARD: shard}
