"""Credits every row with room on what its cluster holds: the first half of Phase 1.

Rows are taken by precedence, so a higher row never lacks room that a lower row has. Acquiring is `acquire`'s business.
"""

from operator import le

from bigfleet.engine.shapes.columns.credit import credit_on_columns
from bigfleet.engine.shapes.fleet import DecisionState, add_hosts, add_rows, sort_hosts
from bigfleet.engine.shapes.following import keep_spread, number_hosts, pending, place_as_planned, read_plan
from bigfleet.engine.shapes.gangs import choose_again, credit_gang
from bigfleet.engine.shapes.hosting import clear_row, clear_rows, place_first_fit, place_more, place_row
from bigfleet.engine.shapes.repack import (
    domains_of,
    is_fixed,
    put_in_domains,
    repack,
    restore,
    restore_precedence,
    save,
)
from bigfleet.engine.shapes.state import ClusterState, HostState, RowState


def credit(fleet: DecisionState) -> None:
    """Credit all rows, as planned where there is a plan, then pack each cluster again where something has no place."""
    if fleet.columns is not None:
        others = credit_on_columns(fleet, fleet.columns)
        add_rows(fleet, (c for c in fleet.clusters.values() if not is_served_on_columns(c)))
        for cluster in others:
            add_hosts(fleet, cluster)
    for cluster in fleet.clusters.values():
        read_plan(cluster, fleet)
        place_as_planned(cluster)
    for row in fleet.rows:
        if row.cluster.claims is not None:
            continue
        if row.same_key is not None:
            _credit_gang(row, fleet)
            continue
        waits = pending(row)
        for group, count in waits.items():
            group.left -= count
        if row in row.cluster.planned_for:
            place_more(row, row.cluster.hosts)
        else:
            place_row(row, row.cluster.hosts)
        for group, count in waits.items():
            group.left += count
        keep_spread(row)
        if row.has_left and not waits:
            _credit_orphans(row, fleet)
    for cluster in sorted(fleet.clusters.values(), key=lambda c: c.id):
        # Repacking gives room back.
        cluster.index = None
        if cluster.claims is not None:
            cluster.is_credited = not cluster.claims.has_left
        else:
            cluster.is_credited = not any(row.has_left for row in cluster.rows)
        if cluster.is_credited:
            continue
        cluster.leave_columns()
        if not any(pending(row) for row in cluster.rows):
            repack(cluster, fleet)
            cluster.is_credited = not any(row.has_left for row in cluster.rows)


def is_credited_without(host: HostState, cluster: ClusterState, fleet: DecisionState, *, above: int) -> bool:
    """Return whether the next decision serves the rows ranked before `above` as well without the machine.

    Nothing has its place on the machine. A small cluster may have been packed with it in a way that is not found
    without it, and pods under a strict spread may have places that are open only with its domain.
    """
    hosts, numbered = list(cluster.hosts), cluster.numbered
    served = [row for row in cluster.rows if row.rank < above]
    left = [group.left for row in served for group in row.groups]
    before, domains = save(cluster), domains_of(cluster.rows)
    cluster.hosts.remove(host)
    rows = [row for row in cluster.rows if not is_fixed(row)]
    clear_rows(rows, cluster.hosts)
    for row in rows:
        if row.same_key is not None:
            row.domain = None
    sort_hosts(cluster, fleet.options)
    number_hosts(cluster, fleet)
    place_as_planned(cluster)
    for row in rows:
        if row.same_key is not None:
            choose_again(row, fleet)
        else:
            place_more(row, cluster.hosts)
            keep_spread(row)
    repack(cluster, fleet)
    restore_precedence(cluster, fleet)
    found = [group.left for row in served for group in row.groups]
    cluster.hosts[:], cluster.numbered = hosts, numbered
    put_in_domains(domains)
    restore(cluster, before)
    return all(map(le, found, left))


def is_served_on_columns(cluster: ClusterState) -> bool:
    """Return whether credit on columns gave everything that the cluster wants a place."""
    claims = cluster.claims
    return claims is not None and not claims.has_left and not claims.has_impossible


def _credit_gang(row: RowState, fleet: DecisionState) -> None:
    """Credit a gang on what its cluster holds, and on its own machines in creation of which the cluster is not known.

    Those have to be looked at with the others, because all of them must lie in one domain.
    """
    cluster = row.cluster
    orphans = fleet.orphans.get((row.need.fingerprint, row.need.group), [])
    added = [fleet.host(cluster, machine) for machine in orphans]
    if added:
        cluster.hosts.extend(added)
        cluster.index = None
    credit_gang(row, fleet)
    for host in added:
        if host.is_claimed:
            orphans.remove(host.machine)
            cluster.has_orphans = True
        else:
            cluster.hosts.remove(host)
            cluster.index = None


def _credit_orphans(row: RowState, fleet: DecisionState) -> None:
    """Credit the row's own machines in creation of which the cluster is not known, by id, while they help."""
    own = fleet.orphans.get((row.need.fingerprint, row.need.group), [])
    for machine in list(own):
        if not row.has_left:
            return
        host = fleet.host(row.cluster, machine)
        _place_with(row, host)
        if host.is_claimed:
            own.remove(machine)
            row.cluster.has_orphans = True
            row.cluster.hosts.append(host)


def _place_with(row: RowState, host: HostState) -> None:
    """Place what the row has left on one host more; a spread row from the beginning, if that leaves fewer pods.

    A new domain lowers the minimum of all: what stood on the others before may not stand there now.
    """
    if row.spread is None or row.divisible is not None:
        place_first_fit(row, [host])
        return
    cluster = row.cluster
    before, left = save(cluster), sum(group.left for group in row.groups)
    clear_row(row, cluster.hosts)
    place_row(row, [*cluster.hosts, host])
    if sum(group.left for group in row.groups) >= left:
        clear_row(row, [host])
        restore(cluster, before)
