"""Replays the previous decision's earmarks beside the current ones, to find gangs whose choice could change.

docs/adr/0111-incremental-decisions.md. What is free enters a gang's choice by domain, as a count and sums of supply. At
the turn of a row these are compared, domain by domain, with what they were at its turn in the last decision: where
nothing differs its choice stands, and where little does only that little can win. Nothing here may choose a domain.
"""

import numpy as np

from bigfleet.engine.columnar.arrays import NO_DOMAIN
from bigfleet.engine.columnar.kernels.base import inlined


@inlined
def compare_cell(gangs, replay, gang, cell):
    """Note whether the cell is now what it was; one that may differ is listed once."""
    differs = gangs.members[cell] != replay.members[cell]
    for d in range(gangs.total.shape[1]):
        differs = differs or gangs.total[cell, d] != replay.total[cell, d]
    replay.differs[cell] = differs
    if differs and replay.listed[cell] == 0:
        replay.listed[cell] = 1
        replay.changed[gangs.base[gang] + replay.counts[gang]] = cell - gangs.base[gang]
        replay.counts[gang] += 1


@inlined
def replay_until(fleet, gangs, replay, place):
    """Earmark again what rows before a place of the last decision's order earmarked."""
    at = replay.state[0]
    while at < len(replay.then_place) and replay.then_place[at] < place:
        shape = replay.then_shape[at]
        supply = fleet.supply_of[shape]
        for gang in range(len(gangs.fit)):
            domain = fleet.domain_of[gangs.key[gang], shape]
            if domain == NO_DOMAIN or fleet.fits[gangs.fit[gang], shape] == 0:
                continue
            if fleet.helps[supply] & gangs.mask[gang] == 0:
                continue
            cell = gangs.base[gang] + domain
            replay.members[cell] -= 1
            for d in range(fleet.supply.shape[1]):
                replay.total[cell, d] -= fleet.supply[supply, d]
            compare_cell(gangs, replay, gang, cell)
        at += 1
    replay.state[0] = at


@inlined
def is_any_changed(gangs, memo, replay, gang, row):
    """Say whether some domain in the row's memo differs from what it was."""
    if replay.counts[gang] == 0:
        return False
    base, is_any = gangs.base[gang], False
    for i in range(memo.start[row], memo.stop[row]):
        is_any = is_any or replay.differs[base + memo.domain[i]] != 0
    return is_any


@inlined
def changed_domains(gangs, replay, gang):
    """Leave those domains listed that differ, from the base of their class on; returns how many these are."""
    base, kept = gangs.base[gang], 0
    for i in range(base, base + replay.counts[gang]):
        domain = replay.changed[i]
        if replay.differs[base + domain] != 0:
            replay.changed[base + kept] = domain
            kept += 1
        else:
            replay.listed[base + domain] = 0
    replay.counts[gang] = kept
    return kept


@inlined
def earmark(fleet, gangs, work, replay, place, machine):
    """Hide the machine from the totals of every later domain choice, for the row at a place of the order."""
    work.earmarked[machine] = 1
    shape = fleet.shape[machine]
    supply = fleet.supply_of[shape]
    replay.now_place[replay.state[1]] = place
    replay.now_shape[replay.state[1]] = shape
    replay.state[1] += 1
    for gang in range(len(gangs.fit)):
        domain = fleet.domain_of[gangs.key[gang], shape]
        if domain == NO_DOMAIN or fleet.fits[gangs.fit[gang], shape] == 0:
            continue
        if fleet.helps[supply] & gangs.mask[gang] == 0:
            continue
        cell = gangs.base[gang] + domain
        gangs.members[cell] -= 1
        for d in range(fleet.supply.shape[1]):
            gangs.total[cell, d] -= fleet.supply[supply, d]
        if replay.state[2] != 0:
            compare_cell(gangs, replay, gang, cell)


@inlined
def earmark_rest(fleet, rows, gangs, work, scratch, replay, row, place):
    """Earmark what the row would still want of its domain's free machines; it claims nothing (§5.3)."""
    cell = gangs.base[rows.gang[row]] + work.domain[row]
    start, stop = gangs.earmark_from[cell], gangs.start[cell + 1]
    while start < stop and work.earmarked[gangs.machines[start]] != 0:
        start += 1
    gangs.earmark_from[cell] = start
    left, want = scratch.left, work.want[row]
    for d in range(len(left)):
        left[d] = work.remaining[row, d]
    for i in range(start, stop):
        if want == 0:
            return
        machine = gangs.machines[i]
        supply = fleet.supply_of[fleet.shape[machine]]
        if work.earmarked[machine] != 0 or fleet.helps[supply] & want == 0:
            continue
        earmark(fleet, gangs, work, replay, place, machine)
        for d in range(len(left)):
            if left[d] > 0:
                left[d] = max(0, left[d] - fleet.supply[supply, d])
                if left[d] == 0:
                    want &= ~(np.int64(1) << d)
