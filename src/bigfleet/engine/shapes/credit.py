"""Credits every row with room on what its cluster holds: the first half of Phase 1.

Rows are taken by precedence, so a higher row never lacks room that a lower row has. Acquiring is `acquire`'s business.
"""

from bigfleet.engine.shapes.fleet import Fleet
from bigfleet.engine.shapes.gangs import credit_gang
from bigfleet.engine.shapes.hosting import place_first_fit, place_row
from bigfleet.engine.shapes.repack import repack
from bigfleet.engine.shapes.state import Row


def credit(fleet: Fleet) -> None:
    """Credit all rows, then pack each cluster again where something has no place."""
    for row in fleet.rows:
        if row.same_key is not None:
            credit_gang(row, fleet)
        else:
            place_row(row, row.cluster.hosts)
            if row.has_left:
                _credit_orphans(row, fleet)
    for cluster in sorted(fleet.clusters.values(), key=lambda c: c.id):
        repack(cluster, fleet)


def _credit_orphans(row: Row, fleet: Fleet) -> None:
    """Credit the row's own machines in creation of which the cluster is not known, by id, while they help."""
    own = fleet.orphans.get((row.need.fingerprint, row.need.group), [])
    for machine in list(own):
        if not row.has_left:
            return
        host = fleet.host(row.cluster, machine)
        place_first_fit(row, [host])
        if host.is_claimed:
            own.remove(machine)
            row.cluster.hosts.append(host)
