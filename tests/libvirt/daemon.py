"""Runs a libvirt daemon of the test's own, with a storage pool, for tests with real domains.

It is a session daemon of a user without rights, in a temporary directory: root's own daemon, its domains and its
directories are not touched. Domains are emulated, so that no /dev/kvm is needed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.patience import wait_until

REQUIRED_VARIABLE: Final = "BIGFLEET_REQUIRE_LIBVIRT"
#: The packages of Debian that tests with guests need, apart from the binding.
PROGRAMS: Final = (
    "libvirtd",
    "virtlogd",
    "qemu-img",
    "qemu-system-x86_64",
    "qemu-ga",
    "busybox",
    "openssl",
    "syslinux",
    "mcopy",
)
UNPRIVILEGED_ID: Final = 65534
POOL: Final = "machines"
IMAGE: Final = "guest.raw"


def missing() -> str:
    """Return what is not installed, or ""."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=search) is None]
    try:
        import libvirt  # noqa: F401
    except ImportError:
        absent.append("libvirt's Python binding (make libvirt)")
    return ", ".join(absent)


def require_libvirt() -> None:
    """Skip the test where libvirt is not installed; fail it where it has to be."""
    absent = missing()
    if absent and os.environ.get(REQUIRED_VARIABLE) == "1":
        pytest.fail(f"{REQUIRED_VARIABLE}=1, and these are not installed: {absent}")
    if absent:
        pytest.skip(f"not installed: {absent}")


class LibvirtDaemon:
    """A daemon in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pool_directory = directory / "pool"
        #: Where the serial consoles of domains are logged.
        self.console_directory = directory / "console"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """What to connect to."""
        return f"qemu+unix:///session?socket={self._runtime}/libvirt/libvirt-sock"

    @property
    def _runtime(self) -> Path:
        return self.directory / "run"

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The daemon's process."""
        assert self._process is not None, "it was started"
        return self._process

    def start(self) -> None:
        """Start it, and wait until it answers."""
        # Below the first one are sockets, whose paths may have 107 characters.
        homes = {name: self.directory / name[:2] for name in ("config", "cache", "data")}
        for path in (self._runtime, self.pool_directory, self.console_directory, *homes.values()):
            path.mkdir(mode=0o711, exist_ok=True)
            self.give(path)
        self._runtime.chmod(0o700)
        environment = {
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "HOME": str(self.directory),
            "XDG_RUNTIME_DIR": str(self._runtime),
            **{f"XDG_{name.upper()}_HOME": str(path) for name, path in homes.items()},
        }
        is_root = os.geteuid() == 0
        with (self.directory / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["libvirtd", "--timeout", "0"],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=UNPRIVILEGED_ID if is_root else None,
                group=UNPRIVILEGED_ID if is_root else None,
                extra_groups=[] if is_root else None,
            )
        wait_until(lambda: self._answers(), lambda: (self.directory / "daemon.log").read_text())

    def give(self, path: Path) -> None:
        """Make the daemon's user the owner of a path."""
        if os.geteuid() == 0:
            os.chown(path, UNPRIVILEGED_ID, UNPRIVILEGED_ID)

    def _answers(self) -> bool:
        import libvirt

        # Otherwise the binding prints each refusal.
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        assert self.process.poll() is None, (self.directory / "daemon.log").read_text()
        try:
            libvirt.open(self.uri).close()
        except libvirt.libvirtError:
            return False
        return True

    def make_pool(self) -> None:
        """Define and start the pool, and have it started with the daemon."""
        connection = self.open()
        xml = f"<pool type='dir'><name>{POOL}</name><target><path>{self.pool_directory}</path></target></pool>"
        pool = connection.storagePoolDefineXML(xml)
        pool.setAutostart(1)
        pool.create()
        connection.close()

    def open(self) -> Any:
        """Return a connection of the test's own."""
        import libvirt

        return libvirt.open(self.uri)

    def put_image(self, path: Path) -> None:
        """Put an image into the pool."""
        target = self.pool_directory / IMAGE
        shutil.copyfile(path, target)
        self.give(target)
        connection = self.open()
        connection.storagePoolLookupByName(POOL).refresh()
        connection.close()

    def domains(self) -> list[str]:
        """Return the names of all domains."""
        connection = self.open()
        names = sorted(domain.name() for domain in connection.listAllDomains())
        connection.close()
        return names

    def volumes(self) -> list[str]:
        """Return the files of the pool except the image."""
        return sorted(path.name for path in self.pool_directory.iterdir() if path.name != IMAGE)

    def console(self, domain: str) -> str:
        """Return what a guest wrote to its serial console since its domain was defined."""
        path = self.console_directory / f"{domain}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def guest_pid(self, domain: str) -> int:
        """Return the process of a guest that runs, which outlives the daemon."""
        return int((self._runtime / "libvirt" / "qemu" / "run" / f"{domain}.pid").read_text())

    def remove_domains(self) -> None:
        """Switch all domains off and remove them with their volumes and consoles."""
        import libvirt

        connection = self.open()
        for domain in connection.listAllDomains():
            with suppress(libvirt.libvirtError):
                domain.destroy()
            domain.undefine()
        for name in self.volumes():
            (self.pool_directory / name).unlink()
        connection.storagePoolLookupByName(POOL).refresh()
        connection.close()
        for path in self.console_directory.iterdir():
            path.unlink()

    def kill(self) -> None:
        """Kill the daemon; its guests go on."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the daemon, its guests and the log daemon that it started."""
        with suppress(Exception):
            if self.process.poll() is not None:
                self.start()
            self.remove_domains()
        self.process.terminate()
        self.process.wait()
        log_daemon = self._runtime / "libvirt" / "virtlogd.pid"
        if log_daemon.exists():
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(log_daemon.read_text()), signal.SIGTERM)
            # It removes its files on its way out.
            for _ in range(50):
                if not log_daemon.exists():
                    break
                time.sleep(0.1)


@contextmanager
def libvirt_daemon() -> Iterator[LibvirtDaemon]:
    """Have a daemon with a pool while the context lasts."""
    # Not pytest's directory, into which no other user may look; a socket's path has to be short as well.
    directory = Path(tempfile.mkdtemp(prefix="bf-"))
    directory.chmod(0o711)
    daemon = LibvirtDaemon(directory)
    daemon.give(directory)
    try:
        daemon.start()
        daemon.make_pool()
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)
