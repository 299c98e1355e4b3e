"""Transitions that do not end: driven again once, then shown as stuck (docs/spec/shard.md §9.5)."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.shard import process as shard_process
from bigfleet.cli.shard.process_settings import ShardProcessSettings
from bigfleet.engine.folding import folded_profile
from bigfleet.model import labels
from bigfleet.model.frames import BootstrapRequest, BootstrapResponse, DrainOutcome
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.gen import shardread_pb2
from bigfleet.shard.actuation.provider_backoff import MAX_SECONDS
from bigfleet.shard.ports import FenceToken, ListedMachine, ProviderRefusal, RefusalKind, ShardSettings, TransitionAck
from bigfleet.shard.sessions.demand import NeedsTable
from tests.rpc.live_shard import live_shard
from tests.shard.audit.audit_memory import MemoryAuditLog
from tests.shard.world import ScriptedProvider, World, machine, need

S = MachineState


@dataclass
class Forgetful(ScriptedProvider):
    """Takes a call and forgets to do it; the same call again is a repeat, and ends it where `heals`."""

    heals: bool = True
    metadata_sent: list[Mapping[str, str]] = field(default_factory=list)
    graces_sent: list[tuple[str, int]] = field(default_factory=list)

    async def drain(self, machine_id: MachineId, grace_seconds: int, token: FenceToken) -> TransitionAck:
        self.graces_sent.append((machine_id, grace_seconds))
        return await super().drain(machine_id, grace_seconds, token)

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        self.metadata_sent.append(dict(metadata))
        return await super().configure(machine_id, cluster, blob, metadata, token)

    def _transition(self, method: str, machine_id: MachineId, token: FenceToken, *rest: Any) -> TransitionAck:
        _source, target, *_binding = rest
        refusals = self.refusals.get((method, machine_id))
        if machine_id in self.records and self.records[machine_id].state is target and not refusals:
            self.calls.append((method, machine_id, token.sequence))
            if self.heals:
                self.settle(machine_id)
            shown = ListedMachine(self.records[machine_id], self.metadata.get(machine_id, {}))
            return TransitionAck(operation_id="again", record=shown)
        return super()._transition(method, machine_id, token, *rest)


async def creating(world: World) -> None:
    """Bring m1 to Creating."""
    world.provider.add(machine("m1", S.SPECULATIVE, capacity_type=CapacityType.SPOT))
    world.connect("c1").report(need("c1", "4"))
    await world.cycle()


async def configuring(world: World) -> None:
    """Bring m1 to Configuring."""
    world.provider.add(machine("m1", S.IDLE))
    world.connect("c1").report(need("c1", "4", priority=700))
    await world.cycle()


async def draining(world: World) -> None:
    """Bring m1 to Draining; its operator is done after five of six hundred seconds."""
    world.provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world.connect("c1").report()
    await world.cycle()


async def deleting(world: World) -> None:
    """Bring m1 to Deleting."""
    world.provider.add(machine("m1", S.IDLE, capacity_type=CapacityType.SPOT))
    await world.cycle()
    await world.shard._clock.sleep(60)
    await world.cycle()


#: The way in, the state, the call, its bound in seconds, the kind that it counts as.
TRANSITIONS = [
    pytest.param(creating, S.CREATING, "create", 1200, "Provision", id="creating"),
    pytest.param(configuring, S.CONFIGURING, "configure", 900, "Bootstrap", id="configuring"),
    pytest.param(draining, S.DRAINING, "drain", 1200, "Reclaim", id="draining"),
    pytest.param(deleting, S.DELETING, "delete", 1200, "Delete", id="deleting"),
]
ENDS = {S.CREATING: S.IDLE, S.CONFIGURING: S.CONFIGURED, S.DRAINING: S.IDLE, S.DELETING: S.SPECULATIVE}
Enter = Callable[[World], Any]


async def pass_time(world: World, seconds: float, step_seconds: float = 10.0) -> None:
    """Let time go by in timer cycles."""
    passed = 0.0
    while passed < seconds:
        await world.shard._clock.sleep(min(step_seconds, seconds - passed))
        passed += step_seconds
        await world.cycle()


async def in_transition(provider: ScriptedProvider, enter: Enter, **options: Any) -> World:
    """Return a world whose m1 is in the transition, and was looked at in it."""
    world = World(provider, **options)
    await enter(world)
    await world.cycle()
    return world


@pytest.mark.rule("shard 9.5/1", "shard 13/2")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("enter", "state", "call", "bound_seconds", "kind"), TRANSITIONS)
async def test_a_transition_over_its_bound_is_driven_again_and_ends(
    enter: Enter, state: MachineState, call: str, bound_seconds: float, kind: str
) -> None:
    """The same call with a fresh token; what the provider says then is followed."""
    log = MemoryAuditLog()
    world = await in_transition(Forgetful(), enter, audit_log=log)
    before = list(world.provider.calls)
    await pass_time(world, bound_seconds - 20)
    assert (world.state("m1"), world.provider.calls) == (state, before)

    await pass_time(world, 30)
    again = [made for made in world.provider.calls if made not in before]
    assert again[0][:2] == (call, "m1")
    assert again[0][2] > max(sequence for _method, _machine, sequence in before)
    assert world.provider.state("m1") in (ENDS[state], S.CONFIGURING)
    assert world.metric("redrives_total", kind=kind) == 1
    (record,) = [each for each in log.records if each["kind"] == "Redrive"]
    assert (record["reason"], record["outcome"], record["token_sequence"]) == ("shard.redrive", "success", again[0][2])
    assert world.metric("machines_stuck", state=state.label) == 0
    assert not world.shard.stuck.stuck()


@pytest.mark.rule("shard 9.5/5", "shard 15/13")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("enter", "state", "call", "bound_seconds", "kind"), TRANSITIONS)
async def test_a_transition_that_still_does_not_end_is_shown_as_stuck_and_left_alone(
    enter: Enter, state: MachineState, call: str, bound_seconds: float, kind: str
) -> None:
    """Once per stay, for as long as it takes; the provider's word ends it."""
    world = await in_transition(Forgetful(heals=False), enter)
    before = len(world.provider.calls)
    await pass_time(world, 5 * bound_seconds, step_seconds=60)

    assert [made[0] for made in world.provider.calls[before:]] == [call]
    assert (world.state("m1"), world.shard.stuck.is_stuck(MachineId("m1"))) == (state, True)
    assert world.metric("machines_stuck", state=state.label) == 1
    assert world.metric("redrives_total", kind=kind) == 1

    world.provider.settle("m1")
    await world.cycle()
    assert (world.shard.stuck.is_stuck(MachineId("m1")), world.metric("machines_stuck", state=state.label)) == (
        False,
        0,
    )


@pytest.mark.rule("shard 9.5/1")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("enter", "state", "call", "bound_seconds", "kind"), TRANSITIONS)
async def test_a_synchronous_provider_ends_a_lost_transition_with_the_second_call(
    enter: Enter, state: MachineState, call: str, bound_seconds: float, kind: str
) -> None:
    """Whose first answer was lost and whose machine did not move; the ack of the second is the end."""
    provider = Forgetful()
    world = await in_transition(provider, enter)
    provider.synchronous = True
    await pass_time(world, bound_seconds + 20)

    assert world.metric("action_execute_outcomes_total", kind="Redrive", outcome="success") == 1
    assert world.metric("redrives_total", kind=kind) == 1
    assert world.state("m1") is not state


@pytest.mark.rule("shard 9.5/5")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("enter", "state", "call", "bound_seconds", "kind"), TRANSITIONS)
@pytest.mark.parametrize(
    ("refusal", "outcome", "after"),
    [
        (RefusalKind.FENCED, "fenced", "held"),
        (RefusalKind.NOT_SUPPORTED, "not_supported", "held"),
        (RefusalKind.NOT_FOUND, "not_found", "gone"),
        (RefusalKind.UNKNOWN_OUTCOME, "unknown_outcome", "stuck"),
        (RefusalKind.EXHAUSTED, "exhausted", "stuck"),
        (RefusalKind.REFUSED, "provider_error", "stuck"),
    ],
)
async def test_each_refusal_of_a_redrive(
    enter: Enter,
    state: MachineState,
    call: str,
    bound_seconds: float,
    kind: str,
    refusal: RefusalKind,
    outcome: str,
    after: str,
) -> None:
    """As for any call (§9.6); what was not applied leaves the machine where it is, stuck."""
    provider = Forgetful(heals=False)
    world = await in_transition(provider, enter)
    provider.refusals[call, "m1"] = [refusal]
    await pass_time(world, bound_seconds + 20)

    outcome = "configure_error" if (call, outcome) == ("configure", "provider_error") else outcome
    assert [told for each, _machine, told in world.outcomes()].count(outcome) == 1
    assert world.shard.ledger.history[-1].kind_label == "Redrive"
    known = world.shard.inventory.get("m1")
    is_held = world.shard.machine_backoff.is_held("m1")
    stuck = world.shard.stuck.is_stuck(MachineId("m1"))
    assert (is_held, stuck) == (after == "held", after == "stuck")
    if after != "gone":
        assert known is not None
        assert known.state is (S.FAILED if after == "held" else state)


class Unready(Forgetful):
    """Says whether it takes calls."""

    is_up = True

    async def accepts_calls(self) -> bool:
        return self.is_up


@pytest.mark.rule("shard 9.5/6")
@pytest.mark.virtual_time
@pytest.mark.parametrize(("enter", "state", "call", "bound_seconds", "kind"), TRANSITIONS)
@pytest.mark.parametrize("is_known", [True, False], ids=["during a back-off", "not ready when it is called"])
async def test_a_provider_that_takes_no_calls_uses_no_redrive_up(
    enter: Enter, state: MachineState, call: str, bound_seconds: float, kind: str, is_known: bool
) -> None:
    """The machine is driven again when the provider is ready, and is not stuck before that."""
    provider = Unready()
    world = await in_transition(provider, enter)
    provider.is_up = False
    if is_known:
        world.shard.executors.provider_backoff.refused()
    else:
        provider.refusals[call, "m1"] = [RefusalKind.NOT_READY]
    before = len(provider.calls)
    await pass_time(world, bound_seconds + 60)
    assert (world.state("m1"), world.shard.stuck.is_stuck(MachineId("m1"))) == (state, False)
    assert len(provider.calls) - before == (0 if is_known else 1)

    provider.is_up = True
    await pass_time(world, MAX_SECONDS + 30)
    assert world.metric("action_execute_outcomes_total", kind="Redrive", outcome="success") == 1
    assert world.metric("machines_stuck", state=state.label) == 0


@pytest.mark.rule("shard 9.5/3")
@pytest.mark.virtual_time
async def test_a_configure_is_driven_again_with_a_fresh_blob_and_what_the_provider_echoes() -> None:
    """Cluster and metadata as the provider has them, not as this process would make them now."""
    provider = Forgetful()
    world = await in_transition(provider, configuring)
    operator = world.connect("c1")
    asked: list[BootstrapRequest] = []

    def answer(request: BootstrapRequest) -> BootstrapResponse:
        asked.append(request)
        return BootstrapResponse(request_id=request.request_id, user_data=b"fresh")

    operator.answer = answer
    provider.metadata["m1"] = {**provider.metadata["m1"], "somebody/else": "said", labels.ASSIGNED_PRIORITY: "1"}
    await pass_time(world, 920)

    assert provider.metadata_sent[-1]["somebody/else"] == "said"
    assert provider.metadata_sent[-1][labels.ASSIGNED_PRIORITY] == "1"
    assert provider.blobs["m1"] == b"fresh"
    assert [request.requirements for request in asked] == [
        (Requirement("node.kubernetes.io/instance-type", Operator.IN, ("t4",)),)
    ]
    assert (world.state("m1"), world.machine("m1").cluster) == (S.CONFIGURED, "c1")


@pytest.mark.rule("shard 9.5/3")
@pytest.mark.virtual_time
async def test_a_provider_without_an_echo_is_told_what_it_was_told_before() -> None:
    """The stamps are still here: an echo may come only with Configured."""
    provider = Forgetful()
    world = await in_transition(provider, configuring)
    provider.metadata.clear()
    await pass_time(world, 920)

    assert provider.metadata_sent[0] == provider.metadata_sent[1]


@pytest.mark.rule("shard 9.5/5")
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("obstacle", "outcome"),
    [("session", "no_session"), ("blob", "blob_timeout"), ("row", "stale"), ("get", "configure_error")],
)
async def test_a_configure_that_cannot_be_driven_is_stuck_at_once(obstacle: str, outcome: str) -> None:
    """Without operator, blob, row, or the provider's account no call is made, and nothing is rolled back."""

    class Mute(Forgetful):
        async def get(self, machine_id: MachineId) -> ListedMachine:
            raise ProviderRefusal(RefusalKind.UNKNOWN_OUTCOME, "connection refused")

    provider = Mute() if obstacle == "get" else Forgetful()
    world = await in_transition(provider, configuring)
    operator = world.connect("c1")
    if obstacle == "session":
        world.shard.stop_sessions()
    elif obstacle == "blob":
        operator.answer = None
    elif obstacle == "row":
        operator.report()
    await pass_time(world, 920)
    await world.cycle()

    assert world.outcomes()[-1] == ("Bootstrap", "m1", outcome)
    assert [call[0] for call in provider.calls] == ["configure"]
    assert (world.state("m1"), world.shard.stuck.is_stuck(MachineId("m1"))) == (S.CONFIGURING, True)


@pytest.mark.rule("shard 9.5/7")
@pytest.mark.virtual_time
async def test_a_machine_that_moved_just_before_it_is_driven_again_is_only_read() -> None:
    """Get shows that the provider has ended the transition itself."""
    provider = Forgetful()
    world = await in_transition(provider, configuring)
    await world.shard._clock.sleep(901)
    await world.step()
    provider.settle("m1")
    await world.shard.actuator.run_inline()

    assert world.outcomes()[-1] == ("Bootstrap", "m1", "noop")
    assert (world.state("m1"), len(provider.calls)) == (S.CONFIGURED, 1)


@pytest.mark.rule("shard 9.5/4", "shard 9.5/7")
@pytest.mark.virtual_time
async def test_the_grace_of_a_drain_counts_and_is_over_when_it_is_driven_again() -> None:
    """Ten seconds of grace and ten minutes on top; a drain whose grace nobody here knows gets the longest there is."""
    provider = Forgetful(heals=False)
    provider.add(machine("m1", S.IDLE), machine("old", S.DRAINING, cluster="low"))
    world = World(provider)
    low, high = world.connect("low"), world.connect("high")
    low.drain = (DrainOutcome.DRAINED, 1.0)
    low.report(need("low", "4", priority=10))
    await world.cycle()
    provider.settle("m1")
    await world.cycle()
    high.report(need("high", "4", priority=1_000_000))
    await world.cycle()
    assert (provider.state("m1"), provider.grace_seconds["m1"]) == (S.DRAINING, 9)
    begun = world.shard._clock.monotonic_seconds()

    await pass_time(world, 640)
    assert [call[:2] for call in provider.calls] == [("configure", "m1"), ("drain", "m1"), ("drain", "m1")]
    assert world.metric("redrives_total", kind="Preempt") == 1
    assert provider.state("old") is S.DRAINING
    await pass_time(world, 1230 - (world.shard._clock.monotonic_seconds() - begun))
    assert provider.graces_sent == [("m1", 9), ("m1", 0), ("old", 0)]


@pytest.mark.rule("shard 9.5/2")
@pytest.mark.virtual_time
async def test_a_machine_whose_drain_waits_for_its_operator_is_not_overdue() -> None:
    """It has an action in flight, which ends by itself."""
    provider = Forgetful()
    provider.add(machine("m1", S.CONFIGURED, cluster="c1"))
    world = World(provider, settings=ShardSettings(stuck_draining_margin_seconds=0))
    operator = world.connect("c1")
    operator.drain = None
    operator.report()
    await world.step()
    workers = asyncio.create_task(world.shard.actuator.run())
    for _ in range(59):
        await world.shard._clock.sleep(10)
        await world.step()
    assert (world.state("m1"), provider.calls) == (S.DRAINING, [])
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)


@pytest.mark.rule("shard 9.5/1")
@pytest.mark.virtual_time
async def test_each_stay_is_measured_anew() -> None:
    """A machine that was Configuring before, for another binding, starts at zero."""
    provider = Forgetful()
    world = await in_transition(provider, configuring)
    await pass_time(world, 600)
    provider.settle("m1")
    operator = world.connect("c1")
    operator.report()
    await world.cycle()
    await world.cycle()
    provider.settle("m1")
    operator.report(need("c1", "4"))
    await world.cycle()
    assert world.state("m1") is S.CONFIGURING
    await pass_time(world, 600)

    assert world.metric("redrives_total", kind="Bootstrap") == 0


@pytest.mark.rule("shard 9.5/2")
@pytest.mark.virtual_time
async def test_woken_cycles_drive_nothing_again() -> None:
    """Only the timer does: a busy shard has no other measure than a quiet one."""
    world = await in_transition(Forgetful(), creating)
    await world.shard._clock.sleep(5000)
    await world.cycle(is_timer=False)
    assert world.metric("redrives_total", kind="Provision") == 0

    await world.cycle()
    assert world.metric("redrives_total", kind="Provision") == 1


@pytest.mark.rule("shard 6/20")
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("posture", "outcome", "counter"),
    [
        (ShardSettings(actuation_paused=True), "suppressed", "actions_suppressed_total"),
        (ShardSettings(dry_run=True), "dryrun", "actions_dryrun_total"),
    ],
)
async def test_a_pause_and_a_dry_run_suppress_a_redrive(posture: ShardSettings, outcome: str, counter: str) -> None:
    """It is recorded once, no call is made, and the machine is shown as stuck."""
    log = MemoryAuditLog()
    provider = Forgetful()
    provider.add(machine("m1", S.CREATING))
    world = World(provider, settings=posture, audit_log=log)
    await world.cycle()
    await pass_time(world, 1300)

    assert [(record["kind"], record["outcome"]) for record in log.records] == [("Redrive", outcome)]
    assert (world.metric(counter, kind="Redrive"), world.metric("redrives_total", kind="Provision")) == (1, 0)
    assert (provider.calls, world.shard.stuck.is_stuck(MachineId("m1"))) == ([], True)


@pytest.mark.rule("shard 9.5/6")
@pytest.mark.virtual_time
async def test_a_full_queue_puts_a_redrive_off() -> None:
    """What finds no room is driven again by a later timer cycle."""
    provider = Forgetful(heals=False)
    provider.add(*(machine(f"m{number}", S.CREATING) for number in range(5)))
    world = World(provider, settings=ShardSettings(execute_concurrency_max=1))
    await world.cycle()
    await world.shard._clock.sleep(1300)
    counts = []
    for _ in range(4):
        await world.cycle()
        counts.append(len(provider.calls))

    assert counts == [2, 4, 5, 5]


@pytest.mark.rule("shard 9.5/5")
async def test_a_reader_sees_and_finds_stuck_machines() -> None:
    """The flag of MachineView, the filter of ListMachines, and the kind of the action."""
    provider = Forgetful(heals=False)
    provider.add(machine("m1", S.CREATING), machine("m2", S.CREATING), machine("m3", S.IDLE))
    world = World(provider, settings=ShardSettings(stuck_creating_seconds=0))
    async with live_shard(world) as live:
        await world.cycle()
        provider.settle("m2")
        await world.cycle()
        await world.cycle()

        asked = shardread_pb2.ListMachinesRequest(flags=["stuck"])
        found = [frame.machine async for frame in live.read.ListMachines(asked) if frame.HasField("machine")]
        every = [frame.machine async for frame in live.read.ListMachines(shardread_pb2.ListMachinesRequest())]
        actions = live.read.ListActions(shardread_pb2.ListActionsRequest(kinds=["Redrive"], machine_id="m1"))
        kinds = [frame.action.kind async for frame in actions]

    assert [view.machine.id for view in found] == ["m1"]
    assert [view.machine.id for view in every if view.stuck] == ["m1"]
    assert kinds == ["Redrive"]


def test_a_row_is_found_by_the_stamps_of_its_machine_folded_or_not() -> None:
    """A folded gang's machines carry the fingerprint of the folded profile and no group."""
    same = Requirement("topology.bigfleet/rack", Operator.SAME)
    row = need("c1", "4", group="g")
    gang = replace(row, profile=replace(row.profile, requirements=(same,)))
    folded = folded_profile(gang.profile)
    table = NeedsTable()
    table.replace("c1", [row, gang], now_unix_nanos=1)

    assert table.profile_of(row.key) == row.profile
    assert table.profile_of(gang.key) == gang.profile
    assert table.profile_of(("c1", folded.fingerprint, "")) == folded
    for key in [("c1", folded.fingerprint, "g"), ("c1", row.fingerprint, ""), ("c2", row.fingerprint, "g")]:
        assert table.profile_of(key) is None


# ---- flags ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 1/9")
def test_the_bounds_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sets what its name says; the defaults are those of the specification."""
    given: list[ShardSettings] = []

    async def serve(_process: ShardProcessSettings, settings: ShardSettings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr(shard_process, "serve_shard", serve)
    monkeypatch.setattr(runtime, "configure_logging", lambda *_arguments: None)
    flags = [
        "--stuck-creating",
        "1m",
        "--stuck-configuring",
        "2m",
        "--stuck-deleting",
        "3m",
        "--stuck-draining-margin",
        "0s",
    ]
    for arguments in ([], flags):
        assert CliRunner().invoke(app, ["shard", "--provider-addr", "127.0.0.1:1", *arguments]).exit_code == 0

    assert [
        (
            each.stuck_creating_seconds,
            each.stuck_configuring_seconds,
            each.stuck_deleting_seconds,
            each.stuck_draining_margin_seconds,
        )
        for each in given
    ] == [(1200, 900, 1200, 600), (60, 120, 180, 0)]
