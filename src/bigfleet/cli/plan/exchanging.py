"""Carries out exchanges on paper until none is ready, as a shard with `--exchange on` would (docs/spec/exchange.md).

One exchange of a cluster is carried out at once: what comes serves, what goes is Idle. The decisions that follow let
everything leave that the cluster needs no longer. Then the next one is searched. This module does not decide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from bigfleet.cli.engine.cases import HOST
from bigfleet.cli.plan.exchanges import ExchangeSearch
from bigfleet.cli.plan.planning import question_of
from bigfleet.cli.plan.settling import Settled, settle
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.compositions.targets import targets_of
from bigfleet.engine.decision import ActionKind
from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.states import MachineState

ROUNDS_MAX: Final = 1000
_FREE: Final = (MachineState.IDLE, MachineState.SPECULATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """A fleet at rest in which no exchange is ready."""

    settled: Settled
    #: What the clusters' machines cost at rest before the first exchange.
    cost_before_usd_per_hour: float
    #: (cluster, exchange), in the order in which they were carried out.
    carried_out: tuple[tuple[str, ExchangeProposal], ...]
    #: What each cluster could exchange now, and what it waits for; ids ascending.
    left: tuple[ClusterExchanges, ...]


def exchange_until_rest(settled: Settled, *, rounds_max: int = ROUNDS_MAX) -> Exchanged:
    """Return the fleet after every exchange that is ready; in each round at most one of a cluster.

    A round looks at the clusters that have exchanged in the one before, and at all of them when there is nothing left
    to do for these. Exchanges between clusters come when no cluster has one of its own. Raises RunFault if so many
    rounds do not suffice, or when the fleet does not come to rest in between.
    """
    before = settled.plan.before.serving_usd_per_hour
    search = ExchangeSearch()
    done: list[tuple[str, ExchangeProposal]] = []
    among: Set[str] | None = None
    for _ in range(rounds_max):
        found = search.exchanges_of(settled.plan, has_moves=False, among=among)
        carried = _carry_out(found, settled)
        if not carried.done and among is None:
            found = search.exchanges_of(settled.plan)
            carried = _carry_out(found, settled)
            if not carried.done:
                return Exchanged(
                    settled=settled, cost_before_usd_per_hour=before, carried_out=tuple(done), left=tuple(found)
                )
        done += carried.done
        among = {name for cluster, proposal in carried.done for name in (cluster, proposal.taker) if name} or None
        if among:
            settled = _at_rest_again(settled, carried, among)
    raise RunFault(f"--exchange on: no rest within {rounds_max} rounds of exchanges; report both files")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What was carried out at once."""

    done: list[tuple[str, ExchangeProposal]]
    #: All machines, as they are afterwards.
    machines: Mapping[MachineId, Machine]
    actions: Counter[ActionKind]


def _carry_out(found: Sequence[ClusterExchanges], settled: Settled) -> _Round:
    """Carry out the first proposal that is ready of each cluster."""
    machines = {machine_id: one.machine for machine_id, one in settled.plan.given.machines.items()}
    done: list[tuple[str, ExchangeProposal]] = []
    counts: Counter[ActionKind] = Counter()
    busy: set[str] = set()
    for one in found:
        proposal = next((each for each in one.proposals if each.waits_for is None), None)
        if proposal is None or busy & {one.cluster, proposal.taker}:
            continue
        changed = carried_out(machines, one.cluster, proposal, settled.plan.options.reserved)
        # What another one took in this round is not on offer any more.
        if changed is None:
            continue
        counts += _actions(machines, changed, proposal)
        machines |= changed
        busy |= {one.cluster, proposal.taker} - {""}
        done.append((one.cluster, proposal))
    return _Round(done=done, machines=machines, actions=counts)


def carried_out(
    machines: Mapping[MachineId, Machine],
    cluster: str,
    proposal: ExchangeProposal,
    reserved: Set[str] = frozenset(),
) -> dict[MachineId, Machine] | None:
    """Return the machines that an exchange of a cluster changes, as they are afterwards; None if too few are on offer.

    Idle machines come first, `reserved` ones never. What comes has the stamp of what goes: it serves the same rows.
    """
    stamp = machines[MachineId(proposal.machine_ids[0])].stamp._asdict()
    changed = {}
    for machine_id in map(MachineId, proposal.machine_ids):
        changed[machine_id] = replace(machines[machine_id].without_binding(), state=MachineState.IDLE, host=HOST)
    missing: Counter[ClassKey] = proposal.comes_by_class
    free = [one for one in machines.values() if one.state in _FREE and one.id not in reserved]
    for machine in sorted(free, key=lambda one: one.state is not MachineState.IDLE):
        if not +missing:
            break
        if missing[key := class_key(machine)] > 0:
            missing[key] -= 1
            serving = replace(machine, state=MachineState.CONFIGURED, host=HOST, cluster=ClusterId(cluster), **stamp)
            changed[machine.id] = serving
    if +missing:
        return None
    if proposal.taker_part is None:
        return changed
    then = carried_out({**machines, **changed}, proposal.taker, proposal.taker_part, reserved)
    return None if then is None else {**changed, **then}


def _actions(
    machines: Mapping[MachineId, Machine], changed: Mapping[MachineId, Machine], proposal: ExchangeProposal
) -> Counter[ActionKind]:
    """Return the actions that carry an exchange out."""
    counts: Counter[ActionKind] = Counter()
    part = proposal.taker_part
    counts[ActionKind.RECLAIM] = len(proposal.machine_ids) + (0 if part is None else len(part.machine_ids))
    for machine_id, machine in changed.items():
        if machine.state is MachineState.CONFIGURED:
            is_there = machines[machine_id].state is not MachineState.SPECULATIVE
            counts[ActionKind.BOOTSTRAP if is_there else ActionKind.PROVISION] += 1
    return counts


def _at_rest_again(settled: Settled, carried: _Round, exchanged: Set[str]) -> Settled:
    """Return the fleet at rest after exchanges, with everything that was done for it.

    A cluster that has exchanged is planned again: what its pods do not need leaves, and where machines have become
    cheaper, more slack may be worth its price.
    """
    plan, machines = settled.plan, carried.machines
    given = replace(
        plan.given,
        machines={
            machine_id: one
            if machines[machine_id] is one.machine
            else replace(one, machine=machines[machine_id], idle_since_seconds=None)
            for machine_id, one in plan.given.machines.items()
        },
    )
    asked = question_of(given)
    demand = [need for need in asked.demand if need.cluster in exchanged]
    settings = dict.fromkeys(exchanged, plan.given.settings)
    planned = targets_of(asked.snapshot, demand, asked.options, settings=settings)
    after = settle(given, targets={**plan.options.targets, **planned})
    actions = Counter(settled.actions) + carried.actions + Counter(after.actions)
    return replace(after, cycles=settled.cycles + 1 + after.cycles, actions=dict(actions))
