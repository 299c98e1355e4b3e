"""Ends the programs of a killed provider before the next start runs any, with a helper process.

docs/spec/exec-provider.md §6, docs/adr/0227-a-killed-provider-leaves-no-program.md. The helper shares a lock with the
provider and holds it until the programs have ended.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import structlog

from bigfleet.files.private import open_file
from bigfleet.model.clock import Clock
from bigfleet.provider.programs import orphan_killer_process
from bigfleet.provider.records.refusal import StartRefused

_log = structlog.get_logger("bigfleet.provider.programs.orphan_killer")

#: Of the file next to the state that is locked.
LOCK_SUFFIX: Final = ".programs"
#: After SIGKILL the helper waits so long for the ends of programs.
_KILLED_SECONDS_MAX: Final = 5.0
#: A start waits so long for the ends of programs that were begun before it.
_FORMER_SECONDS_MAX: Final = 15.0
_POLL_SECONDS: Final = 0.02
_CLOSE_SECONDS_MAX: Final = 1.0


class HelperAbsent(Exception):
    """The helper cannot be started now, so no program may run."""


class OrphanKiller:
    """Knows the process groups that run, and a helper that ends them when this process dies."""

    def __init__(
        self,
        lock_path: Path,
        *,
        clock: Clock,
        terminate_seconds: float = 0.0,
        former_seconds_max: float = _FORMER_SECONDS_MAX,
    ) -> None:
        """Wait for the ends of programs of a former start. Raises StartRefused if they do not end.

        `terminate_seconds` 0 sends no SIGTERM before SIGKILL.
        """
        self._lock_path = lock_path
        self._terminate_seconds = terminate_seconds
        self._groups: set[int] = set()
        self._helper: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = _locked(lock_path, clock, former_seconds_max)

    @classmethod
    def of_state(cls, state_path: Path, *, clock: Clock, terminate_seconds: float = 0.0) -> "OrphanKiller":
        """Return one for the programs of a provider with this state file. Raises StartRefused."""
        lock_path = state_path.with_name(state_path.name + LOCK_SUFFIX)
        return cls(lock_path, clock=clock, terminate_seconds=terminate_seconds)

    @property
    def helper_process_id(self) -> int | None:
        """The helper's, None until the first group."""
        return None if self._helper is None else self._helper.pid

    def watch(self, group: int) -> None:
        """End this group if this process dies. Raises HelperAbsent."""
        if self._is_closed:
            raise HelperAbsent("the provider stops")
        self._groups.add(group)
        try:
            if self._helper is None:
                self._start_helper()
            else:
                self._send(f"+{group}\n")
        except OSError as error:
            self._groups.discard(group)
            raise HelperAbsent(f"the helper that ends programs cannot be started: {error.strerror}") from error

    def forget(self, group: int) -> None:
        """Do not end this group from now on: it has ended by itself."""
        self._groups.discard(group)
        # Without a helper the next group starts one.
        with contextlib.suppress(OSError):
            self._send(f"-{group}\n")

    def close(self) -> None:
        """Let the helper end what still runs, and let go of the lock."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._lock)
        helper, self._helper = self._helper, None
        if helper is not None and helper.stdin is not None:
            helper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(_CLOSE_SECONDS_MAX)

    def _send(self, line: str) -> None:
        if self._helper is None:
            return
        assert self._helper.stdin is not None, "a pipe"
        try:
            os.write(self._helper.stdin.fileno(), line.encode())
        except OSError as error:
            # It was killed, or reads no more.
            _log.warning("backend.program_helper_lost", error=str(error), groups=len(self._groups))
            self._drop_helper()
            self._start_helper()

    def _drop_helper(self) -> None:
        """End the helper before its input closes: what it knows is out of date."""
        helper, self._helper = self._helper, None
        if helper is not None and helper.stdin is not None:
            helper.kill()
            helper.wait()
            helper.stdin.close()

    def _start_helper(self) -> None:
        """Start a helper that knows all groups. Raises OSError."""
        arguments = [f"{self._terminate_seconds:g}", f"{_KILLED_SECONDS_MAX:g}", str(self._lock_path)]
        helper = subprocess.Popen(  # noqa: S603 - a file of ours in this interpreter, no shell
            # Isolated, without site-packages: it needs nothing, and starts in a fraction of the time.
            [sys.executable, "-I", "-S", orphan_killer_process.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            # Ctrl-C is for the provider.
            start_new_session=True,
            pass_fds=(self._lock,),
        )
        assert helper.stdin is not None, "a pipe"
        self._helper = helper
        # It reads at once; if it does not, another one takes its place.
        os.set_blocking(helper.stdin.fileno(), False)
        try:
            for group in self._groups:
                os.write(helper.stdin.fileno(), f"+{group}\n".encode())
        except OSError:
            self._drop_helper()
            raise


def _locked(path: Path, clock: Clock, seconds_max: float) -> int:
    """Return a descriptor that holds the lock. Raises StartRefused."""
    try:
        descriptor = open_file(path)
    except OSError as error:
        raise StartRefused(f"{path}: {error.strerror}; the state needs a directory to write in") from error
    deadline_seconds = clock.monotonic_seconds() + seconds_max
    is_logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if clock.monotonic_seconds() >= deadline_seconds:
                os.close(descriptor)
                raise StartRefused(
                    f"{path}: programs that a former start began have not ended in {seconds_max:g} s; end them and "
                    f"the process orphan_killer_process.py that has this file open, then start again"
                ) from error
            if not is_logged:
                _log.info("backend.former_programs_awaited", file=str(path))
                is_logged = True
            threading.Event().wait(_POLL_SECONDS)
        else:
            return descriptor
