"""Checks EDGE: calls in the wrong state, repeats, unknown and empty ids, and arguments at their limits.

docs/spec/provider.md §3, §5. If the contract allows several outcomes, each of them passes, and no other.
"""

from collections.abc import Mapping

from bigfleet.conformance.areas.life import expect_unbound
from bigfleet.conformance.behaviour import Area
from bigfleet.conformance.calls import machine_text
from bigfleet.conformance.expecting import (
    broken,
    expect,
    expect_fenced,
    expect_ok,
    expect_refused,
    expect_same_map,
    how,
)
from bigfleet.conformance.lab import Lab
from bigfleet.conformance.ports import (
    CallToken,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    MachineSeen,
    Mutation,
    Status,
)
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.model.states import MachineState

AREA = Area("EDGE")

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
_KIBIBYTE = 1024
_BIG_METADATA_BYTES = 512 * _KIBIBYTE
_BIG_BLOB_BYTES = 3 * _KIBIBYTE * _KIBIBYTE
_KEYS = 64
_S = MachineState


def expect_unchanged(now: MachineSeen, before: MachineSeen, expectation: str) -> None:
    """Raise Broken when state, host, binding or error of a machine changed."""
    expect(now.state is before.state, f"{expectation}: still {before.state.name}", machine_text(now))
    expect(now.host == before.host, f"{expectation}: the same host", machine_text(now))
    expect(now.cluster == before.cluster, f"{expectation}: cluster {before.cluster!r}", machine_text(now))
    expect_same_map(now.metadata, before.metadata, expectation)
    expect(now.last_error == before.last_error, f"{expectation}: the same last_error", machine_text(now))


def big_map(size_bytes: int) -> dict[str, str]:
    """Return metadata of about that size, keys and values together."""
    value = "v" * (size_bytes // _KEYS - len("key-00"))
    return {f"key-{number:02d}": value for number in range(_KEYS)}


@AREA.behaviour(1, ConformanceProfile.CORE)
async def create_on_configured(lab: Lab) -> None:
    """Create on CONFIGURED is refused, binding intact."""
    before = await lab.configured(metadata={"a": "1", "b": ""})
    expect_refused(await lab.call(Create(before.id, lab.token())), "Create on CONFIGURED")
    await lab.stays(before.id, _S.CONFIGURED, "Create on CONFIGURED changes no state")
    expect_unchanged(await lab.get(before.id), before, "Create on CONFIGURED")


@AREA.behaviour(2, ConformanceProfile.CORE)
async def configure_on_speculative(lab: Lab) -> None:
    """Configure on SPECULATIVE is refused, nothing bound."""
    machine_id = await lab.slot()
    request = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob, lab.token())
    expect_refused(await lab.call(request), "Configure on SPECULATIVE")
    machine = await lab.stays(machine_id, _S.SPECULATIVE, "Configure on SPECULATIVE changes no state")
    expect_unbound(machine, "Configure on SPECULATIVE binds nothing")


@AREA.behaviour(3, ConformanceProfile.CORE)
async def drain_on_idle(lab: Lab) -> None:
    """Drain on IDLE is refused or a no-op, never fenced; the machine stays IDLE."""
    machine_id = await lab.idle()
    answer = await lab.call(Drain(machine_id, 0, lab.token()))
    expect(not answer.is_fenced, "Drain on IDLE with a fresh token is never fenced", how(answer))
    machine = await lab.stays(machine_id, _S.IDLE, "Drain on IDLE leaves it IDLE")
    expect(machine.host is not None, "Drain on IDLE leaves the host", machine_text(machine))


@AREA.behaviour(4, ConformanceProfile.CLOUD)
async def delete_out_of_position(lab: Lab) -> None:
    """Delete on CONFIGURED is refused; on SPECULATIVE refused, a no-op or UNIMPLEMENTED; state unchanged."""
    slot = await lab.slot()
    bound = await lab.configured()
    expect_refused(await lab.call(Delete(bound.id, lab.token())), "Delete on CONFIGURED")
    answer = await lab.call(Delete(slot, lab.token()))
    expect(not answer.is_fenced, "Delete on SPECULATIVE with a fresh token is never fenced", how(answer))
    await lab.stays(slot, _S.SPECULATIVE, "Delete on SPECULATIVE leaves it SPECULATIVE")
    await lab.stays(bound.id, _S.CONFIGURED, "Delete on CONFIGURED leaves it CONFIGURED")
    expect_unchanged(await lab.get(bound.id), bound, "Delete on CONFIGURED")


@AREA.behaviour(5, ConformanceProfile.CORE)
async def repeats_change_nothing(lab: Lab) -> None:
    """Configure again at CONFIGURED and Create again at IDLE succeed and change nothing."""
    machine_id = await lab.slot()
    before = await lab.create(machine_id)
    await lab.done(Create(machine_id))
    await lab.stays(machine_id, _S.IDLE, "Create again at IDLE leaves it IDLE")
    expect_unchanged(await lab.get(machine_id), before, "Create again at IDLE")
    request = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob)
    before = (await lab.way(request, _S.CONFIGURED)).end
    await lab.done(request)
    await lab.stays(machine_id, _S.CONFIGURED, "Configure again at CONFIGURED leaves it CONFIGURED")
    expect_unchanged(await lab.get(machine_id), before, "Configure again at CONFIGURED")


@AREA.behaviour(6, ConformanceProfile.CORE)
async def repeats_return_the_first_id(lab: Lab) -> None:
    """Such a repeat returns the first operation id; the ids of Create and Configure differ."""
    machine_id = await lab.slot()
    created = await _repeated(lab, Create(machine_id))
    configured = await _repeated(lab, Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob))
    expect(created != configured, "the operation ids of Create and Configure differ", created)


async def _repeated(lab: Lab, request: Mutation) -> str:
    """Carry a call, and again once it ended; return the operation id of both."""
    first = await lab.done(request)
    await lab.way_of(request.machine_id)
    again = await lab.done(request)
    expectation = f"a repeated {type(request).__name__} returns the first id {first.operation_id}"
    expect(again.operation_id == first.operation_id, expectation, again.operation_id)
    return first.operation_id


@AREA.behaviour(7, ConformanceProfile.CORE)
async def unknown_ids(lab: Lab) -> None:
    """Create, Configure, Drain of an unknown id: NOT_FOUND, and no machine appears."""
    machine_id = lab.new_machine_id()
    for request in (Create(machine_id), Configure(machine_id, lab.new_cluster(), {"k": "v"}), Drain(machine_id)):
        answer = await lab.call(lab.stamped(request))
        expectation = f"{type(request).__name__} of an unknown id is NOT_FOUND"
        expect(answer.status is Status.NOT_FOUND, expectation, how(answer))
        answer = await lab.call(Get(machine_id))
        expect(answer.status is Status.NOT_FOUND, "no machine appears: Get is NOT_FOUND", how(answer))
    ids = {machine.id for machine in (await lab.list_machines()).machines}
    expect(machine_id not in ids, "no machine appears in List", machine_id)


@AREA.behaviour(8, ConformanceProfile.CORE)
async def empty_ids(lab: Lab) -> None:
    """An empty id on Get, Create, Configure, Drain: INVALID_ARGUMENT."""
    cluster = lab.new_cluster()
    for request in (Get(""), Create("", lab.token()), Configure("", cluster, token=lab.token()), Drain("")):
        answer = await lab.call(request)
        expectation = f"{type(request).__name__} with an empty id is INVALID_ARGUMENT"
        expect(answer.status is Status.INVALID_ARGUMENT, expectation, how(answer))


@AREA.behaviour(9, ConformanceProfile.CORE)
async def half_a_mebibyte_of_metadata(lab: Lab) -> None:
    """512 KiB of metadata: exact echo, or INVALID_ARGUMENT without effect."""
    await exact_or_refused(lab, big_map(_BIG_METADATA_BYTES), "512 KiB of metadata")


async def exact_or_refused(lab: Lab, metadata: Mapping[str, str], what: str) -> None:
    """Configure with a map; raise Broken unless it is echoed exactly, or INVALID_ARGUMENT and nothing happened."""
    machine_id = await lab.idle()
    before = await lab.get(machine_id)
    answer = await lab.call(Configure(machine_id, lab.new_cluster(), metadata, lab.blob, lab.token()))
    if answer.status is Status.INVALID_ARGUMENT:
        await lab.stays(machine_id, _S.IDLE, f"{what}, refused, leaves the machine IDLE")
        expect_unchanged(await lab.get(machine_id), before, f"{what}, refused")
        return
    expect_ok(answer, f"{what}: taken, or INVALID_ARGUMENT")
    end = (await lab.way_of(machine_id, answer)).end
    expect(end.state is _S.CONFIGURED, f"{what}, taken, ends in CONFIGURED", machine_text(end))
    expect_same_map(end.metadata, metadata, "Get")
    expect_same_map((await lab.listed(machine_id)).metadata, metadata, "List")


@AREA.behaviour(10, ConformanceProfile.CORE)
async def negative_grace(lab: Lab) -> None:
    """A negative grace: INVALID_ARGUMENT and still CONFIGURED, or a clean drain."""
    before = await lab.configured()
    answer = await lab.call(Drain(before.id, -1, lab.token()))
    if answer.status is Status.INVALID_ARGUMENT:
        await lab.stays(before.id, _S.CONFIGURED, "a refused Drain leaves the machine CONFIGURED")
        expect_unchanged(await lab.get(before.id), before, "a refused Drain")
        return
    expect_ok(answer, "a negative grace is INVALID_ARGUMENT or taken")
    end = (await lab.way_of(before.id, answer)).end
    expect(end.state is _S.IDLE, "a Drain that was taken ends in IDLE", machine_text(end))
    expect_unbound(end, "a Drain that was taken leaves no cluster, metadata or error")


@AREA.behaviour(11, ConformanceProfile.CORE)
async def negative_tokens(lab: Lab) -> None:
    """Negative token numbers are never fenced on first contact."""
    machine_id = await lab.slot()
    for epoch, sequence in ((-1, -1), (-1, 5), (0, -1), (5, -1), (INT64_MIN, INT64_MIN), (INT64_MIN, INT64_MAX)):
        answer = await lab.call(Drain(machine_id, 0, CallToken(lab.new_shard(), epoch, sequence)))
        expect(not answer.is_fenced, f"({epoch}, {sequence}) of a new shard is not fenced", how(answer))


@AREA.behaviour(12, ConformanceProfile.CORE)
async def largest_token(lab: Lab) -> None:
    """The int64-maximum token is accepted; its replay and any lower one are fenced."""
    machine_id, shard = await lab.idle(), lab.new_shard()
    request = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob, CallToken(shard, INT64_MAX, INT64_MAX))
    expect_ok(await lab.call(request), "Configure with the largest token")
    await lab.way_of(machine_id)
    expect_fenced(await lab.call(request), "its replay")
    for epoch, sequence in ((INT64_MAX, INT64_MAX - 1), (INT64_MAX - 1, INT64_MAX), (1, 1), (-1, -1)):
        answer = await lab.call(Drain(machine_id, 0, CallToken(shard, epoch, sequence)))
        expect_fenced(answer, f"the lower token ({epoch}, {sequence})")


@AREA.behaviour(13, ConformanceProfile.CORE)
async def large_blob(lab: Lab) -> None:
    """A 3 MiB blob: accepted, INVALID_ARGUMENT or RESOURCE_EXHAUSTED; no half-way state."""
    machine_id, cluster = await lab.idle(), lab.new_cluster()
    before = await lab.get(machine_id)
    # Newlines change neither a script nor a configuration.
    blob = lab.blob.ljust(_BIG_BLOB_BYTES, b"\n")
    answer = await lab.call(Configure(machine_id, cluster, {"k": "v"}, blob, lab.token()))
    if answer.is_ok:
        end = (await lab.way_of(machine_id, answer)).end
        expect(end.state is _S.CONFIGURED, "a blob that was taken ends in CONFIGURED", machine_text(end))
        expect(end.cluster == cluster, "a blob that was taken binds the machine", machine_text(end))
        return
    allowed = (Status.INVALID_ARGUMENT, Status.RESOURCE_EXHAUSTED)
    expect(answer.status in allowed, "a 3 MiB blob: OK, INVALID_ARGUMENT or RESOURCE_EXHAUSTED", how(answer))
    await lab.stays(machine_id, _S.IDLE, "a blob that was refused leaves the machine IDLE")
    expect_unchanged(await lab.get(machine_id), before, "a blob that was refused")


@AREA.behaviour(14, ConformanceProfile.CORE)
async def five_transitions_five_ids(lab: Lab) -> None:
    """Five transitions in a row give five ids; repeating the last returns its id."""
    machine_id = await lab.slot()
    bind, free = Configure(machine_id, lab.new_cluster(), {"k": "v"}, lab.blob), Drain(machine_id)
    ids: list[str] = []
    for request in (Create(machine_id), bind, free, bind, free):
        answer = await lab.done(request)
        await lab.way_of(machine_id)
        expect(answer.operation_id not in ids, "each transition has an id of its own", answer.operation_id)
        ids.append(answer.operation_id)
    again = await lab.done(free)
    expect(again.operation_id == ids[-1], f"repeating the last Drain returns {ids[-1]}", again.operation_id)


@AREA.behaviour(15, ConformanceProfile.CLOUD)
async def unknown_ids_in_a_cloud(lab: Lab) -> None:
    """Get of an unknown id: NOT_FOUND; Delete of one: NOT_FOUND or UNIMPLEMENTED."""
    machine_id = lab.new_machine_id()
    answer = await lab.call(Get(machine_id))
    expect(answer.status is Status.NOT_FOUND, "Get of an unknown id is NOT_FOUND", how(answer))
    answer = await lab.call(Delete(machine_id, lab.token()))
    if answer.status not in (Status.NOT_FOUND, Status.UNIMPLEMENTED):
        broken("Delete of an unknown id is NOT_FOUND or UNIMPLEMENTED", how(answer))
