"""Providers whose records a shard cannot use: outside of its limits, without a size, or other than what was offered."""

import dataclasses

from bigfleet.conformance.ports import Answer, HostSeen, List, MachineSeen, Request
from bigfleet.model.limits.record_limits import LABELS_MAX, PRICE_USD_PER_HOUR_MAX, RESOURCE_NAMES_MAX, TEXT_BYTES_MAX
from bigfleet.model.states import CapacityType, MachineState
from tests.conformance.bench import Mutant
from tests.conformance.client_mutants import answered, showing, shown
from tests.conformance.read_mutants import Bend, hosted, of_state, of_type, one_of

S = MachineState
_SLOTS = (S.SPECULATIVE, S.CREATING)


def made(change: Bend) -> Bend:
    """Return a bend of machines that have been made: what a Create gives is not what was offered."""
    return lambda machine: machine if machine.state in _SLOTS else change(machine)


def blank_behind_the_id(_request: Request, answer: Answer) -> Answer:
    def bend(machine: MachineSeen) -> MachineSeen:
        return dataclasses.replace(machine, id=f"{machine.id} ") if machine.id.endswith("7") else machine

    return showing(answer, bend)


def other_ref_when_bound(machine: MachineSeen) -> MachineSeen:
    if machine.host is None or machine.state is not S.CONFIGURED:
        return machine
    return dataclasses.replace(machine, host=HostSeen(machine.host.provider, f"{machine.host.ref}-x"))


def long_ref(machine: MachineSeen) -> MachineSeen:
    if machine.host is None:
        return machine
    return dataclasses.replace(machine, host=HostSeen(machine.host.provider, "r" * (TEXT_BYTES_MAX + 1)))


def paid_otherwise(machine: MachineSeen) -> MachineSeen:
    is_spot = machine.capacity_type is CapacityType.SPOT
    changed = CapacityType.ON_DEMAND if is_spot else CapacityType.SPOT
    return dataclasses.replace(machine, capacity_type=changed, interruption_probability=0.1)


class NodeNames:
    """Bends machines so that a node name, once shown, stays."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def __call__(self, machine: MachineSeen) -> MachineSeen:
        if machine.node_name:
            self._names[machine.id] = machine.node_name
        return dataclasses.replace(machine, node_name=self._names.get(machine.id, ""))


RECORD_CLIENT_MUTANTS = (
    Mutant(
        name="a machine on demand is free",
        breaks="SHAPE-2",
        clients=shown(of_type(CapacityType.ON_DEMAND, price_usd_per_hour=0.0)),
    ),
    Mutant(name="a node name outlives the host", breaks="SHAPE-7", clients=shown(NodeNames())),
    Mutant(
        name="a hosted machine costs more than a shard takes",
        breaks="SHAPE-8",
        clients=shown(hosted(price_usd_per_hour=PRICE_USD_PER_HOUR_MAX * 1000)),
    ),
    Mutant(
        name="a record has too many labels",
        breaks="SHAPE-8",
        clients=shown(one_of(None, labels={f"k{number}": "v" for number in range(LABELS_MAX + 1)})),
    ),
    Mutant(
        name="a label is too long",
        breaks="SHAPE-8",
        clients=shown(one_of(None, labels={"l": "x" * (TEXT_BYTES_MAX + 1)})),
    ),
    Mutant(
        name="labels fill more than a record",
        breaks="SHAPE-8",
        clients=shown(one_of(None, labels={f"k{number}": "x" * 1000 for number in range(200)})),
    ),
    Mutant(
        name="a record has too many resources",
        breaks="SHAPE-8",
        clients=shown(one_of(None, resources={f"r{number}": "1" for number in range(RESOURCE_NAMES_MAX + 1)})),
    ),
    Mutant(name="a zone has a line break", breaks="SHAPE-8", clients=shown(one_of(None, zone="zone\na"))),
    Mutant(name="a host's ref is too long", breaks="SHAPE-8", clients=shown(long_ref)),
    Mutant(
        name="a node's name is too long",
        breaks="SHAPE-8",
        clients=shown(of_state(S.CONFIGURED, node_name="n" * (TEXT_BYTES_MAX + 1))),
    ),
    Mutant(name="an id in List has a blank", breaks="SHAPE-8", clients=answered(List, blank_behind_the_id)),
    Mutant(name="a machine has no size", breaks="SHAPE-9", clients=shown(one_of(None, resources={}, allocatable={}))),
    Mutant(
        name="a machine gives nothing to pods", breaks="SHAPE-9", clients=shown(one_of(None, allocatable={"cpu": "0"}))
    ),
    Mutant(
        name="another type is made than was offered",
        breaks="SHAPE-10",
        clients=shown(made(lambda m: dataclasses.replace(m, instance_type=f"{m.instance_type}-real"))),
    ),
    Mutant(
        name="it is made in another zone than was offered",
        breaks="SHAPE-10",
        clients=shown(made(lambda m: dataclasses.replace(m, zone="elsewhere"))),
    ),
    Mutant(name="it is paid otherwise than was offered", breaks="SHAPE-10", clients=shown(made(paid_otherwise))),
    Mutant(name="a bound machine is on another host", breaks="SHAPE-10", clients=shown(other_ref_when_bound)),
    Mutant(name="a node name outlives the binding", breaks="SHAPE-11", clients=shown(NodeNames())),
)
