"""Real domains of stub guests: kills of the provider and the daemon, full disks, domains that others removed.

docs/spec/libvirt-provider.md. The guests have a disk of zeros, so that no test waits for a boot.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigfleet.provider.backends.libvirt.names import domain_name, overlay_name, seed_name
from tests.conformance.certifications import certification_of
from tests.libvirt.daemon import LibvirtDaemon
from tests.libvirt.providers import (
    SECRET,
    STUB_MEMORY,
    Running,
    assert_nowhere,
    hosts_file,
    machine_id,
    provider,
)
from tests.patience import wait_until
from tests.processes import bigfleet

CERTIFY_SECONDS_MAX = 3600.0
DOMAIN = domain_name(machine_id(0))
SERVING = domain_name(machine_id(1))
REACHED = {"create": "IDLE", "configure": "CONFIGURED", "drain": "IDLE", "delete": "SPECULATIVE"}


def is_ready(_node: str) -> bool:
    """Say that every node is Ready."""
    return True


def brought_before(running: Running, verb: str) -> None:
    """Bring the first slot to where an operation begins."""
    before = {"configure": ["create"], "drain": ["create", "configure"], "delete": ["create"]}
    for each in before.get(verb, []):
        running.call(each)
        running.until(0, REACHED[each])


def assert_one_of_each(daemon: LibvirtDaemon, verb: str) -> None:
    """Assert what is on the host after an operation."""
    if verb == "delete":
        assert (daemon.domains(), daemon.volumes()) == ([], [])
        return
    disks = [] if verb == "drain" else [overlay_name(DOMAIN)]
    assert daemon.domains() == [DOMAIN]
    assert daemon.volumes() == sorted([*disks, seed_name(DOMAIN)])


def test_points_are_counted() -> None:
    """Nothing is killed where nothing is counted: the program names its effects as the interface does."""
    pytest.importorskip("libvirt")
    from bigfleet.provider.backends.libvirt.hypervisor import Hypervisor
    from tests.libvirt.killed_provider import EFFECTS

    assert all(hasattr(Hypervisor, name) for name in EFFECTS)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", list(REACHED))
def test_a_provider_that_is_killed_at_each_effect_carries_on_and_leaves_one_of_each(
    verb: str, when: str, daemon: LibvirtDaemon, tmp_path: Path
) -> None:
    point, is_killed = 0, True
    while is_killed:
        folder = tmp_path / str(point)
        folder.mkdir()
        key = folder / "key"
        key.write_bytes(bytes(32))
        key.chmod(0o600)
        flags = ("--kubeconfig-dir", str(folder / "kubeconfigs"), "--intent-key", str(key))
        with provider(daemon, folder, *flags, memory=STUB_MEMORY, is_ready=is_ready) as running:
            brought_before(running, verb)
        effects = folder / "effects"
        killed = (sys.executable, "-m", "tests.libvirt.killed_provider", str(point), when, str(effects))
        with provider(daemon, folder, *flags, memory=STUB_MEMORY, is_ready=is_ready, program=killed) as running:
            running.call(verb)
            wait_until(lambda: running.is_over(0, REACHED[verb]), running.log.read_text)
        done = effects.read_text().splitlines()
        is_killed = len(done) == point + 1 and running.was_killed()
        with provider(daemon, folder, *flags, memory=STUB_MEMORY, is_ready=is_ready) as running:
            running.until(0, REACHED[verb])
            assert_one_of_each(daemon, verb)
            wait_until(lambda: not _holds(daemon), running.log.read_text)
        daemon.remove_domains()
        point += 1
    assert point > 3, "every operation has several effects"


def _holds(daemon: LibvirtDaemon) -> bool:
    return any(SECRET in path.read_bytes() for path in daemon.pool_directory.iterdir())


@pytest.mark.slow
def test_a_daemon_that_is_killed_and_comes_back_costs_no_machine(daemon: LibvirtDaemon, tmp_path: Path) -> None:
    with provider(daemon, tmp_path, memory=STUB_MEMORY, is_ready=is_ready) as running:
        for number in range(2):
            running.create(number)
            running.until(number, "IDLE")
        running.configure(1, "team-b")
        running.until(1, "CONFIGURED")
        node, guest = running.machine(1).node_name, daemon.guest_pid(SERVING)
        daemon.kill()
        wait_until(lambda: "host.unread" in running.log.read_text(), running.log.read_text)
        running.configure(0, "team-a")
        assert (running.state(0), running.state(1)) == ("CONFIGURING", "CONFIGURED")
        daemon.start()
        running.until(0, "CONFIGURED")
        assert_nowhere(SECRET, tmp_path, daemon.directory)
        # The machine that served goes on: the same guest, the same node.
        wait_until(lambda: "host.read_again" in running.log.read_text(), running.log.read_text)
        assert (running.state(1), running.machine(1).node_name, daemon.guest_pid(SERVING)) == (
            "CONFIGURED",
            node,
            guest,
        )
        assert "domain.started_again" not in running.log.read_text()
        for number in range(2):
            running.drain(number)
            running.until(number, "IDLE")
        assert daemon.domains() == sorted([DOMAIN, SERVING])
        assert daemon.volumes() == sorted([seed_name(DOMAIN), seed_name(SERVING)])


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_offers_its_slots_and_the_file_is_read_again_on_sighup(
    daemon: LibvirtDaemon, tmp_path: Path
) -> None:
    flags = ("--kubeconfig-dir", str(tmp_path / "kubeconfigs"))
    away = {"uri": "qemu+unix:///session?socket=/nowhere"}
    with provider(daemon, tmp_path, *flags, memory=STUB_MEMORY, host=away) as running:
        assert len(running.ids()) == 4
        running.create(0)
        running.until(0, "FAILED")
        assert running.machine(0).last_error.startswith("STOCKOUT: host h: qemu+unix:///session?socket=/nowhere: ")
        hosts = (tmp_path / "hosts.yaml").read_text()
        (tmp_path / "hosts.yaml").write_text("types: 1")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "hosts.load_failed" in running.log.read_text(), running.log.read_text)
        assert len(running.ids()) == 4
        (tmp_path / "hosts.yaml").write_text(hosts.replace("cpus: 4", "cpus: 6"))
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(running.ids()) == 6, running.log.read_text)


@pytest.mark.long
def test_a_daemon_that_hangs_is_left_and_found_again(daemon: LibvirtDaemon, tmp_path: Path) -> None:
    with provider(daemon, tmp_path, memory=STUB_MEMORY, is_ready=is_ready) as running:
        running.create(0)
        running.until(0, "IDLE")
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: "host.connection_lost" in running.log.read_text(), running.log.read_text)
            assert running.state(0) == "IDLE"
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        running.configure(0, "team-a")
        running.until(0, "CONFIGURED")


@pytest.mark.slow
def test_a_domain_that_was_undefined_by_others_is_lost_at_once(daemon: LibvirtDaemon, tmp_path: Path) -> None:
    flags = ("--kubeconfig-dir", str(tmp_path / "kubeconfigs"), "--reconcile-interval=1h")
    with provider(daemon, tmp_path, *flags, memory=STUB_MEMORY, is_ready=is_ready) as running:
        running.create(0)
        running.until(0, "IDLE")
        connection = daemon.open()
        domain = connection.lookupByName(DOMAIN)
        domain.destroy()
        domain.undefine()
        connection.close()
        running.until(0, "FAILED")
        assert running.machine(0).last_error.startswith(f"HOST_LOST: domain {DOMAIN} is gone")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_pool_is_a_stockout_and_leaves_nothing_behind(daemon: LibvirtDaemon, tmp_path: Path) -> None:
    image = (daemon.pool_directory / "guest.raw").read_bytes()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(daemon.pool_directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        daemon.give(daemon.pool_directory)
        source = tmp_path / "stub.raw"
        source.write_bytes(image)
        daemon.put_image(source)
        with provider(daemon, tmp_path, memory=STUB_MEMORY, is_ready=is_ready) as running:
            running.create(0)
            running.until(0, "FAILED")
            assert running.machine(0).last_error.startswith("STOCKOUT: host h: ")
            assert "No space left on device" in running.machine(0).last_error
            assert daemon.domains() == []
    finally:
        subprocess.run(["umount", "-l", str(daemon.pool_directory)], check=True)


@pytest.mark.long
# Ten minutes on a busy machine: each Create and Delete is one of a real domain.
@pytest.mark.timeout(CERTIFY_SECONDS_MAX)
def test_the_provider_is_certified_on_stub_guests(
    daemon: LibvirtDaemon, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    certification = certification_of(request)
    room: dict[str, Any] = {"cpus": 400, "memory": "64Gi", "disk": "100Gi"}
    hosts = hosts_file(daemon, tmp_path, guest_memory=STUB_MEMORY, **room)
    served = [sys.executable, "-m", "tests.libvirt.certified_provider", "provider", "libvirt"]
    flags = f"--hosts {hosts} --kubeconfig-dir {tmp_path} --metrics-addr off --addr {{addr}} --state {{state}}"
    fault = f"{shlex.join(bigfleet('provider', 'fault', '--metrics-addr', 'off'))} --seed-count {{seeds}}"
    done = subprocess.run(
        bigfleet(
            "conformance",
            *("--profile", certification.flag, "--patience=120s", "--out", str(tmp_path / "out")),
            *("--launch", f"{shlex.join(served)} {flags}"),
            *("--launch-fault", f"{fault} --addr {{addr}} --state {{state}}"),
        ),
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=CERTIFY_SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    certification.expect_report(tmp_path / "out")
