"""Machines that really boot, by what their guests say on the console (docs/spec/libvirt-provider.md §4 to §6)."""

import hashlib
from pathlib import Path

import pytest

from bigfleet.provider.backends.libvirt.names import domain_name
from tests.libvirt.daemon import LibvirtDaemon
from tests.libvirt.providers import (
    GRACE_SECONDS,
    SECRET,
    assert_a_machine_boots_and_goes,
    assert_nowhere,
    blob,
    last_boot,
    machine_id,
    provider,
)
from tests.patience import wait_until


@pytest.mark.slow
def test_a_machine_boots_into_its_cluster_shuts_down_and_is_removed(booting: LibvirtDaemon, tmp_path: Path) -> None:
    assert_a_machine_boots_and_goes(booting, tmp_path)


@pytest.mark.long
def test_four_machines_change_clusters_and_none_finds_what_the_former_one_wrote(
    booting: LibvirtDaemon, tmp_path: Path
) -> None:
    numbers = range(4)
    with provider(booting, tmp_path) as running:
        for number in numbers:
            running.create(number)
        for number in numbers:
            running.until(number, "IDLE")
        for clusters in (("team-a", "team-b"), ("team-b", "team-a")):
            for number in numbers:
                running.configure(number, clusters[number % 2])
            for number in numbers:
                running.until(number, "CONFIGURED")
                text = last_boot(booting, domain_name(machine_id(number)))
                node = running.machine(number).node_name
                assert f"host={node}\nBF-DISK clean\nBF-JOIN by=seed cluster={clusters[number % 2]}\n" in text
            assert_nowhere(SECRET, tmp_path, booting.directory)
            for number in numbers:
                running.drain(number, GRACE_SECONDS)
            for number in numbers:
                running.until(number, "IDLE")
                assert "BF-OFF" in last_boot(booting, domain_name(machine_id(number)))
        for number in numbers:
            running.delete(number)
        for number in numbers:
            running.until(number, "SPECULATIVE")
        assert (booting.domains(), booting.volumes()) == ([], [])


@pytest.mark.long
def test_a_guest_joins_and_leaves_by_its_agent_and_its_next_disk_is_clean(
    booting: LibvirtDaemon, tmp_path: Path
) -> None:
    domain = domain_name(machine_id(0))
    with provider(booting, tmp_path, "--bootstrap", "agent") as running:
        running.create(0)
        running.until(0, "IDLE")
        first = booting.console(domain)
        for cluster in ("team-a", "team-b"):
            running.configure(0, cluster)
            running.until(0, "CONFIGURED")
            data = blob(cluster)
            digest = hashlib.sha256(data).hexdigest()[:8]
            text = last_boot(booting, domain)
            assert f"BF-JOIN by=agent cluster={cluster} blob={len(data)} sum={digest} mode=600\n" in text
            assert "BF-DISK clean" in text
            assert_nowhere(SECRET, tmp_path, booting.directory)
            if cluster == "team-a":
                # It ran, so it was used as it was.
                assert booting.console(domain).startswith(first)
                assert booting.console(domain).count("BF-BOOT") == 1
            running.drain(0, GRACE_SECONDS)
            running.until(0, "IDLE")
            text = last_boot(booting, domain)
            assert f"BF-DRAIN cluster={cluster} grace={GRACE_SECONDS}\nBF-OFF" in text


@pytest.mark.long
def test_a_bootstrap_program_that_fails_fails_the_configure_with_its_exit_code(
    booting: LibvirtDaemon, tmp_path: Path
) -> None:
    with provider(booting, tmp_path, "--bootstrap", "agent") as running:
        running.create(0)
        running.until(0, "IDLE")
        running.configure(0, "refuse")
        running.until(0, "FAILED")
        assert "/opt/bigfleet/bootstrap ended with exit code 7" in running.machine(0).last_error
        assert SECRET not in running.log.read_bytes()


@pytest.mark.long
def test_a_guest_that_is_switched_off_is_started_again_with_its_disk(booting: LibvirtDaemon, tmp_path: Path) -> None:
    domain = domain_name(machine_id(0))
    with provider(booting, tmp_path) as running:
        running.create(0)
        running.until(0, "IDLE")
        running.configure(0, "team-a")
        running.until(0, "CONFIGURED")
        connection = booting.open()
        connection.lookupByName(domain).destroy()
        connection.close()
        # The seed has no bootstrap data any more, and the disk is the one that it left.
        wait_until(lambda: "BF-DISK used-by team-a" in last_boot(booting, domain), running.log.read_text)
        assert "BF-JOIN" not in last_boot(booting, domain)
        assert running.state(0) == "CONFIGURED"
