"""Runs an external program, such as etcd, as a child of `bigfleet up` that ends when its parent ends.

The started process becomes the program, so that its process id is the program's. A guard process waits on the pipe from
the parent: it closes when the parent is gone, and the guard then ends the program. The program is in a session of its
own, because Ctrl-C on a terminal reaches a whole process group at once and the program must outlive its users. Nothing
here reads or changes what the program does.
"""

import os
import select
import signal
import sys
from typing import Final, NoReturn

#: How soon a guard sees that its program is gone.
_LOOK_SECONDS: Final = 0.2


def become(program: str, *arguments: str) -> NoReturn:
    """Run a program in the place of this process, guarded. Raises OSError when it cannot be run."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    mine = os.getpid()
    if os.fork() == 0:
        _guard(mine)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.execv(program, [program, *arguments])  # noqa: S606 - a program and its arguments, no shell


def _guard(program: int) -> NoReturn:
    """End the program when the parent closes our standard input; end with the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == program:
        readable, _writable, _broken = select.select([0], [], [], _LOOK_SECONDS)
        if readable and not os.read(0, 4096):
            if os.getppid() == program:
                os.kill(program, signal.SIGTERM)
            break
    os._exit(0)


if __name__ == "__main__":
    become(*sys.argv[1:])
