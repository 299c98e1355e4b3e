"""Checks the claims of a decision against the demand, without any code of the engine.

Everything is computed from the records: what a machine offers, what each claim takes, where it may stand.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from bigfleet.engine.decision import ActionKind, Decision, Options, RowResult
from bigfleet.model.machine import Machine
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator
from bigfleet.model.states import MachineState

SHARED = (MachineState.CONFIGURED, MachineState.CONFIGURING)


def violations(machines: Sequence[Machine], demand: Sequence[Need], options: Options, decision: Decision) -> list[str]:
    """Return one sentence for each claim or action that must not be."""
    by_id: dict[str, Machine] = {machine.id: machine for machine in machines}
    found = [*_actions(by_id, options, decision), *_results(demand, decision)]
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    owner: dict[str, str] = {}
    acquiring = (ActionKind.BOOTSTRAP, ActionKind.PROVISION)
    acquired = {str(a.machine_id): str(a.cluster) for a in decision.actions if a.kind in acquiring}
    for result in decision.rows:
        cluster = result.need.cluster
        for machine_id, taken in _taken(result):
            used[machine_id].update(taken)
            if owner.setdefault(machine_id, cluster) != cluster:
                found.append(f"{machine_id} is claimed by {owner[machine_id]} and {cluster}")
            machine = by_id[machine_id]
            if machine.state in SHARED:
                is_there = machine.cluster == cluster
            elif machine.state is MachineState.CREATING:
                is_there = machine.intended_cluster in ("", cluster)
            else:
                is_there = acquired.get(machine_id) == cluster
            if not is_there:
                found.append(f"{cluster} claims {machine_id}, which is {machine.state.label} and not its own")
            if machine_id in options.unjoined:
                found.append(f"{machine_id} has not joined and is claimed")
            found.extend(_profile(result.need, machine))
        found.extend(_limits(result))
        found.extend(_domains(result, by_id))
    for machine_id, taken in used.items():
        found.extend(_room(by_id[machine_id], owner[machine_id], taken, options))
    return found


def _taken(result: RowResult) -> Iterator[tuple[str, Mapping[str, int]]]:
    shapes = (*result.need.shapes, *result.need.waiting)
    for placement in result.placements:
        pods = {name: milli * placement.count for name, milli in shapes[placement.shape].resources.items()}
        yield placement.machine_id, {**pods, "pods": 1000 * placement.count}
    yield from result.shares


def _room(machine: Machine, cluster: str, taken: Mapping[str, int], options: Options) -> Iterator[str]:
    supply = dict(machine.supply)
    for overhead in options.overheads.get(cluster, ()):
        if all(r.holds(machine.attribute(r.key)) for r in overhead.requirements):
            for name, milli in overhead.resources.items():
                if name in supply:
                    supply[name] = max(0, supply[name] - milli)
    for name, milli in taken.items():
        if name == "pods" and name not in supply:
            continue
        if milli > supply.get(name, 0):
            yield f"{machine.id} has {name} {supply.get(name, 0)}, claims take {milli}"


def _profile(need: Need, machine: Machine) -> Iterator[str]:
    for requirement in need.profile.requirements:
        if not requirement.holds(machine.attribute(requirement.key)):
            yield f"{machine.id} does not hold {requirement} of {need.key}"
    if need.profile.interruption_bucket == 27 and machine.interruption_probability > 0:
        yield f"{machine.id} can be interrupted and hosts the pinned {need.key}"


def _limits(result: RowResult) -> Iterator[str]:
    shapes = (*result.need.shapes, *result.need.waiting)
    on: Counter[tuple[str, int]] = Counter()
    for placement in result.placements:
        on[(placement.machine_id, placement.shape)] += placement.count
        if placement.count <= 0:
            yield f"{result.need.key} claims {placement.count} pods on {placement.machine_id}"
    for (machine_id, index), count in on.items():
        limit = shapes[index].max_per_machine
        if limit and count > limit:
            yield f"{machine_id} hosts {count} pods of shape {index} of {result.need.key}, the limit is {limit}"


def _domains(result: RowResult, by_id: Mapping[str, Machine]) -> Iterator[str]:
    for requirement in result.need.profile.requirements:
        if requirement.operator is Operator.SAME:
            values = {by_id[machine_id].attribute(requirement.key) for machine_id, _ in _taken(result)}
            if len(values) > 1 and requirement.key == result.need.profile.same_key:
                yield f"the gang {result.need.key} stands in {sorted(map(str, values))}"
    spread = result.need.profile.strict_spread
    if spread is not None and result.need.shapes:
        counts: Counter[str] = Counter()
        for placement in result.placements:
            value = by_id[placement.machine_id].attribute(spread.topology_key)
            if value is None:
                yield f"{placement.machine_id} has no {spread.topology_key}, {result.need.key} is spread over it"
            else:
                counts[value] += placement.count
        if counts and max(counts.values()) - min(counts.values()) > spread.skew_max:
            yield f"{result.need.key} is spread {dict(counts)}, the skew is {spread.skew_max}"


def _results(demand: Sequence[Need], decision: Decision) -> Iterator[str]:
    if len(decision.rows) != len(demand):
        yield f"{len(demand)} rows, {len(decision.rows)} results"
    for need, result in zip(demand, decision.rows, strict=False):
        if result.need.key != need.key:
            yield f"{result.need.key} stands in the place of {need.key}"
        shapes = (*need.shapes, *need.waiting)
        placed: Counter[int] = Counter()
        for placement in result.placements:
            placed[placement.shape] += placement.count
        unplaced = dict(result.unplaced)
        aside = {i.shape for i in result.impossible}
        for index, shape in enumerate(shapes):
            expected = 0 if index in aside else shape.count - unplaced.get(index, 0)
            if placed[index] != expected:
                yield f"{need.key} places {placed[index]} pods of shape {index}, says {expected}"
        is_whole = all(placed[i] == shape.count for i, shape in enumerate(shapes))
        if shapes and result.satisfied != is_whole:
            yield f"{need.key} satisfied {result.satisfied}, all pods placed {is_whole}"
        if not shapes:
            held: Counter[str] = Counter()
            for _, amounts in result.shares:
                held.update(amounts)
            lacking = {n: milli - held[n] for n, milli in need.aggregate.items() if milli > held[n]}
            if dict(result.deficit) != lacking:
                yield f"{need.key} lacks {lacking}, says {dict(result.deficit)}"


def _actions(by_id: Mapping[str, Machine], options: Options, decision: Decision) -> Iterator[str]:
    counts = Counter(action.machine_id for action in decision.actions)
    yield from (f"{machine_id} has {count} actions" for machine_id, count in counts.items() if count > 1)
    claimed = {machine_id for result in decision.rows for machine_id, _ in _taken(result)}
    short = {result.need.key for result in decision.rows if not result.satisfied}
    starts = {
        ActionKind.BOOTSTRAP: MachineState.IDLE,
        ActionKind.PROVISION: MachineState.SPECULATIVE,
        ActionKind.RECLAIM: MachineState.CONFIGURED,
        ActionKind.PREEMPT: MachineState.CONFIGURED,
        ActionKind.DELETE: MachineState.IDLE,
    }
    for action in decision.actions:
        machine = by_id[action.machine_id]
        if machine.state is not starts[action.kind]:
            yield f"{action.kind.label} of {machine.id}, which is {machine.state.label}"
        if action.kind in (ActionKind.RECLAIM, ActionKind.DELETE) and machine.id in claimed:
            yield f"{action.kind.label} of {machine.id}, which is claimed"
        if action.kind is ActionKind.RECLAIM:
            if machine.cluster not in options.reported:
                yield f"{machine.id} is reclaimed from {machine.cluster}, which is silent"
            stamp = (machine.cluster, machine.assigned_need_fingerprint, machine.assigned_group)
            if stamp in short and machine.id not in options.unjoined:
                yield f"{machine.id} is reclaimed while its row is short"
        if action.machine_id in options.reserved and machine.state in (MachineState.IDLE, MachineState.SPECULATIVE):
            yield f"{machine.id} is reserved and has a {action.kind.label}"
        if action.kind is ActionKind.PREEMPT and machine.cluster in options.reported:
            for result in decision.rows:
                is_on_it = any(machine_id == machine.id for machine_id, _ in _taken(result))
                if is_on_it and result.need.profile.priority >= action.preemptor_priority:
                    priority = result.need.profile.priority
                    yield f"{machine.id} hosts priority {priority}, preempted for {action.preemptor_priority}"
