"""Acquires machines for rows that are short: the second half of Phase 1.

A machine is chosen for what it would host of the row and of the lower rows of its cluster. Where the cluster has a
target composition, machines of its classes are taken first. A row that is parked, or a gang without a domain,
acquires nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import repeat
from operator import attrgetter, gt
from typing import Final

from bigfleet.engine.shapes.choice import OfferChoice, Prices, choose, reference_prices, repetitions
from bigfleet.engine.shapes.credit import is_credited_without
from bigfleet.engine.shapes.fleet import ChoiceNote, DecisionState, sort_hosts
from bigfleet.engine.shapes.following import acquire_as_planned, drop_surplus, keep_spread, missing_of_target
from bigfleet.engine.shapes.gangs import choose_again
from bigfleet.engine.shapes.hosting import (
    capacity,
    clear_row,
    clear_rows,
    fitting,
    may_host,
    place,
    place_more,
    place_row,
    places_of,
    put_back,
    spread_counts,
    with_room,
)
from bigfleet.engine.shapes.repack import (
    SEARCHED_HOSTS_MAX,
    displace,
    pack_without,
    repack,
    restore,
    restore_precedence,
    save,
)
from bigfleet.engine.shapes.spread_domains import empty_domains, open_offers, scarce_domains, unplaced
from bigfleet.engine.shapes.state import ClusterState, HostState, OfferState, PodGroup, RowState
from bigfleet.engine.targets import class_key
from bigfleet.model.machine import Machine
from bigfleet.model.profile import TopologySpread
from bigfleet.model.states import CapacityType, MachineState

#: Times that a cluster is credited and acquires again within one decision.
SETTLING_ROUNDS_MAX: Final = 4
#: Most short rows that are given machines of other clusters, and most machines that are considered.
HANDED_OVER_MAX: Final = 128
#: Most attempts to move pods of higher rows off such a machine.
MOVES_MAX: Final = 32


def acquire(fleet: DecisionState) -> None:
    """Acquire for every short row in processing order, then trim each cluster and complete its target."""
    prices = {
        c.id: _prices(c, fleet)
        for c in fleet.clusters.values()
        if not c.is_credited and any(row.has_left for row in c.rows)
    }
    # What gangs counted on only chose the domains of others.
    for offer in fleet.offers:
        offer.earmarked = 0
    for row in fleet.rows:
        if row.has_left and row.may_acquire:
            _acquire(row, fleet, prices[row.cluster.id])
    lacked = {row: _lacks(row) for row in fleet.rows if row.has_left}
    # Nothing is acquired for the others.
    clusters = [c for c in fleet.clusters.values() if not c.is_credited or c.id in fleet.options.targets]
    clusters.sort(key=lambda c: c.id)
    for cluster in clusters:
        repack(cluster, fleet)
        _search_offers(cluster, fleet)
        if cluster.id not in fleet.options.targets:
            _drop_unnecessary(cluster, fleet)
            _settle(cluster, fleet, prices.get(cluster.id))
    late: set[RowState] = set()
    for cluster in clusters:
        _complete_target(cluster, fleet)
        repack(cluster, fleet)
        if _replace_displaced(cluster, fleet, prices.get(cluster.id)):
            late.update(row for row in cluster.rows if row.has_left)
        _use_what_is_free(cluster)
        trimmed = [row for row in cluster.rows if keep_spread(row)]
        if trimmed:
            _use_what_is_free(cluster)
        _drop_beyond_target(cluster, fleet)
        _give_back_unclaimed(cluster, fleet)
    late.update(row for row in fleet.rows if row.has_left and any(map(gt, _lacks(row), lacked.get(row, repeat(0)))))
    yielding = _give_slack_back(clusters, fleet, prices)
    if yielding:
        _take_what_was_given_back(clusters, fleet, prices)
    _hand_over(clusters, late, fleet, prices)
    _take_what_was_given_back(clusters, fleet, prices)
    for cluster in yielding:
        _complete_target(cluster, fleet)
    for row in fleet.rows:
        row.is_short = row.has_left or bool(row.impossible)


def _lacks(row: RowState) -> list[int]:
    """Return how many pods of each group have no place."""
    return [group.left for group in row.groups]


def _replace_displaced(cluster: ClusterState, fleet: DecisionState, prices: Prices | None) -> bool:
    """Take back for higher rows what the claims of a target gave to lower ones, and acquire; return whether it did."""
    if prices is None or not restore_precedence(cluster, fleet):
        return False
    for row in cluster.rows:
        if row.has_left and row.may_acquire:
            _acquire(row, fleet, prices)
    return True


def _give_slack_back(
    clusters: Sequence[ClusterState], fleet: DecisionState, prices: Mapping[str, Prices]
) -> list[ClusterState]:
    """Give back what was acquired to complete a target if a short row of another cluster could use it.

    The row was displaced after its turn. Returns the clusters that lack machines of their target then.
    """
    short = [row for row in fleet.rows if row.has_left and row.may_acquire and row.cluster.id in prices]
    yielding = []
    for cluster in clusters if short else ():
        others = [row for row in short if row.cluster is not cluster]
        slack = [host for host in cluster.acquired if host.is_target and not host.is_claimed]
        wanted = [host for host in slack if any(_could_host(row, host, fleet) for row in others)]
        for host in wanted:
            _give_back(host, cluster)
        if wanted:
            yielding.append(cluster)
    return yielding


def _hand_over(
    clusters: Sequence[ClusterState], late: Set[RowState], fleet: DecisionState, prices: Mapping[str, Prices]
) -> None:
    """Give short rows machines that rows of other clusters acquired and that effectively serve lower rows.

    A higher row acquired such a machine, and it hosts only lower rows, or its pods of higher rows fit where the plan
    has lower rows. Or a lower row acquired it, and the short row was displaced after its turn (`late`). Without this
    the short row preempts it when it is Configured, and the other cluster acquires it again in the next cycle.
    """
    acquired = [
        (host, cluster, fleet.notes[host.machine.id].row)
        for cluster in clusters
        for host in cluster.acquired
        if (cluster.planned or late) and host.machine.id in fleet.notes
    ][:HANDED_OVER_MAX]
    first = min((acquirer.rank for _, cluster, acquirer in acquired if cluster.planned), default=len(fleet.rows))
    short = [
        row
        for row in fleet.rows
        if (row in late or row.rank >= first) and row.has_left and row.may_acquire and row.cluster.id in prices
    ]
    moves = 0
    affected: set[ClusterState] = set()
    for row in short[:HANDED_OVER_MAX]:
        for host, cluster, acquirer in acquired:
            may_get_it = cluster.planned if acquirer.rank <= row.rank else row in late
            if not row.has_left or cluster is row.cluster or not may_get_it:
                continue
            # A gang that lost another machine may have given this one back.
            is_there = host in cluster.acquired and host.is_claimed
            if not is_there or not _could_host(row, host, fleet):
                continue
            above = sorted([other for other in host.rows() if other.rank < row.rank], key=attrgetter("rank"))
            moves += bool(above)
            if above and (moves > MOVES_MAX or not _move_to_lower(above, host, row.rank, fleet)):
                continue
            affected.add(cluster)
            clear_rows(host.rows(), [host])
            fleet.notes.pop(host.machine.id, None)
            _give_back(host, cluster)
            _acquire(row, fleet, prices[row.cluster.id])
    # Others may use what the row that a machine was given back for could not.
    for row in fleet.rows if affected else ():
        is_concerned = row.cluster in affected or row in late
        if is_concerned and row.has_left and row.may_acquire and row.cluster.id in prices:
            _acquire(row, fleet, prices[row.cluster.id])
    for cluster in clusters if affected else ():
        _give_back_unclaimed(cluster, fleet)


def _take_what_was_given_back(
    clusters: Sequence[ClusterState], fleet: DecisionState, prices: Mapping[str, Prices]
) -> None:
    """Let short rows acquire once more if a machine that could host a pod of them was given back after their turn."""
    offers = [offer for offer in fleet.offers if offer.has_returned]
    changed = set()
    for row in fleet.rows if offers else ():
        if not row.has_left or not row.may_acquire or row.cluster.id not in prices:
            continue
        if any(offer.has_returned and _could_acquire(row, offer, fleet) for offer in offers):
            _acquire(row, fleet, prices[row.cluster.id])
            changed.add(row.cluster)
    for cluster in clusters:
        if cluster in changed:
            _use_what_is_free(cluster)
            _give_back_unclaimed(cluster, fleet)


def _move_to_lower(rows: Sequence[RowState], host: HostState, rank: int, fleet: DecisionState) -> bool:
    """Move pods of some rows from a machine to room that rows of their cluster below `rank` use.

    Return whether all of them moved, to where the next decision places them, too; otherwise nothing changes.
    """
    if any(row.same_key is not None or row.spread is not None or row.divisible is not None for row in rows):
        return False
    cluster = rows[0].cluster
    before, others = save(cluster), [other for other in cluster.hosts if other is not host]
    left = [[group.left for group in row.groups] for row in rows]
    clear_rows(rows, [host])
    for row in rows:
        place_row(row, others)
        displace(row, others, below=rank)
    is_moved = [[group.left for group in row.groups] for row in rows] == left
    if is_moved and is_credited_without(host, cluster, fleet, above=rank):
        return True
    restore(cluster, before)
    return False


def _could_host(row: RowState, host: HostState, fleet: DecisionState) -> bool:
    """Return whether the machine, empty, could host something that the row has left."""
    return _could_use(row, host.machine, host.shape, fleet)


def _could_acquire(row: RowState, offer: OfferState, fleet: DecisionState) -> bool:
    """Return whether a machine of the offer could host something that the row has left."""
    return _could_use(row, offer.example, offer.shape, fleet)


def _could_use(row: RowState, machine: Machine, shape: int, fleet: DecisionState) -> bool:
    if not row.may_use(machine, shape):
        return False
    room = fleet.total(row.cluster.id, shape)
    return row.divisible is not None or any(fitting(room, group.request, 1) for group in row.groups if group.left)


def _use_what_is_free(cluster: ClusterState) -> None:
    """Place what rows have left on what the cluster has now.

    Lower rows may have acquired machines with room for a higher gang, or a domain that a spread lacked.
    """
    for row in cluster.rows:
        if row.matching and row.has_left:
            place_more(row, cluster.hosts)


def _give_back_unclaimed(cluster: ClusterState, fleet: DecisionState) -> None:
    """Give back what was acquired and is neither claimed nor in the target: it would be excess at once.

    So is what a target has for a gang that then found no domain, if no other row could use it.
    """
    drop_surplus(cluster, fleet)
    for host in list(cluster.acquired):
        if not host.is_claimed and not (host.is_target and _is_wanted(host.machine, host.shape, cluster)):
            _give_back(host, cluster)


def _is_wanted(machine: Machine, shape: int, cluster: ClusterState) -> bool:
    """Return whether the machine could be acquired for a row of the cluster."""
    return any(row.may_acquire and row.may_use(machine, shape) for row in cluster.rows)


def _prices(cluster: ClusterState, fleet: DecisionState) -> Prices:
    of_pods = fleet.pod_prices_in(cluster.id)
    return reference_prices(cluster.rows, of_pods, fleet.free_at_first(), fleet.dimensions.pods)


def _search_offers(cluster: ClusterState, fleet: DecisionState) -> None:
    """Look for machines that host what has no place yet when lower rows hold what only they could use.

    A higher row that took the only machine of a kind may run elsewhere. Small clusters are searched over what they hold
    and what is left on offer together.
    """
    rows = [row for row in cluster.rows if row.may_acquire]
    if not any(row.has_left for row in rows) or len(cluster.hosts) >= SEARCHED_HOSTS_MAX:
        return
    usable = [o for o in fleet.offers if o.available and any(row.may_use(o.example, o.shape) for row in rows)]
    usable.sort(key=lambda o: (o.example.price_usd_per_hour, o.peek().id))
    added: list[HostState] = []
    for offer in usable:
        while offer.available and len(cluster.hosts) < SEARCHED_HOSTS_MAX:
            added.append(_take(cluster, offer, fleet))
    if added:
        repack(cluster, fleet)
    for host in reversed(added):
        if not host.is_claimed:
            _give_back(host, cluster)


def _settle(cluster: ClusterState, fleet: DecisionState, prices: Prices | None) -> None:
    """Credit the cluster as the next cycle will, and acquire what that leaves without a place.

    Pods are placed beside the machine that was acquired for them; the next cycle places them in hosting order. Without
    this step a fleet comes to rest only after several cycles.
    """
    for _ in range(SETTLING_ROUNDS_MAX):
        if not cluster.acquired or prices is None:
            return
        rows = [row for row in cluster.rows if row.same_key is None]
        clear_rows(rows, cluster.hosts)
        sort_hosts(cluster, fleet.options)
        for row in rows:
            place_row(row, cluster.hosts)
        repack(cluster, fleet)
        acquired = len(cluster.acquired)
        for row in cluster.rows:
            if row.has_left and row.may_acquire:
                _acquire(row, fleet, prices)
        if len(cluster.acquired) == acquired:
            return


# ---- one row -----------------------------------------------------------------------------------------------------


def _acquire(row: RowState, fleet: DecisionState, prices: Prices) -> None:
    """Acquire for one row; a gang whose domain has lost machines to higher rows chooses again, once."""
    cluster = row.cluster
    before = len(cluster.acquired)
    _acquire_in_domain(row, fleet, prices)
    if row.same_key is None or not row.has_left or not row.is_satisfiable or cluster.has_orphans:
        return
    clear_row(row, cluster.hosts)
    for host in cluster.acquired[before:]:
        if not host.is_claimed and not host.is_target:
            fleet.notes.pop(host.machine.id, None)
            _give_back(host, cluster)
    choose_again(row, fleet)
    if row.has_left and row.may_acquire:
        _acquire_in_domain(row, fleet, prices)
    # A domain could host it before higher rows took its machines: it is short of machines, not of a domain.
    row.is_satisfiable = True


def _acquire_in_domain(row: RowState, fleet: DecisionState, prices: Prices) -> None:
    """Place the row on what its cluster acquired already, then acquire until nothing is left or nothing helps."""
    cluster, spread = row.cluster, row.spread
    for host in acquire_as_planned(row, fleet):
        note_plan(host, row, fleet)
    keep_spread(row)
    if not row.has_left:
        return
    if spread is not None and row.divisible is None:
        _acquire_spread(row, spread, fleet, prices)
        return
    if cluster.acquired or cluster.unavailable:
        # What was planned on a machine that is not to be had may have its place on what the cluster holds.
        place_row(row, cluster.hosts if cluster.planned else cluster.acquired)
    if cluster.unavailable and row.same_key is None and spread is None:
        displace(row, cluster.hosts, below=row.rank)
    while row.has_left:
        offers = [offer for offer in fleet.usable(row) if offer.available]
        found = _choose(row, offers, fleet, prices)
        if found is None:
            return
        choice, _ = found
        for _ in range(1 if choice.fill.shares else repetitions(choice, choice.offer.available)):
            _take_noted(row, found, fleet)
            place_row(row, cluster.hosts[-1:])


def _acquire_spread(row: RowState, spread: TopologySpread, fleet: DecisionState, prices: Prices) -> None:
    """Acquire under a strict spread: what does not lower the number of pods without a place is given back.

    Its domain is then left out. A new domain lowers the minimum of all: the row is placed from the beginning, and may
    lack more until the domain has more machines.
    """
    cluster = row.cluster
    closed = scarce_domains(row, fleet, spread)
    row.spread_domains = empty_domains(row, fleet, spread, closed)
    fewest, places = unplaced(row), places_of(row)
    if cluster.acquired or cluster.unavailable:
        _place_again(row)
        if unplaced(row) > fewest:
            put_back(row, places)
        fewest, places = unplaced(row), places_of(row)
    added: list[HostState] = []
    is_new, last = False, fewest
    while row.has_left:
        counts = spread_counts(row, cluster.hosts, spread)
        found = _choose(row, open_offers(row, fleet, counts, closed, may_open=not added), fleet, prices)
        if found is not None:
            host = _take_noted(row, found, fleet)
            if not added:
                is_new = host.machine.attribute(spread.topology_key) not in counts
            added.append(host)
            _place_again(row)
            if unplaced(row) >= fewest and not is_new:
                put_back(row, places)
                place_more(row, cluster.hosts)
            left = unplaced(row)
            if left < fewest:
                fewest, places, last, added = left, places_of(row), left, []
                continue
            if is_new and (len(added) == 1 or left < last):
                last = left
                continue
        if not added:
            return
        value = added[0].machine.attribute(spread.topology_key)
        closed.add(value or "")
        row.spread_domains = tuple(each for each in row.spread_domains if each != value)
        clear_row(row, added)
        for host in added:
            fleet.notes.pop(host.machine.id, None)
            _give_back(host, cluster)
        put_back(row, places)
        place_more(row, cluster.hosts)
        fewest, places, added = unplaced(row), places_of(row), []
        last = fewest


def _place_again(row: RowState) -> None:
    """Place the row on all that its cluster has, from the beginning."""
    clear_row(row, row.cluster.hosts)
    place_row(row, row.cluster.hosts)


def note_plan(host: HostState, row: RowState, fleet: DecisionState) -> None:
    """Note that the machine was acquired because the target composition has it."""
    fleet.notes[host.machine.id] = ChoiceNote(
        row=row,
        cost_usd_per_hour=host.machine.price_usd_per_hour,
        runner_up="",
        costs_more_usd_per_hour=0.0,
        is_by_target=True,
    )


def _take_noted(row: RowState, found: tuple[OfferChoice, bool], fleet: DecisionState) -> HostState:
    """Acquire the machine that was chosen, and note why."""
    choice, is_by_target = found
    host = _take(row.cluster, choice.offer, fleet)
    fleet.notes[host.machine.id] = ChoiceNote(
        row=row,
        cost_usd_per_hour=choice.cost_usd_per_hour,
        runner_up=choice.runner_up,
        costs_more_usd_per_hour=choice.runner_up_costs_more_usd_per_hour,
        is_by_target=is_by_target,
    )
    return host


def _take(cluster: ClusterState, offer: OfferState, fleet: DecisionState) -> HostState:
    host = fleet.host(cluster, offer.take())
    host.offer = offer
    cluster.hosts.append(host)
    cluster.acquired.append(host)
    return host


def _choose(
    row: RowState, offers: Sequence[OfferState], fleet: DecisionState, prices: Prices
) -> tuple[OfferChoice, bool] | None:
    """Return the next machine, of the target's classes while those help, else of any; and whether a target chose."""
    cluster = row.cluster
    totals = fleet.totals(cluster.id)
    others = _others(row)
    missing = missing_of_target(cluster, fleet)
    preferred = [offer for offer in offers if missing.get(class_key(offer.example), 0) > 0] if missing else []
    for candidates, is_by_target in ((preferred, True), (offers, False)):
        left = _left_to_spread(row, fleet)
        choice = choose(row, others, candidates, totals, prices, left=left, head_start=fleet.options.idle_head_start)
        if choice is not None:
            return choice, is_by_target
    return None


def _others(row: RowState) -> list[RowState]:
    """Return the lower rows of the cluster that may fill what the row leaves of a machine."""
    rows = row.cluster.rows
    lower = rows[rows.index(row) + 1 :]
    return [
        other
        for other in lower
        if other.has_left and other.same_key is None and other.spread is None and not other.need.parked
    ]


def _left_to_spread(row: RowState, fleet: DecisionState) -> dict[PodGroup, int]:
    """Return at most how many pods of a spread row one machine may take; empty for other rows."""
    spread = row.spread
    if spread is None or row.divisible is not None:
        return {}
    return {group: min(group.left, spread.skew_max) for group in row.groups}


# ---- targets -----------------------------------------------------------------------------------------------------


def _complete_target(cluster: ClusterState, fleet: DecisionState) -> None:
    """Acquire what the target has beyond the claims: the room that the scheduler's order needs."""
    missing = missing_of_target(cluster, fleet)
    if not any(count > 0 for count in missing.values()):
        return
    for offer in fleet.idle_first():
        key = class_key(offer.example)
        if not _is_wanted(offer.example, offer.shape, cluster):
            continue
        while missing.get(key, 0) > 0 and offer.available:
            missing[key] -= 1
            _take(cluster, offer, fleet).is_target = True


# ---- trimming ----------------------------------------------------------------------------------------------------


def _drop_unnecessary(cluster: ClusterState, fleet: DecisionState) -> None:
    """Give back machines acquired in this decision whose pods fit on the others, the dearest first."""
    acquired = sorted(cluster.acquired, key=lambda h: (-_price_to_use(h), h.machine.id))
    for host in acquired:
        if host.is_claimed and not _move_away(host, cluster):
            continue
        _give_back(host, cluster)


def _drop_beyond_target(cluster: ClusterState, fleet: DecisionState) -> None:
    """Give back what was acquired beyond the target if the target's claims serve every row as well without it.

    A row acquires such a machine at its turn when pods of others stand where the target has it.
    """
    target = fleet.options.targets.get(cluster.id)
    if target is None or not cluster.acquired:
        return
    left, beyond = Counter(target.counts), []
    for host in cluster.hosts:
        key = fleet.class_of(host)
        left[key] -= 1
        if left[key] < 0 and host.offer is not None and not host.is_target:
            beyond.append(host)
    if beyond and pack_without(beyond, cluster, fleet):
        for host in beyond:
            fleet.notes.pop(host.machine.id, None)
            _give_back(host, cluster)


def _give_back(host: HostState, cluster: ClusterState) -> None:
    """Undo an acquisition; nothing may claim the machine."""
    assert host.offer is not None, f"{host.machine.id} was not acquired in this decision"
    cluster.hosts.remove(host)
    cluster.acquired.remove(host)
    host.offer.give_back(host.machine)


def _price_to_use(host: HostState) -> float:
    machine = host.machine
    is_fixed = machine.capacity_type not in (CapacityType.ON_DEMAND, CapacityType.SPOT)
    return 0.0 if machine.state is MachineState.IDLE and is_fixed else machine.price_usd_per_hour


def _move_away(host: HostState, cluster: ClusterState) -> bool:
    """Move the host's pods to the cluster's other hosts; returns False, with nothing changed, when they do not fit."""
    bound = any(g.row.spread is not None or g.row.same_key is not None for g in host.claims)
    if host.shares or bound:
        return False
    moved: list[tuple[PodGroup, HostState, int]] = []
    for group, count in sorted(host.claims.items(), key=lambda item: (-item[0].size, item[0].row.rank, item[0].index)):
        left = count
        for other in with_room(group.request, cluster.hosts):
            if not left:
                break
            if other is host or not may_host(group, other):
                continue
            group.left += left
            taken = min(left, capacity(group, other))
            group.left -= left
            if taken:
                group.left += taken
                place(group, other, taken)
                moved.append((group, other, taken))
                left -= taken
        if left:
            _move_back(moved)
            return False
    host.claims.clear()
    return True


def _move_back(moved: Sequence[tuple[PodGroup, HostState, int]]) -> None:
    for group, other, count in moved:
        for d, milli in group.request:
            other.room[d] += milli * count
        other.claims[group] -= count
        if not other.claims[group]:
            del other.claims[group]
