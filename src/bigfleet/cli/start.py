"""Starts the installed programs: imports a program and runs it, and ends quietly at Ctrl-C also during the imports.

The imports take longer than many commands. This module must import nothing but small modules of the standard library.
"""

import os
import signal
import sys
from importlib import import_module
from typing import Final

#: What a shell reports of a command that Ctrl-C ended.
INTERRUPTED: Final = 130


def bigfleet() -> None:
    """Run `bigfleet`."""
    _run("bigfleet.cli.main")


def hail_dedicated() -> None:
    """Run `hail-dedicated`."""
    _run("bigfleet.cli.hail.program")


def _run(module: str) -> None:
    """Call the function `main` of a module."""
    former = signal.getsignal(signal.SIGINT)
    # A parent may have chosen to ignore the signal. An import that an exception leaves can print lines of its own, so
    # the process ends at once; it has written nothing yet.
    if former is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    main = import_module(module).main
    try:
        signal.signal(signal.SIGINT, former)
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
