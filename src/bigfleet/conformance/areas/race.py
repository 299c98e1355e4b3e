"""Checks RACE: sixteen concurrent calls become one operation, or end in one clean state (docs/spec/provider.md §3, §5).

Concurrent calls carry tokens of different shards, unless tokens are the subject: those of one shard may overtake each
other and be fenced. This module must not depend on the order in which calls arrive.
"""

import asyncio
from collections.abc import Sequence

from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import broken, expect, expect_fenced, expect_ok, expect_same_map
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import (
    Answer,
    CallToken,
    Configure,
    Create,
    Delete,
    Drain,
    MachineSeen,
    Mutation,
)
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("RACE")

_CALLS = 16
_MACHINES = 8
_S = MachineState
_METADATA = {"race": "1", "empty": ""}


async def together(lab: Lab, requests: Sequence[Mutation], connections: int = 1) -> list[Answer]:
    """Carry all requests at once, dealt out over the connections, and return their answers in order."""
    return await asyncio.gather(*(lab.call(request, place % connections) for place, request in enumerate(requests)))


async def collapse(
    lab: Lab, requests: Sequence[Mutation], target: MachineState, *, connections: int = 1
) -> tuple[MachineSeen, list[Answer]]:
    """Carry equal requests at once; return the settled machine and the acks.

    Raises Broken unless all were taken as one operation that settles once in `target`, with one entry in List.
    """
    kind, machine_id = type(requests[0]).__name__, requests[0].machine_id
    answers = await together(lab, requests, connections)
    for answer in answers:
        expect_ok(answer, f"each of {len(requests)} equal {kind} calls")
    ids = {answer.operation_id for answer in answers}
    expect(len(ids) == 1 and "" not in ids, f"{len(requests)} equal {kind} calls are one operation", sorted(ids))
    end = (await lab.way_of(machine_id)).end
    expect(end.state is target, f"{kind} ends in {target.name}", machine_text(end))
    await lab.stays(machine_id, target, f"{kind} settles once")
    listed = await lab.listed(machine_id)
    expect(listed.state is target, f"List shows {target.name}", machine_text(listed))
    return await lab.get(machine_id), answers


@AREA.behaviour(1, ConformanceProfile.CORE)
async def race_of_create(lab: Lab) -> None:
    """Create: one id, one settlement, one entry in List."""
    machine_id = await lab.slot()
    end, _answers = await collapse(lab, [Create(machine_id, token) for token in lab.shards(_CALLS)], _S.IDLE)
    expect_unbound(end, "an IDLE machine shows no cluster, metadata or error")


@AREA.behaviour(2, ConformanceProfile.CORE)
async def race_of_configure(lab: Lab) -> None:
    """Configure: the same."""
    machine_id, cluster = await lab.idle(), lab.new_cluster()
    requests = [Configure(machine_id, cluster, _METADATA, lab.blob, token) for token in lab.shards(_CALLS)]
    end, _answers = await collapse(lab, requests, _S.CONFIGURED)
    _expect_bound(end, cluster)


def _expect_bound(machine: MachineSeen, cluster: str) -> None:
    expect(machine.cluster == cluster, f"{machine.id} is bound to {cluster}", machine_text(machine))
    expect_same_map(machine.metadata, _METADATA, machine.id)


@AREA.behaviour(3, ConformanceProfile.CORE)
async def race_of_drain(lab: Lab) -> None:
    """Drain: the same."""
    machine = await lab.configured()
    end, _answers = await collapse(lab, [Drain(machine.id, 0, token) for token in lab.shards(_CALLS)], _S.IDLE)
    expect_unbound(end, "a drained machine shows no cluster, metadata or error")


@AREA.behaviour(4, ConformanceProfile.CORE)
async def configure_races_drain(lab: Lab) -> None:
    """Configure racing Drain ends in exactly one clean resting state."""
    machine_id, cluster = await lab.idle(), lab.new_cluster()
    for _round in range(2):
        tokens = iter(lab.shards(_CALLS))
        requests: list[Mutation] = []
        for _ in range(_CALLS // 2):
            requests += [
                Configure(machine_id, cluster, _METADATA, lab.blob, next(tokens)),
                Drain(machine_id, 0, next(tokens)),
            ]
        for answer in await together(lab, requests):
            expect(not answer.is_fenced, "tokens of new shards are not fenced", answer.details)
        await _expect_clean_rest(lab, machine_id, cluster)


async def _expect_clean_rest(lab: Lab, machine_id: str, cluster: str) -> None:
    end = (await lab.way_of(machine_id)).end
    expect(end.state in (_S.IDLE, _S.CONFIGURED), "the race ends in IDLE or CONFIGURED", machine_text(end))
    end = await lab.stays(machine_id, end.state, "the race ends in exactly one state")
    if end.state is _S.IDLE:
        expect_unbound(end, "the race ended in IDLE: no cluster, metadata or error")
    else:
        _expect_bound(end, cluster)
        expect(not end.last_error, "the race ended in CONFIGURED: no error", machine_text(end))


@AREA.behaviour(5, ConformanceProfile.CORE)
async def race_of_epochs(lab: Lab) -> None:
    """Once an epoch was seen, its tokens and older ones in parallel: the older always fenced, at least one newer
    accepted.
    """
    machine_id, shard = await lab.slot(), lab.new_shard()
    first = await lab.call(Drain(machine_id, 0, CallToken(shard, 5, 1)))
    expect(not first.is_fenced, "first contact is not fenced", first.details)
    requests = [
        Create(machine_id, CallToken(shard, epoch, sequence))
        for place in range(_CALLS // 2)
        for epoch, sequence in ((4, 1000 + place), (5, 2 + place))
    ]
    answers = await together(lab, requests)
    for request, answer in zip(requests, answers, strict=True):
        if request.token.epoch == 4:
            expect_fenced(answer, f"(4, {request.token.sequence}) after epoch 5 was seen")
        else:
            expect(answer.is_ok or answer.is_fenced, "a newer token is taken, or overtaken", answer.details)
    expect(any(answer.is_ok for answer in answers), "at least one token of the newer epoch is accepted")
    end = (await lab.way_of(machine_id)).end
    expect(end.state is _S.IDLE, "Create ends in IDLE", machine_text(end))


@AREA.behaviour(6, ConformanceProfile.CORE)
async def race_over_connections(lab: Lab) -> None:
    """Repeats collapse over two connections too."""
    machine_id, cluster = await lab.slot(), lab.new_cluster()
    creates = [Create(machine_id, token) for token in lab.shards(_CALLS)]
    await collapse(lab, creates, _S.IDLE, connections=2)
    requests = [Configure(machine_id, cluster, _METADATA, lab.blob, token) for token in lab.shards(_CALLS)]
    end, _answers = await collapse(lab, requests, _S.CONFIGURED, connections=2)
    _expect_bound(end, cluster)


@AREA.behaviour(7, ConformanceProfile.CORE)
async def eight_machines(lab: Lab) -> None:
    """Eight machines in parallel: distinct ids, no cross-talk."""
    machine_ids = [await lab.slot() for _ in range(_MACHINES)]
    created = await together(lab, [lab.stamped(Create(machine_id)) for machine_id in machine_ids])
    expect_distinct(created, "Create")
    await settle_all(lab, machine_ids, _S.IDLE)
    bindings = {machine_id: (lab.new_cluster(), {"of": machine_id}) for machine_id in machine_ids}
    requests = [lab.stamped(Configure(machine_id, *bindings[machine_id])) for machine_id in machine_ids]
    configured = await together(lab, requests)
    expect_distinct([*created, *configured], "Create and Configure")
    for machine in await settle_all(lab, machine_ids, _S.CONFIGURED):
        cluster, metadata = bindings[machine.id]
        expect(machine.cluster == cluster, f"{machine.id} is bound to {cluster}", machine_text(machine))
        expect_same_map(machine.metadata, metadata, machine.id)


def expect_distinct(answers: Sequence[Answer], kind: str) -> None:
    """Raise Broken unless all calls were taken, each as an operation of its own."""
    ids = [expect_ok(answer, kind).operation_id for answer in answers]
    expect(len({*ids}) == len(ids), f"{kind} of different machines have different operation ids", sorted(ids))


async def settle_all(lab: Lab, machine_ids: Sequence[str], state: MachineState) -> list[MachineSeen]:
    """Return the machines once all of them rest in `state`. Raises Broken."""
    seconds_max = lab.patience.bulk_seconds
    ways = await asyncio.gather(*(lab.way_of(machine_id, seconds_max=seconds_max) for machine_id in machine_ids))
    for way in ways:
        expect(way.end.state is state, f"each machine ends in {state.name}", machine_text(way.end))
    return [way.end for way in ways]


@AREA.behaviour(8, ConformanceProfile.CORE)
async def acks_of_a_burst(lab: Lab) -> None:
    """Acks in a burst show CONFIGURING or CONFIGURED only, with the right cluster."""
    machine_id, cluster = await lab.idle(), lab.new_cluster()
    requests = [Configure(machine_id, cluster, _METADATA, lab.blob, token) for token in lab.shards(_CALLS)]
    _end, answers = await collapse(lab, requests, _S.CONFIGURED)
    for answer in answers:
        if answer.machine is None:
            broken("an ack shows the machine")
        text = machine_text(answer.machine)
        expect(answer.machine.state in (_S.CONFIGURING, _S.CONFIGURED), "an ack shows CONFIGURING or CONFIGURED", text)
        expect(answer.machine.cluster == cluster, f"an ack shows cluster {cluster}", text)


@AREA.behaviour(9, ConformanceProfile.CLOUD)
async def race_of_delete(lab: Lab) -> None:
    """Delete: the same."""
    machine_id = await lab.idle()
    end, _answers = await collapse(lab, [Delete(machine_id, token) for token in lab.shards(_CALLS)], _S.SPECULATIVE)
    expect(end.host is None, "a deleted machine has no host", machine_text(end))
