"""Ctrl-C ends a command that talks to a server, also where gRPC would hold it up."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bigfleet.cli.runtime.early_end import ended_by_interrupt
from tests.patience import PATIENCE_SECONDS
from tests.processes import bigfleet

#: A body that takes each KeyboardInterrupt for itself, as gRPC's compiled part does in effect.
_STUBBORN = """
import sys, time
from bigfleet.cli.runtime.early_end import ended_by_interrupt
print("begun", flush=True)
with ended_by_interrupt({code}, lambda: print("in order")):
    print("said")
    print("inside", file=sys.stderr, flush=True)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass
"""


@pytest.mark.parametrize("code", [0, 130])
def test_a_body_that_swallows_interrupts_is_ended_with_all_that_it_printed(code: int) -> None:
    program = (sys.executable, "-c", _STUBBORN.format(code=code))
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "inside\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == code
    assert out == "begun\nsaid\nin order\n"


def test_the_former_handler_is_back_afterwards() -> None:
    former = signal.getsignal(signal.SIGINT)

    with ended_by_interrupt():
        assert signal.getsignal(signal.SIGINT) is not former

    assert signal.getsignal(signal.SIGINT) is former


def test_an_ignored_interrupt_stays_ignored() -> None:
    """A shell without job control starts what runs in the background so."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ended_by_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_thread_that_is_not_the_main_one_changes_nothing() -> None:
    handlers = []

    def look() -> None:
        with ended_by_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert handlers == [signal.getsignal(signal.SIGINT)]


@contextmanager
def silent_server() -> Iterator[tuple[str, socket.socket]]:
    """Yield the address of a server that takes connections and says nothing, and its socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_SECONDS)
        yield f"127.0.0.1:{listening.getsockname()[1]}", listening


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("get", "machines"), 130),
        (("get", "machines", "-w"), 0),
        (("get", "shards"), 130),
        (("get", "shards", "-w"), 0),
        (("explain", "machine", "m-1"), 130),
        (("cluster", "readmit", "blue"), 130),
        (("admin", "remove-shard", "shard-1"), 130),
        (("admin", "snapshot", "save", "never-made"), 130),
    ],
)
def test_a_command_that_waits_for_a_server_ends_at_once(arguments: tuple[str, ...], code: int) -> None:
    with silent_server() as (address, listening):
        command = bigfleet(*arguments, "--addr", address)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = listening.accept()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            connection.close()

    assert (process.returncode, out, err) == (code, "", "")
