"""The wheel of a release with the extra `libvirt` is installed in an empty place and serves virtual machines.

`make release-check` runs these tests first; without libvirt it fails.
"""

from pathlib import Path

import pytest

from bigfleet.provider.backends.libvirt.names import domain_name, overlay_name, seed_name
from tests.libvirt.daemon import LibvirtDaemon
from tests.libvirt.providers import STUB_MEMORY, assert_a_machine_boots_and_goes, machine_id, provider
from tests.release.installed import build_binding, install, make_index, needs_release, succeed

pytestmark = [pytest.mark.long, needs_release]

DOMAINS = [domain_name(machine_id(number)) for number in range(2)]


@pytest.fixture(scope="module")
def environment(running_daemon: LibvirtDaemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the wheel; the daemon is first, because what is not installed fails at once."""
    assert running_daemon.domains() == []
    binding = build_binding(tmp_path_factory.mktemp("binding"))
    index = make_index(tmp_path_factory.mktemp("index"), binding)
    return install(tmp_path_factory.mktemp("empty") / "environment", index, "bigfleet[libvirt]").parent


@pytest.fixture(scope="module")
def program(environment: Path) -> list[str]:
    """The installed command, which reads no module from another place."""
    return [str(environment / "bin" / "python"), "-I", str(environment / "bin" / "bigfleet")]


def test_it_is_installed_with_the_binding_and_nothing_of_the_checkout(environment: Path, program: list[str]) -> None:
    place = succeed(*program[:2], "-c", "import bigfleet, libvirt; print(bigfleet.__file__, libvirt.__file__)")

    assert [Path(path).is_relative_to(environment) for path in place.split()] == [True, True]


def test_it_creates_binds_drains_and_deletes_machines(
    daemon: LibvirtDaemon, environment: Path, program: list[str], tmp_path: Path
) -> None:
    with provider(daemon, tmp_path, memory=STUB_MEMORY, is_ready=lambda _node: True, program=program) as running:
        loaded = Path(f"/proc/{running.process.pid}/maps").read_text()
        for number in range(2):
            running.create(number)
            running.until(number, "IDLE")
        assert daemon.domains() == sorted(DOMAINS)
        running.configure(0, "team-a")
        running.until(0, "CONFIGURED")
        assert daemon.guest_pid(DOMAINS[0]) != daemon.guest_pid(DOMAINS[1])
        running.drain(0)
        running.until(0, "IDLE")
        # The disk of the machine that was drained is gone.
        assert daemon.volumes() == sorted([seed_name(DOMAINS[0]), seed_name(DOMAINS[1]), overlay_name(DOMAINS[1])])
        for number in range(2):
            running.delete(number)
            running.until(number, "SPECULATIVE")
        assert (daemon.domains(), daemon.volumes()) == ([], [])

    assert str(environment) in loaded


def test_a_machine_boots_into_its_cluster(booting: LibvirtDaemon, program: list[str], tmp_path: Path) -> None:
    assert_a_machine_boots_and_goes(booting, tmp_path, program)
