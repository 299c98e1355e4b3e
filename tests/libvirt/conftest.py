"""Daemons for tests with real domains; without libvirt these tests are skipped, unless BIGFLEET_REQUIRE_LIBVIRT=1."""

from collections.abc import Iterator

import pytest

from tests.libvirt.daemon import LibvirtDaemon, libvirt_daemon, require_libvirt
from tests.libvirt.guest_image import build_image


@pytest.fixture(scope="module")
def running_daemon() -> Iterator[LibvirtDaemon]:
    """Return a daemon whose pool is empty."""
    require_libvirt()
    with libvirt_daemon() as daemon:
        yield daemon


@pytest.fixture
def booting(running_daemon: LibvirtDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LibvirtDaemon]:
    """Return a daemon whose image is a guest that boots."""
    image = tmp_path_factory.mktemp("image") / "guest.raw"
    build_image(image)
    running_daemon.put_image(image)
    yield running_daemon
    running_daemon.remove_domains()


@pytest.fixture
def daemon(running_daemon: LibvirtDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LibvirtDaemon]:
    """Return a daemon whose image is a stub."""
    image = tmp_path_factory.mktemp("image") / "stub.raw"
    image.write_bytes(bytes(1 << 20))
    running_daemon.put_image(image)
    yield running_daemon
    running_daemon.remove_domains()
