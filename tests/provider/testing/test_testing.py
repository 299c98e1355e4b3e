"""The public test kit: what it hands out works on authors' backends, and its state machine finds what is broken."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from bigfleet.model.states import MachineState
from bigfleet.provider import testing as testkit
from bigfleet.provider.backend import CONFIGURE_WAITS, Host, MachineView, Op
from bigfleet.provider.records.kinds import Kind
from bigfleet.provider.testing import FakeBackend, FaultBackend, FaultReadiness, LoopClock, SeededIds, four_edges

QUICK = settings(
    max_examples=12, stateful_step_count=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
#: What is broken need not be told in the smallest way.
HUNT = settings(QUICK, max_examples=200, phases=[Phase.generate])


def a_fake() -> testkit.Provider:
    return FakeBackend(5, resumable=frozenset(Kind) - {Kind.CONFIGURE}), CONFIGURE_WAITS


class Barren(FakeBackend):
    """Offers slots of which it makes no host."""

    async def create(self, machine: MachineView, op: Op) -> Host:
        raise RuntimeError("no such machine")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        a_fake,
        lambda: (FakeBackend(5), CONFIGURE_WAITS),
        lambda: (FaultBackend(5, clock=LoopClock()), FaultReadiness()),
    ],
    ids=["resumable", "not resumable", "fault"],
)
def test_the_state_machine_finds_nothing_on_sound_backends(make: Callable[[], testkit.Provider]) -> None:
    run_state_machine_as_test(four_edges(make), settings=QUICK)


def test_the_state_machine_finds_a_backend_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"Create ended so: .* BACKEND"):
        run_state_machine_as_test(four_edges(lambda: (Barren(5), CONFIGURE_WAITS)), settings=HUNT)


def test_the_state_machine_finds_an_inventory_without_slots() -> None:
    with pytest.raises(AssertionError, match="offers no slot"):
        run_state_machine_as_test(four_edges(lambda: (FakeBackend(0), CONFIGURE_WAITS)), settings=HUNT)


@pytest.mark.virtual_time
async def test_a_core_is_made_and_certified_in_a_few_lines() -> None:
    core = await testkit.started_core(FakeBackend(64))
    await core.create("fake-0")

    assert (await testkit.settled(core, "fake-0")).state is MachineState.IDLE
    await core.delete("fake-0")
    await testkit.settled(core, "fake-0")
    report = await testkit.certify(core)
    await core.stop()

    assert report.verdict is testkit.Verdict.CERTIFIED, [result for result in report.results if result.reason]
    assert len(report.results) == 73


def test_ids_are_of_their_seed() -> None:
    one, again, other = SeededIds(1), SeededIds(1), SeededIds(2)
    first = [one.new_id() for _ in range(3)]

    assert first == [again.new_id() for _ in range(3)]
    assert len({*first, *(other.new_id() for _ in range(3))}) == 6
    assert {len(each) for each in first} == {26}
    with pytest.raises(ValueError, match="seed -1"):
        SeededIds(-1)


def test_it_needs_hypothesis_for_the_state_machine_alone() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from bigfleet.provider.testing import FakeBackend, four_edges\n"
        "FakeBackend(1)\n"
        "four_edges(lambda: None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stderr.splitlines()[-1] == (
        "ImportError: four_edges needs Hypothesis, which is not installed; "
        "run make setup in a checkout, or pip install 'hypothesis>=6.170'"
    )
