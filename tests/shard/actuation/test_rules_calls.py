"""Each provider call with each way of not being accepted, by a synchronous and an asynchronous provider.

docs/spec/shard.md §9.2 to §9.4 and the table of §9.6; answers to Configure are in test_executors.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.model.frames import BootstrapRequest
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import Machine
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.actuation.executors import DISAGREEMENT_CAUSE, FENCED_CAUSE
from bigfleet.shard.outcomes import ActionOutcome
from bigfleet.shard.ports import (
    FenceToken,
    ListedMachine,
    ProviderRefusal,
    RefusalKind,
    ShardSettings,
    TransitionAck,
)
from tests.shard.world import ScriptedProvider, World, machine, need

pytestmark = pytest.mark.virtual_time

S = MachineState
SPEC = Path(__file__).parents[3] / "docs" / "spec" / "shard.md"
#: Call → where its machine starts, the state that it is on its way in, and the kind of its action.
CALLS: dict[str, tuple[Machine, MachineState, str]] = {
    "create": (machine("m1", S.SPECULATIVE, capacity_type=CapacityType.ON_DEMAND), S.CREATING, "Provision"),
    "configure": (machine("m1", S.IDLE), S.CONFIGURING, "Bootstrap"),
    "drain": (machine("m1", S.CONFIGURED, cluster="c1"), S.DRAINING, "Reclaim"),
    "delete": (machine("m1", S.IDLE, capacity_type=CapacityType.ON_DEMAND), S.DELETING, "Delete"),
}


async def called(provider: ScriptedProvider, call: str) -> World:
    """Return a world in which that call for m1 has been made and answered."""
    provider.add(CALLS[call][0])
    world = World(provider)
    operator = world.connect("c1", "no-capability")
    if call in ("create", "configure"):
        operator.report(need("c1", "4"))
    elif call == "drain":
        operator.report()
    await world.cycle()
    if call == "delete":
        await world.shard._clock.sleep(600)
        await world.cycle()
    assert [made[:2] for made in provider.calls] == [(call, "m1")]
    return world


REFUSALS: dict[RefusalKind, str] = {
    RefusalKind.FENCED: "fenced",
    RefusalKind.NOT_FOUND: "not_found",
    RefusalKind.NOT_SUPPORTED: "not_supported",
    RefusalKind.UNKNOWN_OUTCOME: "unknown_outcome",
    RefusalKind.NOT_READY: "refused",
    RefusalKind.EXHAUSTED: "exhausted",
    RefusalKind.REFUSED: "provider_error",
}


@pytest.mark.rule("shard 9.6/1", "shard 9.6/6", "shard 9.7/2", "shard 16/1")
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda kind: kind.value)
@pytest.mark.parametrize("call", CALLS)
async def test_each_refusal_of_each_call(call: str, refusal: RefusalKind, synchronous: bool) -> None:
    """One attempt, the outcome and the machine's state of the table; nothing is left in the ledger."""
    provider = ScriptedProvider(synchronous=synchronous)
    provider.refusals[call, "m1"] = [refusal]
    world = await called(provider, call)
    source, transitional, kind = CALLS[call]
    outcome = REFUSALS[refusal]
    if (call, outcome) == ("configure", "provider_error"):
        outcome = "configure_error"

    assert world.outcomes() == [(kind, "m1", outcome)]
    assert not world.shard.ledger.is_pending("m1")
    known = world.shard.inventory.get("m1")
    if refusal is RefusalKind.NOT_FOUND:
        assert known is None
        return
    assert known is not None
    disagrees = call == "delete" and refusal in (RefusalKind.NOT_SUPPORTED, RefusalKind.REFUSED)
    is_held = refusal in (RefusalKind.FENCED, RefusalKind.NOT_SUPPORTED) or disagrees
    is_open = refusal is RefusalKind.UNKNOWN_OUTCOME
    assert known.state is (S.FAILED if is_held else transitional if is_open else source.state)
    assert world.shard.machine_backoff.is_held("m1") is is_held
    assert (known.last_error == DISAGREEMENT_CAUSE) is disagrees
    assert (known.last_error == FENCED_CAUSE) is (refusal is RefusalKind.FENCED)
    assert world.metric("fenced_total") == (refusal is RefusalKind.FENCED)
    # Get is asked at once where nothing was applied, and nowhere else.
    is_settled = refusal in (RefusalKind.EXHAUSTED, RefusalKind.REFUSED, RefusalKind.NOT_READY)
    assert provider.gets == (["m1"] if is_settled else [])
    assert world.shard.executors.provider_backoff.is_active is (refusal is RefusalKind.NOT_READY)


@pytest.mark.rule("shard 9.6/7")
@pytest.mark.parametrize("call", ["create", "configure", "drain"])
async def test_the_third_refusal_in_a_row_holds_the_machine(call: str) -> None:
    """For half an hour, whatever the call; the provider's state is taken again then."""
    provider = ScriptedProvider()
    # A Create without capacity is no strike: it backs off the pool (§9.8).
    second = RefusalKind.REFUSED if call == "create" else RefusalKind.EXHAUSTED
    provider.refusals[call, "m1"] = [RefusalKind.REFUSED, second, RefusalKind.REFUSED]
    world = await called(provider, call)
    for _ in range(5):
        await world.cycle()
    assert (len(provider.calls), world.state("m1")) == (3, S.FAILED)

    await world.shard._clock.sleep(1800)
    await world.cycle()
    assert len(provider.calls) == 4


@pytest.mark.rule("shard 9.6/3")
@pytest.mark.parametrize("call", CALLS)
async def test_a_fenced_call_is_never_made_again(call: str) -> None:
    """The machine stays Failed here whatever time it is; the alarm is logged at error with what to do."""
    provider = ScriptedProvider()
    provider.refusals[call, "m1"] = [RefusalKind.FENCED]
    with capture_logs() as logs:
        world = await called(provider, call)
    for _ in range(3):
        await world.shard._clock.sleep(100_000)
        await world.cycle()

    assert (len(provider.calls), world.state("m1"), world.metric("machines_held")) == (1, S.FAILED, 1)
    (told,) = [line for line in logs if line["event"] == "shard.fenced"]
    assert (told["log_level"], "stop one of the two processes" in told["advice"]) == ("error", True)


@pytest.mark.rule("shard 8/8")
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_is_not_answered_is_given_up(call: str) -> None:
    """After --execute-timeout; its outcome is unknown, and the machine stays on its way until it is observed."""

    class Hangs(ScriptedProvider):
        def _transition(self, method: str, machine_id: Any, token: FenceToken, *rest: Any) -> TransitionAck:
            ack = super()._transition(method, machine_id, token, *rest)
            raise _NeverAnswers(ack)

    provider = Hangs()
    for name in CALLS:
        setattr(provider, name, _hanging(getattr(provider, name)))
    world = await called(provider, call)
    _source, transitional, kind = CALLS[call]

    assert (world.outcomes(), world.state("m1")) == ([(kind, "m1", "unknown_outcome")], transitional)
    assert world.shard.ledger.history[-1].message == f"{call}: no answer within 30 s"
    assert world.shard._clock.monotonic_seconds() == 30 + (600 if call == "delete" else 0)


class _NeverAnswers(Exception):
    """The call was applied and its answer does not come."""


def _hanging(call: Any) -> Any:
    async def hangs(*arguments: Any) -> TransitionAck:
        try:
            ack: TransitionAck = await call(*arguments)
        except _NeverAnswers:
            await asyncio.Event().wait()
        return ack

    return hangs


class Answers(ScriptedProvider):
    """Answers Create, Drain and Delete with one given record."""

    answer: ListedMachine

    def _transition(self, method: str, machine_id: Any, token: FenceToken, *rest: Any) -> TransitionAck:
        self.calls.append((method, machine_id, token.sequence))
        return TransitionAck(operation_id="op", record=self.answer)


BROKEN = {"price_usd_per_hour": -1.0}


@pytest.mark.rule("shard 9.2/2", "shard 9.3/8", "shard 9.4/2", "shard 16/1")
@pytest.mark.parametrize(
    ("call", "shown", "outcome", "state"),
    [
        ("create", machine("m1", S.CREATING), "success", S.CREATING),
        ("create", machine("m1", S.CONFIGURED, cluster="c9"), "success", S.CONFIGURED),
        ("create", machine("m1", S.SPECULATIVE), "transition_error", S.SPECULATIVE),
        ("create", machine("m1", S.FAILED, last_error="no room"), "transition_error", S.FAILED),
        ("create", machine("m1", S.IDLE, **BROKEN), "invalid_record", S.FAILED),
        ("create", machine("m2", S.IDLE), "invalid_record", S.FAILED),
        ("drain", machine("m1", S.IDLE), "success", S.IDLE),
        ("drain", machine("m1", S.DRAINING, cluster="c1"), "success", S.DRAINING),
        ("drain", machine("m1", S.CONFIGURED, cluster="c1"), "transition_error", S.CONFIGURED),
        ("drain", machine("m1", S.FAILED, last_error="stuck"), "transition_error", S.FAILED),
        ("drain", machine("m1", S.IDLE, **BROKEN), "invalid_record", S.FAILED),
        ("delete", machine("m1", S.SPECULATIVE), "success", S.SPECULATIVE),
        ("delete", machine("m1", S.DELETING), "success", S.DELETING),
        ("delete", machine("m1", S.IDLE), "transition_error", S.IDLE),
        ("delete", machine("m1", S.SPECULATIVE, **BROKEN), "invalid_record", S.FAILED),
    ],
)
async def test_each_answer_to_create_drain_and_delete(
    call: str, shown: Machine, outcome: str, state: MachineState
) -> None:
    """What the record shows is taken whatever was asked; one that breaks the invariant holds the machine."""
    provider = Answers()
    provider.answer = ListedMachine(shown, {})
    world = await called(provider, call)

    assert (world.outcomes(), world.state("m1")) == ([(CALLS[call][2], "m1", outcome)], state)
    assert world.shard.machine_backoff.is_held("m1") is (outcome == "invalid_record")


@pytest.mark.rule("shard 9.6/9", "shard 15/11")
@pytest.mark.parametrize(
    ("call", "kind"), [("create", "Create"), ("configure", "Configure"), ("drain", "Drain"), ("delete", "Delete")]
)
async def test_an_operation_that_fails_is_followed_with_its_text(call: str, kind: str) -> None:
    """FAILED shown by the provider while the machine is on its way; its binding and stamps stay (§9.6, §15)."""
    provider = ScriptedProvider()
    world = await called(provider, call)
    provider.fail("m1", f"{kind}: broken")
    await world.cycle()

    assert (world.state("m1"), world.machine("m1").last_error) == (S.FAILED, f"{kind}: broken")
    assert world.machine("m1").cluster == ("c1" if call in ("configure", "drain") else "")


@pytest.mark.rule("shard 9.7/1")
def test_the_outcomes_are_those_of_the_page() -> None:
    """A bounded label set: all and only (docs/spec/shard.md §9.7)."""
    text = SPEC.read_text(encoding="utf-8").partition("### 9.7")[2].partition("In the audit log also")[0]

    assert {outcome.value for outcome in ActionOutcome} == set(re.findall(r"`(\w+)`", text))


@pytest.mark.rule("shard 8/8")
async def test_a_machine_gets_a_slot_only_when_one_is_free() -> None:
    """`--execute-concurrency` calls at once, each with a deadline of its own, independent of the cycle (§8)."""
    running: list[str] = []
    most: list[int] = []

    class Slow(ScriptedProvider):
        async def configure(self, *arguments: Any) -> TransitionAck:
            running.append(arguments[0])
            most.append(len(running))
            await world.shard._clock.sleep(20)
            running.remove(arguments[0])
            return await super().configure(*arguments)

    provider = Slow(synchronous=True)
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(6)))
    world = World(provider, settings=ShardSettings(execute_concurrency_max=3))
    world.connect("c1").report(need("c1", "24"))
    await world.step()
    workers = asyncio.create_task(world.shard.actuator.run())
    await world.shard._clock.sleep(41)
    workers.cancel()
    await asyncio.gather(workers, return_exceptions=True)

    assert (max(most), [outcome for *_rest, outcome in world.outcomes()]) == (3, ["success"] * 6)


class Storing(ScriptedProvider):
    """Takes 64 KiB of metadata, as docs/spec/provider.md §3 says."""

    async def configure(
        self, machine_id: MachineId, cluster: ClusterId, blob: bytes, metadata: Mapping[str, str], token: FenceToken
    ) -> TransitionAck:
        """Reject a call with more metadata."""
        if sum(len(key) + len(value) for key, value in metadata.items()) > 64 * 1024:
            raise ProviderRefusal(RefusalKind.REFUSED, "INVALID_ARGUMENT: shard_metadata has more than 64 KiB")
        return await ScriptedProvider.configure(self, machine_id, cluster, blob, metadata, token)


async def test_a_row_that_no_machine_can_store_is_refused_and_no_machine_is_held() -> None:
    """A Configure with its fingerprint would be rejected for one machine after the other, and each would be set aside
    for all clusters: the row is refused instead, before its operator is asked and before the provider is called.
    """
    provider = Storing()
    provider.add(*(machine(f"m{number}", S.IDLE) for number in range(5)))
    provider.add(machine("s1", S.SPECULATIVE, capacity_type=CapacityType.ON_DEMAND))
    world = World(provider)
    red, blue = world.connect("red"), world.connect("blue")
    hosts = Requirement("example.com/host", Operator.NOT_IN, tuple(f"{number:0100}" for number in range(1_000)))
    row = need("red", "4")
    red.report(replace(row, profile=replace(row.profile, requirements=(*row.profile.requirements, hosts))))
    blue.report()
    for _ in range(10):
        await world.cycle()
        await asyncio.sleep(10)

    (outcome,) = world.outcomes()
    assert (outcome[0], outcome[2]) == ("Bootstrap", "blob_error")
    assert provider.calls == []
    assert not any(isinstance(frame, BootstrapRequest) for frame in red.frames)
    assert "are too long" in next(iter(world.shard.demand_backoff.texts().values()))

    blue.report(need("blue", "4"))
    await world.cycle()
    assert [made[0] for made in provider.calls] == ["configure"]
    assert len(world.shard.machine_backoff) == 0
    assert sorted(world.state(f"m{number}").name for number in range(5)) == ["CONFIGURING", *["IDLE"] * 4]
