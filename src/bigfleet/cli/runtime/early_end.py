"""Ends a process before its work is done: at Ctrl-C during a call, or when its parent process ends.

Python raises KeyboardInterrupt wherever the main thread is. If it is inside gRPC's compiled part, gRPC counts a call as
running that is not, and closing its channel then blocks forever.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

#: What a shell reports of a command that Ctrl-C ended.
INTERRUPTED: Final = 130


@contextmanager
def ended_by_interrupt(code: int = INTERRUPTED, before_end: Callable[[], None] | None = None) -> Iterator[None]:
    """End the process with a code at SIGINT while the context lasts; what was printed is written out first.

    `before_end` puts a terminal back in order. No `finally` runs, so nothing that writes a file may use this. An
    ignored SIGINT stays ignored; in a thread other than the main one the context does nothing.
    """

    def end(_number: int, _frame: object) -> None:
        # The interrupt may have stopped a write: the buffer then refuses a second one, and the reader may be gone.
        with suppress(RuntimeError, OSError):
            if before_end is not None:
                before_end()
            sys.stdout.flush()
        os._exit(code)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def end_with_parent() -> None:
    """End this spawned process when its parent has ended, from a thread; only the parent answers to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was spawned"

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
