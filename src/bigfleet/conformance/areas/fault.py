"""Checks FAULT: the state of a machine after its operation fails (docs/spec/provider.md §6, §7, §14, §20).

The slot that is created and the cluster that is bound select the failure. This module must not wait for a machine to
leave FAILED: no call ends it.
"""

from bigfleet.conformance.areas.edge import expect_unchanged
from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import expect, expect_refused
from bigfleet.conformance.lab import FAULT_TIMEOUT_SECONDS, Lab, Way
from bigfleet.conformance.ports import Configure, Create, Delete, Drain, MachineSeen, Mutation
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("FAULT")

#: The selectors: a slot that carries this, and clusters that end as their name says.
CREATE_ERROR = "create=error"
CONFIGURE_ERROR = "fault-error"
CONFIGURE_TIMEOUT = "fault-timeout"
CONFIGURE_SLOW_OK = "fault-slow-ok"
READINESS_BLOCK = "fault-readiness-block"
DRAIN_ERROR = "fault-drain-error"

_READS = 3
#: The late success comes 1 s after the timeout; so long it is waited for, and how often it is looked for.
_LATE_SECONDS = 2.5
_LATE_READS = 10
#: Two clocks never quite agree on when a timeout is over.
_EARLY_SHARE = 0.9
_S = MachineState


def expect_failed(machine: MachineSeen, what: str) -> None:
    """Raise Broken unless a machine is FAILED and says why."""
    expect(machine.state is _S.FAILED, f"{what} ends FAILED", machine_text(machine))
    expect(bool(machine.last_error.strip()), f"{what} says why in last_error", machine_text(machine))


async def ended(lab: Lab, request: Mutation) -> Way:
    """Carry a call that must be taken and read its machine until it rests. Raises Broken when it is stuck."""
    ack = await lab.done(request)
    return await lab.way_of(request.machine_id, ack, seconds_max=lab.patience.fault_seconds)


async def bound_badly(lab: Lab, cluster: str) -> Way:
    """Bind an idle machine to a cluster of the selectors and read it until it rests. Raises Broken."""
    return await ended(lab, Configure(await lab.idle(), cluster, {"fault": cluster}, lab.blob))


@AREA.behaviour(1, ConformanceProfile.FAULT)
async def configure_error(lab: Lab) -> None:
    """A Configure error ends FAILED with text, not stuck."""
    expect_failed((await bound_badly(lab, CONFIGURE_ERROR)).end, "a Configure that errs")


@AREA.behaviour(2, ConformanceProfile.FAULT)
async def create_error(lab: Lab) -> None:
    """A Create error: the same."""
    way = await ended(lab, Create(await lab.faulty_slot(CREATE_ERROR)))
    expect_failed(way.end, "a Create that errs")


@AREA.behaviour(3, ConformanceProfile.FAULT)
async def overrun(lab: Lab) -> None:
    """An overrun ends FAILED with text when the timeout is over."""
    machine_id = await lab.idle()
    began_seconds = lab.clock.monotonic_seconds()
    way = await ended(lab, Configure(machine_id, CONFIGURE_TIMEOUT, {"k": "v"}, lab.blob))
    took_seconds = lab.clock.monotonic_seconds() - began_seconds
    expect_failed(way.end, "a Configure that hangs")
    expectation = f"a Configure that hangs is given up after {FAULT_TIMEOUT_SECONDS:g} s, not before"
    expect(took_seconds >= FAULT_TIMEOUT_SECONDS * _EARLY_SHARE, expectation, f"after {took_seconds:.2f} s")


@AREA.behaviour(4, ConformanceProfile.FAULT)
async def late_success(lab: Lab) -> None:
    """A late success changes nothing."""
    failed = (await bound_badly(lab, CONFIGURE_SLOW_OK)).end
    expect_failed(failed, "a Configure that outlasts its timeout")
    for _ in range(_LATE_READS):
        await lab.clock.sleep(_LATE_SECONDS / _LATE_READS)
        expect_unchanged(await lab.get(failed.id), failed, "a success after the timeout")


@AREA.behaviour(5, ConformanceProfile.FAULT)
async def failed_refuses(lab: Lab) -> None:
    """FAILED refuses every further mutation and keeps its text."""
    failed = [(await bound_badly(lab, CONFIGURE_ERROR)).end]
    failed.append((await ended(lab, Create(await lab.faulty_slot(CREATE_ERROR)))).end)
    for before in failed:
        expect_failed(before, "what errs")
        for request in (
            Create(before.id),
            Configure(before.id, before.cluster or lab.new_cluster(), before.metadata, lab.blob),
            Configure(before.id, lab.new_cluster(), {"other": "x"}, lab.blob),
            Drain(before.id),
            Delete(before.id),
        ):
            name = f"{type(request).__name__} on FAILED"
            expect_refused(await lab.call(lab.stamped(request)), name)
            expect_unchanged(await lab.get(before.id), before, name)
        await lab.stays(before.id, _S.FAILED, "refused calls leave FAILED as it is")
        expect_unchanged(await lab.get(before.id), before, "refused calls")


@AREA.behaviour(6, ConformanceProfile.FAULT)
async def drain_error(lab: Lab) -> None:
    """A failing Drain with grace 0 ends FAILED with text, or IDLE."""
    machine = await lab.configured(cluster=DRAIN_ERROR)
    end = (await ended(lab, Drain(machine.id, 0))).end
    if end.state is _S.IDLE:
        expect_unbound(end, "a failing Drain that ends IDLE leaves no cluster, metadata or error")
    else:
        expect_failed(end, "a failing Drain that does not end IDLE")


@AREA.behaviour(7, ConformanceProfile.FAULT)
async def failed_is_readable(lab: Lab) -> None:
    """FAILED is readable by Get (three times) and List, with the same text."""
    failed = (await bound_badly(lab, CONFIGURE_ERROR)).end
    expect_failed(failed, "a Configure that errs")
    for number in range(_READS):
        reading = await lab.get(failed.id)
        expect_failed(reading, f"Get {number + 1} shows that it")
        expect_unchanged(reading, failed, f"Get {number + 1}")
    listed = await lab.listed(failed.id)
    expect_failed(listed, "List shows that it")
    expect_unchanged(listed, failed, "List")


@AREA.behaviour(8, ConformanceProfile.FAULT)
async def never_ready(lab: Lab) -> None:
    """Without readiness never CONFIGURED, then FAILED."""
    way = await bound_badly(lab, READINESS_BLOCK)
    for reading in way.readings[:-1]:
        is_waiting = reading.state is _S.CONFIGURING
        expect(is_waiting, "while the node is not Ready only CONFIGURING is seen", machine_text(reading))
    expect_failed(way.end, "a Configure whose node never gets Ready")
    await lab.stays(way.end.id, _S.FAILED, "a machine whose node never got Ready stays FAILED")
