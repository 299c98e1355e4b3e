"""How a program of ours begins and ends: what is settled before it has threads, and which errors are one line."""

import os
import subprocess
import sys

import pytest

FORKS_WHILE_IT_SERVES = """
import asyncio, os
import typer
from bigfleet.cli.runtime.program import run_program

app = typer.Typer()

async def serve() -> int:
    from grpc import aio
    server = aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert len(os.listdir("/proc/self/task")) > 1
    child = os.fork()
    if not child:
        os._exit(len(os.listdir("/proc/self/task")))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

@app.command()
def run() -> None:
    os.write(1, str(asyncio.run(serve())).encode())
    os._exit(0)

run_program(app, "forks")
"""


def test_a_fork_is_one_thread_whatever_grpc_runs() -> None:
    """gRPC's threads, started again between fork and exec, killed one child of `bigfleet up` in ten."""
    unset = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_IT_SERVES], env=unset, capture_output=True, text=True, check=True
    )

    assert done.stdout == "1", done.stderr


def test_numpy_starts_no_threads() -> None:
    """OpenBLAS starts one for each core, and they spin."""
    unset = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    body = "import os, numpy; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", ONE_COMMAND.format(body=body)], env=unset, capture_output=True, text=True, check=True
    )

    assert done.stdout == "1\n", done.stderr


STARTS = """
import gc, sys

rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
sys.argv = ["bigfleet", *sys.argv[1:]]
from bigfleet.cli.main import main

rounds.clear()
try:
    main()
finally:
    print(len(rounds), sys.modules["structlog.dev"].rich)
    import rich
"""


def test_a_start_looks_for_no_garbage_and_imports_no_rich() -> None:
    """A shard's imports were looked through 435 times, which took a tenth of its start."""
    command = [sys.executable, "-c", STARTS, "shard", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "0 None", done.stderr


ONE_COMMAND = """
import sys
import typer
from bigfleet.cli.runtime.program import run_program

app = typer.Typer(pretty_exceptions_enable=False)

@app.command()
def run() -> None:
    {body}

run_program(app, "program")
"""


NO_SPACE = (
    b"a file or standard output: No space left on device; "
    b"it is not complete; make room on its disk, or check disk and mount"
)


def run_body(body: str, output: str = os.devnull, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command of one statement, with a standard output and options of the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *options, "-c", ONE_COMMAND.format(body=body)]
    with open(output, "wb") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=environment, check=False)


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "body", ["sys.stdout.write('a line')", "typer.echo('a line')", "sys.stdout.write('a line' * 100_000)"]
)
def test_an_output_onto_a_full_disk_ends_in_one_line(body: str, options: tuple[str, ...]) -> None:
    """Also what reaches the disk only at the end."""
    done = run_body(body, "/dev/full", *options)

    assert (done.returncode, done.stderr) == (1, b"program: " + NO_SPACE + b"\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "PermissionError(13, 'Permission denied', '/data/shard.db')",
            b"/data/shard.db: Permission denied; check the file, its directory, its disk and the rights of this user",
        ),
        (
            "OSError(28, 'No space left on device')",
            NO_SPACE,
        ),
    ],
)
def test_a_file_that_a_command_could_not_use_ends_in_one_line(error: str, said: bytes) -> None:
    done = run_body(f"raise {error}")

    assert (done.returncode, done.stderr) == (1, b"program: " + said + b"\n")


def test_an_error_of_no_file_is_a_defect_and_shows_where() -> None:
    done = run_body("raise ConnectionResetError(104, 'Connection reset by peer')")

    assert done.returncode == 1
    assert done.stderr.startswith(b"Traceback")
