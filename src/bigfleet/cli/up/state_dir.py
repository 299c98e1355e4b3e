"""Manages the directory of a run: its owner, its purpose, and the position of the run.

A marker file says that the directory belongs to `bigfleet up`; without it nothing in a directory is deleted. A file
lock, held by the kernel for the life of the process, rejects a second run. State that must survive the process is
written to a new file and renamed. This module does not know what the children do.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.cli.up.settings import RunIdentity
from bigfleet.files.private import make_directory

FORMAT: Final = 1
_MARKER: Final = "bigfleet-up.json"
_LOCK: Final = "lock"
_PORTS: Final = "ports.json"
_PROGRESS: Final = "progress.json"
_FLAG_OF_FIELD: Final = {
    "clusters": "--clusters",
    "machines": "--machines",
    "seed": "--seed",
    "trace_digest": "--nodes and --pods",
    "shards": "--shards",
    "store": "--store",
    "kubernetes": "--kubernetes",
}
#: What a directory was made for before it could be made for anything else.
_FORMER: Final = {"shards": 1, "store": "", "kubernetes": 0}


class ShardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One of several shards at one moment."""

    #: That it owns, in any state.
    machines: int
    bound_machines: int
    #: Share of its demand that does not lack, in its worst dimension.
    covered: float


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fleet at one moment; amounts in cores, bytes and units by resource name."""

    seconds: float
    demand: dict[str, float]
    bound: dict[str, float]
    shortfall: dict[str, float]
    #: Machines that serve a cluster.
    bound_machines: int
    #: Demand that no machine serves, by the GPU models that would do; "" is demand without GPUs.
    shortfall_by_model: dict[str, dict[str, float]]
    #: By shard id; empty where there is one.
    shards: dict[str, ShardPoint] = {}
    #: Machines moved between shards so far.
    moved_machines: int = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run, from which it resumes."""

    #: Virtual or trace seconds.
    position_seconds: float = 0.0
    #: A trace that has been replayed to its end.
    finished: bool = False
    timeline: tuple[TimelinePoint, ...] = ()


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    identity: dict[str, Any]


class StateDir:
    """An open, locked state directory; use it as a context."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor = lock_descriptor

    @classmethod
    def open(cls, path: Path, *, identity: RunIdentity, fresh: bool) -> "StateDir":
        """Take the directory, made if it is absent, emptied first if `fresh`, or if its run is never resumed.

        Raises UsageFault when it is not ours or was made for another run, RunFault when another process has it.
        """
        try:
            make_directory(path)
            strangers = sorted(
                entry.name for entry in path.iterdir() if entry.name != _LOCK and not _is_of_another_run(entry)
            )
        except OSError as error:
            raise UsageFault(f"--state-dir: {path}: {error.strerror}; name a directory that can be written") from error
        if strangers and _MARKER not in strangers:
            raise UsageFault(
                f"--state-dir: {path} holds {strangers[0]!r} and no BigFleet state; name another or an empty directory"
            )
        state = cls(path, _lock(path))
        try:
            if fresh or (identity.kubernetes and state._is_of_control_planes()):
                state._clear()
            state._check_marker(identity)
        except BaseException:
            state.close()
            raise
        return state

    def __enter__(self) -> "StateDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the directory."""
        os.close(self._lock_descriptor)

    @property
    def logs(self) -> Path:
        """Where the children's logs go."""
        return self.path / "logs"

    def ports(self, names: Sequence[str]) -> dict[str, int]:
        """Return a loopback port for each name: those of the last run as long as all are free, else fresh ones.

        They are stored, so that a child that is restarted listens where it did before.
        """
        with contextlib.suppress(OSError, msgspec.ValidationError, msgspec.DecodeError):
            known = msgspec.json.decode((self.path / _PORTS).read_bytes(), type=dict[str, int])
            if known.keys() == set(names) and all(map(_is_free, known.values())):
                return known
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self._write(_PORTS, ports)
        return ports

    def progress(self) -> Progress:
        """Return where the last run stood. Raises UsageFault when the file is damaged."""
        file = self.path / _PROGRESS
        if not file.exists():
            return Progress()
        try:
            return msgspec.json.decode(file.read_bytes(), type=Progress)
        except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise UsageFault(f"--state-dir: {file} cannot be read ({error}); --fresh starts over") from error

    def save_progress(self, progress: Progress) -> None:
        """Keep where the run stands."""
        self._write(_PROGRESS, progress)

    def write_text(self, name: str, text: str) -> Path:
        """Put a file into the directory and return its path."""
        path = self.path / name
        _replace(path, text.encode())
        return path

    def _clear(self) -> None:
        if not (self.path / _MARKER).is_file():
            return
        for entry in self.path.iterdir():
            # The marker goes last: a clearing that is interrupted leaves a directory that is still ours.
            if entry.name in (_LOCK, _MARKER) or _is_of_another_run(entry):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (self.path / _MARKER).unlink()

    def _is_of_control_planes(self) -> bool:
        """Return whether the last run here had real control planes, which start empty."""
        with contextlib.suppress(OSError, msgspec.ValidationError, msgspec.DecodeError):
            marker = msgspec.json.decode((self.path / _MARKER).read_bytes(), type=_Marker)
            return bool(marker.identity.get("kubernetes"))
        return False

    def _check_marker(self, identity: RunIdentity) -> None:
        file = self.path / _MARKER
        wanted = asdict(identity)
        if not file.exists():
            self._write(_MARKER, _Marker(format=FORMAT, identity=wanted))
            return
        try:
            marker = msgspec.json.decode(file.read_bytes(), type=_Marker)
        except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise UsageFault(f"--state-dir: {file} cannot be read ({error}); --fresh starts over") from error
        if marker.format != FORMAT:
            raise UsageFault(f"--state-dir: {self.path} was made by another version; --fresh starts over")
        # How many clusters there are may follow from the number of shards: what was given is reported first.
        for field, value in sorted(wanted.items(), key=lambda item: item[0] not in _FORMER):
            known = marker.identity.get(field, _FORMER.get(field))
            if known == value:
                continue
            if field == "trace_digest":
                raise UsageFault(
                    f"--nodes and --pods: the run in {self.path} replays {'another trace' if known else 'no trace'}; "
                    "--fresh starts over"
                )
            raise UsageFault(
                f"{_FLAG_OF_FIELD[field]}: the run in {self.path} was started with {known}, not {value}; "
                "--fresh starts over"
            )

    def _write(self, name: str, value: msgspec.Struct | dict[str, int]) -> None:
        _replace(self.path / name, msgspec.json.encode(value))


def _is_of_another_run(entry: Path) -> bool:
    """Return whether an entry of a state directory is one itself, such as that of `make kubernetes-demo`."""
    return entry.is_dir() and not entry.is_symlink() and (entry / _MARKER).is_file()


def _lock(path: Path) -> int:
    file = path / _LOCK
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UsageFault(f"--state-dir: {file}: {error.strerror}; name a directory that can be written") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise RunFault(
            f"another bigfleet up (process {holder}) uses {path}; stop it, or name another --state-dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _replace(path: Path, content: bytes) -> None:
    """Write so that a reader, or a process that dies half way, sees the old content or the new."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_ports(count: int) -> Iterator[int]:
    # All are held open until all are known, so that they differ.
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        yield from [probe.getsockname()[1] for probe in probes]
