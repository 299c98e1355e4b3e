"""Programs that misbehave, as data: what each becomes, and that nothing of it is left. The programs are real ones."""

import asyncio
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.provider.backend import Transient
from bigfleet.provider.operations.invoke import DeadlinePassed, within
from bigfleet.provider.programs.process import ERROR_BYTES_RETAINED_MAX
from bigfleet.provider.programs.runner import ProgramFailed, ProgramResult, ProgramRunner, decoded
from tests.patience import wait_until
from tests.processes import is_running

#: Longer than a pipe holds, so that a program that does not read it blocks the one who writes.
LARGE_QUESTION = {"blob": "b" * (1 << 20)}
BLOB = b"#cloud-config\nruncmd: [[kubeadm, join, --token, abcdef.0123456789abcdef]]\n"
#: Starts a process that holds the pipes, and waits until it has left the group.
STRAY = "setsid sh -c 'echo $$ > stray; exec sleep 600' & while ! [ -s stray ]; do sleep 0.02; done"


@dataclass(frozen=True)
class Case:
    """A program, and how its run ends."""

    name: str
    script: str
    exit_code: int = 0
    output: bytes = b""
    error_line: str = ""


CASES = [
    Case("it reads the question", 'cat > question; echo "{}"', output=b"{}\n"),
    Case("it never reads its standard input", 'echo "{}"', output=b"{}\n"),
    Case("it closes its standard input", 'exec <&-; echo "{}"', output=b"{}\n"),
    Case("it writes invalid UTF-8", "printf '\\377\\376'; printf 'bad \\377\\n' >&2", 0, b"\xff\xfe", "bad \ufffd"),
    Case("its last line is blank", "printf 'first\\nthe cause\\n\\n  \\n' >&2; exit 3", 3, b"", "the cause"),
    Case("it writes control characters", "printf 'a\\033[31mb\\tc\\n' >&2; exit 1", 1, b"", "a [31mb c"),
    Case("it kills itself", "kill -9 $$", -9),
    Case("its grandchild holds the output", "sleep 600 & echo $! > child; echo '{}'", output=b"{}\n"),
    Case(
        "its grandchild left the group and holds the output",
        f"{STRAY}; echo '{{}}'",
        output=b"{}\n",
    ),
    Case("it forks fifty times", "for n in $(seq 50); do sleep 600 & echo $! >> child; done; exit 4", 4),
    Case("it prints the blob", "cat blob >&2; exit 1", 1, b"", "[redacted]"),
    Case("it prints the blob in base64", "printf 'got ' >&2; base64 -w0 blob >&2; exit 1", 1, b"", "got [redacted]"),
    Case("it prints the blob in lines of base64", "base64 -w 40 blob | head -n 2 >&2; exit 1", 1, b"", "[redacted]"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "blob").write_bytes(BLOB)
    yield tmp_path
    for stray in (tmp_path / "stray").read_text().split() if (tmp_path / "stray").exists() else ():
        os.kill(int(stray), 9)


def runner_in(folder: Path, script: str, *, terminate_seconds: float = 2.0) -> ProgramRunner:
    program = folder / "program"
    program.write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\n{script}\n')
    program.chmod(0o700)
    return ProgramRunner(str(program), clock=SystemClock(), terminate_seconds=terminate_seconds, pipes_seconds_max=0.5)


def is_left(folder: Path) -> bool:
    """Return whether a process of the program's group still runs."""
    children = folder / "child"
    return children.exists() and any(is_running(int(pid)) for pid in children.read_text().split())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_program_that_misbehaves(case: Case, folder: Path) -> None:
    result = await runner_in(folder, case.script).run("configure", LARGE_QUESTION, secret=BLOB)

    assert result == ProgramResult(exit_code=case.exit_code, output=case.output, error_line=case.error_line)
    wait_until(lambda: not is_left(folder), "a process of the program's group is left")


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (b"no json", "create answered what is not understood: JSON is malformed"),
        (b"\xff", "create answered what is not understood"),
        (b"[]", "create answered what is not understood: Expected `object`, got `array`"),
    ],
)
def test_an_answer_that_is_not_understood(output: bytes, text: str) -> None:
    with pytest.raises(ProgramFailed, match=text):
        decoded("create", output, dict[str, int])


def test_what_is_not_understood_is_shown_without_the_secret() -> None:
    with pytest.raises(ProgramFailed, match=r"^configure answered what is not understood: .*\[redacted\]") as failed:
        decoded("configure", b'{"a": "' + b"x" * 20 + b'"}', dict[str, int], secret=b"Expected `int`, got `str`")
    assert "Expected `int`, got" not in str(failed.value)


async def test_a_long_answer_is_bounded(folder: Path) -> None:
    runner = runner_in(folder, "head -c 3000000 /dev/zero")
    with pytest.raises(ProgramFailed, match=r"^create wrote more than 1 MiB$"):
        await runner.run("create", {}, output_bytes_max=1 << 20)


@pytest.mark.slow
async def test_a_gibibyte_of_output_and_of_errors_is_not_retained(folder: Path) -> None:
    taken = 0

    def take(data: bytes) -> None:
        nonlocal taken
        taken += len(data)

    script = "head -c 1073741824 /dev/zero; head -c 1073741824 /dev/zero >&2; printf '\\nfull\\n' >&2; exit 1"
    result = await runner_in(folder, script).run("inventory", {}, take_output=take)
    assert (taken, result.error_line, result.output) == (1 << 30, "full", b"")


async def test_of_long_errors_the_end_is_retained(folder: Path) -> None:
    script = f"head -c {4 * ERROR_BYTES_RETAINED_MAX} /dev/zero | tr '\\0' 'x' >&2; echo >&2; echo cause >&2; exit 1"
    assert (await runner_in(folder, script).run("create", {})).error_line == "cause"


async def test_what_the_taker_of_the_output_raises_ends_the_program(folder: Path) -> None:
    def take(data: bytes) -> None:
        raise ProgramFailed("line 1 is no JSON")

    runner = runner_in(folder, "echo x; sleep 600 & echo $! > child; wait")
    with pytest.raises(ProgramFailed, match="line 1"):
        await runner.run("inventory", {}, take_output=take)
    wait_until(lambda: not is_left(folder), "a process of the program's group is left")


async def cut_off(runner: ProgramRunner, seconds: float) -> asyncio.Task[ProgramResult]:
    """Run a program as the kit does, until its deadline; return the task that was left behind, at its end."""
    left: list[asyncio.Task[ProgramResult]] = []
    deadline_seconds = SystemClock().monotonic_seconds() + seconds
    with pytest.raises(DeadlinePassed):
        await within(runner.run("create", {}, deadline_monotonic_seconds=deadline_seconds), seconds, left.append)
    await asyncio.wait(left)
    return left[0]


async def test_a_program_hears_sigterm_before_its_deadline(folder: Path) -> None:
    script = "trap 'echo asked > term; echo the array rebuilds >&2; exit 9' TERM; sleep 600 & echo $! > child; wait"
    deadline_seconds = SystemClock().monotonic_seconds() + 4.0
    result = await runner_in(folder, script).run("create", {}, deadline_monotonic_seconds=deadline_seconds)
    assert (result.exit_code, result.error_line) == (9, "the array rebuilds")
    assert (folder / "term").exists()


async def test_a_program_that_ignores_sigterm_is_killed_at_its_deadline(folder: Path) -> None:
    script = "trap '' TERM; echo $$ > child; while :; do sleep 0.1; done"
    left = await cut_off(runner_in(folder, script), 2.0)
    assert left.cancelled()
    assert not is_left(folder)


async def test_a_program_that_sigterm_ends_is_one_whose_time_was_over(folder: Path) -> None:
    left = await cut_off(runner_in(folder, "echo $$ > child; exec sleep 600"), 2.0)
    assert left.cancelled()
    assert not is_left(folder)


async def test_without_a_time_for_sigterm_there_is_none(folder: Path) -> None:
    script = "trap 'echo asked > term; exit 9' TERM; sleep 600 & echo $! > child; wait"
    left = await cut_off(runner_in(folder, script, terminate_seconds=0.0), 1.0)
    assert left.cancelled()
    assert not (folder / "term").exists()


async def test_a_success_that_was_seen_too_late_is_returned(folder: Path) -> None:
    """The kit compensates it: cancelled while a stray process held the pipes, after the program had succeeded."""
    runner_in(folder, f'{STRAY}; echo \'{{"host_ref": "h"}}\'')
    runner = ProgramRunner(str(folder / "program"), clock=SystemClock(), terminate_seconds=0.5, pipes_seconds_max=600)
    left = await cut_off(runner, 4.0)
    assert left.result().output == b'{"host_ref": "h"}\n'


async def test_a_call_of_no_operation_is_killed_when_its_own_time_is_over(folder: Path) -> None:
    runner = runner_in(folder, "trap '' TERM; echo $$ > child; while :; do sleep 0.1; done")
    with pytest.raises(ProgramFailed, match=r"^inventory did not end in 1 s and was killed$"):
        await runner.run("inventory", {}, seconds=1.0)
    assert not is_left(folder)


async def test_a_program_that_is_replaced_while_it_runs_ends_as_it_began(folder: Path) -> None:
    runner = runner_in(folder, "echo > begun; while ! [ -e go ]; do sleep 0.05; done; echo old")
    running = asyncio.create_task(runner.run("create", {}))
    while not (folder / "begun").exists():  # noqa: ASYNC110 - another process sets no event
        await asyncio.sleep(0.01)
    (folder / "next").write_text("#!/bin/sh\necho new\n")
    (folder / "next").chmod(0o700)
    (folder / "next").replace(folder / "program")
    (folder / "go").touch()
    assert (await running).output == b"old\n"
    assert (await runner.run("create", {})).output == b"new\n"


async def test_a_program_that_cannot_be_started_fails_for_good(folder: Path) -> None:
    runner = runner_in(folder, "echo")
    program = folder / "program"
    program.write_text("echo")
    with pytest.raises(ProgramFailed, match="Exec format error; begin a script with #!"):
        await runner.run("create", {})
    program.chmod(0o600)
    with pytest.raises(ProgramFailed, match="program: Permission denied"):
        await runner.run("create", {})
    program.unlink()
    with pytest.raises(ProgramFailed, match="program: No such file or directory"):
        await runner.run("create", {})


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM, errno.ETXTBSY])
async def test_a_lack_of_resources_may_pass(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", refused)
    with pytest.raises(Transient, match=os.strerror(number)):
        await runner_in(folder, "echo").run("create", {})


async def test_the_program_has_the_environment_that_it_is_given(folder: Path) -> None:
    runner_in(folder, "env")
    runner = ProgramRunner(str(folder / "program"), clock=SystemClock(), environment={"A": "1"})
    lines = (await runner.run("create", {})).output.decode().splitlines()
    assert {line.split("=")[0] for line in lines} <= {"A", "PWD", "OLDPWD", "SHLVL", "_"}
    assert "A=1" in lines
