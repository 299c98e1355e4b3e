"""Checks SCALE: a large fleet stays complete, well formed and quick to read (docs/spec/provider.md §23).

Times are measured by the client and include its own reading. Limits apply to the slowest machine, never to a mean.
"""

import math
from collections.abc import Sequence

from bigfleet.conformance.areas.edge import expect_unchanged
from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.areas.listing import cursor_now, delta_since, expect_ids, ids_of, listed_by_pages
from bigfleet.conformance.areas.race import expect_distinct, settle_all, together
from bigfleet.conformance.areas.shape import (
    expect_accepted,
    expect_fitting,
    expect_named,
    expect_placed,
    expect_priced,
    expect_ratios,
    expect_sized,
)
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import expect, expect_ok, expect_same_map
from bigfleet.conformance.lab import Lab, side_by_side
from bigfleet.conformance.ports import Configure, Create, Delete, Get, List, Request, Status
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("SCALE")

_CHANGES = 20
#: Machines of a page; a fleet of no more would prove nothing about pages.
PAGE = 500
_CHURNING = 8
_CHURN_ROUNDS = 5
_CREATES = 16
_GETS = 120
_TIMED_CREATES = 120
_LISTS = 60
_PERCENTILE = 0.99
_CALL_SECONDS_MAX = 0.25
_LIST_SECONDS_MAX = 2.0
_FULL_LIST_SECONDS_MAX = 3.0
_DRIFTING = 20
_QUIET_SECONDS = 2.0
_QUIET_READS = 4
_S = MachineState
_SHAPES = (
    expect_named,
    expect_placed,
    expect_priced,
    expect_ratios,
    expect_fitting,
    expect_accepted,
    expect_sized,
)


@AREA.behaviour(1, ConformanceProfile.SCALE)
async def everything_is_there(lab: Lab) -> None:
    """The full list has at least the seeded count, each record in shape (zone and capacity type too)."""
    machines = (await lab.list_machines()).machines
    count = len(ids_of(machines, "the full list"))
    expect(count >= lab.scale_count, f"the full list has at least {lab.scale_count} machines", count)
    for machine in machines:
        for expect_shape in _SHAPES:
            expect_shape(machine)


@AREA.behaviour(2, ConformanceProfile.SCALE)
async def delta_of_twenty(lab: Lab) -> None:
    """The delta after 20 Configures is exactly those 20."""
    machine_ids = await lab.many_idle(_CHANGES)
    cursor = await cursor_now(lab)
    requests = [lab.stamped(Configure(machine_id, lab.new_cluster(), {"k": "v"}, b"")) for machine_id in machine_ids]
    for answer in await together(lab, requests):
        expect_ok(answer, f"each of {_CHANGES} Configures")
    await settle_all(lab, machine_ids, _S.CONFIGURED)
    delta = await delta_since(lab, cursor)
    expectation = f"the delta after {_CHANGES} Configures is exactly those machines"
    expect_ids(ids_of(delta.machines, "a delta"), {*machine_ids}, expectation)


@AREA.behaviour(3, ConformanceProfile.SCALE)
async def pages_cover_the_fleet(lab: Lab) -> None:
    """Pages of 500 cover the fleet without repeats."""
    wanted = ids_of((await lab.list_machines()).machines, "the full list")
    listed = await listed_by_pages(lab, PAGE, b"", len(wanted))
    expect_ids(ids_of(listed, f"a List in pages of {PAGE}"), wanted, f"pages of {PAGE} cover the fleet")


@AREA.behaviour(4, ConformanceProfile.SCALE)
async def configure_and_drain_for_long(lab: Lab) -> None:
    """Eight machines churn Configure/Drain for the soak, clean at every IDLE."""
    until_seconds = lab.clock.monotonic_seconds() + lab.soak_seconds
    machine_ids = await lab.many_idle(_CHURNING)
    await side_by_side([_churn(lab, machine_id, until_seconds) for machine_id in machine_ids])


async def _churn(lab: Lab, machine_id: str, until_seconds: float) -> None:
    number = 0
    while number == 0 or lab.clock.monotonic_seconds() < until_seconds:
        number += 1
        cluster, metadata = lab.next_cluster(machine_id), {"of": machine_id, f"round-{number}": "x"}
        bound = await lab.configure(machine_id, cluster, metadata)
        expect(bound.cluster == cluster, f"{machine_id} is bound to {cluster}", machine_text(bound))
        expect_same_map(bound.metadata, metadata, f"{machine_id}, round {number}")
        expect_unbound(await lab.drain(machine_id), f"{machine_id} is clean at IDLE, round {number}")


@AREA.behaviour(5, ConformanceProfile.SCALE)
async def create_and_delete_for_long(lab: Lab) -> None:
    """Create/Delete churn keeps the number of machines."""
    before = ids_of((await lab.list_machines()).machines, "the full list")
    slots = [await lab.slot() for _ in range(_CHURNING)]
    for _ in range(_CHURN_ROUNDS):
        await side_by_side([lab.create(machine_id) for machine_id in slots])
        await _expect_fleet(lab, before, "after Creates")
        answers = await together(lab, [lab.stamped(Delete(machine_id)) for machine_id in slots])
        if all(answer.status is Status.UNIMPLEMENTED for answer in answers):
            return
        for answer in answers:
            expect_ok(answer, "Delete of an IDLE machine")
        await settle_all(lab, slots, _S.SPECULATIVE)
        await _expect_fleet(lab, before, "after Deletes")


async def _expect_fleet(lab: Lab, before: set[str], when: str) -> None:
    now = ids_of((await lab.list_machines()).machines, f"the full list {when}")
    expect_ids(now, before, f"{when} there are the same {len(before)} machines")


@AREA.behaviour(6, ConformanceProfile.SCALE)
async def percentiles(lab: Lab) -> None:
    """99th percentile: Get and Create ≤ 250 ms, List ≤ 2 s (120, 120, 60 samples)."""
    slots = [await lab.slot() for _ in range(_TIMED_CREATES)]
    await _expect_quick(lab, [Get(lab.draws.choice(slots)) for _ in range(_GETS)], _CALL_SECONDS_MAX)
    await _expect_quick(lab, [lab.stamped(Create(machine_id)) for machine_id in slots], _CALL_SECONDS_MAX)
    await settle_all(lab, slots, _S.IDLE)
    await _expect_quick(lab, [List() for _ in range(_LISTS)], _LIST_SECONDS_MAX)


async def _expect_quick(lab: Lab, requests: Sequence[Request], seconds_max: float) -> None:
    took_seconds = sorted([await _timed(lab, request) for request in requests])
    slowest = took_seconds[math.ceil(_PERCENTILE * len(took_seconds)) - 1]
    name = type(requests[0]).__name__
    expectation = f"99 % of {len(requests)} {name} calls end within {seconds_max * 1000:g} ms"
    expect(slowest <= seconds_max, expectation, f"{slowest * 1000:.0f} ms")


async def _timed(lab: Lab, request: Request) -> float:
    """Carry a call that must be taken; return how many seconds it took."""
    began_seconds = lab.clock.monotonic_seconds()
    expect_ok(await lab.call(request), type(request).__name__)
    return lab.clock.monotonic_seconds() - began_seconds


@AREA.behaviour(7, ConformanceProfile.SCALE)
async def one_full_list(lab: Lab) -> None:
    """One full list ≤ 3 s."""
    took_seconds = await _timed(lab, List())
    expectation = f"a full list ends within {_FULL_LIST_SECONDS_MAX:g} s"
    expect(took_seconds <= _FULL_LIST_SECONDS_MAX, expectation, f"{took_seconds:.2f} s")


@AREA.behaviour(8, ConformanceProfile.SCALE)
async def sixteen_creates(lab: Lab) -> None:
    """16 parallel Creates: distinct ids, all reach IDLE."""
    slots = [await lab.slot() for _ in range(_CREATES)]
    expect_distinct(await together(lab, [lab.stamped(Create(machine_id)) for machine_id in slots]), "Create")
    await settle_all(lab, slots, _S.IDLE)


@AREA.behaviour(9, ConformanceProfile.SCALE)
async def no_drift(lab: Lab) -> None:
    """Idle machines do not drift in a quiet window."""
    machine_ids = await lab.many_idle(_DRIFTING)
    before = {machine_id: await lab.get(machine_id) for machine_id in machine_ids}
    for _ in range(_QUIET_READS):
        await lab.clock.sleep(_QUIET_SECONDS / _QUIET_READS)
        listed = {machine.id: machine for machine in (await lab.list_machines()).machines}
        for machine_id in machine_ids:
            expect(machine_id in listed, f"{machine_id} stays in List")
            for reading in (listed[machine_id], await lab.get(machine_id)):
                expect_unchanged(reading, before[machine_id], "a quiet while")
