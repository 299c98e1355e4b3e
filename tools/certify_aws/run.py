"""Runs the conformance suite against real EC2 within a bound, and ends everything that it launched.

The suite starts `bigfleet provider aws` through `launch`, which ends the instances of the providers before it: so no
more instances run at a time than the offerings have. Ctrl-C ends the suite, and then what it launched.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from bigfleet.model.clock import Clock
from bigfleet.provider.backends.aws.boto import AwsSession
from tools.certify_aws.guard import CertifyFault, Limits
from tools.certify_aws.leftovers import POLL_SECONDS, Leftovers

ROOT: Final = Path(__file__).resolve().parents[2]
#: Begins the name of each provider of each run.
NAME: Final = "certify-"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS_MAX: Final = 15.0
#: Bootstrap data that runs on any machine and does nothing.
_SCRIPT: Final = b"#!/bin/sh\n"
#: Nothing more comes of a launch that was under way: EC2 shows a new instance within seconds.
QUIET_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as it was asked for."""

    #: Begins the name of each of its providers.
    name: str
    region: str
    endpoint_url: str | None
    offerings: Path
    #: `s3://BUCKET/PREFIX`.
    bootstrap: str
    node_role: str
    profiles: str
    only: str
    patience: str
    poll_interval: str
    quiet_seconds: float
    out: Path
    limits: Limits


def provider_flags(run: Run) -> list[str]:
    """Return the flags of each provider of the run."""
    return [
        f"--region={run.region}",
        f"--offerings={run.offerings.resolve()}",
        f"--bootstrap={run.bootstrap}",
        f"--node-role={run.node_role}",
        f"--launch-rate={run.limits.launches_per_second:g}",
        f"--poll-interval={run.poll_interval}",
        "--metrics-addr=off",
        *([f"--endpoint-url={run.endpoint_url}"] if run.endpoint_url else []),
    ]


def carry_out(run: Run, session: AwsSession, clock: Clock, say: Callable[[str], None]) -> int:
    """Run the suite, end what it launched, and return its exit code.

    Raises CertifyFault when something could not be ended; its text names it.
    """
    leftovers = Leftovers(session, clock, prefix=run.name, say=say)
    stop = _Stop()
    code = 1
    with stop.listening():
        process = _started(run, say)
        try:
            code = stop.wait(process, run.limits.run_seconds)
        except _Interrupted:
            say("interrupted; ending what was launched")
        except subprocess.TimeoutExpired:
            say(f"the suite took more than {run.limits.run_seconds / 60:.0f} min; ending what was launched")
        finally:
            _end_group(process)
            left = leftovers.end_all(
                seconds_max=run.limits.clean_up_seconds,
                quiet_seconds=run.quiet_seconds,
                poll_seconds=min(POLL_SECONDS, run.quiet_seconds / 4),
            )
    if left:
        raise CertifyFault(f"still there, and billed: {', '.join(left)}; end them by hand, or run it with --clean")
    say("nothing that was launched is left")
    return code


class _Interrupted(Exception):
    """A signal asked for the end."""


class _Stop:
    """Ends the wait for the suite at a signal; during a clean-up it ignores signals."""

    def __init__(self) -> None:
        self._is_asked = self._is_waiting = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals that ask for the end."""
        before = [signal.signal(each, self._note) for each in _SIGNALS]
        try:
            yield
        finally:
            for each, former in zip(_SIGNALS, before, strict=True):
                signal.signal(each, former)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked = True
        if self._is_waiting:
            # Once: what follows is the clean-up.
            self._is_waiting = False
            raise _Interrupted

    def wait(self, process: "subprocess.Popen[bytes]", seconds: float) -> int:
        """Return the exit code. Raises _Interrupted, also for a signal that came before, or TimeoutExpired."""
        self._is_waiting = True
        try:
            if self._is_asked:
                raise _Interrupted
            return process.wait(seconds)
        finally:
            self._is_waiting = False


def _started(run: Run, say: Callable[[str], None]) -> "subprocess.Popen[bytes]":
    run.out.mkdir(parents=True, exist_ok=True)
    blob = run.out / "bootstrap.sh"
    blob.write_bytes(_SCRIPT)
    command = [sys.executable, "-m", "bigfleet.cli.main", "conformance", f"--profile={run.profiles}"]
    command += [f"--patience={run.patience}", f"--blob={blob}", f"--out={run.out}"]
    command += [f"--only={run.only}"] if run.only else []
    launch = [sys.executable, "-m", "tools.certify_aws.launch", run.name, "{addr}", "{state}", *provider_flags(run)]
    command += ["--launch", shlex.join(launch)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    # A group of its own: Ctrl-C comes to this process only, which then ends the suite and its providers.
    process = subprocess.Popen(  # noqa: S603 - arguments of ours, no shell
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )
    say(f"process {process.pid} runs the suite; reports go to {run.out}")
    return process


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End the suite and each provider that it started, at the latest with SIGKILL."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS_MAX)
    # Providers are not this process's children: the group is gone once no signal reaches it.
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.1)


def lane_name(run_name: str, state: str) -> str:
    """Return the name of the provider with a state file: another state knows nothing of its instances."""
    return f"{run_name}-{zlib.crc32(state.encode()):08x}"


def provider_command(run_name: str, address: str, state: str, flags: Sequence[str]) -> list[str]:
    """Return the command of one provider of a run."""
    named = [f"--addr={address}", f"--state={state}", f"--provider={lane_name(run_name, state)}"]
    return [sys.executable, "-m", "bigfleet.cli.main", "provider", "aws", *flags, *named]
