"""Checks FENCE: which tokens pass, and for which calls marks are stored (docs/spec/provider.md §4).

A Drain of a slot tries a token without moving a machine: the slot is in the wrong state and the fence is checked first,
so FAILED_PRECONDITION is a stale token and any other answer one that passed. This module must not reuse a shard id.
"""

from collections.abc import Callable
from dataclasses import replace

from bigfleet.conformance.areas.edge import expect_unchanged
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import expect, expect_fenced, expect_ok, how
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import (
    ABSENT,
    CallToken,
    Configure,
    Create,
    Delete,
    Drain,
    Mutation,
    Status,
)
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("FENCE")

_RANDOM_TOKENS = 200
_Stamped = Callable[[CallToken], Mutation]
_S = MachineState
#: Epoch, sequence, and whether the pair passes after those before it.
_TABLE = (
    (1, 1, True),
    (1, 1, False),
    (1, 0, False),
    (0, 99, False),
    (1, 2, True),
    (1, 10, True),
    (1, 3, False),
    (1, 9, False),
    (1, 11, True),
    (2, 1, True),
    (1, 12, False),
    (1, 999, False),
    (2, 1, False),
    (2, 2, True),
    (5, 1, True),
    (4, 100, False),
    (3, 1, False),
    (5, 2, True),
    (10, 2, True),
    (9, 999, False),
    (10, 1, False),
    (10, 10, True),
    (11, -5, True),
    (11, -6, False),
    (11, -4, True),
    (11, 0, True),
    (11, 0, False),
    (-1, 100, False),
    (2**31, 1, True),
    (2**31 - 1, 2**40, False),
    (2**31, 2**31 + 1, True),
    (2**31, 2**31, False),
    (2**40, 0, True),
    (2**40, -1, False),
)


async def passes(lab: Lab, machine_id: str, token: CallToken) -> bool:
    """Return whether a token passes the fence of a SPECULATIVE machine; it is a Drain, which moves nothing."""
    answer = await lab.call(Drain(machine_id, 0, token))
    expect(not answer.is_ok, "Drain on SPECULATIVE is not taken", how(answer))
    return not answer.is_fenced


async def expect_pass(lab: Lab, machine_id: str, token: CallToken, *, wanted: bool, why: str) -> None:
    """Raise Broken unless the token passes, or is fenced, as wanted."""
    passed = await passes(lab, machine_id, token)
    said = "passes" if wanted else "is fenced"
    expect(passed is wanted, f"({token.epoch}, {token.sequence}) {said}: {why}", "passed" if passed else "fenced")


@AREA.behaviour(1, ConformanceProfile.CORE)
async def fenced_before_not_found(lab: Lab) -> None:
    """A stale token for a machine that does not exist is fenced on all four calls; a fresh one gets NOT_FOUND."""
    for request in (
        Create(lab.new_machine_id()),
        Drain(lab.new_machine_id()),
        Delete(lab.new_machine_id()),
        Configure(lab.new_machine_id(), lab.new_cluster()),
    ):
        await _expect_fence_first(lab, request)


async def _expect_fence_first(lab: Lab, request: Mutation) -> None:
    shard, name = lab.new_shard(), type(request).__name__
    answer = await lab.call(replace(request, token=CallToken(shard, 5, 5)))
    if isinstance(request, Delete) and answer.status is Status.UNIMPLEMENTED:
        return
    expect(answer.status is Status.NOT_FOUND, f"first {name} of an unknown id is NOT_FOUND", how(answer))
    for sequence in (5, 4):
        stale = await lab.call(replace(request, token=CallToken(shard, 5, sequence)))
        expect_fenced(stale, f"{name} of an unknown id with (5, {sequence}) after (5, 5)")
    answer = await lab.call(replace(request, token=CallToken(shard, 5, 6)))
    expect(answer.status is Status.NOT_FOUND, f"a fresh token on {name} of an unknown id gets NOT_FOUND", how(answer))


@AREA.behaviour(2, ConformanceProfile.CORE)
async def marks_do_not_leak(lab: Lab) -> None:
    """Marks leak neither between shards nor between machines of a shard."""
    one, two = await lab.slot(), await lab.slot()
    a, b = lab.new_shard(), lab.new_shard()
    steps = (
        (one, CallToken(a, 10, 10), True, "first contact"),
        (one, CallToken(b, 1, 1), True, "another shard has marks of its own"),
        (two, CallToken(a, 1, 1), True, "another machine of the shard has a mark of its own"),
        (two, CallToken(a, 1, 2), True, "it rises by itself"),
        (one, CallToken(a, 10, 9), False, "the mark of the first machine stayed"),
        (one, CallToken(b, 1, 1), False, "the mark of the other shard stayed"),
        (two, CallToken(a, 1, 2), False, "the mark of the other machine stayed"),
        (two, CallToken(b, 0, 0), True, "first contact of the other shard with the other machine"),
    )
    for machine_id, token, wanted, why in steps:
        await expect_pass(lab, machine_id, token, wanted=wanted, why=why)


@AREA.behaviour(3, ConformanceProfile.CORE)
async def table_of_tokens(lab: Lab) -> None:
    """A long table of accept and reject: lexicographic order, epoch restart, skipped numbers."""
    machine_id, shard = await lab.slot(), lab.new_shard()
    before = "nothing"
    for epoch, sequence, wanted in _TABLE:
        token = CallToken(shard, epoch, sequence)
        await expect_pass(lab, machine_id, token, wanted=wanted, why=f"the newest was {before}")
        before = f"({epoch}, {sequence})" if wanted else before


@AREA.behaviour(4, ConformanceProfile.CORE)
async def reads_between_fenced_calls(lab: Lab) -> None:
    """Reads work between fenced calls, and fenced calls change nothing."""
    machine_id, shard = await lab.idle(), lab.new_shard()
    cluster, newest, stale = lab.new_cluster(), CallToken(shard, 7, 7), CallToken(shard, 7, 6)
    request = Configure(machine_id, cluster, {"k": "v"}, lab.blob, newest)
    before = (await lab.way(request, _S.CONFIGURED)).end
    for fenced in (
        Drain(machine_id, 0, stale),
        Configure(machine_id, lab.new_cluster(), {"other": "x"}, b"", stale),
        Create(machine_id, stale),
        Delete(machine_id, stale),
    ):
        answer = await lab.call(fenced)
        if not (isinstance(fenced, Delete) and answer.status is Status.UNIMPLEMENTED):
            expect_fenced(answer, f"{type(fenced).__name__} with a stale token")
        expect_unchanged(await lab.get(machine_id), before, f"Get after a fenced {type(fenced).__name__}")
        expect_unchanged(await lab.listed(machine_id), before, f"List after a fenced {type(fenced).__name__}")
    await lab.stays(machine_id, _S.CONFIGURED, "fenced calls change nothing")


@AREA.behaviour(5, ConformanceProfile.CORE)
async def replayed_configure(lab: Lab) -> None:
    """A stale replay of an applied Configure is fenced; with a fresh token it returns the same id."""
    machine_id = await lab.idle()
    cluster = lab.new_cluster()
    await _replay(lab, lambda token: Configure(machine_id, cluster, {"k": "v"}, lab.blob, token), _S.CONFIGURED)


@AREA.behaviour(6, ConformanceProfile.CORE)
async def replayed_drain(lab: Lab) -> None:
    """The same for Drain."""
    machine = await lab.configured()
    await _replay(lab, lambda token: Drain(machine.id, 0, token), _S.IDLE)


async def _replay(lab: Lab, request: _Stamped, target: MachineState) -> None:
    shard = lab.new_shard()
    first = await lab.done(request(CallToken(shard, 3, 3)))
    name = type(request(ABSENT)).__name__
    end = (await lab.way_of(request(ABSENT).machine_id)).end
    expect(end.state is target, f"{name} ends in {target.name}", machine_text(end))
    expect_fenced(await lab.call(request(CallToken(shard, 3, 3))), f"a replayed {name}")
    again = await lab.done(request(CallToken(shard, 3, 4)))
    expectation = f"with a fresh token {name} returns {first.operation_id}"
    expect(again.operation_id == first.operation_id, expectation, again.operation_id)


@AREA.behaviour(7, ConformanceProfile.CORE)
async def absent_tokens(lab: Lab) -> None:
    """Absent tokens are never fenced and leave no mark."""
    slot, shard = await lab.slot(), lab.new_shard()
    for token, wanted, why in (
        (ABSENT, True, "absent"),
        (ABSENT, True, "absent again: no mark was left"),
        (CallToken(shard, -5, -5), True, "first contact after absent ones"),
        (ABSENT, True, "absent after a shard's token"),
        (CallToken(shard, -5, -5), False, "the shard's mark stayed"),
        (CallToken(shard, -5, -4), True, "absent ones moved no mark"),
    ):
        await expect_pass(lab, slot, token, wanted=wanted, why=why)
    for request, target in (
        (Create(slot), _S.IDLE),
        (Configure(slot, lab.new_cluster(), {"k": "v"}, lab.blob), _S.CONFIGURED),
        (Drain(slot), _S.IDLE),
    ):
        expect_ok(await lab.call(request), f"{type(request).__name__} without a token")
        end = (await lab.way_of(slot)).end
        expect(end.state is target, f"it ends in {target.name}", machine_text(end))


@AREA.behaviour(8, ConformanceProfile.CORE)
async def rising_tokens(lab: Lab) -> None:
    """Rising tokens of one shard pass through Create and two Configure/Drain rounds; the first is stale afterwards."""
    machine_id, shard = await lab.slot(), lab.new_shard()
    bind = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob)
    steps: tuple[tuple[Mutation, MachineState], ...] = (
        (Create(machine_id), _S.IDLE),
        (bind, _S.CONFIGURED),
        (Drain(machine_id), _S.IDLE),
        (bind, _S.CONFIGURED),
        (Drain(machine_id), _S.IDLE),
    )
    for number, (request, target) in enumerate(steps, start=1):
        await lab.way(replace(request, token=CallToken(shard, 1, number)), target)
    expect_fenced(await lab.call(Create(machine_id, CallToken(shard, 1, 1))), "the first token afterwards")


@AREA.behaviour(9, ConformanceProfile.CORE)
async def epoch_bump(lab: Lab) -> None:
    """After an epoch bump old tokens are fenced and the first of the new epoch passes (by Delete, or Drain where Delete
    is missing).
    """
    machine_id, shard = await lab.slot(), lab.new_shard()
    await lab.way(Create(machine_id, CallToken(shard, 1, 100)), _S.IDLE)
    answer = await lab.call(Delete(machine_id, CallToken(shard, 2, 1)))
    if answer.status is Status.UNIMPLEMENTED:
        await lab.way(
            Configure(machine_id, lab.new_cluster(), {"k": "v"}, b"", CallToken(shard, 1, 101)), _S.CONFIGURED
        )
        answer = await lab.call(Drain(machine_id, 0, CallToken(shard, 2, 1)))
    expect_ok(answer, "the first token of the new epoch, lower in sequence")
    settled = (await lab.way_of(machine_id)).end
    for sequence in (100, 102, 10**6):
        expect_fenced(
            await lab.call(Create(machine_id, CallToken(shard, 1, sequence))), f"(1, {sequence}) of the old epoch"
        )
        expect_fenced(await lab.call(Drain(machine_id, 0, CallToken(shard, 1, sequence))), f"(1, {sequence}) on Drain")
    expect_unchanged(await lab.get(machine_id), settled, "tokens of the old epoch")


@AREA.behaviour(10, ConformanceProfile.CORE)
async def refused_calls_move_the_mark(lab: Lab) -> None:
    """A token that passes in a call that is then refused has moved the mark."""
    machine_id, shard = await lab.slot(), lab.new_shard()
    answer = await lab.call(Drain(machine_id, 0, CallToken(shard, 1, 5)))
    expect(answer.is_refused, "Drain on SPECULATIVE is refused, not by the fence", how(answer))
    expect_fenced(await lab.call(Drain(machine_id, 0, CallToken(shard, 1, 5))), "the token of a refused call, again")
    expect_fenced(await lab.call(Create(machine_id, CallToken(shard, 1, 4))), "a lower one on another call")
    await lab.stays(machine_id, _S.SPECULATIVE, "a fenced Create changes nothing")
    expect_ok(await lab.call(Create(machine_id, CallToken(shard, 1, 6))), "a higher one")


@AREA.behaviour(11, ConformanceProfile.CORE)
async def random_tokens(lab: Lab) -> None:
    """200 random tokens agree with "strictly greater than the maximum so far"."""
    machine_id, shard = await lab.slot(), lab.new_shard()
    newest: tuple[int, int] | None = None
    for _ in range(_RANDOM_TOKENS):
        drawn = (lab.draws.below(8), lab.draws.below(60))
        wanted = newest is None or drawn > newest
        await expect_pass(lab, machine_id, CallToken(shard, *drawn), wanted=wanted, why=f"the newest was {newest}")
        newest = drawn if wanted else newest
