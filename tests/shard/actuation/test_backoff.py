"""Whom a shard leaves alone for a while, and when that ends (docs/spec/shard.md §9.2, §9.6)."""

import math
from dataclasses import replace

import pytest

from bigfleet.engine.decision import Action, ActionKind
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.metadata import FINGERPRINT_BYTES_MAX
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.states import MachineState
from bigfleet.shard.actuation.backoff import DemandBackoff, MachineBackoff
from bigfleet.shard.outcomes import ActionRecord
from tests.shard.world import need

S = MachineState


class HandClock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def monotonic_seconds(self) -> float:
        """Return the hand's position."""
        return self.now_seconds

    def unix_nanos(self) -> int:
        """Return nothing of interest."""
        return 0

    async def sleep(self, seconds: float) -> None:
        """Turn the hand."""
        self.now_seconds += seconds


@pytest.fixture
def clock() -> HandClock:
    """A clock at zero."""
    return HandClock()


def bootstrap(cluster: str = "c1", kind: ActionKind = ActionKind.BOOTSTRAP) -> Action:
    """Return an action of the row that `need` makes."""
    profile = need(cluster, "4").profile
    return Action(kind=kind, machine_id=MachineId("m1"), cluster=ClusterId(cluster), reason="test", profile=profile)


FINGERPRINT = need("c1", "4").fingerprint


# ---- strikes ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.6/7")
def test_the_third_refusal_in_a_row_counts(clock: HandClock) -> None:
    """An accepted call in between starts the count again."""
    machine_backoff = MachineBackoff(clock)
    first = [machine_backoff.refused("m1") for _ in range(2)]
    machine_backoff.accepted("m1")

    assert (first, [machine_backoff.refused("m1") for _ in range(3)]) == ([False, False], [False, False, True])
    assert not machine_backoff.refused("m2")


@pytest.mark.rule("shard 9.6/7")
def test_a_hold_doubles_from_half_an_hour_to_a_day(clock: HandClock) -> None:
    """Each time that the machine is held again without an accepted call in between."""
    machine_backoff = MachineBackoff(clock)
    held_seconds = []
    for _ in range(8):
        machine_backoff.hold("m1", S.IDLE, until_restart=False)
        started = clock.now_seconds
        while machine_backoff.holds("m1", S.IDLE):
            clock.now_seconds += 600
        held_seconds.append(clock.now_seconds - started)

    assert held_seconds == [1800, 3600, 7200, 14400, 28800, 57600, 86400, 86400]
    machine_backoff.accepted("m1")
    machine_backoff.hold("m1", S.IDLE, until_restart=False)
    clock.now_seconds += 1800
    assert not machine_backoff.holds("m1", S.IDLE)


@pytest.mark.rule("shard 9.6/8")
def test_a_hold_ends_early_when_the_provider_shows_another_state(clock: HandClock) -> None:
    """Compared with the state at the hold's start."""
    machine_backoff = MachineBackoff(clock)
    machine_backoff.hold("m1", S.IDLE, until_restart=True)
    assert (machine_backoff.holds("m1", S.IDLE), len(machine_backoff), machine_backoff.is_held("m1")) == (True, 1, True)
    assert (machine_backoff.holds("m1", S.FAILED), len(machine_backoff), machine_backoff.is_held("m1")) == (
        False,
        0,
        False,
    )


def test_a_hold_for_good_never_expires(clock: HandClock) -> None:
    """It lasts as long as the process."""
    machine_backoff = MachineBackoff(clock)
    machine_backoff.hold("good", S.IDLE, until_restart=True)
    machine_backoff.hold("while", S.IDLE, until_restart=False)
    assert machine_backoff.expired() == []
    clock.now_seconds = 1800

    assert (machine_backoff.expired(), machine_backoff.holds("good", S.IDLE)) == (["while"], True)


def test_a_machine_that_is_gone_is_forgotten(clock: HandClock) -> None:
    """Its successor of the same id starts clean."""
    machine_backoff = MachineBackoff(clock)
    machine_backoff.refused("m1")
    machine_backoff.refused("m1")
    machine_backoff.hold("m2", S.IDLE, until_restart=True)
    machine_backoff.forget("m1")
    machine_backoff.forget("m2")

    assert (machine_backoff.refused("m1"), machine_backoff.is_held("m2")) == (False, False)


# ---- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.2/14", "shard 9.2/16")
def test_a_refused_row_is_backed_off_for_twice_as_long_each_time(clock: HandClock) -> None:
    """From 30 s to 10 min; what was refused stays known until the row succeeds."""
    demand_backoff = DemandBackoff(clock)
    waits = []
    for _ in range(7):
        demand_backoff.refuse("c1", FINGERPRINT, "")
        started = clock.now_seconds
        while demand_backoff.is_backed_off(bootstrap()):
            clock.now_seconds += 5
        waits.append(clock.now_seconds - started)

    assert waits == [30, 60, 120, 240, 480, 600, 600]
    assert demand_backoff.refused() == {("c1", FINGERPRINT, "")}
    demand_backoff.succeeded("c1", FINGERPRINT, "")
    demand_backoff.refuse("c1", FINGERPRINT, "")
    clock.now_seconds += 30
    assert not demand_backoff.is_backed_off(bootstrap())


@pytest.mark.rule("shard 9.2/14")
def test_refusals_of_one_round_count_once(clock: HandClock) -> None:
    """Six machines asked for at the same time are one thing that the operator cannot do."""
    demand_backoff = DemandBackoff(clock)
    for _ in range(6):
        demand_backoff.refuse("c1", FINGERPRINT, "")
    clock.now_seconds = 30

    assert not demand_backoff.is_backed_off(bootstrap())


@pytest.mark.parametrize("kind", [ActionKind.BOOTSTRAP, ActionKind.PROVISION])
def test_a_row_that_no_machine_can_store_is_left_out_until_it_leaves_the_demand(
    clock: HandClock, kind: ActionKind
) -> None:
    """Neither time nor a new session makes it shorter."""
    demand_backoff = DemandBackoff(clock)
    action = bootstrap(kind=kind)
    profile = action.profile
    assert profile is not None
    room = FINGERPRINT_BYTES_MAX - len(profile.fingerprint) - len("x:2:;")
    values = ("v" * room, "v" * (room + 1))
    longest, too_long = (
        replace(action, profile=replace(profile, requirements=(*profile.requirements, requirement)))
        for requirement in (Requirement("x", Operator.NOT_IN, (value,)) for value in values)
    )
    records = [
        ActionRecord(action_id="a", action=each, decided_cycle=1, decided_unix_nanos=1) for each in (longest, too_long)
    ]
    assert [demand_backoff.refuse_oversized(record) for record in records] == [False, True]
    assert "at most 49,152 are allowed" in records[1].message
    clock.now_seconds = 1e9
    demand_backoff.session_opened("c1")
    assert [demand_backoff.is_backed_off(each) for each in (longest, too_long)] == [False, True]

    demand_backoff.keep_only(lambda _key: False)
    assert not demand_backoff.is_backed_off(too_long)


@pytest.mark.rule("shard 8/5")
def test_only_what_binds_a_machine_to_the_row_is_left_out(clock: HandClock) -> None:
    """Other kinds, other clusters and other groups go on."""
    demand_backoff = DemandBackoff(clock)
    demand_backoff.refuse("c1", FINGERPRINT, "")
    backed_off = [demand_backoff.is_backed_off(bootstrap(kind=kind)) for kind in ActionKind]

    assert backed_off == [True, True, False, False, False]
    assert not demand_backoff.is_backed_off(bootstrap("c2"))


@pytest.mark.rule("shard 9.2/16")
def test_a_new_session_clears_what_is_held_against_its_cluster(clock: HandClock) -> None:
    """Rows and breaker; other clusters keep theirs."""
    demand_backoff = DemandBackoff(clock)
    for cluster in ("c1", "c2"):
        demand_backoff.refuse(cluster, FINGERPRINT, "")
        for _ in range(3):
            demand_backoff.unanswered(cluster)
        demand_backoff.asked(cluster)
    demand_backoff.session_opened("c1")

    assert [demand_backoff.is_backed_off(bootstrap(cluster)) for cluster in ("c1", "c2")] == [False, True]
    assert [demand_backoff.may_ask(cluster) for cluster in ("c1", "c2")] == [True, False]


@pytest.mark.rule("shard 9.2/16")
def test_a_row_that_left_the_demand_is_forgotten(clock: HandClock) -> None:
    """What is kept is bounded by what is asked for."""
    demand_backoff = DemandBackoff(clock)
    demand_backoff.refuse("c1", FINGERPRINT, "")
    demand_backoff.keep_only(lambda key: key == ("c1", FINGERPRINT, ""))
    assert demand_backoff.refused() == {("c1", FINGERPRINT, "")}
    demand_backoff.keep_only(lambda _key: False)
    assert demand_backoff.refused() == frozenset()


# ---- the blob breaker -------------------------------------------------------------------------------------------


@pytest.mark.rule("shard 9.2/6")
def test_the_breaker_lets_one_probe_through_at_a_time(clock: HandClock) -> None:
    """From the third unanswered request in a row until one is answered."""
    demand_backoff = DemandBackoff(clock)
    for _ in range(2):
        demand_backoff.unanswered("c1")
    demand_backoff.asked("c1")
    assert demand_backoff.may_ask("c1")
    demand_backoff.unanswered("c1")
    assert demand_backoff.may_ask("c1")
    demand_backoff.asked("c1")
    assert not demand_backoff.may_ask("c1")
    demand_backoff.unanswered("c1")
    assert demand_backoff.may_ask("c1")
    demand_backoff.asked("c1")
    demand_backoff.answered("c1")
    asked = []
    for _ in range(5):
        asked.append(demand_backoff.may_ask("c1"))
        demand_backoff.asked("c1")

    assert asked == [True] * 5
    assert demand_backoff.may_ask("c2")


def test_no_hold_is_longer_than_its_bound(clock: HandClock) -> None:
    """However often a machine is held."""
    machine_backoff = MachineBackoff(clock)
    for _ in range(2000):
        machine_backoff.hold("m1", S.IDLE, until_restart=False)

    assert math.isfinite(machine_backoff._holds["m1"].until_seconds)
    assert machine_backoff._holds["m1"].until_seconds == 86_400
