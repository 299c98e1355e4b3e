"""Gives processes a small file system of their own in memory, which a test fills and makes room on.

It is mounted in a mount namespace, so that no other process sees it, and stays until the test ends: what runs on it may
be killed and started again.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS, wait_until

SIZE_BYTES = 16 * 1024 * 1024
_FILLER = "filler"
#: Of a tmpfs: a page.
_BLOCK_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Root may mount in a mount namespace of its own, others in a user namespace of their own.
_NAMESPACES = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
_MAY_MOUNT = subprocess.run(
    ["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
)
needs_small_disk = pytest.mark.skipif(
    _MAY_MOUNT.returncode != 0, reason="this host lets nothing be mounted in a namespace of one's own"
)


class SmallDisk:
    """A file system that is seen by commands of `command` and, at `inside`, by the test."""

    def __init__(self, holder: int, folder: Path) -> None:
        self._holder = holder
        #: Where processes on it see it.
        self.folder = folder
        #: The same place for the test.
        self.inside = Path(f"/proc/{holder}/root{folder}")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs on it, in a process of the same id."""
        joins = ("--mount",) if "--user" not in _NAMESPACES else ("--user", "--preserve-credentials", "--mount")
        return ["nsenter", "--target", str(self._holder), *joins, *command]

    def fill(self) -> None:
        """Leave no block free."""
        with (self.inside / _FILLER).open("ab", buffering=0) as file:
            for size in (1 << 20, _BLOCK_BYTES):
                # The last write of a size may be a part of it.
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        with pytest.raises(OSError, match="No space left on device"):
            (self.inside / "probe").write_bytes(b"x")

    def make_room(self, *, blocks: int | None = None) -> None:
        """Free what `fill` took, or so many blocks of it."""
        filler = self.inside / _FILLER
        if blocks is None:
            filler.unlink()
        else:
            os.truncate(filler, filler.stat().st_size - blocks * _BLOCK_BYTES)


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Provide a file system at a new folder while the context lasts."""
    folder.mkdir()
    script = 'mount -t tmpfs -o size="$1",mode=700 tmpfs "$2" && touch "$2/mounted" && exec sleep infinity'
    holder = subprocess.Popen(["unshare", *_NAMESPACES, "sh", "-c", script, "sh", str(SIZE_BYTES), str(folder)])
    disk = SmallDisk(holder.pid, folder)
    try:
        wait_until((disk.inside / "mounted").exists, "the file system is not mounted")
        (disk.inside / "mounted").unlink()
        yield disk
    finally:
        holder.kill()
        holder.wait(PATIENCE_SECONDS)
