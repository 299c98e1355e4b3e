"""Checks DUR: a kill -9 loses nothing that a reply has confirmed (docs/spec/provider.md §11, §12).

Each behaviour kills the provider right after the reply whose content must survive. This module must not wait for a
flush.
"""

from bigfleet.conformance.areas.edge import INT64_MAX, expect_unchanged
from bigfleet.conformance.areas.fault import CONFIGURE_TIMEOUT, READINESS_BLOCK, expect_failed
from bigfleet.conformance.areas.fence import expect_pass
from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.areas.listing import cursor_now, ids_of
from bigfleet.conformance.areas.meta import HOSTILE
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import broken, expect, expect_fenced, expect_ok, expect_same_map
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import CallToken, Configure, Create, Drain, MachineSeen
from bigfleet.conformance.profiles import ConformanceProfile, Lane
from bigfleet.model.states import MachineState

AREA = Area("DUR")

_S = MachineState


@AREA.behaviour(1, ConformanceProfile.DURABLE)
async def marks_survive(lab: Lab) -> None:
    """A replayed token is fenced after a kill."""
    machine_id, slot, unknown, shard = await lab.slot(), await lab.slot(), lab.new_machine_id(), lab.new_shard()
    created = Create(machine_id, CallToken(shard, 5, 7))
    ack = expect_ok(await lab.call(created), "Create with a first token")
    await lab.way_of(machine_id, ack)
    await expect_pass(lab, slot, CallToken(shard, 3, 2), wanted=True, why="first contact")
    await lab.call(Drain(unknown, 0, CallToken(shard, 4, 4)))
    await lab.site.restart()
    expect_fenced(await lab.call(created), "the token of an applied Create, after a kill")
    for at, epoch, sequence, what in (
        (machine_id, 5, 6, "a lower token"),
        (slot, 3, 2, "the token of a call that was refused"),
        (unknown, 4, 4, "the token for a machine that does not exist"),
    ):
        answer = await lab.call(Drain(at, 0, CallToken(shard, epoch, sequence)))
        expect_fenced(answer, f"{what}, ({epoch}, {sequence}), after a kill")
    await expect_pass(lab, slot, CallToken(shard, 3, 3), wanted=True, why="the mark after a kill is (3, 2)")


@AREA.behaviour(2, ConformanceProfile.DURABLE)
async def operations_survive(lab: Lab) -> None:
    """A repeated Configure returns the id from before the kill."""
    machine_id = await lab.idle()
    request = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob)
    first = await lab.done(request)
    await lab.way_of(machine_id, first)
    await lab.site.restart()
    again = await lab.done(request)
    expectation = f"Configure, repeated after a kill, returns {first.operation_id}"
    expect(again.operation_id == first.operation_id, expectation, again.operation_id)
    await lab.stays(machine_id, _S.CONFIGURED, "a repeat after a kill changes nothing")


@AREA.behaviour(3, ConformanceProfile.DURABLE)
async def bindings_survive(lab: Lab) -> None:
    """Cluster and metadata are intact."""
    before = [await lab.configured(metadata=HOSTILE), await lab.configured(metadata={"a": "1", "empty": ""})]
    await lab.site.restart()
    for machine in before:
        for reading in (await lab.get(machine.id), await lab.listed(machine.id)):
            text = machine_text(reading)
            expect(reading.cluster == machine.cluster, f"after a kill the cluster is {machine.cluster}", text)
            expect_same_map(reading.metadata, machine.metadata, "after a kill")


@AREA.behaviour(4, ConformanceProfile.DURABLE)
async def machines_survive(lab: Lab) -> None:
    """The same ids in the same states."""
    lent = [await lab.slot(), await lab.idle(), (await lab.configured()).id]
    before = (await lab.list_machines()).machines
    ids = ids_of(before, "List before a kill")
    await lab.site.restart()
    now = {machine.id: machine for machine in (await lab.list_machines()).machines}
    expect(now.keys() == ids, "after a kill List names the same ids", sorted(now.keys() ^ ids)[:3])
    for machine in before:
        text = machine_text(now[machine.id])
        expect(now[machine.id].state is machine.state, f"after a kill {machine.id} is {machine.state.name}", text)
    seen = {machine.id: machine for machine in before}
    for machine_id in lent:
        expect_unchanged(await lab.get(machine_id), seen[machine_id], "a kill")


@AREA.behaviour(5, ConformanceProfile.DURABLE)
async def ids_do_not_come_again(lab: Lab) -> None:
    """The revision is not empty, and a new operation id repeats no old one."""
    machine_ids = [await lab.idle(), await lab.idle()]
    old: set[str] = set()
    # Ids that are counted from a start repeat themselves where two lives do the same from their starts on.
    for _life in range(2):
        await lab.site.restart()
        await cursor_now(lab)
        ids = {operation_id for machine_id in machine_ids for operation_id in await _round(lab, machine_id)}
        again = sorted(ids & old)
        expect(not again, "an operation after a kill has an id of its own", again)
        old |= ids


async def _round(lab: Lab, machine_id: str) -> list[str]:
    """Bind and free a machine; return the ids of both operations."""
    ids = []
    for request in (Configure(machine_id, lab.next_cluster(machine_id), {"k": "v"}, lab.blob), Drain(machine_id)):
        ack = await lab.done(request)
        await lab.way_of(machine_id, ack)
        ids.append(ack.operation_id)
    return ids


@AREA.behaviour(6, ConformanceProfile.DURABLE, lane=Lane.FAULT)
async def interrupted_transitions_end(lab: Lab) -> None:
    """An interrupted transition ends FAILED with text, or clean; FAILED if it never ended (with --launch-fault)."""
    acks = []
    for selector in (CONFIGURE_TIMEOUT, READINESS_BLOCK):
        request = Configure(await lab.idle(), selector, {"interrupted": selector}, lab.blob)
        acks.append((request, await lab.done(request)))
    await lab.site.restart()
    for request, _ack in acks:
        end = (await lab.way_of(request.machine_id, seconds_max=lab.patience.fault_seconds)).end
        _expect_ended(end, request)
        await lab.stays(end.id, end.state, "an interrupted transition ends once")


def _expect_ended(end: MachineSeen, request: Configure) -> None:
    if request.cluster == CONFIGURE_TIMEOUT:
        # Its call into the backend hung until the kill: a host may have been bound or not.
        expect_failed(end, "an interrupted Configure that never ended")
    elif end.state is _S.IDLE:
        expect_unbound(end, "an interrupted Configure that ends IDLE leaves no cluster, metadata or error")
    elif end.state is _S.CONFIGURED:
        broken("an interrupted Configure without readiness is never CONFIGURED", machine_text(end))
    else:
        expect_failed(end, "an interrupted Configure that ends in no other way")


@AREA.behaviour(7, ConformanceProfile.DURABLE)
async def first_contact_after_a_kill(lab: Lab) -> None:
    """An unknown shard's (1, 1) is accepted after the restart."""
    machine_id = await lab.slot()
    for number, token in enumerate(
        (CallToken(lab.new_shard(), 9, 9), CallToken(lab.new_shard(), INT64_MAX, INT64_MAX))
    ):
        await expect_pass(lab, machine_id, token, wanted=True, why=f"first contact of shard {number + 1}")
    await lab.site.restart()
    token = CallToken(lab.new_shard(), 1, 1)
    ack = expect_ok(await lab.call(Create(machine_id, token)), "Create with (1, 1) of a new shard after a kill")
    end = (await lab.way_of(machine_id, ack)).end
    expect(end.state is _S.IDLE, "Create after a kill ends in IDLE", machine_text(end))
