"""Whatever providers and operators do: nothing leaks, and the shard's view ends where the provider's is.

Stories of cycles, roll-ups, refusals, lost answers, silent operators, lost sessions and machines that come, go and fail
are drawn by Hypothesis and run on virtual time, in each mode of reconcile (docs/spec/shard.md §5, §8, §9, §16).
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.model.frames import CAPABILITY_DRAIN_RESULT, BootstrapRequest, BootstrapResponse, DrainOutcome
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.ports import RefusalKind, ShardSettings
from bigfleet.shard.sessions.outbox import CloseReason
from bigfleet.sim.kernel.virtual_time import run_virtual
from tests.engine.proof import in_proportion
from tests.shard.world import FakeOperator, RevisionedProvider, ScriptedProvider, World, machine, need

S = MachineState
MACHINES = [f"m{number}" for number in range(6)]
CLUSTERS = ("c1", "c2")
CALLS = [(method, name) for method in ("create", "configure", "drain", "delete") for name in MACHINES]
ANSWERS: dict[str, Callable[[BootstrapRequest], BootstrapResponse] | None] = {
    "boots": lambda request: BootstrapResponse(request_id=request.request_id, user_data=b"#"),
    "refuses": lambda request: BootstrapResponse(request_id=request.request_id, error="no template"),
    "expires": lambda request: BootstrapResponse(request_id=request.request_id, user_data=b"#", ttl_seconds=1),
    "is silent": None,
}
DRAINS = {
    "drains": (DrainOutcome.DRAINED, 3.0),
    "fails": (DrainOutcome.FAILED, 1.0),
    "expires": (DrainOutcome.GRACE_EXPIRED, 60.0),
    "declines": (DrainOutcome.WOULD_NOT_FIT, 1.0),
    "is silent": None,
}

machines, clusters = st.sampled_from(MACHINES), st.sampled_from(CLUSTERS)
disturbances = st.one_of(
    st.tuples(st.just("settle")),
    st.tuples(st.just("refuse"), st.sampled_from(list(RefusalKind)), st.integers(1, 3)),
    st.tuples(st.just("lose"), st.booleans()),
    st.tuples(st.just("answer"), clusters, st.sampled_from(list(ANSWERS)), st.sampled_from(list(DRAINS))),
    st.tuples(st.just("reconnect"), clusters, st.booleans()),
    st.tuples(st.just("disconnect"), clusters),
    st.tuples(st.just("show"), machines, st.sampled_from((S.IDLE, S.CONFIGURED, S.FAILED, S.SPECULATIVE))),
    st.tuples(st.just("remove"), machines),
    st.tuples(st.just("list"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from((1, 40, 700, 4000))),
)
reports = st.tuples(st.just("report"), clusters, st.integers(0, 5), st.sampled_from((100, 900)))
cycles = st.tuples(st.just("cycle"), st.booleans())
#: Something odd, perhaps a roll-up, and a cycle that meets it.
rounds = st.tuples(st.lists(disturbances, max_size=2), st.lists(reports, max_size=1), cycles)
modes = st.sampled_from(("full", "tombstones", "no tombstones"))


@dataclass
class Story:
    """One world and what happens in it."""

    mode: str
    synchronous: bool
    provider: ScriptedProvider = field(init=False)
    world: World = field(init=False)
    operators: dict[str, FakeOperator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode == "full":
            self.provider = ScriptedProvider(synchronous=self.synchronous)
        else:
            self.provider = RevisionedProvider(synchronous=self.synchronous, tombstones=self.mode == "tombstones")
        for number, name in enumerate(MACHINES):
            kind = CapacityType.SPOT if number % 2 else CapacityType.BARE_METAL
            self.provider.add(machine(name, S.SPECULATIVE if number % 3 else S.IDLE, capacity_type=kind))
        options = ShardSettings(
            incremental_reconcile=self.mode != "full", full_list_every_cycles=3, execute_concurrency_max=2
        )
        self.world = World(self.provider, settings=options)
        for cluster in CLUSTERS:
            self.operators[cluster] = self.world.connect(cluster)

    async def happen(self, step: tuple[object, ...]) -> None:
        """Let one thing happen."""
        match step:
            case ("report", str(cluster), int(machines_wanted), int(priority)):
                rows = [need(cluster, str(4 * machines_wanted), priority=priority)] if machines_wanted else []
                self.operators[cluster].report(*rows)
            case ("cycle", bool(is_timer)):
                await self.world.cycle(is_timer=is_timer)
            case ("settle",):
                self.provider.settle()
            case ("refuse", RefusalKind() as kind, int(times)):
                self.provider.refusals = {call: [kind] * times for call in CALLS}
            case ("lose", bool(loses)):
                self.provider.lost_answers = set(CALLS) if loses else set()
            case ("answer", str(cluster), str(answer), str(drain)):
                self.operators[cluster].answer, self.operators[cluster].drain = ANSWERS[answer], DRAINS[drain]
            case ("reconnect", str(cluster), bool(can_tell)):
                capability = CAPABILITY_DRAIN_RESULT if can_tell else "none"
                self.operators[cluster] = self.world.connect(cluster, capability)
            case ("disconnect", str(cluster)):
                self.world.shard.sessions.close(self.operators[cluster].session, CloseReason.GONE)
            case ("list", bool(fails)):
                self.provider.list_fails = fails
            case ("wait", int(seconds)):
                await self.world.shard._clock.sleep(seconds)
            case ("show", str(name), MachineState() as state):
                bound = {"cluster": "c1"} if state is S.CONFIGURED else {}
                cause = {"last_error": "broken"} if state is S.FAILED else {}
                self.provider.metadata.pop(name, None)
                self.provider.add(machine(name, state, capacity_type=CapacityType.SPOT, **bound, **cause))
            case ("remove", str(name)):
                self.provider.records.pop(name, None)

    async def end(self) -> None:
        """Let everything come to rest."""
        provider = self.provider
        provider.list_fails = False
        provider.refusals.clear()
        provider.lost_answers.clear()
        for cluster in CLUSTERS:
            self.operators[cluster] = self.world.connect(cluster)
            self.operators[cluster].report()
        await self.world.shard._clock.sleep(100_000)
        for _ in range(10):
            await self.world.cycle()
            provider.settle()
            await self.world.shard._clock.sleep(700)
        for _ in range(2):
            await self.world.shard.reconciler.run()

    def check_nothing_leaked(self) -> None:
        """The ledger holds all and only actions under way; outside a cycle's work there are none."""
        shard = self.world.shard
        assert shard.ledger._pending == {}
        assert not shard.actuator._queue
        assert not shard.actuator._slots.held
        assert shard.actuator._slots._slots._value == 2
        assert (shard.sessions._bootstraps, shard.sessions._drains) == ({}, {})
        assert shard.executors._drain_waits == {}
        assert shard.demand_backoff._probing == set()
        assert all(record.outcome is not None for record in shard.ledger.history)
        for kind in ("blob", "drain"):
            assert self.world.metric("execute_waiting", **{"for": kind}) == 0

    def check_views_agree(self) -> None:
        """Every machine that is not held for good is in the provider's state, and no other is known."""
        shard = self.world.shard
        assert set(self.provider.records) == set(shard.inventory.ids)
        for name, record in self.provider.records.items():
            known = self.world.machine(name)
            hold = shard.machine_backoff._holds.get(name)
            if hold is None or not math.isinf(hold.until_seconds):
                assert (known.state, known.cluster) == (record.state, record.cluster), name
            assert known.cluster or not known.assigned_need_fingerprint or known.state is S.FAILED


@pytest.mark.rule("shard 8/2", "shard 16/4")
@pytest.mark.slow
@given(mode=modes, synchronous=st.booleans(), story=st.lists(rounds, min_size=1, max_size=8))
@settings(max_examples=in_proportion(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_leaks_and_the_views_agree(mode: str, synchronous: bool, story: list[Any]) -> None:
    """No entry of the ledger, slot or waiter outlives its action, and one quiet hour makes both views one."""

    async def live() -> None:
        told = Story(mode, synchronous)
        for odd, report, cycle in story:
            for step in (*odd, *report, cycle):
                await told.happen(step)
            told.check_nothing_leaked()
        await told.end()
        told.check_nothing_leaked()
        told.check_views_agree()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    run_virtual(live)
