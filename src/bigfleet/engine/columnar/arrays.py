"""Groups the arrays that the engine passes to its kernels.

Named tuples, because compiled code takes them as they are. Field comments give shape and meaning; R rows, cluster by
cluster, each cluster's in list order; N machines in id order; P places of bound machines and machines in creation,
cluster by cluster; C clusters, S shapes, U distinct supplies, D resource dimensions, L listings, G gang classes. This
module does not compute anything.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bigfleet.model.states import MachineState

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: States as columns hold them: NumPy compares a column with a member of an enum several times as slowly.
SPECULATIVE, CREATING, IDLE = int(MachineState.SPECULATIVE), int(MachineState.CREATING), int(MachineState.IDLE)
CONFIGURING, CONFIGURED = int(MachineState.CONFIGURING), int(MachineState.CONFIGURED)
DRAINING = int(MachineState.DRAINING)
#: Holder of a machine without a holder, and of one that no phase but the third may see.
FREE = -1
HIDDEN = -2
#: A machine that is not claimed as a free one, one that is, and one that no phase but the third may see.
AVAILABLE, CLAIMED, UNSEEN = 0, 1, 2
#: A dispute that the pass must be run again for, and one that it has settled.
UNSETTLED, SETTLED = 1, 2
#: How a row is served.
MODE_PLAIN, MODE_SPREAD, MODE_SAME = 0, 1, 2
#: No domain; and a domain that only exact arithmetic outside the kernels may choose.
NO_DOMAIN = -1
UNDECIDED = -2
#: Scaled quantities and every sum of them stay below this, so that no int64 wraps.
QUANTITY_MAX = 2**61


class FleetArrays(NamedTuple):
    """What a decision reads of the machines. Read only."""

    shape: Int32s  # N
    offer: Int32s  # N
    stamp: Int32s  # N
    cluster: Int32s  # N: number in the vocabulary
    cluster_of: Int32s  # vocabulary's cluster number -> C
    supply_of: Int32s  # S: supply number
    supply: Int64s  # U x D, scaled
    helps: Int64s  # U: bit d set when dimension d is positive
    offer_price: Floats  # offers
    idle: Int32s  # Idle machines, acquisition order
    speculative: Int32s  # buckets x Speculative machines, acquisition order of each bucket
    coming: Int32s  # Draining machines with a preemptor by (preemptor, id)
    coming_for: Int64s  # the preemptor of each: cluster << 32 | pair
    fits: Bytes  # F x S: whether the shape fits
    domain_of: Int32s  # K x S: rank of the value of topology key k, NO_DOMAIN without one
    domains: Int32s  # K: how many values the topology key has


class BoundMachines(NamedTuple):
    """Bound machines and machines in creation, one segment per cluster: Configured, Configuring, each in keep-priority
    order, then Creating by (pair, id). The segment of no cluster has the Creating machines recorded for none.
    """

    machines: Int32s  # P
    shapes: Int32s  # P: sequential access is what keeps a scan fast
    pairs: Int32s  # P: number of (fingerprint, group) of the stamps
    held: Int32s  # P: place of the holder among its cluster's rows, FREE or HIDDEN
    place_of: Int32s  # N: place of the machine, -1 for what is neither bound nor in creation
    start: Int64s  # C
    configuring: Int64s  # C: where the Configuring part starts
    creating: Int64s  # C: where the Creating part starts
    stop: Int64s  # C


class Rows(NamedTuple):
    """What a decision reads of the rows. Only disputes write, to `listing` and `is_fresh`."""

    mode: Bytes  # R
    parked: Bytes  # R
    fit: Int32s  # R
    listing: Int32s  # R: number of the (cluster, fit) listing, -1 for rows that scan their cluster's segment
    cluster: Int32s  # R
    row_start: Int64s  # C: first row of the cluster
    pair: Int32s  # R
    precedence: Int64s  # R
    priority: Int64s  # R
    aggregate: Int64s  # R x D, scaled and rounded up
    mask: Int64s  # R: bit d set when dimension d is wanted
    key: Int32s  # R: number of the topology key, -1 for plain rows
    skew: Int64s  # R: strict spread only
    bucket: Int32s  # R: which order of Speculative
    gang: Int32s  # R: gang class of Same rows, -1
    weight: Int64s  # R x D: common denominator over the aggregate, 0 where nothing is wanted
    is_exact: Bytes  # R: whether coverages fit the integers
    is_fresh: Bytes  # R: whether the row is credited again; the others keep their credit unless a dispute ends that


class Listings(NamedTuple):
    """Places of bound machines that fit, per (cluster, fit), in the order of the segment."""

    places: Int32s
    is_shared: Bytes  # L: 1 when the listing is written down; 0 when its only row scans the segment itself
    start: Int64s  # L: into `places`, or into the segment
    length: Int64s  # L: shrinks as claimed machines are dropped


class Gangs(NamedTuple):
    """Free machines per gang class and domain: Idle then Speculative, each in acquisition order."""

    fit: Int32s  # G
    key: Int32s  # G
    mask: Int64s  # G
    bucket: Int32s  # G
    base: Int64s  # G + 1: first domain cell of the class
    start: Int64s  # cells + 1: where the domain's machines start
    active: Int32s  # domains that have free machines, class by class, ascending
    active_start: Int64s  # G + 1
    machines: Int32s
    members: Int64s  # cells: machines not earmarked
    total: Int64s  # cells x D: their supply
    earmark_from: Int64s  # cells: everything before is earmarked
    claim_from: Int64s  # cells: everything before is claimed


class Memo(NamedTuple):
    """What open gangs could be credited in the domains that may win: enough to choose again later."""

    start: Int64s  # R
    stop: Int64s  # R
    domain: Int32s
    members: Int64s
    credit: Int64s  # x D
    own: Int64s  # x D
    size: Int64s  # [entries written, 1 when there was no room]


class Replay(NamedTuple):
    """The last decision's earmarks, carried out again beside today's, so that it shows where the two differ.

    A cell that has as many machines and as much supply as it had at the same row's turn cannot turn the row's choice.
    """

    members: Int64s  # cells: as in Gangs, in the last decision
    total: Int64s  # cells x D
    place_then: Int64s  # R: the unchanged row's place in the order of the last decision
    then_place: Int64s  # earmarks of the last decision, in order: place of the row
    then_shape: Int32s  # and shape of the machine
    now_place: Int64s  # the same of this decision, as far as it has come
    now_shape: Int32s
    differs: Bytes  # cells: whether the two decisions differ in it at this moment
    listed: Bytes  # cells: whether it stands in `changed`
    changed: Int32s  # cells: domains that may differ, from the base of their class on
    counts: Int64s  # G: how many of them
    state: Int64s  # [earmarks carried out again, earmarks of this decision, 1 when the two can be compared]


class Work(NamedTuple):
    """What a decision writes."""

    status: Bytes  # N: AVAILABLE, CLAIMED as a free machine, or UNSEEN
    taken: Bytes  # N: 1 for a machine that some row counts on in Phase 2
    earmarked: Bytes  # N
    remaining: Int64s  # R x D
    want: Int64s  # R: bit d set while dimension d remains
    domain: Int32s  # R
    satisfiable: Bytes  # R
    is_open: Bytes  # R: whether free machines have a say in the gang's choice of a domain
    credited: Int32s  # machines in the order of their claims, stored from decision to decision
    credit_from: Int64s  # R: the row's machines in `credited`, from and to
    credit_to: Int64s  # R
    acquired: Int32s  # free machines in the order of their claims
    acquire_from: Int64s  # R: the row's machines in `acquired`, from and to
    acquire_to: Int64s  # R
    taken_row: Int32s  # coming machines and victims in order
    taken_machine: Int32s
    taken_victim: Bytes  # 1 for a victim, 0 for a coming machine
    lengths: Int64s  # [credited, acquired, taken, places of `credited` that fresh rows may need]
    cursor_idle: Int64s  # F
    cursor_speculative: Int64s  # buckets x F
    disputed: Bytes  # C: whether a stored choice no longer held: SETTLED when the rest was credited again at once


class Scratch(NamedTuple):
    """Per-domain sums of one row; `seen` says which cells belong to the gathering at hand."""

    gathering: Int64s  # [number of the gathering at hand]
    gathered: Int64s  # [its listing, -1 for none that may be used again; key; mask; domains touched; candidates]
    seen: Int64s  # domains
    members: Int64s  # domains
    first: Int32s  # domains: place of the first candidate
    last: Int32s  # domains: last one
    credit: Int64s  # domains x D
    own: Int64s  # domains x D
    touched: Int32s  # domains
    covered_own: Int64s  # domains: own coverage where creditable machines alone cover the row, else -1; by `touched`
    totals_max: Int64s  # D: beyond, the uncapped coverage of the row at hand would not fit
    left: Int64s  # D: what the row at hand would still want once what it earmarks is its own
    queue: Int32s  # N: candidates of the row at hand, in order
    following: Int32s  # N: place of the next candidate of the same domain, -1
    preference: Floats  # N


class PodHosts(NamedTuple):
    """Hosts of a decision over pods by cluster, each in hosting order; K kinds of hosts, T totals. Read only."""

    first: Int64s  # C + 1: where the hosts of each cluster begin
    row: Int64s  # H: row of the view
    kind: Int32s  # H
    total_of: Int64s  # K: place in totals
    access_of: Int64s  # K: column of is_allowed
    totals: Int64s  # T x D: room of an empty host


class PodGroups(NamedTuple):
    """Groups of pods by cluster, in the order in which they are placed; G groups, Q requests. Read only."""

    first: Int64s  # C + 1: where the groups of each cluster begin
    number: Int64s  # G: place in requests
    requests: Int64s  # Q x D
    counts: Int64s  # G
    limits: Int64s  # G: most pods on one host
    access: Int64s  # G: row of is_allowed
    is_allowed: Bytes  # accesses x kinds of access


class PodPlaces(NamedTuple):
    """Where pods are placed. Written."""

    is_claimed: Bytes  # N: by row of the view
    left: Int64s  # G: pods without a place
    first_claim: Int64s  # G + 1: where the claims of each group begin


class PodClaims(NamedTuple):
    """Claims of pods, as many as there is room for. Written."""

    host: Int32s
    pods: Int64s


class OpenHosts(NamedTuple):
    """What placing the pods of one cluster remembers. Written."""

    hosts: Int64s  # hosts that were looked at and may have room for what follows, in hosting order
    rooms: Int64s  # hosts x D: what is left of them
    least: Int64s  # groups + 1 x D: the least request of each group of the cluster and those after it
    full_until: Int64s  # Q: a host before which none of the cluster holds a pod, or one of an earlier cluster
