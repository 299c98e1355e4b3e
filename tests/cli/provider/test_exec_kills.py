"""`bigfleet provider exec` killed with SIGKILL during each verb that changes something, before and after its effect.

docs/spec/exec-provider.md §2 and §6, docs/spec/provider.md §11 and §12. A real process, a real program, real gRPC, a
real state file. The program of the killed provider is ended before the next start runs one, unless the helper that ends
it was killed first: then it runs on.
"""

import base64
import os
import signal
from pathlib import Path

import pytest

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from tests.cli.provider.provider_client import BLOB, VERBS
from tests.cli.provider.rack_program import AFTER, BEFORE, MACHINE, ExecProvider, Rack, intent_key
from tests.patience import wait_until

pytestmark = pytest.mark.slow

#: What became of the program that the killed provider had begun.
RUNS_ON, ENDED = "runs on", "ended"
#: A program that runs on after its effect changes nothing more; `make test-long` runs these.
KILLS = [
    pytest.param(verb, moment, orphan, marks=[pytest.mark.long] if (moment, orphan) == (AFTER, RUNS_ON) else [])
    for verb in VERBS
    for moment in (BEFORE, AFTER)
    for orphan in (RUNS_ON, ENDED)
]
#: Of a program that resumes nothing: where the machine is in the end, by the moment of the kill.
NOT_RESUMED = [
    ("create", BEFORE, pb.MACHINE_STATE_SPECULATIVE),
    ("create", AFTER, pb.MACHINE_STATE_IDLE),
    ("configure", BEFORE, pb.MACHINE_STATE_IDLE),
    ("configure", AFTER, pb.MACHINE_STATE_CONFIGURED),
    ("drain", BEFORE, pb.MACHINE_STATE_CONFIGURED),
    ("drain", AFTER, pb.MACHINE_STATE_IDLE),
    ("delete", BEFORE, pb.MACHINE_STATE_IDLE),
    ("delete", AFTER, pb.MACHINE_STATE_SPECULATIVE),
]


@pytest.mark.parametrize(("verb", "moment", "orphan"), KILLS)
def test_a_kill_in_a_verb_is_carried_on_with_the_same_operation(
    verb: str, moment: str, orphan: str, tmp_path: Path
) -> None:
    rack = Rack(tmp_path / "rack")
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path))
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        rack.hold(moment, verb)
        operation_id = client.accept(verb, MACHINE)
        program = rack.wait_until_stopped(moment, verb)
        if orphan == RUNS_ON:
            provider.kill_helper()
        os.kill(pid, signal.SIGKILL)
    with provider.served() as (client, _pid):
        wait_until(lambda: len(rack.asked(verb)) == 2, provider.log.read_text)
        rack.go_on(moment, verb)
        machine = client.settled(MACHINE)
        if orphan == RUNS_ON:
            rack.wait_until_ended(program)
        rack.check_end(verb, machine)
        # The same call again is the same operation, and runs nothing.
        assert client.accept(verb, MACHINE) == operation_id
        rack.check_end(verb, client.get(MACHINE))
    blob = base64.b64encode(BLOB).decode() if verb == "configure" else None
    asked = [(each.id, each.attempt, each.blob) for each in rack.asked(verb)]
    assert asked == [(operation_id, 1, blob), (operation_id, 2, blob)]
    assert rack.effects(verb) == [operation_id]
    assert bool(rack.overlaps) is (orphan == RUNS_ON)
    # No verb of before it was run again.
    assert all(len(rack.asked(former)) == 1 for former in VERBS[: VERBS.index(verb)])


@pytest.mark.parametrize("verb", VERBS)
def test_a_kill_after_the_answer_was_stored_runs_nothing_again(verb: str, tmp_path: Path) -> None:
    rack = Rack(tmp_path / "rack")
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path))
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        operation_id = client.accept(verb, MACHINE)
        stored = client.settled(MACHINE)
        os.kill(pid, signal.SIGKILL)
    with provider.served() as (client, _pid):
        assert client.get(MACHINE) == stored
        assert client.accept(verb, MACHINE) == operation_id
        rack.check_end(verb, client.get(MACHINE))
    assert provider.events("operation.resumed") == []
    assert [(each.id, each.attempt) for each in rack.asked(verb)] == [(operation_id, 1)]
    assert rack.effects(verb) == [operation_id]


@pytest.mark.parametrize(("verb", "moment", "state"), NOT_RESUMED)
def test_a_verb_that_is_not_resumable_is_not_run_again_and_its_outcome_is_looked_for(
    verb: str, moment: str, state: int, tmp_path: Path
) -> None:
    rack = Rack(tmp_path / "rack", resumable=False)
    provider = ExecProvider(tmp_path, rack.program, "--failed-hold=1s")
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        rack.hold(moment, verb)
        operation_id = client.accept(verb, MACHINE)
        rack.wait_until_stopped(moment, verb)
        os.kill(pid, signal.SIGKILL)
    # Without its data only the readiness of a Configure is looked at, for its time.
    rack.describe(resumable=False, configure="3s")
    with provider.served() as (client, _pid):
        wait_until(lambda: client.get(MACHINE).state == state, provider.log.read_text)
        assert client.get(MACHINE).host.ref == rack.host
        assert client.get(MACHINE).cluster == rack.cluster
    assert [each.id for each in rack.asked(verb)] == [operation_id]
    assert rack.effects(verb) == ([operation_id] if moment == AFTER else [])
    # What the program of before was to do is not done behind the back of the one that looks for its outcome.
    assert rack.overlaps == []


@pytest.mark.parametrize(("moment", "state"), [(BEFORE, pb.MACHINE_STATE_IDLE), (AFTER, pb.MACHINE_STATE_CONFIGURED)])
def test_a_configure_whose_data_was_not_stored_is_not_run_again_and_its_readiness_is_looked_at(
    moment: str, state: int, tmp_path: Path
) -> None:
    rack = Rack(tmp_path / "rack")
    # Without --intent-key.
    provider = ExecProvider(tmp_path, rack.program, "--failed-hold=1s")
    with provider.served() as (client, pid):
        client.live_until("configure", MACHINE)
        rack.hold(moment, "configure")
        operation_id = client.accept("configure", MACHINE)
        rack.wait_until_stopped(moment, "configure")
        os.kill(pid, signal.SIGKILL)
    rack.describe(resumable=True, configure="3s")
    with provider.served() as (client, _pid):
        wait_until(lambda: client.get(MACHINE).state == state, provider.log.read_text)
        assert client.get(MACHINE).cluster == rack.cluster
    assert [each["with_backend"] for each in provider.events("operation.resumed")] == [False]
    assert [each.id for each in rack.asked("configure")] == [operation_id]
    assert rack.overlaps == []


#: Of a verb whose answer came too late: where the machine is in the end, by the moment of the kill in `compensate`.
COMPENSATED = [
    ("create", BEFORE, pb.MACHINE_STATE_IDLE),
    ("create", AFTER, pb.MACHINE_STATE_SPECULATIVE),
    ("configure", BEFORE, pb.MACHINE_STATE_CONFIGURED),
    ("configure", AFTER, pb.MACHINE_STATE_IDLE),
    # There is nothing to undo.
    ("drain", BEFORE, pb.MACHINE_STATE_IDLE),
    ("delete", BEFORE, pb.MACHINE_STATE_SPECULATIVE),
]


@pytest.mark.parametrize(("verb", "moment", "state"), COMPENSATED)
def test_a_kill_while_a_late_result_is_undone_leaves_what_is_there_to_be_looked_for(
    verb: str, moment: str, state: int, tmp_path: Path
) -> None:
    rack = Rack(tmp_path / "rack", compensates=True)
    rack.describe(resumable=True, **{verb: "15s"})
    provider = ExecProvider(tmp_path, rack.program, intent_key(tmp_path), "--failed-hold=1s")
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        rack.answer_late(verb)
        rack.hold(moment, "compensate")
        operation_id = client.accept(verb, MACHINE)
        rack.wait_until_stopped(moment, "compensate")
        machine = client.get(MACHINE)
        assert machine.state == pb.MACHINE_STATE_FAILED
        assert machine.last_error.startswith("TIMEOUT: ")
        os.kill(pid, signal.SIGKILL)
    with provider.served() as (client, _pid):
        wait_until(lambda: client.get(MACHINE).state == state, provider.log.read_text)
        assert client.get(MACHINE).host.ref == rack.host
        assert client.get(MACHINE).cluster == rack.cluster
    assert [each.id for each in rack.asked("compensate")] == [operation_id]
    assert [each.id for each in rack.asked(verb)] == [operation_id]
    assert rack.effects(verb) == [operation_id]
    assert rack.effects("compensate") == ([operation_id] if moment == AFTER else [])
    assert rack.overlaps == []
