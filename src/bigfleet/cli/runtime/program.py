"""Ends a command: turns a failure into a line and an exit code, in one place.

Used by the `bigfleet` command and by every provider that is a program of its own. This module does not print a
traceback for a user's mistake.
"""

import errno
import faulthandler
import gc
import os
import sys
from typing import Final, NoReturn

import typer

from bigfleet.cli.runtime.failures import CommandFault
from bigfleet.cli.runtime.terminal import echo_error
from bigfleet.model.validation import switch_validation_on

#: Set to 1, states are compared with their invariants in every command, to look for a defect.
VALIDATE_VARIABLE: Final = "BIGFLEET_VALIDATE"
#: The thresholds with which the interpreter starts its garbage collector.
COLLECTOR_THRESHOLDS: Final = gc.get_threshold()
#: New objects at which it first runs while a command starts: more than any command imports.
COLLECTOR_OBJECTS_AT_START: Final = 300_000
#: What a disk refuses without a name of the file, as for one that is open already.
_OF_DISKS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})


def run_program(app: typer.Typer, name: str) -> NoReturn:
    """Run the command line and exit: 0 done, 1 a run that failed, 2 a wrong call, which is reported in one line."""
    # gRPC's core reads both when it is first imported. It would print lines of its own beside ours; and it would start
    # its threads again in every fork of ours, which now and then kills a child before it has become what it is to be.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # numpy's OpenBLAS starts a thread for each core when it is imported, and they spin before they sleep: 0.1 s of
    # processor time on two cores. No command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imports leave no garbage, and the collector takes a tenth of a start. Servers switch it off once they serve.
    gc.set_threshold(COLLECTOR_OBJECTS_AT_START, *COLLECTOR_THRESHOLDS[1:])
    # A crash below Python leaves where each thread stood; sys.stderr may be no file when somebody calls this.
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    from bigfleet.rpc.security.tls_floor import require_tls13

    require_tls13()
    if os.environ.get(VALIDATE_VARIABLE) == "1":
        switch_validation_on()
    try:
        code = app(prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            # Here an error can be reported; at the end of the interpreter it would be a traceback.
            sys.stdout.flush()
    except CommandFault as fault:
        for number, line in enumerate(fault.lines):
            echo_error(line if number else f"{name}: {line}")
        sys.exit(fault.exit_code)
    except typer.TyperException as fault:
        _fail_usage(fault, name)
    except UnicodeEncodeError as error:
        # An argument may be any bytes; messages, logs and our own output hold text alone.
        if not any("\udc80" <= char <= "\udcff" for char in error.object):
            raise
        echo_error(f"{name}: {error.object!r} is not UTF-8; names must be UTF-8")
        sys.exit(2)
    except OSError as error:
        _fail_file(error, name)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail_usage(fault: typer.TyperException, name: str) -> NoReturn:
    # What click calls a usage error formats itself, with the option's name; its class is not public in typer.
    describe = getattr(fault, "format_message", fault.__str__)
    message = " ".join(describe().split()).rstrip(".")
    context = getattr(fault, "ctx", None)
    command = context.command_path if context is not None else name
    if message:  # a group without a command has printed its help, and that says it all
        echo_error(f"{command}: {message}; see {command} --help")
    sys.exit(2)


def _fail_file(error: OSError, name: str) -> NoReturn:
    """Report what could not be read or written. An error that names no file and comes from no disk is a defect."""
    place, advice = error.filename, "check the file, its directory, its disk and the rights of this user"
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # The interpreter would try again to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
    if place is None:
        if error.errno not in _OF_DISKS:
            raise error
        # Which of both it was cannot be seen from the error: without buffers the output fails where it is written.
        place, advice = (
            "a file or standard output",
            "it is not complete; make room on its disk, or check disk and mount",
        )
    echo_error(f"{name}: {place}: {error.strerror or error}; {advice}")
    sys.exit(1)
