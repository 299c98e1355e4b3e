"""Ends a spawned process when its parent has ended, however it ended."""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Watch the parent from a thread; only the parent answers to signals of the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was spawned"

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
