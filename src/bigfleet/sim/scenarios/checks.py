"""Checks what must hold in every cycle of every scenario: one function each, whose docstring is the sentence.

docs/spec/simulation.md, "Invariants". A check looks at the world from outside: at the provider's records, the nodes of
the clusters and the decisions, not at what a shard says of itself. It yields what is broken and must never repair it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bigfleet.engine.decision import ActionKind
from bigfleet.model.states import MachineState
from bigfleet.provider.records.record import Record
from bigfleet.sim.pods.evictions import Cause
from bigfleet.sim.scenarios.world import ClosedWorld, Step

Records = Mapping[str, Record]


# ---- of the fleet, at the end of a cycle -------------------------------------------------------------------------


def one_cluster(world: ClosedWorld, records: Records) -> Iterator[str]:
    """S1: a machine is bound to at most one cluster."""
    homes: dict[str, str] = {}
    for cluster, operator in world.operators.items():
        for machine_id in operator.pods.nodes:
            if machine_id in homes:
                yield f"S1: {machine_id} is a node of {homes[machine_id]} and of {cluster}"
            homes[machine_id] = cluster
    for machine_id, record in records.items():
        home = homes.get(machine_id, "")
        if record.state is MachineState.CONFIGURED and home != record.machine.cluster:
            yield f"S1: {machine_id} is bound to {record.machine.cluster} and is a node of {home or 'no cluster'}"


def no_cluster_without_host(world: ClosedWorld, records: Records) -> Iterator[str]:
    """S4: no machine without a host has a cluster."""
    for machine_id, record in records.items():
        if record.machine.cluster and not record.machine.host.is_present:
            yield f"S4: {machine_id} has the cluster {record.machine.cluster} and no host"
    for machine_id in world.substrate.clusters.keys() - world.substrate.hosts.keys():
        yield f"S4: {machine_id} is a node without a host"


def conserved(world: ClosedWorld, records: Records) -> Iterator[str]:
    """S5: machines are conserved, and none has two owners."""
    for machine_id in world.stock.keys() ^ records.keys():
        yield f"S5: {machine_id} {'appeared' if machine_id in records else 'is gone'}"
    if len(world.homes) > 1:
        for machine_id, record in records.items():
            owners = world.owners(record)
            if len(owners) > 1:
                yield f"S5: {machine_id} belongs to {' and to '.join(owners)}"


def divergence(world: ClosedWorld, records: Records) -> Iterator[str]:
    """S18: the incremental decision equals the full one."""
    for process in world.processes:
        diverged = process.shard.metrics.engine_divergences._value.get()
        if diverged:
            yield f"S18: {diverged:g} decisions of {process.id} differ from the full pass"


def failed_cycles(world: ClosedWorld, records: Records) -> Iterator[str]:
    """No cycle ends in an error."""
    for process in world.processes:
        failures = process.shard.metrics.cycle_failures._value.get()
        if failures:
            yield f"{failures:g} cycles of {process.id} failed"


def no_pod_left_waiting(world: ClosedWorld, records: Records) -> Iterator[str]:
    """S22: a voluntary reclaim leaves no pod pending that ran before."""
    for operator in world.operators.values():
        for eviction in operator.evictions:
            is_new = eviction.at_seconds >= world.began_seconds
            if is_new and eviction.cause is Cause.RECLAIMED and eviction.left_waiting and eviction.without_room:
                yield f"S22: {eviction.machine_id} is reclaimed, and {eviction.left_waiting} more pods wait"


AT_REST = (one_cluster, no_cluster_without_host, conserved, divergence, failed_cycles, no_pod_left_waiting)


# ---- of a decision, before it is carried out ---------------------------------------------------------------------


def one_domain(world: ClosedWorld, step: Step) -> Iterator[str]:
    """S6: a gang's machines are in one domain."""
    decision = step.report.decision
    for row in decision.rows if decision is not None else ():
        key = row.need.profile.same_key
        if key is None:
            continue
        values = {world.stock[machine_id].slot.labels.get(key, "") for machine_id in row.claimed}
        if len(values) > 1:
            yield f"S6: {row.need.cluster} {row.need.group!r} holds machines in {', '.join(sorted(values))}"


def lower_victims(world: ClosedWorld, step: Step) -> Iterator[str]:
    """S7: a victim's priority is strictly lower than its preemptor's."""
    decision = step.report.decision
    if decision is None:
        return
    claims = {(machine_id, row.need.profile.priority) for row in decision.rows for machine_id in row.claimed}
    for action in decision.actions:
        if action.kind is not ActionKind.PREEMPT:
            continue
        higher = [p for machine_id, p in claims if machine_id == action.machine_id and p >= action.preemptor_priority]
        if higher:
            yield f"S7: {action.machine_id} of priority {max(higher)} for {action.preemptor_priority}"


def only_heard(world: ClosedWorld, step: Step) -> Iterator[str]:
    """S9: nothing is reclaimed from a cluster that has not reported since the shard started."""
    decision = step.report.decision
    for action in decision.actions if decision is not None else ():
        if action.kind is ActionKind.RECLAIM and action.cluster not in step.process.traffic.heard:
            yield f"S9: {action.machine_id} is reclaimed from {action.cluster}, of which nothing was heard"


def never_fixed(world: ClosedWorld, step: Step) -> Iterator[str]:
    """S16: fixed capacity is never deleted."""
    decision = step.report.decision
    for action in decision.actions if decision is not None else ():
        if action.kind is ActionKind.DELETE and world.stock[action.machine_id].slot.fixed:
            yield f"S16: {action.machine_id} is fixed capacity"


ON_DECISION = (one_domain, lower_victims, only_heard, never_fixed)


# ---- of what was carried out -------------------------------------------------------------------------------------


def capped(reclaims: Counter[str], configured: Mapping[str, int], fraction: float) -> Iterator[str]:
    """S8: reclaims per cluster per cycle never exceed the cap."""
    for cluster, count in sorted(reclaims.items()):
        cap = max(1, int(fraction * configured.get(cluster, 0)))
        if fraction > 0 and count > cap:
            yield f"S8: {count} reclaims of {cluster} in one cycle, the cap is {cap}"


def recorded(process: str, calls: int, records: int) -> Iterator[str]:
    """S14: every mutating call has exactly one audit record."""
    if calls != records:
        yield f"S14: {process} made {calls} mutating calls and wrote {records} records of them"


def unmoved(journal: Sequence[str], alone: Sequence[str]) -> Iterator[str]:
    """S12: with the coordinator gone, no shard's decisions differ from those of a shard that never had one."""
    for line, other in zip(journal, alone, strict=True):
        if line != other:
            yield f"S12: with a coordinator {line!r}, without one {other!r}"
            return
