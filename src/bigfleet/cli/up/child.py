"""Runs one `bigfleet` command as a child of `bigfleet up`: it stops with its parent, and only on request.

The parent starts it in a session of its own, so that a signal to the parent's group does not reach it, and stops its
children in order. The child also blocks SIGINT. If the parent is killed, the pipe to the child's standard input closes,
and the child then stops. This module does not decide what the child does.
"""

import os
import signal
import threading


def _stop_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the command line of this process as `bigfleet` would."""
    # Before any thread exists: threads inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_with_parent, name="parent-watch", daemon=True).start()
    from bigfleet.cli.main import main as bigfleet

    bigfleet()


if __name__ == "__main__":
    main()
