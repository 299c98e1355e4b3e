"""How a program of ours begins: what a process that starts others must have settled before it is one of threads."""

import os
import subprocess
import sys

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
