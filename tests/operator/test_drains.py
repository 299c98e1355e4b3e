"""The table of drains: one per machine, deadlines that only come closer, results that stay until the machine goes."""

import pytest

from bigfleet.model.frames import DrainOutcome, DrainResult, ReclaimInstruction
from bigfleet.model.states import MachineState
from bigfleet.operator.drains import GRACE_DEFAULT_SECONDS, DrainTable


def instruction(id: str = "i", *machines: str, grace_seconds: int = 600) -> ReclaimInstruction:
    return ReclaimInstruction(
        instruction_id=id,
        nodes=tuple(f"node-{machine}" for machine in machines),
        machine_ids=machines,
        provider_ids=tuple(f"p://{machine}" for machine in machines),
        grace_seconds=grace_seconds,
    )


def result(id: str = "i", machine: str = "m", outcome: DrainOutcome = DrainOutcome.DRAINED) -> DrainResult:
    return DrainResult(instruction_id=id, machine_id=machine, outcome=outcome)


def test_each_machine_of_an_instruction_is_a_drain() -> None:
    table = DrainTable()

    drains = table.begin(instruction("i", "m", "n"), now_seconds=100.0)

    assert [(d.machine_id, d.node, d.provider_id, d.deadline_seconds) for d in drains] == [
        ("m", "node-m", "p://m", 700.0),
        ("n", "node-n", "p://n", 700.0),
    ]


def test_a_shard_that_names_only_nodes_is_understood() -> None:
    bare = ReclaimInstruction(instruction_id="i", nodes=("m",), machine_ids=(), provider_ids=(), grace_seconds=60)

    (drain,) = DrainTable().begin(bare, now_seconds=0.0)

    assert (drain.machine_id, drain.node, drain.provider_id) == ("m", "m", "")


@pytest.mark.parametrize("grace_seconds", [0, -5])
def test_no_grace_is_half_a_minute(grace_seconds: int) -> None:
    (drain,) = DrainTable().begin(instruction("i", "m", grace_seconds=grace_seconds), now_seconds=0.0)

    assert drain.deadline_seconds == GRACE_DEFAULT_SECONDS


def test_the_same_instruction_again_can_only_hasten() -> None:
    table = DrainTable()
    table.begin(instruction("i", "m", grace_seconds=600), now_seconds=0.0)

    assert table.begin(instruction("i", "m", grace_seconds=900), now_seconds=10.0) == []
    (hastened,) = table.begin(instruction("i", "m", grace_seconds=30), now_seconds=20.0)

    assert hastened.deadline_seconds == 50.0


def test_a_new_instruction_takes_the_place_of_the_old() -> None:
    table = DrainTable()
    table.begin(instruction("old", "m"), now_seconds=0.0)
    table.begin(instruction("new", "m", grace_seconds=900), now_seconds=0.0)

    assert not table.finish(result("old"))
    assert table.finish(result("new"))


def test_a_result_is_kept_until_the_machine_goes() -> None:
    table = DrainTable()
    table.begin(instruction("i", "m"), now_seconds=0.0)
    table.finish(result())
    table.observe("m", MachineState.DRAINING)

    assert table.results() == [result()]
    assert table.begin(instruction("i", "m"), now_seconds=5.0) == []

    table.observe("m", MachineState.IDLE)
    assert table.results() == []


def test_a_second_result_changes_nothing() -> None:
    table = DrainTable()
    table.begin(instruction("i", "m"), now_seconds=0.0)

    assert table.finish(result())
    assert not table.finish(result(outcome=DrainOutcome.FAILED))


@pytest.mark.parametrize("state", list(MachineState))
def test_only_states_that_say_so_end_a_drain(state: MachineState) -> None:
    table = DrainTable()
    table.begin(instruction("i", "m"), now_seconds=0.0)

    ended = table.observe("m", state)

    going_on = {MachineState.DRAINING, MachineState.CONFIGURING, MachineState.UNSPECIFIED}
    assert (ended is None) == (state in going_on)


def test_a_resync_ends_the_drains_of_machines_that_it_did_not_name() -> None:
    table = DrainTable()
    table.begin(instruction("i", "a", "b", "c"), now_seconds=0.0)

    assert [drain.machine_id for drain in table.forget_all_but(["b"])] == ["a", "c"]
    assert len(table) == 1


def test_machines_that_were_not_found_are_not_begun() -> None:
    table = DrainTable()
    table.begin(instruction("i", "a", "b"), now_seconds=0.0)
    table.finish(result(machine="a", outcome=DrainOutcome.NODE_NOT_FOUND))

    assert table.count_begun("i") == 1


def test_a_drain_that_an_earlier_process_began_has_its_result_and_its_end() -> None:
    earlier, table = DrainTable(), DrainTable()
    (drain,) = earlier.begin(instruction("i", "m"), now_seconds=0.0)

    assert table.resume(drain)
    assert table.finish(result())
    assert table.results() == [result()]
    assert table.begin(instruction("i", "m"), now_seconds=5.0) == []
    assert table.observe("m", MachineState.CONFIGURED) is not None


def test_a_drain_of_this_process_is_not_replaced_by_one_of_an_earlier() -> None:
    earlier, table = DrainTable(), DrainTable()
    (old,) = earlier.begin(instruction("old", "m"), now_seconds=0.0)
    (new,) = table.begin(instruction("new", "m"), now_seconds=0.0)

    assert not table.resume(old)
    assert table.get("m") == new
