"""Every scenario of tests/cases/sim holds, and a scenario that does not hold says so.

A planted defect changes the real shard from outside: its engine's answers, its settings, or what the clusters report.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bigfleet.engine.columns.store import ColumnSnapshot
from bigfleet.engine.decision import Action, ActionKind, Decision, Options
from bigfleet.model.frames import RollUp
from bigfleet.model.need import Need
from bigfleet.model.ownership import Owned
from bigfleet.model.states import MachineState
from bigfleet.operator.rollup import recount
from bigfleet.provider.records.fence import NO_TOKEN
from bigfleet.shard.cycle.controller import Shard
from bigfleet.shard.cycle.engine_runner import DecisionEngine, fleet_engine
from bigfleet.sim.pods import cluster_pods as pods
from bigfleet.sim.scenarios import cluster_agent
from bigfleet.sim.scenarios.runner import ScenarioOutcome, run, run_scenario, scenario_of, scenarios
from bigfleet.sim.scenarios.scenario_file import Expectation, Measure, Scenario
from bigfleet.sim.scenarios.world import ClosedWorld
from bigfleet.sim.sites import remote_provider

#: Cycles of the soak outside of `make soak`: fleets grow, shrink and are released in them.
SOAK_CYCLES = 40


def shortened(scenario: Scenario, cycles: int) -> Scenario:
    """Return the scenario over fewer cycles; what must hold at its end must hold there too."""
    return msgspec.structs.replace(scenario, cycles=cycles)


def small_soak() -> Scenario:
    """Return the soak with a tenth of its machines, a fifth of its clusters, and less of its life."""
    scenario = shortened(scenario_of("soak"), SOAK_CYCLES)
    scenario = msgspec.structs.replace(scenario, clusters=scenario.clusters[:6])
    machines = tuple(msgspec.structs.replace(stock, count=stock.count // 10) for stock in scenario.machines)
    lasting = tuple(e for e in scenario.must_hold if e.measure is Measure.TRANSITION_CYCLES)
    return msgspec.structs.replace(scenario, machines=machines, must_hold=lasting)


def assert_holds(outcome: ScenarioOutcome) -> None:
    """Fail with what is not met, and with how the world ended."""
    assert outcome.is_met, "\n".join([*outcome.faults, *outcome.journal[-3:]])


#: Those that take eight seconds or more, beside those whose files say that they are slow. The last three take four;
#: their quick tests are `coordinator-loss`, `test_a_fleet_comes_to_rest` and `test_a_planted_defect_is_found`.
SLOW_SCENARIOS = frozenset(
    {"gang-scatter", "impossible-gang", "order-flip", "zombie-shard", "store-partition", "steady-state", "calm"}
)
#: Those of which a shorter form is a test of its own.
LONG_SCENARIOS = frozenset({"soak", "handover-crash-at-every-step"})


def scenario_params() -> list[Any]:
    """Return the scenarios, those that take long marked."""
    return [pytest.param(name, marks=scenario_marks(name)) for name in scenarios()]


def scenario_marks(name: str) -> list[pytest.MarkDecorator]:
    if name in LONG_SCENARIOS:
        return [pytest.mark.long]
    return [pytest.mark.slow] if name in SLOW_SCENARIOS or scenario_of(name).slow else []


@pytest.mark.rule("shard 6/13", "shard 16/6")
@pytest.mark.parametrize("name", scenario_params())
def test_a_scenario_holds(name: str) -> None:
    """What its file says must hold does, and no invariant is broken in any cycle."""
    assert_holds(run(name))


def test_a_fleet_comes_to_rest() -> None:
    """The steady state over its first cycles."""
    scenario = shortened(scenario_of("steady-state"), 60)
    resting = tuple(
        msgspec.structs.replace(e, at_least=30) if e.measure is Measure.QUIET_CYCLES else e for e in scenario.must_hold
    )

    assert_holds(run_scenario(msgspec.structs.replace(scenario, must_hold=resting), name="steady-state"))


@pytest.mark.slow
def test_a_fleet_that_never_rests_neither_loses_nor_strands_a_machine() -> None:
    """The soak over its first cycles."""
    scenario = shortened(scenario_of("soak"), SOAK_CYCLES)
    lasting = [e for e in scenario.must_hold if e.measure is not Measure.GROWTH_PERCENT]

    assert_holds(run_scenario(msgspec.structs.replace(scenario, must_hold=tuple(lasting)), name="soak"))


@pytest.mark.slow
def test_a_handover_survives_the_death_of_each_process_in_the_middle() -> None:
    """One death of each process after the donor let go, and one after the recipient took; all are in the long run."""
    scenario = scenario_of("handover-crash-at-every-step")
    middle = tuple(
        msgspec.structs.replace(crashes, from_second=second, to_second=second)
        for crashes, second in zip(scenario.crashes, (206.5, 236.5), strict=True)
    )

    outcome = run_scenario(msgspec.structs.replace(scenario, crashes=middle), name="handover")

    assert_holds(outcome)
    assert outcome.actions["fencetouch"] >= 6


def test_idle_machines_go_where_the_composition_has_them() -> None:
    """Also where the provider answers before the host runs, so that any cluster could take them."""
    scenario = msgspec.structs.replace(scenario_of("cost-routing"), synchronous_create=False)

    outcome = run_scenario(scenario, name="cost-routing")

    assert_holds(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["shrink", "gang-dwell", "zombie-shard", "priority-inversion"])
def test_a_scenario_holds_for_other_seeds(name: str, seed: int) -> None:
    """Seeds change jitter and draws, not what must hold."""
    assert_holds(run(name, seed))


@pytest.mark.slow
def test_equal_seeds_give_equal_traces() -> None:
    """The journal is a function of the scenario and the seed."""
    first, second, other = (run_scenario(small_soak(), name="soak", seed=seed) for seed in (7, 7, 8))

    assert first.journal == second.journal
    assert first.trace_hash == second.trace_hash
    assert first.trace_hash != other.trace_hash


@pytest.mark.slow
def test_a_trace_depends_neither_on_the_process_nor_on_its_hash_seed() -> None:
    """Two processes with other hash seeds come to one trace hash."""
    program = (
        "from bigfleet.cli.runtime.kernel_cache import keep_kernels; keep_kernels();"
        "from bigfleet.sim.scenarios.runner import run; print(run('shard-loss', 5).trace_hash)"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]

    assert hashes[0] == hashes[1] == f"{run('shard-loss', 5).trace_hash}\n"


async def breaks(*_self: Any) -> None:
    """Stand in for a part of the world that ends in an error."""
    raise ZeroDivisionError("a part of the world broke")


def test_an_operator_that_breaks_breaks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the world runs ends unheard."""
    monkeypatch.setattr(cluster_agent.ClusterOperator, "run", breaks)

    with pytest.raises(ZeroDivisionError):
        run("steady-state", cycles_max=1)


def test_an_actuator_that_breaks_breaks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a process of the shard runs ends unheard."""

    def make_shard(**arguments: Any) -> Shard:
        shard = Shard(**arguments)
        monkeypatch.setattr(shard.actuator, "run", breaks)
        return shard

    with pytest.raises(ZeroDivisionError):
        run_scenario(scenario_of("steady-state"), name="steady-state", cycles_max=1, make_shard=make_shard)


def test_a_process_that_does_not_come_back_breaks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death in the middle is followed by a new process, or told."""
    monkeypatch.setattr(ClosedWorld, "_crash_once", breaks)

    with pytest.raises(ZeroDivisionError):
        run("steady-state", cycles_max=1)


def test_progress_is_told_over_all_arms() -> None:
    """Each cycle is told once, the last one as the whole."""
    told: list[tuple[int, int]] = []
    outcome = run("provision-runway", cycles_max=2, on_cycle=lambda done, of: told.append((done, of)))

    assert told == [(done, 10) for done in range(1, 11)]
    assert outcome.cycles == 10
    assert outcome.verdicts == ()


# ---- teeth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "measure", "false"),
    [
        ("capacity-stockout", Measure.MACHINES, 31),
        ("capacity-stockout", Measure.SHORTFALL, 248),
        ("priority-inversion", Measure.HELD, 3),
        ("priority-inversion", Measure.ACTIONS, 5),
        ("priority-inversion", Measure.BOUND_PERCENT, 50),
        ("drain-failure", Measure.SHORTFALLS, 1),
    ],
)
def test_an_expectation_that_is_false_is_not_met(name: str, measure: Measure, false: float) -> None:
    """Its sentence, what was measured and the scenario's name are told."""
    scenario = scenario_of(name)
    expectation = next(e for e in scenario.must_hold if e.measure is measure)
    wrong = msgspec.structs.replace(expectation, exactly=false)

    outcome = run_scenario(msgspec.structs.replace(scenario, must_hold=(wrong,)), name=name)

    assert not outcome.is_met
    assert outcome.faults == [f"{name}: {wrong.text}, measured {expectation.exactly:g}"]


Change = Callable[[ColumnSnapshot, Decision], Sequence[Action]]


class PlantedEngine:
    """The real engine with one defect."""

    def __init__(self, engine: DecisionEngine, actions: Change, options: Callable[[Options], Options]) -> None:
        self._engine = engine
        self._actions = actions
        self._options = options

    def decide(self, view: ColumnSnapshot, demand: Sequence[Need], options: Options, /, **more: Any) -> Decision:
        decision = self._engine.decide(view, demand, self._options(options), **more)
        return replace(decision, actions=tuple(self._actions(view, decision)))


def with_engine(
    actions: Change = lambda _view, decision: decision.actions,
    options: Callable[[Options], Options] = lambda options: options,
) -> Callable[..., Shard]:
    """Return a maker of shards whose engine has a defect."""

    def make_engine(**arguments: Any) -> DecisionEngine:
        return PlantedEngine(fleet_engine(**arguments), actions, options)

    return lambda **arguments: Shard(make_engine=make_engine, **arguments)


def with_settings(**changes: Any) -> Callable[..., Shard]:
    """Return a maker of shards that run with other settings than the scenario says."""
    return lambda settings, **arguments: Shard(settings=replace(settings, **changes), **arguments)


def plus_reclaim_of_an_incumbent(_view: ColumnSnapshot, decision: Decision) -> Sequence[Action]:
    """Take a machine away that a row holds."""
    assert decision.basis is not None
    machines = decision.basis.snapshot().of_state(MachineState.CONFIGURED)
    victim = next((m for m in machines if any(m.id in row.claimed for row in decision.rows)), None)
    if victim is None:
        return decision.actions
    reclaim = Action(
        kind=ActionKind.RECLAIM,
        machine_id=victim.id,
        cluster=victim.cluster,
        reason="phase3.excess",
        grace_seconds=600,
    )
    return [*(a for a in decision.actions if a.machine_id != victim.id), reclaim]


def without(kind: ActionKind) -> Change:
    """Return a change that forgets all actions of a kind."""
    return lambda _view, decision: [action for action in decision.actions if action.kind is not kind]


def deleting_what_is_idle(_view: ColumnSnapshot, decision: Decision) -> Sequence[Action]:
    """Give every idle machine back at once, whatever it is."""
    assert decision.basis is not None
    idle = decision.basis.snapshot().of_state(MachineState.IDLE)
    taken = {action.machine_id for action in decision.actions}
    deletes = [
        Action(kind=ActionKind.DELETE, machine_id=m.id, cluster=m.cluster, reason="phase3.release")
        for m in idle
        if m.id not in taken
    ]
    return [*decision.actions, *deletes]


def believing_all_reported(options: Options) -> Options:
    """Take every cluster for one that has reported."""
    return replace(options, reported=frozenset({"east", "west"}))


@pytest.mark.parametrize(
    ("name", "cycles", "make_shard", "told"),
    [
        ("idle-release", 110, with_engine(without(ActionKind.DELETE)), "actions (kind delete)"),
        ("priority-inversion", 40, with_engine(without(ActionKind.PREEMPT)), "machines (cluster train"),
        ("idle-release", 20, with_engine(deleting_what_is_idle), "S16"),
        ("shrink", 60, with_settings(reclaim_cap_fraction=0.0), "S8"),
        ("calm", 60, with_settings(reclaim_after_seconds=0.0), "churn"),
        ("capacity-stockout", 10, with_settings(dry_run=True), "machines (state configured)"),
    ],
)
def test_a_planted_defect_is_found(name: str, cycles: int, make_shard: Callable[..., Shard], told: str) -> None:
    """The scenario that is about it says what it is; without the defect it has nothing to say."""
    scenario = shortened(scenario_of(name), cycles)
    about = tuple(e for e in scenario.must_hold if told in e.text) or (TRUE,)
    scenario = msgspec.structs.replace(scenario, must_hold=about)

    sound = run_scenario(scenario, name=name)
    planted = run_scenario(scenario, name=name, make_shard=make_shard)

    assert sound.faults == []
    assert any(told in fault for fault in planted.faults), planted.faults


def two_at_a_time() -> Scenario:
    """Return the scenario `shrink` with clusters that just may lose two machines at once: a twentieth of forty."""
    scenario = shortened(scenario_of("shrink"), 8)
    stock = tuple(msgspec.structs.replace(each, count=40) for each in scenario.machines)
    return msgspec.structs.replace(scenario, machines=stock, must_hold=(TRUE,))


@pytest.mark.parametrize(("fraction", "is_found"), [(0.05, False), (0.075, True)])
def test_the_reclaim_cap_is_that_of_the_machines_before_the_first_drain(fraction: float, is_found: bool) -> None:
    """By the time that a decision is seen, its first drain has begun: the cluster has 39 machines left."""
    outcome = run_scenario(two_at_a_time(), name="shrink", make_shard=with_settings(reclaim_cap_fraction=fraction))

    assert outcome.actions["reclaim"] >= 2
    assert any("S8" in fault for fault in outcome.faults) == is_found, outcome.faults


def test_a_reclaim_of_what_is_needed_is_churn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operators do not look whether pods fit elsewhere, a machine that a row holds goes and is replaced."""
    monkeypatch.setattr(pods.PodCluster, "do_not_fit", lambda _self, _machine_id: [])
    scenario = shortened(scenario_of("sub-machine-gangs"), 20)

    outcome = run_scenario(scenario, name="sub-machine-gangs", make_shard=with_engine(plus_reclaim_of_an_incumbent))

    assert any("churn is 0" in fault for fault in outcome.faults), outcome.faults
    assert any("S22" in fault for fault in outcome.faults), outcome.faults


#: Of any world.
TRUE = Expectation(measure=Measure.MACHINES, at_least=0)


def test_a_reclaim_from_a_cluster_that_was_not_heard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that starts again believes, without a report, that nobody wants anything."""

    def deaf_once_it_is_a_second_process(**arguments: Any) -> Shard:
        shard = with_engine(options=believing_all_reported)(**arguments)
        if shard.epoch > 1:
            monkeypatch.setattr(shard.sessions, "receive_rollup", lambda _session, _offer: None)
        return shard

    outcome = run_scenario(
        shortened(scenario_of("shard-loss"), 30), name="shard-loss", make_shard=deaf_once_it_is_a_second_process
    )

    assert any("S9" in fault for fault in outcome.faults), outcome.faults


def test_demand_of_waiting_pods_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that leaves out the pods that run gets their machines taken away."""

    def roll_up(self: cluster_agent.ClusterOperator) -> RollUp:
        waiting = [pods._request_of(pod) for pod in self.pods.pods.values() if pod.node is None]
        self._stamp_nanos += 1
        return RollUp(
            cluster_id=self.cluster,
            timestamp_unix_nanos=self._stamp_nanos,
            needs=recount(self.cluster, waiting),
        )

    monkeypatch.setattr(cluster_agent.ClusterOperator, "roll_up", roll_up)
    monkeypatch.setattr(pods.PodCluster, "do_not_fit", lambda _self, _machine_id: [])

    outcome = run_scenario(shortened(scenario_of("bound-counts"), 20), name="bound-counts")

    assert any("kind reclaim" in fault for fault in outcome.faults), outcome.faults


def test_machines_that_two_shards_own_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that take whatever they see for their own have the same machines."""
    monkeypatch.setattr(Owned, "owns", lambda *_machine, **_title: True)
    scenario = scenario_of("handover-crash-at-every-step")

    outcome = run_scenario(msgspec.structs.replace(scenario, crashes=(), cycles=1, events=()), name="handover")

    assert any("S5" in fault and " and to " in fault for fault in outcome.faults), outcome.faults


def test_a_shard_that_waits_for_its_coordinator_is_found() -> None:
    """One that acts only without a coordinator decides otherwise than one that never had one."""

    def make_shard(**arguments: Any) -> Shard:
        settings = replace(arguments.pop("settings"), dry_run=arguments["ownership_file"] is not None)
        return Shard(settings=settings, **arguments)

    outcome = run_scenario(
        shortened(scenario_of("coordinator-loss"), 16), name="coordinator-loss", make_shard=make_shard
    )

    assert any("S12" in fault for fault in outcome.faults), outcome.faults


@pytest.mark.slow
def test_calls_without_a_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, nothing stops what an older process asks for."""
    monkeypatch.setattr(remote_provider, "Token", lambda *_token: NO_TOKEN)

    outcome = run_scenario(scenario_of("zombie-shard"), name="zombie-shard")

    assert any("fenced" in fault for fault in outcome.faults), outcome.faults
