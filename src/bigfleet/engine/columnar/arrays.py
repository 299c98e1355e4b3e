"""The groups of arrays that travel between the engine's Python and its kernels.

Named tuples, because compiled code takes them as they are. Field comments give shape and meaning; R rows in processing
order, N machines in id order, S shapes, U distinct supplies, D resource dimensions, V views, G gang classes. Nothing
here computes anything.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Claim of a machine that nobody holds, and of one that no phase but the third may see.
FREE = -1
HIDDEN = -2
#: How a row is served.
MODE_PLAIN, MODE_SPREAD, MODE_SAME = 0, 1, 2
#: No domain; and a domain that only exact arithmetic outside the kernels may choose.
NO_DOMAIN = -1
UNDECIDED = -2
#: Scaled quantities and every sum of them stay below this, so that no int64 wraps.
QUANTITY_MAX = 2**61


class Fleet(NamedTuple):
    """What a decision reads of the machines. Read only."""

    shape: Int32s  # N
    offer: Int32s  # N
    stamp: Int32s  # N
    supply_of: Int32s  # S: supply number
    supply: Int64s  # U x D, scaled
    helps: Int64s  # U: bit d set when dimension d is positive
    stamp_pair: Int32s  # stamps: number of (fingerprint, group)
    stamp_intended: Int32s  # stamps: cluster number, 0 for none
    offer_price: Floats  # offers
    idle: Int32s  # Idle machines, acquisition order
    speculative: Int32s  # buckets x Speculative machines, acquisition order of each bucket
    creating: Int32s  # Creating machines by (pair, id)
    coming: Int32s  # Draining machines with a preemptor by (preemptor, id)
    fits: Bytes  # F x S: whether the shape fits
    domain_of: Int32s  # K x S: rank of the value of topology key k, NO_DOMAIN without one
    domains: Int32s  # K: how many values the topology key has


class Rows(NamedTuple):
    """What a decision reads of the rows, in processing order. Read only."""

    mode: Bytes  # R
    parked: Bytes  # R
    fit: Int32s  # R
    listing: Int32s  # R: number of the (cluster, fit) view
    cluster: Int32s  # R
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
    creating_start: Int64s  # R
    creating_stop: Int64s  # R
    coming_start: Int64s  # R
    coming_stop: Int64s  # R


class Views(NamedTuple):
    """Bound machines that fit, per (cluster, fit), Configured before Configuring, each in keep-priority order."""

    machines: Int32s
    shapes: Int32s  # of the machines: walking along is what keeps a walk fast
    pairs: Int32s  # of the machines' stamps
    start: Int64s  # V
    length: Int64s  # V: shrinks as claimed machines are dropped


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


class Work(NamedTuple):
    """What a decision writes."""

    claim: Int32s  # N: row that holds the machine, FREE or HIDDEN
    taken: Int32s  # N: row that the machine drains for in Phase 2, -1
    earmarked: Bytes  # N
    remaining: Int64s  # R x D
    want: Int64s  # R: bit d set while dimension d remains
    domain: Int32s  # R
    satisfiable: Bytes  # R
    claimed: Int32s  # machines in the order of their claims
    credit_from: Int64s  # R: the row's credited machines in `claimed`, from and to
    credit_to: Int64s  # R
    acquire_from: Int64s  # R: and its acquired ones
    acquire_to: Int64s  # R
    taken_row: Int32s  # coming machines and victims in order
    taken_machine: Int32s
    taken_victim: Bytes  # 1 for a victim, 0 for a coming machine
    lengths: Int64s  # [claimed, taken]
    cursor_idle: Int64s  # F
    cursor_speculative: Int64s  # buckets x F


class Scratch(NamedTuple):
    """Per-domain sums of one row; `seen` says which cells belong to the gathering at hand."""

    gathering: Int64s  # [number of the gathering at hand]
    seen: Int64s  # domains
    members: Int64s  # domains
    first: Int32s  # domains: place of the first candidate
    last: Int32s  # domains: last one
    credit: Int64s  # domains x D
    own: Int64s  # domains x D
    touched: Int32s  # domains
    queue: Int32s  # N: candidates of the row at hand, in order
    following: Int32s  # N: place of the next candidate of the same domain, -1
    preference: Floats  # N
