"""Programs of a provider that died are ended before the next start runs any (docs/spec/exec-provider.md §6)."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.model.clock import Clock
from bigfleet.provider.backend import Transient
from bigfleet.provider.programs.orphan_killer import OrphanKiller
from bigfleet.provider.programs.runner import ProgramRunner
from bigfleet.provider.records.refusal import StartRefused
from tests.guides import executable
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import is_running

#: Runs the program at argv[1] as a provider does whose lock is at argv[2], and says when the program has begun.
PROVIDER = """
import asyncio, pathlib, sys
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.programs.orphan_killer import OrphanKiller
from bigfleet.provider.programs.runner import ProgramRunner

async def main():
    orphans = OrphanKiller(pathlib.Path(sys.argv[2]), clock=SystemClock(), terminate_seconds=float(sys.argv[3]))
    await ProgramRunner(sys.argv[1], clock=SystemClock(), orphans=orphans).run("create", {"a": 1})

asyncio.run(main())
"""
#: Waits with a child in its group, and says who they are.
WAITS = 'cat > question; sleep 600 & echo "$$ $!" > draft; mv draft began; wait'


class Groups:
    """Starts processes in groups of their own."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> int:
        """Start one and return its group."""
        self._processes.append(subprocess.Popen(command or ("sleep", "600"), start_new_session=True))
        return self._processes[-1].pid

    def exit_code(self, group: int) -> int | None:
        """Return how one ended, None while it runs."""
        (process,) = (each for each in self._processes if each.pid == group)
        return process.poll()

    def end(self) -> None:
        """Leave none behind."""
        for process in self._processes:
            process.kill()
            process.wait()


class RecordingKiller(OrphanKiller):
    """Knows which groups began and ended."""

    def __init__(self, lock_path: Path, *, clock: Clock) -> None:
        super().__init__(lock_path, clock=clock)
        self.begun: list[int] = []
        self.ended: list[int] = []

    def watch(self, group: int) -> None:
        self.begun.append(group)
        super().watch(group)

    def forget(self, group: int) -> None:
        self.ended.append(group)
        super().forget(group)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder for a program, of which nothing is left behind."""
    yield tmp_path
    began = tmp_path / "began"
    for process_id in map(int, began.read_text().split() if began.exists() else ()):
        if is_running(process_id):
            os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.end()


def killer(
    folder: Path, *, terminate_seconds: float = 0.0, former_seconds_max: float = PATIENCE_SECONDS
) -> OrphanKiller:
    return OrphanKiller(
        folder / "lock",
        clock=SystemClock(),
        terminate_seconds=terminate_seconds,
        former_seconds_max=former_seconds_max,
    )


def ignored_by(process_id: int) -> set[int]:
    """Return the signals that a process ignores."""
    (mask,) = re.findall(r"^SigIgn:\t(\w+)$", Path(f"/proc/{process_id}/status").read_text(), re.MULTILINE)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def run_until_it_waits(
    folder: Path, script: str, *, terminate_seconds: float
) -> tuple[subprocess.Popen[bytes], int, int]:
    """Return a provider that runs a program, and the ids of the program and of its child."""
    program = executable(folder / "program", f'#!/bin/sh\ncd "$(dirname "$0")"\n{script}\n')
    arguments = (str(program), str(folder / "lock"), str(terminate_seconds))
    provider = subprocess.Popen([sys.executable, "-c", PROVIDER, *arguments])
    began = folder / "began"
    wait_until(began.exists, "the program never began")
    process_id, child_id = map(int, began.read_text().split())
    return provider, process_id, child_id


@pytest.mark.parametrize("terminate_seconds", [0.0, 0.2, 60.0])
def test_the_group_of_a_program_ends_with_a_killed_provider(terminate_seconds: float, folder: Path) -> None:
    provider, process_id, child_id = run_until_it_waits(folder, WAITS, terminate_seconds=terminate_seconds)
    assert is_running(process_id)
    assert is_running(child_id)
    provider.send_signal(signal.SIGKILL)
    provider.wait()
    # What the next start does before it runs a program.
    killer(folder).close()
    assert not is_running(process_id)
    assert not is_running(child_id)
    assert (folder / "question").read_text() == '{"a":1}'


def test_a_program_may_end_in_order_before_it_is_killed(folder: Path) -> None:
    script = f"trap 'echo ended > ended; exit' TERM; {WAITS}"
    provider, process_id, _child_id = run_until_it_waits(folder, script, terminate_seconds=60.0)
    provider.send_signal(signal.SIGKILL)
    provider.wait()
    killer(folder).close()
    assert not is_running(process_id)
    assert (folder / "ended").exists()


def test_a_program_that_ignores_sigterm_is_killed(folder: Path) -> None:
    provider, process_id, child_id = run_until_it_waits(folder, f"trap '' TERM; {WAITS}", terminate_seconds=0.2)
    provider.send_signal(signal.SIGKILL)
    provider.wait()
    killer(folder).close()
    assert not is_running(process_id)
    assert not is_running(child_id)


def test_signals_to_the_whole_service_do_not_end_the_helper(groups: Groups, tmp_path: Path) -> None:
    orphans = killer(tmp_path)
    group = groups.start()
    orphans.watch(group)
    helper = orphans.helper_process_id
    assert helper is not None
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    wait_until(lambda: ignored_by(helper).issuperset(numbers), "it ignores no signals")
    for number in numbers:
        os.kill(helper, number)
    orphans.close()
    wait_until(lambda: groups.exit_code(group) == -signal.SIGKILL, "the group runs on")


def test_a_group_that_has_ended_is_left_alone(groups: Groups, tmp_path: Path) -> None:
    orphans = killer(tmp_path)
    known, forgotten = groups.start(), groups.start()
    for group in (known, forgotten):
        orphans.watch(group)
    orphans.forget(forgotten)
    orphans.close()
    wait_until(lambda: groups.exit_code(known) is not None, "the group runs on")
    killer(tmp_path).close()
    assert groups.exit_code(forgotten) is None


def test_a_helper_that_was_killed_is_replaced_by_one_that_knows_all_groups(groups: Groups, tmp_path: Path) -> None:
    orphans = killer(tmp_path)
    first, ended, second = groups.start(), groups.start(), groups.start()
    orphans.watch(first)
    orphans.watch(ended)
    helper = orphans.helper_process_id
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    wait_until(lambda: not is_running(helper), "the helper runs on")
    orphans.forget(ended)
    orphans.watch(second)
    assert orphans.helper_process_id not in (None, helper)
    orphans.close()
    for group in (first, second):
        wait_until(lambda group=group: groups.exit_code(group) is not None, "the group runs on")  # type: ignore[misc]
    assert groups.exit_code(ended) is None


def test_a_helper_that_reads_no_more_is_replaced_and_ends_nothing(groups: Groups, tmp_path: Path) -> None:
    orphans = killer(tmp_path)
    known, ended = groups.start(), groups.start()
    orphans.watch(ended)
    helper = orphans.helper_process_id
    assert helper is not None
    os.kill(helper, signal.SIGSTOP)
    orphans.forget(ended)
    # More than a pipe holds.
    for _ in range(20_000):
        orphans.forget(ended)
        if orphans.helper_process_id != helper:
            break
    assert orphans.helper_process_id != helper
    assert not is_running(helper)
    orphans.watch(known)
    orphans.close()
    wait_until(lambda: groups.exit_code(known) is not None, "the group runs on")
    assert groups.exit_code(ended) is None


def test_a_start_waits_for_the_ends_of_programs_of_the_former_one(groups: Groups, tmp_path: Path) -> None:
    group = groups.start("sh", "-c", "trap '' TERM; touch \"$0\"; while :; do sleep 0.1; done", str(tmp_path / "began"))
    wait_until((tmp_path / "began").exists, "it never began")
    former = killer(tmp_path, terminate_seconds=1.0)
    former.watch(group)
    helper = former.helper_process_id
    assert helper is not None
    os.kill(helper, signal.SIGSTOP)
    closing = threading.Thread(target=former.close)
    closing.start()
    try:
        with pytest.raises(StartRefused, match=r"lock: programs .* have not ended in 0\.1 s; end"):
            killer(tmp_path, former_seconds_max=0.1)
        assert groups.exit_code(group) is None
    finally:
        os.kill(helper, signal.SIGCONT)
        closing.join()
    killer(tmp_path).close()
    assert groups.exit_code(group) == -signal.SIGKILL


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"absent/lock: No such file or directory"):
        killer(tmp_path / "absent")


async def test_a_program_without_a_helper_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = executable(tmp_path / "program", '#!/bin/sh\n[ -z "$(cat)" ] || touch "$0.asked"\nsleep 600\n')
    orphans = killer(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(Transient, match=r"^the helper that ends programs cannot be started: No such file"):
        await ProgramRunner(str(program), clock=SystemClock(), orphans=orphans).run("create", {"a": 1})
    assert not (tmp_path / "program.asked").exists()
    orphans.close()


async def test_a_program_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    program = executable(tmp_path / "program", '#!/bin/sh\necho "{}"\n')
    orphans = RecordingKiller(tmp_path / "lock", clock=SystemClock())
    runner = ProgramRunner(str(program), clock=SystemClock(), orphans=orphans)
    await asyncio.gather(*(runner.run("create", {}) for _ in range(5)))
    assert len(orphans.begun) == 5
    assert sorted(orphans.begun) == sorted(orphans.ended)
    orphans.close()
