"""Checks liveness: what must hold within a bounded virtual time after the last fault (L1 to L8).

Checked when the world has come to rest, or when its time is over. The truth is the provider's disk and the pods of the
clusters; the shard is asked only for its verdict on them. This module must not help the world to converge.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from bigfleet.engine.decision import ActionKind, Decision, RowResult
from bigfleet.engine.folding import forms_of
from bigfleet.engine.targets import ClassKey, class_key
from bigfleet.model import labels, vector
from bigfleet.model.clock import NANOS_PER_SECOND
from bigfleet.model.ids import ShardId
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import Domain
from bigfleet.model.profile import Requirement
from bigfleet.model.states import TRANSITIONAL_STATES, MachineState
from bigfleet.provider.records.record import Record
from bigfleet.sim.observations import content_of, is_content
from bigfleet.sim.sites.cluster import ClusterSite
from bigfleet.sim.sites.ownership import owners
from bigfleet.sim.sites.shard import WatchedShard
from bigfleet.sim.world.world import World

S = MachineState
#: Nothing may happen for so long before the world counts as at rest: longer than the hold of an idle machine.
REST_SECONDS = 700.0
#: And for so long after it.
QUIET_SECONDS = 200.0
#: From healing to rest at the latest: holds of half an hour, doubled once, and what follows from them.
REST_SECONDS_MAX = 9_000.0
_LOOK_SECONDS = 10.0
#: A machine that failed may stay so where its provider cannot know what runs on it (docs/spec/provider.md §14).
FAILED_SECONDS_MAX = 1_200.0

#: From healing on a machine may be without an owner for so many report cycles: adoptions that failed three times are
#: tried again every ten.
NOBODYS_REPORT_CYCLES_MAX = 30

Check = Callable[[World, WatchedShard], Iterator[str]]


async def come_to_rest(world: World, *, rest_seconds: float = REST_SECONDS) -> bool:
    """Wait until nothing has happened for so long; False when the time for it is over."""
    until_seconds = world.clock.monotonic_seconds() + REST_SECONDS_MAX
    quiet_since_seconds = world.clock.monotonic_seconds()
    seen = (-1, -1)
    alone_since_seconds: dict[str, float] = {}
    while world.clock.monotonic_seconds() < until_seconds and not world.observations.violations:
        await world.clock.sleep(_LOOK_SECONDS)
        world.sample()
        for text in nobodys_for_long(world, alone_since_seconds):
            world.observations.breach("S5", text)
        # A reclaim that would leave pods without a place changes nothing, and is tried again from time to time.
        acted = sum(world.observations.actions.values()) - len(world.observations.stranded)
        stirred = (acted, world.observations.moves.changes)
        if stirred != seen or not _is_at_rest(world):
            seen, quiet_since_seconds = stirred, world.clock.monotonic_seconds()
        elif world.clock.monotonic_seconds() - quiet_since_seconds >= rest_seconds:
            return True
    return False


def _is_at_rest(world: World) -> bool:
    return not unrest(world)


def unrest(world: World) -> str:
    """Return what keeps the world from its rest; empty for nothing."""
    shards = [site.shard for site in world.shards if site.shard is not None]
    if len(shards) < len(world.shards) or not all(shard.is_ready and shard.view.cycle for shard in shards):
        return "a shard is not ready"
    records = sorted(world.provider.store.records.values(), key=lambda record: record.id)
    moving = [f"{each.id} is {each.state.label}" for each in records if _is_moving(world, each)]
    held = [f"{machine_id} is held" for shard in shards for machine_id in sorted(shard.machine_backoff.held())]
    in_flight = [
        f"{machine_id} has an action under way" for shard in shards for machine_id in sorted(shard.ledger.in_flight())
    ]
    between = [
        f"{machine_id} is between {name} and another"
        for name, ownership in world.observations.moves.ownerships.items()
        for machine_id in sorted((*ownership.released, *ownership.reservations))
    ]
    return ", ".join([*moving, *held, *in_flight, *_awaiting_reclaim(world, shards), *between][:5])


def _awaiting_reclaim(world: World, shards: Iterable[WatchedShard]) -> list[str]:
    """Return a sentence for each machine that is to be reclaimed when its delay is over, and that its pods could leave.

    A reclaim that is refused makes another machine excess that is like it, long after the last action. So all that are
    alike are looked at: with none that its pods could leave, every one of them will be refused, in turn.
    """
    decisions = ((shard, shard.last_decision) for shard in shards)
    awaited = [
        action.machine_id
        for shard, decided in decisions
        if decided is not None
        for action in decided.actions
        if action.kind is ActionKind.RECLAIM and action.machine_id not in shard.fit_holds.held()
    ]
    serving = {r.machine.id: r.machine for r in world.provider.store.records.values() if r.state is S.CONFIGURED}
    kind_of = {machine_id: (machine.cluster, class_key(machine)) for machine_id, machine in serving.items()}
    leaving = {kind_of[each] for each in awaited if each in serving}
    could = {kind for each, kind in kind_of.items() if kind in leaving and not _pods_fit_nowhere(world, serving[each])}
    return [f"{each} is to be reclaimed" for each in awaited if each not in serving or kind_of[each] in could]


def _pods_fit_nowhere(world: World, machine: Machine) -> bool:
    """Return whether pods on the machine's node have no place on the other nodes of its cluster."""
    return any(site.pods.do_not_fit(machine.id) for site in world.clusters if site.name == machine.cluster)


def _is_moving(world: World, record: Record) -> bool:
    if record.state is not S.FAILED:
        return record.state in TRANSITIONAL_STATES
    since_unix_nanos = max(record.state_since_unix_nanos, world.healed_unix_nanos)
    return world.clock.unix_nanos() - since_unix_nanos < FAILED_SECONDS_MAX * NANOS_PER_SECOND


def last_words(world: World) -> Iterator[tuple[str, str]]:
    """Yield (invariant, sentence) for everything that is not as it must be at the end."""
    for site in world.shards:
        shard = site.shard
        if shard is None or not shard.is_ready:
            yield "L5", f"{site.name} is not ready"
            return
        for name, check in CHECKS:
            for text in check(world, shard):
                yield name, text
    for text in every_machine_has_one_owner(world):
        yield "L5", text


def every_machine_has_one_owner(world: World) -> Iterator[str]:
    """After healing every machine has exactly one owner, but for what lies free in a domain that is being left."""
    for record, found in _unclear(world):
        yield f"{record.id}, {record.state.label}, belongs to {', '.join(found) or 'no shard'}: {_rows(world, record)}"


def nobodys_for_long(world: World, since_seconds: dict[str, float]) -> Iterator[str]:
    """Machines are conserved: in a handover one has no owner for a bounded time, while nothing fails."""
    now_seconds, bound_seconds = world.clock.monotonic_seconds(), NOBODYS_REPORT_CYCLES_MAX * world.plan.report_seconds
    alone = {record.id: record for record, found in _unclear(world) if not found}
    for machine_id in since_seconds.keys() - alone.keys():
        del since_seconds[machine_id]
    for machine_id, record in alone.items():
        since = since_seconds.setdefault(machine_id, now_seconds)
        if now_seconds - since > bound_seconds:
            yield f"{machine_id} has had no owner for {now_seconds - since:.0f} s: {_rows(world, record)}"


def _unclear(world: World) -> Iterator[tuple[Record, list[ShardId]]]:
    """Yield the machines without exactly one owner, with those who own them."""
    ownerships = world.observations.moves.ownerships
    leaving = [(name, domain) for name, ownership in ownerships.items() for domain in ownership.owned.leaving]
    left = [domain for name, domain in leaving if _serves_in(world, name, domain)]
    for record in sorted(world.provider.store.records.values(), key=lambda record: record.id) if ownerships else ():
        found = owners(ownerships, record.machine, record.metadata.get(labels.ASSIGNED_SHARD, ""))
        # A shard that leaves acquires nothing there, and another must wait until it serves no cluster from there.
        is_left = not found and any(record.machine.attribute(key) == value for key, value in left)
        if len(found) != 1 and not is_left:
            yield record, found


def _rows(world: World, record: Record) -> str:
    rows = {
        name: ownership.owned.rows.get(record.machine.id)
        for name, ownership in world.observations.moves.ownerships.items()
    }
    return ", ".join(f"{name} says {row.kind.value if row is not None else 'nothing'}" for name, row in rows.items())


def _serves_in(world: World, shard_id: ShardId, domain: Domain) -> bool:
    """Return whether machines of a domain are bound by a shard."""
    return any(
        record.machine.cluster
        and record.metadata.get(labels.ASSIGNED_SHARD, "") == shard_id
        and record.machine.attribute(domain.topology_key) == domain.topology_value
        for record in world.provider.store.records.values()
    )


def _of_shard(world: World, shard: WatchedShard) -> list[Record]:
    """Return the provider's records of the machines that are a shard's, by id."""
    ownership = world.observations.moves.ownerships.get(shard.shard_id)
    records = sorted(world.provider.store.records.values(), key=lambda record: record.id)
    return [
        record
        for record in records
        if ownership is None
        or ownership.owns(shard.shard_id, record.machine, record.metadata.get(labels.ASSIGNED_SHARD, ""))
    ]


def _clusters_of(world: World, shard: WatchedShard) -> list[ClusterSite]:
    return [site for site in world.clusters if site.shard.name == shard.shard_id]


def every_machine_has_its_owner(world: World, shard: WatchedShard) -> Iterator[str]:
    """After healing every machine has exactly one owner, who knows it as it is."""
    truth = {record.id: record.machine for record in _of_shard(world, shard)}
    for machine_id in sorted(truth.keys() ^ set(shard.inventory.ids)):
        yield f"{machine_id} is known to the {'provider' if machine_id in truth else 'shard'} alone"
    for known in shard.inventory:
        shown = truth.get(known.id)
        if shown is not None and (shown.state, shown.cluster) != (known.state, known.cluster):
            yield (
                f"{known.id}: the provider says {shown.state.label} {shown.cluster!r},"
                f" the shard {known.state.label} {known.cluster!r}"
            )


def clusters_know_their_machines(world: World, shard: WatchedShard) -> Iterator[str]:
    """After healing every cluster knows exactly the machines that are bound to it."""
    bound: defaultdict[str, set[str]] = defaultdict(set)
    for record in world.provider.store.records.values():
        if record.state is S.CONFIGURED:
            bound[record.machine.cluster].add(record.id)
    for site in _clusters_of(world, shard):
        believed = site.believed()
        for machine_id in sorted(bound[site.name] ^ believed):
            who = "the cluster" if machine_id in believed else "the provider"
            yield f"{machine_id} is bound to {site.name} for {who} alone"


def nothing_is_on_its_way(world: World, shard: WatchedShard) -> Iterator[str]:
    """No machine stays in a transitional state beyond its bound without being surfaced."""
    for record in _of_shard(world, shard):
        if record.state in TRANSITIONAL_STATES and not shard.stuck.is_stuck(record.machine.id):
            yield f"{record.id} is {record.state.label} at the provider"


def every_hold_ends(world: World, shard: WatchedShard) -> Iterator[str]:
    """Every hold, quarantine, reservation and cooldown ends."""
    for machine_id in sorted(shard.machine_backoff.held()):
        yield f"{machine_id} is held"
    for site in _clusters_of(world, shard):
        if shard.intake.is_quarantined(site.name):
            yield f"a roll-up of {site.name} is quarantined"
    for row in sorted(shard.demand_backoff.backed_off()):
        yield f"the row {row} is backed off"
    for machine_id in sorted(shard.ledger.in_flight()):
        yield f"{machine_id} has an action in flight"
    ownership = world.observations.moves.ownerships.get(shard.shard_id)
    for machine_id in sorted(ownership.reservations) if ownership is not None else ():
        yield f"{machine_id} is reserved for another shard"
    for machine_id in sorted(shard.ownership.handover.cooling) if shard.ownership is not None else ():
        yield f"{machine_id} may not be given on yet"


def the_demand_in_force_is_true(world: World, shard: WatchedShard) -> Iterator[str]:
    """Satisfiable demand is bound: first of all the shard has to know what is wanted."""
    for site in _clusters_of(world, shard):
        if not is_content(shard.intake.table.rows_of(site.name), content_of(site.truth())):
            yield f"{site.name}: the demand in force is not what the cluster wants"


def satisfiable_demand_is_bound(world: World, shard: WatchedShard) -> Iterator[str]:
    """Satisfiable demand is bound within N cycles."""
    decided = shard.last_decision
    if decided is None:
        yield "nothing was decided"
        return
    truth = [record.machine for record in _of_shard(world, shard)]
    free = [machine for machine in truth if machine.state in (S.IDLE, S.SPECULATIVE)]
    supplied: defaultdict[str, vector.Vector] = defaultdict(lambda: vector.ZERO)
    for machine in truth:
        if machine.state is S.CONFIGURED:
            supplied[machine.cluster] = vector.add(supplied[machine.cluster], machine.supply)
    wanted: defaultdict[str, vector.Vector] = defaultdict(lambda: vector.ZERO)
    for row in decided.rows:
        need = row.need
        if row.satisfied:
            wanted[need.cluster] = vector.add(wanted[need.cluster], need.aggregate)
        elif need.profile.same_key is None:
            shapes = [(*need.shapes, *need.waiting)[index].resources for index, _count in row.unplaced]
            for least in shapes if need.shapes else [need.min_unit]:
                could = [machine.id for machine in free if _serves(machine, need.profile.requirements, least)]
                if could:
                    yield f"the row {need.key} lacks {dict(row.deficit)}, and {could[0]} is free"
        elif not row.claimed:
            yield from _free_domain(need.profile.same_key, free, row)
    for cluster, amount in wanted.items():
        if any(supplied[cluster].get(name, 0) < least for name, least in amount.items()):
            yield f"{cluster} got the report that {dict(amount)} is bound, and has {dict(supplied[cluster])}"


def _free_domain(key: str, free: list[Machine], row: RowResult) -> Iterator[str]:
    need = row.need
    domains: defaultdict[str, vector.Vector] = defaultdict(lambda: vector.ZERO)
    for machine in free:
        domain = machine.attribute(key)
        if domain is not None and _serves(machine, need.profile.requirements, need.min_unit):
            domains[domain] = vector.add(domains[domain], machine.supply)
    for domain, supply in sorted(domains.items()):
        if all(supply.get(name, 0) >= least for name, least in need.aggregate.items()):
            yield f"the gang {need.key} holds nothing, and the domain {domain} is free and large enough"


def _serves(machine: Machine, requirements: Iterable[Requirement], min_unit: vector.Vector) -> bool:
    fits = all(machine.supply.get(name, 0) >= least for name, least in min_unit.items())
    return fits and all(each.holds(machine.attribute(each.key)) for each in requirements)


def excess_is_reclaimed(world: World, shard: WatchedShard) -> Iterator[str]:
    """Excess is reclaimed: at the end a row of its cluster claims every bound machine, or is short and had it bound.

    A machine whose pods fit nowhere else is not excess, nor one that the cluster's target composition has.
    """
    decided = shard.last_decision
    if decided is None:
        return
    claimed = {machine_id: row.need.cluster for row in decided.rows for machine_id in row.claimed}
    short = {need.key for row in decided.rows if not row.satisfied for need in forms_of(row)}
    wanted = _counts_of_targets(decided)
    serving = [record for record in _of_shard(world, shard) if record.state is S.CONFIGURED]
    wanted.subtract((r.machine.cluster, class_key(r.machine)) for r in serving if r.machine.id in claimed)
    for record in serving:
        machine, metadata = record.machine, record.metadata
        if claimed.get(machine.id) == machine.cluster:
            continue
        kind = (machine.cluster, class_key(machine))
        if wanted[kind] > 0:
            wanted[kind] -= 1
            continue
        stamp = (metadata.get(labels.ASSIGNED_NEED_FINGERPRINT, ""), metadata.get(labels.ASSIGNED_GROUP, ""))
        is_held = machine.id in shard.fit_holds.held() or _pods_fit_nowhere(world, machine)
        if (machine.cluster, *stamp) not in short and not is_held:
            yield f"{record.id} serves {record.machine.cluster}, and no row of it claims the machine"


def _counts_of_targets(decided: Decision) -> Counter[tuple[str, ClassKey]]:
    """Return how many machines of each class each cluster should hold by its target composition."""
    targets = decided.basis.options.targets if decided.basis is not None else {}
    return Counter({(cluster, kind): n for cluster, target in targets.items() for kind, n in target.counts.items()})


def pods_of_satisfied_rows_run(world: World, shard: WatchedShard) -> Iterator[str]:
    """At rest every pod of a row that is called met runs, but for those that no machine is good enough for.

    Pods of gangs and of strict spreads may have been given up: the scheduler has left no room for the rest in the place
    where a gang began, or in a domain that a spread lacks.
    """
    decided = shard.last_decision
    if decided is None:
        return
    met = {member.key for row in decided.rows if row.satisfied for member in row.members}
    for site in _clusters_of(world, shard):
        waiting = site.cluster.waiting if site.cluster is not None else None
        for pod in site.pods.waiting:
            template = pod.template
            needs_a_domain = template.topology_key or template.profile.strict_spread is not None
            is_given_up = needs_a_domain and waiting is not None and waiting.is_given_up(pod)
            if (site.name, *template.row) in met and not template.is_unschedulable and not is_given_up:
                yield f"{pod.id} of {site.name} waits, and its row is called met"


def hopeless_pods_harm_no_other_pod(world: World, shard: WatchedShard) -> Iterator[str]:
    """At rest no pod waits beside a free machine that could host it, regardless of the other pods of its row."""
    free = [record.machine for record in _of_shard(world, shard) if record.machine.state in (S.IDLE, S.SPECULATIVE)]
    for site in _clusters_of(world, shard):
        for template in {pod.template: None for pod in site.pods.waiting}:
            if template.is_unschedulable or template.topology_key:
                continue
            could = [machine.id for machine in free if site.pods.would_run_on(template, machine)]
            if could:
                yield f"a pod of {template.name} of {site.name} waits, and {could[0]} is free"


CHECKS: tuple[tuple[str, Check], ...] = (
    ("L6", nothing_is_on_its_way),
    ("L4", every_hold_ends),
    ("L5", every_machine_has_its_owner),
    ("L5", clusters_know_their_machines),
    ("L1", the_demand_in_force_is_true),
    ("L1", satisfiable_demand_is_bound),
    ("L3", excess_is_reclaimed),
    ("L7", pods_of_satisfied_rows_run),
    ("L8", hopeless_pods_harm_no_other_pod),
)
#: L2 is looked at while the world runs: docstring and sentence are here with the others.
L2_SENTENCE = "At constant demand and supply no action is taken after convergence."
