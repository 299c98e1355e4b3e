"""`ExplainNeed` and `ExplainMachine` over real gRPC: why the last cycle decided as it did (docs/spec/shard.md §12)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings

from bigfleet.engine.explain.records import (
    CandidateRejected,
    Credited,
    HeldReason,
    MachineHeld,
    RankedVictim,
    RecordLog,
    Rejection,
    RowFinished,
    RowRef,
    Stage,
    VictimsRanked,
)
from bigfleet.engine.reference.decide import decide
from bigfleet.model import vector
from bigfleet.model.compute import compute_inline
from bigfleet.model.labels import ZONE
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement
from bigfleet.model.states import MachineState
from bigfleet.rpc.servers.explain import EVENTS_MAX, WAITING_MAX
from bigfleet.rpc.wire.convert_explain import LISTED_MAX, attributes_of, explanation_to_wire
from bigfleet.rpc.wire.gen import shardread_pb2
from bigfleet.shard.ports import ShardSettings
from tests.engine.proof import in_proportion
from tests.patience import PATIENCE_SECONDS
from tests.rpc.live_shard import LiveShard, live_shard
from tests.shard.world import ScriptedProvider, World, machine, need
from tests.strategies import FleetInput, fleets

S = MachineState
Code = grpc.StatusCode
T = TypeVar("T")
ROW = RowRef("c1", "p=1", "gang", 3)
RECORDS_SPEC = Path(__file__).parents[2] / "docs" / "spec" / "aggregates.md"


@pytest.fixture
async def live() -> AsyncIterator[LiveShard]:
    """A shard that decides and carries nothing out, so that its cycles see what the test put there."""
    world = World(ScriptedProvider(synchronous=True), settings=ShardSettings(actuation_paused=True))
    async with live_shard(world) as shard:
        yield shard


async def explain_need(live: LiveShard, row: Need, **changes: Any) -> shardread_pb2.ExplainNeedResponse:
    """Ask about a row as it was reported."""
    asked = {"cluster_id": row.cluster, "profile_fingerprint": row.fingerprint, "group": row.group, **changes}
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer: shardread_pb2.ExplainNeedResponse = await live.read.ExplainNeed(
            shardread_pb2.ExplainNeedRequest(**asked)
        )
        return answer


async def explain_machine(live: LiveShard, machine_id: str) -> shardread_pb2.ExplainMachineResponse:
    """Ask about a machine."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer: shardread_pb2.ExplainMachineResponse = await live.read.ExplainMachine(
            shardread_pb2.ExplainMachineRequest(machine_id=machine_id)
        )
        return answer


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """Return the status with which a question is refused."""
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


def gang(group: str, cpu: str) -> Need:
    """Return a row whose machines must share a zone; one that a single machine can host folds."""
    profile = Profile(requirements=(Requirement(ZONE, Operator.SAME),), priority=100)
    return replace(need("c1", cpu), profile=profile, group=group)


def kinds(events: Any) -> list[str]:
    """Return the kinds of the events."""
    return [event.kind for event in events]


# ---- a row -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 12/5")
async def test_a_row_is_explained_from_its_start_to_what_it_lacks(live: LiveShard) -> None:
    """With the row as InspectNeeds shows it, in decision order, as sentences and as fields."""
    live.world.provider.add(
        machine("m1", S.CONFIGURED, cluster="c1"),
        machine("m2", S.IDLE, price_usd_per_hour=2.0),
        machine("m3", S.IDLE, instance_type="t8"),
    )
    row, other = need("c1", "12", priority=700), need("c2", "4", priority=5)
    live.world.connect("c1").report(row)
    live.world.connect("c2").report(other)
    await live.world.cycle()
    answer = await explain_need(live, row)

    assert (answer.cycle, answer.computed_at_unix_nanos) == (1, live.shard.view.computed_at_unix_nanos)
    assert (answer.need.profile_fingerprint, answer.need.claimed_machine_count) == (row.fingerprint, 2)
    assert not answer.truncated
    assert kinds(answer.events) == [
        "row_started",
        "candidate_considered",
        "credited",
        "candidate_rejected",
        "candidate_considered",
        "acquired",
        "row_finished",
        "victims_ranked",
        "candidate_rejected",
        "row_unresolved",
        "machine_kept",
    ]
    events = {(event.kind, event.machine_id): event for event in answer.events}
    assert events["row_started", ""].text == "row 1 of c1 wants cpu 12 at priority 700; 0 rows came before it."
    acquired = events["acquired", "m2"]
    assert acquired.text.startswith("row 1 of c1 takes m2, which is idle at $2.00/h; ")
    assert dict(acquired.attributes) == {
        "row.cluster": "c1",
        "row.fingerprint": row.fingerprint,
        "row.group": "",
        "row.position": "0",
        "machine": "m2",
        "kind": "Bootstrap",
        "price": "2.0",
        "probability": "0.0",
        "penalty_dollars": "0.0",
        "cost": "2.0",
        "remaining": "cpu 4",
        "runner_up": "",
    }
    rejected = events["candidate_rejected", "m3"]
    assert rejected.text == (
        "m3: not taken as an idle machine for row 1 of c1: it does not match "
        "(node.kubernetes.io/instance-type is t8, wanted is In t4)."
    )
    assert (rejected.attributes["reason"], rejected.attributes["detail.value"]) == ("profile", "t8")
    assert rejected.attributes["detail.values"] == '["t4"]'
    finished = events["row_finished", ""]
    assert finished.text == "row 1 of c1 still lacks cpu 4: it has 2 machines, 1 of them taken in this cycle."
    assert json.loads(finished.attributes["claimed"]) == ["m1", "m2"]
    assert (finished.attributes["satisfied"], finished.attributes["matching.idle"]) == ("false", "1")


@pytest.mark.rule("shard 12/6")
async def test_a_folded_row_is_found_as_it_was_reported(live: LiveShard) -> None:
    """Under its own fingerprint and group, and the answer is that of the row that stands for it."""
    live.world.provider.add(machine("m1", S.IDLE), machine("m2", S.IDLE))
    gangs = [gang("a", "4"), gang("b", "4")]
    live.world.connect("c1").report(*gangs)
    await live.world.cycle()
    answers = [await explain_need(live, row) for row in gangs]

    assert [answer.need.need.group for answer in answers] == ["a", "b"]
    assert answers[0].events == answers[1].events
    folded = answers[0].events[0]
    assert (folded.kind, folded.attributes["row.group"]) == ("row_folded", "")
    assert [member["group"] for member in json.loads(folded.attributes["members"])] == ["a", "b"]


async def test_a_gang_is_told_which_domain_it_chose_and_why(live: LiveShard) -> None:
    """The domain stands in its own field."""
    live.world.provider.add(
        *(machine(f"a{number}", S.IDLE, zone="za") for number in range(2)), machine("b1", S.IDLE, zone="zb")
    )
    row = gang("g", "8")
    live.world.connect("c1").report(row)
    await live.world.cycle()
    answer = await explain_need(live, row)

    (ranked,) = [event for event in answer.events if event.kind == "domains_ranked"]
    assert (ranked.domain, ranked.attributes["decided_by"]) == ("za", "1")
    assert ranked.text == (
        f"Of 2 domains of {ZONE}, row 1 of c1 (gang g) chose za before zb: only the first could cover it whole."
    )
    assert [domain["coverages"] for domain in json.loads(ranked.attributes["domains"])] != []
    assert [event.domain for event in answer.events if event.kind == "row_finished"] == ["za"]


@pytest.mark.rule("shard 12/6")
async def test_what_became_of_a_row_is_told_before_what_it_passed_over(live: LiveShard) -> None:
    """A thousand events at most: the end is among them, and truncated says that there was more."""
    live.world.provider.add(*(machine(f"m{number:04d}", S.IDLE, instance_type="t8") for number in range(1500)))
    live.world.provider.add(machine("z", S.IDLE))
    row = need("c1", "4")
    live.world.connect("c1").report(row)
    await live.world.cycle()
    answer = await explain_need(live, row)

    assert (len(answer.events), answer.truncated) == (EVENTS_MAX, True)
    told = [event for event in answer.events if event.kind != "candidate_rejected"]
    assert kinds(told) == ["row_started", "acquired", "row_finished"]
    assert kinds(answer.events)[0] == "row_started"
    assert kinds(answer.events)[-2:] == ["acquired", "row_finished"]


@pytest.mark.rule("shard 12/5")
async def test_the_answer_is_that_of_the_last_cycle_and_of_every_asking(live: LiveShard) -> None:
    """What changed since is not in it, and asking twice gives the same."""
    live.world.provider.add(machine("m1", S.IDLE))
    row = need("c1", "4")
    operator = live.world.connect("c1")
    operator.report(row)
    await live.world.cycle()
    first = await explain_need(live, row)
    operator.report(need("c1", "8"))
    assert await explain_need(live, row) == first

    await live.world.cycle()
    second = await explain_need(live, row)
    assert (first.cycle, second.cycle) == (1, 2)
    assert dict(second.need.need.aggregate_resources) == {"cpu": "8"}


# ---- a machine ---------------------------------------------------------------------------------------------------


async def test_a_machine_is_explained_with_what_was_done_to_it(live: LiveShard) -> None:
    """What each row made of it, what became of it, and its actions, newest first."""
    live.world.provider.add(machine("m1", S.CONFIGURED, cluster="c1"), machine("m2", S.CONFIGURED, cluster="c1"))
    live.world.connect("c1").report(need("c1", "4"))
    for _ in range(2):
        await live.world.cycle()
    kept, reclaimed = await explain_machine(live, "m1"), await explain_machine(live, "m2")

    assert (kept.cycle, kept.machine.machine.id, list(kept.actions)) == (2, "m1", [])
    assert {event.machine_id for event in (*kept.events, *reclaimed.events)} == {"m1", "m2"}
    assert kinds(kept.events) == ["candidate_considered", "credited", "machine_kept"]
    assert kept.events[-1].text == "m1 stays with c1: row 1 of c1 holds it."
    assert kinds(reclaimed.events) == ["candidate_considered", "candidate_rejected", "machine_reclaimed"]
    assert reclaimed.events[1].text == (
        "m2: not taken as a machine that is bound or being made for row 1 of c1: it came after everything was covered."
    )
    assert reclaimed.events[2].attributes["keep_key"] == '["1.0", "0.0"]'
    assert [(action.kind, action.decided_cycle) for action in reclaimed.actions] == [("Reclaim", 2), ("Reclaim", 1)]


async def test_a_machine_that_has_gone_is_explained_as_it_was(live: LiveShard) -> None:
    """The last cycle had it; one that came since is named as such."""
    live.world.provider.add(machine("m1", S.IDLE))
    await live.world.cycle()
    live.shard.inventory.remove(live.shard.inventory.get("m1").id)  # type: ignore[union-attr]
    live.shard.inventory.insert(machine("m2", S.IDLE), now_seconds=0.0)
    answer = await explain_machine(live, "m1")

    assert (answer.machine.machine.id, kinds(answer.events)) == ("m1", ["machine_held"])
    code, details = await refusal(explain_machine(live, "m2"))
    assert (code, "came after that" in details) == (Code.NOT_FOUND, True)


# ---- questions without an answer -----------------------------------------------------------------------------------


@pytest.mark.rule("shard 12/9")
async def test_before_the_first_cycle_has_finished_there_is_nothing_to_explain(live: LiveShard) -> None:
    """UNAVAILABLE: asking again may help."""
    live.world.provider.list_fails = True
    await live.world.cycle()
    for call in (explain_need(live, need("c1", "4")), explain_machine(live, "m1")):
        code, details = await refusal(call)
        assert (code, "no cycle has finished yet" in details) == (Code.UNAVAILABLE, True)


async def test_who_is_not_there_is_named(live: LiveShard) -> None:
    """With the call that lists what there is."""
    row = need("c1", "4")
    live.world.connect("c1").report(row)
    await live.world.cycle()
    for changes, named in (
        ({"cluster_id": "c9"}, "'c9'"),
        ({"profile_fingerprint": "p=7"}, "'p=7'"),
        ({"group": "elsewhere"}, "'elsewhere'"),
    ):
        code, details = await refusal(explain_need(live, row, **changes))
        assert (code, named in details, "InspectNeeds" in details) == (Code.NOT_FOUND, True, True)
    code, details = await refusal(explain_machine(live, "nobody"))
    assert (code, "'nobody'" in details, "ListMachines" in details) == (Code.NOT_FOUND, True, True)


@pytest.mark.rule("shard 12/9")
@pytest.mark.parametrize("wrong", ["", "two words", "m" * 254, "m\x001"])
async def test_a_malformed_id_is_named(live: LiveShard, wrong: str) -> None:
    """Even before the first cycle."""
    row = need("c1", "4")
    code, details = await refusal(explain_machine(live, wrong))
    assert (code, details.startswith("machine_id ")) == (Code.INVALID_ARGUMENT, True)
    code, details = await refusal(explain_need(live, row, cluster_id=wrong))
    assert (code, details.startswith("cluster_id ")) == (Code.INVALID_ARGUMENT, True)
    code, details = await refusal(explain_need(live, row, profile_fingerprint=""))
    assert (code, details.startswith("profile_fingerprint ")) == (Code.INVALID_ARGUMENT, True)


# ---- the line ----------------------------------------------------------------------------------------------------


class SlowCompute:
    """Work that starts when it is asked for and ends when the test lets it."""

    def __init__(self) -> None:
        self.started = asyncio.Queue[None]()
        self.may_end = asyncio.Event()
        self.running = 0
        self.running_max = 0

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run the work, and say how many run at once."""
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        self.started.put_nowait(None)
        try:
            await self.may_end.wait()
            return await compute_inline(work)
        finally:
            self.running -= 1


async def slow_shard(live: LiveShard) -> SlowCompute:
    """Let one cycle finish, then make the shard's work slow."""
    live.world.provider.add(machine("m1", S.IDLE))
    await live.world.cycle()
    live.shard.compute = slow = SlowCompute()
    return slow


@pytest.mark.rule("shard 12/8")
async def test_one_explanation_runs_at_a_time_and_few_wait(live: LiveShard) -> None:
    """One more than may wait is refused at once; the others get their answers."""
    slow = await slow_shard(live)
    calls = [asyncio.create_task(explain_machine(live, "m1")) for _ in range(WAITING_MAX + 2)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    code, details = await refusal(refused)
    assert (code, "ask again" in details) == (Code.RESOURCE_EXHAUSTED, True)

    slow.may_end.set()
    answers = await asyncio.gather(*waiting)
    assert ({len(answer.events) for answer in answers}, slow.running_max) == ({1}, 1)
    assert kinds((await explain_machine(live, "m1")).events) == ["machine_held"]


@pytest.mark.rule("shard 12/8")
async def test_a_reader_that_goes_away_does_not_let_a_second_explanation_run_beside_its_own(live: LiveShard) -> None:
    """Work in a thread cannot be stopped, so the next one waits until it is over."""
    slow = await slow_shard(live)
    gone = asyncio.create_task(explain_machine(live, "m1"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await slow.started.get()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        following = asyncio.create_task(explain_machine(live, "m1"))
        # Two round trips on the same connection: the cancellation and the next question have both arrived.
        for _ in range(2):
            await refusal(explain_machine(live, ""))
        assert slow.running == 1
        slow.may_end.set()
        assert kinds((await following).events) == ["machine_held"]
    assert slow.running_max == 1


# ---- records as messages -----------------------------------------------------------------------------------------


def spec_records() -> dict[str, str]:
    """Return the fields of each record as docs/spec/aggregates.md §8 lists them."""
    table = RECORDS_SPEC.read_text(encoding="utf-8").partition("## 8. ")[2].partition("## 9. ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))


@pytest.mark.rule("shard 12/5")
@settings(max_examples=in_proportion(240), deadline=None)
@given(fleets())
def test_every_record_becomes_a_message(fleet: FleetInput) -> None:
    """Its kind is one of the specification's, its text one sentence, its attributes the fields that it lists."""
    log = RecordLog()
    decide(fleet.snapshot, fleet.demand, fleet.options, log)
    specified = spec_records()
    for record in log.records:
        message = explanation_to_wire(record)
        assert message.kind in specified
        assert message.text.endswith(".")
        assert "\n" not in message.text
        assert message.machine_id == getattr(record, "machine", "")
        mine = {name.partition(".")[0] for name in message.attributes}
        assert not {name for name in mine if name not in specified[message.kind]} - {"matching", "best_domains"}
        assert message == explanation_to_wire(record)


@pytest.mark.rule("shard 12/10")
def test_attributes_are_quantities_exact_floats_and_lists() -> None:
    """None is left out; a list says how many more there are."""
    held = MachineHeld(machine="m1", reason=HeldReason.HOLD_RUNNING, seconds_left=0.1)
    assert attributes_of(held) == {"machine": "m1", "reason": "hold_running", "seconds_left": "0.1"}
    assert "seconds_left" not in attributes_of(replace(held, seconds_left=None))
    memory = {"cpu": 1500, "memory": 16 * 2**30 * 1000}
    credited = Credited(row=ROW, machine="m1", state=S.CONFIGURED, own=True, supply=memory, remaining=vector.ZERO)
    assert attributes_of(credited) == {
        "row.cluster": "c1",
        "row.fingerprint": "p=1",
        "row.group": "gang",
        "row.position": "3",
        "machine": "m1",
        "state": "Configured",
        "own": "true",
        "supply": "cpu 1500m, memory 16Gi",
        "remaining": "",
    }
    small = CandidateRejected(
        row=ROW,
        stage=Stage.IDLE,
        machine="m1",
        reason=Rejection.MIN_UNIT,
        detail={"dimension": "memory", "have": 0, "want": 2**30 * 1000},
    )
    detail = {name: text for name, text in attributes_of(small).items() if name.startswith("detail")}
    assert detail == {"detail.dimension": "memory", "detail.have": "0", "detail.want": "1Gi"}
    many = RowFinished(
        row=ROW,
        satisfied=True,
        deficit=vector.ZERO,
        claimed=tuple(f"m{number}" for number in range(LISTED_MAX + 7)),
        bootstraps=(),
        provisions=(),
        domain="",
        satisfiable=True,
    )
    attributes = attributes_of(many)
    assert (len(json.loads(attributes["claimed"])), attributes["claimed.left_out"]) == (LISTED_MAX, "7")


def test_a_list_of_records_is_told_part_by_part() -> None:
    """Infinite scores included."""
    ranked = RankedVictim(
        machine="v1",
        cluster="c2",
        claimed_by=ROW,
        score=float("inf"),
        gap=5,
        priority_term=5.0,
        drain_term=0.1,
        interruption_term=0.1,
        reclamation_term=0.1,
    )
    attributes = attributes_of(VictimsRanked(row=ROW, victims=(ranked, replace(ranked, claimed_by=None))))
    one, two = json.loads(attributes["victims"])

    assert (one["score"], one["gap"], one["claimed_by.group"]) == ("inf", "5", "gang")
    assert [name for name in two if name.startswith("claimed_by")] == []
