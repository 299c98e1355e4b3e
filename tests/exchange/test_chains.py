"""Proposals that are carried out on paper keep every pod's place, save what they promise, and come to an end."""

from dataclasses import replace
from random import Random

import pytest

from bigfleet.compositions.targets import targets_of
from bigfleet.engine.decision import ActionKind, Options
from bigfleet.engine.shapes.decide import decide
from bigfleet.engine.snapshot import Snapshot
from bigfleet.exchange.values import BlockReason, ExchangeProposal, ExchangeSettings
from bigfleet.model.ids import ClusterId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need
from bigfleet.model.states import CapacityType, MachineState
from tests.exchange.building import OPTIONS, asked, need, offers, pods

SPOT = CapacityType.SPOT
SETTINGS = ExchangeSettings(budget_fraction=0.3)
ROUNDS_MAX = 30


def serving(machine: Machine) -> Machine:
    """Return the machine Configured in cluster c."""
    return replace(machine, state=MachineState.CONFIGURED, host=HostRef("p", machine.id), cluster=ClusterId("c"))


def on_offer(machine: Machine) -> Machine:
    """Return the machine on offer."""
    return replace(machine, state=MachineState.SPECULATIVE, host=HostRef(), cluster=ClusterId(""))


def rows(random: Random) -> list[Need]:
    """Return some rows of pods."""
    return [
        need(
            *(
                pods(random.choice((250, 500, 900, 1500)), random.choice((0.5, 1, 3)), random.randint(1, 9))
                for _ in "ab"
            ),
            priority=100 * random.randint(1, 3),
            interruption_bucket=random.choice((1, 1, 6)),
            reclamation_bucket=random.choice((1, 1, 2)),
        )
        for _ in range(random.randint(2, 6))
    ]


def with_targets(machines: list[Machine], demand: list[Need]) -> Options:
    """Return the options with target compositions for the machines, as a shard has them."""
    return replace(OPTIONS, targets=targets_of(Snapshot.of(machines), demand, OPTIONS))


def at_rest(machines: list[Machine], demand: list[Need]) -> list[Machine]:
    """Return the machines after the actions of decisions until there are none."""
    found = {machine.id: machine for machine in machines}
    for _ in range(8):
        options = with_targets(list(found.values()), demand)
        actions = decide(Snapshot.of(list(found.values())), demand, options).actions
        if not actions:
            break
        for action in actions:
            is_acquired = action.kind in (ActionKind.PROVISION, ActionKind.BOOTSTRAP)
            found[action.machine_id] = (serving if is_acquired else on_offer)(found[action.machine_id])
    return list(found.values())


def carried_out(machines: list[Machine], proposal: ExchangeProposal) -> list[Machine]:
    """Return the machines after the exchange."""
    left = {(kind.instance_type, kind.capacity_type): count for kind, count in proposal.comes}
    after = []
    for machine in machines:
        key = (machine.instance_type, machine.capacity_type.label)
        if machine.id in proposal.machine_ids:
            # Gone for good, so that the next decision has nothing but what came.
            continue
        if machine.state is MachineState.SPECULATIVE and left.get(key, 0):
            left[key] -= 1
            after.append(serving(machine))
        else:
            after.append(machine)
    assert not any(left.values())
    return after


def held_cost(machines: list[Machine]) -> float:
    """Return what cluster c costs, dollars an hour."""
    return sum(machine.price_usd_per_hour for machine in machines if machine.cluster == "c")


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 12))])
def test_a_chain_of_exchanges_ends_and_no_pod_loses_its_place(seed: int) -> None:
    """After each exchange a decision without anything on offer places every pod; at the end nothing is proposed."""
    random = Random(seed)
    demand = rows(random)
    dear = [m for cpu in (4, 8) for m in offers(60, f"dear{cpu}", cpu, 0.3 * cpu, instance_type=f"dear{cpu}")]
    machines = at_rest(dear, demand)
    held = [machine for machine in machines if machine.cluster == "c"]
    cheap = [
        m
        for cpu in (2, 8, 16)
        for m in offers(
            random.choice((2, 30)),
            f"cheap{cpu}",
            cpu,
            random.choice((0.04, 0.1, 0.15)) * cpu,
            instance_type=f"cheap{cpu}",
            capacity_type=random.choice((SPOT, CapacityType.ON_DEMAND)),
            interruption_probability=random.choice((0.0, 0.0001)),
        )
    ]
    machines, done = [*held, *cheap], 0

    for _ in range(ROUNDS_MAX):
        found = asked(machines, demand, settings=SETTINGS, options=with_targets(machines, demand))
        ready = [proposal for proposal in found.proposals if proposal.waits_for is None]
        if not ready and found.blocked is BlockReason.MACHINES_CHANGING:
            # With machines on offer its composition is another one, and that comes without an exchange.
            machines = at_rest(machines, demand)
            continue
        if not ready:
            break
        before = held_cost(machines)
        machines = carried_out(machines, ready[0])
        gate = ready[0].gate
        assert held_cost(machines) - before == pytest.approx(gate.comes_usd_per_hour - gate.goes_usd_per_hour)
        alone = [machine for machine in machines if machine.cluster == "c"]
        decision = decide(Snapshot.of(alone), demand, with_targets(alone, demand))
        assert all(row.satisfied for row in decision.rows)
        # What the claims of the next decision leave empty is reclaimed without an exchange.
        excess = {machine.id for machine in at_rest(alone, demand) if machine.cluster != "c"}
        machines = [machine for machine in machines if machine.id not in excess]
        done += 1
    else:
        pytest.fail(f"the chain does not end within {ROUNDS_MAX} exchanges")
    assert found.blocked is None
    # A seed without an exchange proves nothing.
    assert done
