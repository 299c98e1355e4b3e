"""Checks FUZZ: random tokens, maps, sequences and malformed input against small models (docs/spec/provider.md §23).

All random values come from the behaviour's own stream.
"""

from collections.abc import Callable

from bigfleet.conformance.areas.edge import INT64_MAX, INT64_MIN, expect_unchanged
from bigfleet.conformance.areas.fence import expect_pass
from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.draws import BehaviourDraws
from bigfleet.conformance.expecting import expect, expect_ok, expect_same_map, how
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import (
    ABSENT,
    Answer,
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

AREA = Area("FUZZ")

_TOKENS = 240
_MAPS = 20
_KEYS_MAX = 24
_CHARACTERS_MAX = 40
_STEPS = 60
_CREATES = 200
_BAD_REQUESTS = 120
_ID_BYTES_MAX = 253
_S = MachineState

#: The four edges: from where a call leads where.
_EDGES: dict[type[Mutation], tuple[MachineState, MachineState]] = {
    Create: (_S.SPECULATIVE, _S.IDLE),
    Configure: (_S.IDLE, _S.CONFIGURED),
    Drain: (_S.CONFIGURED, _S.IDLE),
    Delete: (_S.IDLE, _S.SPECULATIVE),
}


def _biased(draws: BehaviourDraws, newest: tuple[int, int]) -> tuple[int, int]:
    """Return a token, most of them close to the newest one."""
    epoch, sequence = newest
    shape = draws.below(8)
    if shape == 0:
        return draws.between(-5, 60), draws.between(-50, 500)
    if shape == 1:
        return epoch - draws.between(1, 3), INT64_MAX - draws.below(3)
    if shape == 2:
        return min(epoch + 1, INT64_MAX), draws.choice((INT64_MIN, -7, 0, 1))
    step = draws.between(-2, 3)
    return epoch, max(INT64_MIN, min(INT64_MAX, sequence + step))


@AREA.behaviour(1, ConformanceProfile.CORE)
async def biased_tokens(lab: Lab) -> None:
    """240 biased tokens, negative ones among them, against the lexicographic model."""
    machine_id, shard = await lab.slot(), lab.new_shard()
    newest = (lab.draws.between(-20, -10), lab.draws.between(-20, 20))
    await expect_pass(lab, machine_id, CallToken(shard, *newest), wanted=True, why="first contact")
    for _ in range(_TOKENS - 1):
        drawn = _biased(lab.draws, newest)
        wanted = drawn > newest
        await expect_pass(lab, machine_id, CallToken(shard, *drawn), wanted=wanted, why=f"the newest was {newest}")
        newest = drawn if wanted else newest


@AREA.behaviour(2, ConformanceProfile.CORE)
async def random_maps(lab: Lab) -> None:
    """20 random UTF-8 maps round-trip on one machine, clean after each drain."""
    machine_id = await lab.idle()
    for number in range(_MAPS):
        keys = lab.draws.below(_KEYS_MAX + 1)
        metadata = {lab.draws.text(_CHARACTERS_MAX): lab.draws.text(_CHARACTERS_MAX) for _ in range(keys)}
        metadata[f"round-{number}"] = ""
        machine = await lab.configure(machine_id, metadata=metadata)
        expect_same_map(machine.metadata, metadata, f"map {number + 1}, Get")
        expect_same_map((await lab.listed(machine_id)).metadata, metadata, f"map {number + 1}, List")
        expect_unbound(await lab.drain(machine_id), f"the drain after map {number + 1} leaves nothing")


@AREA.behaviour(3, ConformanceProfile.CORE)
async def random_sequences(lab: Lab) -> None:
    """Random call sequences follow the four edges."""
    states = {await lab.slot(): _S.SPECULATIVE, await lab.slot(): _S.SPECULATIVE}
    cluster = lab.new_cluster()
    for _ in range(_STEPS):
        machine_id = lab.draws.choice(sorted(states))
        request = _any_kind(lab, machine_id, lab.token(), cluster)
        states[machine_id] = await _step(lab, request, states[machine_id])


async def _step(lab: Lab, request: Mutation, state: MachineState) -> MachineState:
    """Carry one call on a machine that rests in `state`; return where it rests afterwards. Raises Broken."""
    kind = type(request)
    source, target = _EDGES[kind]
    answer = await lab.call(request)
    what = f"{kind.__name__} on {state.name}"
    expect(not answer.is_fenced, f"{what} with a fresh token is not fenced", how(answer))
    may_lack = kind is Delete and answer.status is Status.UNIMPLEMENTED
    if state is source and not may_lack:
        expect_ok(answer, what)
        state = target
    elif answer.is_ok:
        expect(state is target, f"{what} is refused, or a repeat that changes nothing", how(answer))
    end = (await lab.way_of(request.machine_id)).end
    expect(end.state is state, f"after {what} the machine rests in {state.name}", machine_text(end))
    if state is not _S.CONFIGURED:
        expect_unbound(end, f"after {what} nothing is bound")
    return state


@AREA.behaviour(4, ConformanceProfile.CORE)
async def random_creates(lab: Lab) -> None:
    """200 fenced Creates over 3 shards × 4 machines: fenced exactly when the rule says so."""
    machine_ids = [await lab.slot() for _ in range(4)]
    shards = [lab.new_shard() for _ in range(3)]
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for _ in range(_CREATES):
        machine_id, shard = lab.draws.choice(machine_ids), lab.draws.choice(shards)
        drawn = (lab.draws.between(1, 4), lab.draws.between(1, 30))
        before = newest.get((shard, machine_id))
        wanted = before is None or drawn > before
        answer = await lab.call(Create(machine_id, CallToken(shard, *drawn)))
        said = "is taken" if wanted else "is fenced"
        _expect_verdict(answer, wanted, f"Create with {drawn} {said}: the newest was {before}")
        if wanted:
            newest[shard, machine_id] = drawn
    for machine_id in machine_ids:
        end = (await lab.way_of(machine_id)).end
        taken = any(known == machine_id for _shard, known in newest)
        wanted_state = _S.IDLE if taken else _S.SPECULATIVE
        expect(end.state is wanted_state, f"the machine rests in {wanted_state.name}", machine_text(end))


def _expect_verdict(answer: Answer, wanted: bool, expectation: str) -> None:
    expect(answer.is_ok if wanted else answer.is_fenced, expectation, how(answer))


@AREA.behaviour(5, ConformanceProfile.CORE)
async def bad_requests(lab: Lab) -> None:
    """Random bad requests get INVALID_ARGUMENT, NOT_FOUND or a refusal, never the fence."""
    machine_id = await lab.slot()
    before = await lab.get(machine_id)
    for _ in range(_BAD_REQUESTS):
        what, make = lab.draws.choice(_NONSENSE)
        request = make(lab, machine_id, lab.token() if lab.draws.chance(0.7) else ABSENT)
        answer = await lab.call(request)
        expect(answer.is_refused, f"{type(request).__name__} with {what} is refused, not by the fence", how(answer))
    await lab.stays(machine_id, _S.SPECULATIVE, "bad requests move no machine")
    expect_unchanged(await lab.get(machine_id), before, "bad requests")


def _any_kind(lab: Lab, machine_id: str, token: CallToken, cluster: str = "") -> Mutation:
    requests: tuple[Mutation, ...] = (
        Create(machine_id, token),
        Configure(machine_id, cluster or lab.new_cluster(), {"k": "v"}, lab.blob, token),
        Drain(machine_id, 0, token),
        Delete(machine_id, token),
    )
    return lab.draws.choice(requests)


_Make = Callable[[Lab, str, CallToken], Mutation]
#: What is wrong, and a request in which it is; the machine is a free slot.
_NONSENSE: tuple[tuple[str, _Make], ...] = (
    ("an empty id", lambda lab, _slot, token: _any_kind(lab, "", token)),
    ("an unknown id", lambda lab, _slot, token: _any_kind(lab, lab.new_machine_id(), token)),
    (
        "an unknown id of any letters",
        lambda lab, _slot, token: _any_kind(lab, f"{lab.draws.text(40)} {lab.ids.new_id()}", token),
    ),
    (
        "an id that is too long",
        lambda lab, _slot, token: _any_kind(lab, "x" * (_ID_BYTES_MAX + lab.draws.between(1, 2000)), token),
    ),
    ("an empty cluster", lambda lab, slot, token: Configure(slot, "", {"k": "v"}, b"", token)),
    (
        "a cluster that is too long",
        lambda _lab, slot, token: Configure(slot, "c" * (_ID_BYTES_MAX + 1), {}, b"", token),
    ),
    ("a negative grace", lambda lab, slot, token: Drain(slot, -lab.draws.between(1, 2**40), token)),
    ("a machine out of position", lambda _lab, slot, token: Drain(slot, 0, token)),
    ("a machine without a host", lambda lab, slot, token: Configure(slot, lab.new_cluster(), {"k": "v"}, b"", token)),
    (
        "numbers but no shard",
        lambda lab, _slot, _token: _any_kind(lab, lab.new_machine_id(), CallToken("", lab.draws.between(1, 9), 1)),
    ),
)
