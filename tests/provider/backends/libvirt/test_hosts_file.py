"""What a hosts file of libvirt may say, and how a mistake in it is named (docs/spec/libvirt-provider.md §1)."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.model.states import CapacityType
from bigfleet.provider.backends.libvirt.hosts_file import KvmHostsFault, read_kvm_hosts
from tests.provider.backends.libvirt.memory_host import document

Change = Callable[[dict[str, Any]], object]


def written(tmp_path: Path, body: object) -> Path:
    path = tmp_path / "hosts.yaml"
    path.write_text(body if isinstance(body, str) else yaml.safe_dump(body))
    return path


def test_a_file_says_types_and_the_room_of_hosts(tmp_path: Path) -> None:
    body = document(h={"overcommit": {"cpu": 2.5, "memory": 1.5}, "capacity_type": "reserved", "labels": {"rack": "1"}})
    hosts = read_kvm_hosts(written(tmp_path, body))
    host = hosts.hosts["h"]
    assert (host.milli_cpus, host.memory_mib, host.disk_mib) == (10_000, 12 * 1024, 400 * 1024)
    assert (host.capacity_type, dict(host.labels)) == (CapacityType.RESERVED, {"rack": "1"})
    small = hosts.types["small"]
    assert (small.vcpus, small.memory_mib, small.disk_mib, small.allocatable) == (1, 2048, 40 * 1024, None)
    assert (hosts.defaults.firmware, hosts.defaults.reset, hosts.defaults.virtualisation) == ("bios", "reimage", "kvm")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.update(host=1), "host: unknown key"),
        (lambda b: b["defaults"].update(images=1), "defaults.images: unknown key"),
        (lambda b: b["defaults"].pop("image"), "defaults.image: is missing"),
        (lambda b: b["defaults"].update(image="bf-0.qcow2"), "defaults.image: 'bf-0.qcow2' begins with bf-"),
        (lambda b: b["defaults"].update(image="/a/b"), "defaults.image: '/a/b' is a path; give the name that libvirt"),
        (lambda b: b["defaults"].update(firmware="efi"), "defaults.firmware: 'efi' is unknown; choose bios or uefi"),
        (lambda b: b["defaults"].update(virtualisation="xen"), "defaults.virtualisation: 'xen' is unknown"),
        (lambda b: b["defaults"].update(reset="none"), "defaults.reset: 'none' is unknown; a drained machine gets a"),
        (lambda b: b["defaults"].update(network="bridge:"), "defaults.network: names no network"),
        (lambda b: b["defaults"].update(console_log_dir="x"), "defaults.console_log_dir: 'x' is not an absolute path"),
        (lambda b: b.update(types={}), "types: is empty"),
        (lambda b: b["types"]["small"].update(vcpus=0), "types.small.vcpus: 0 must be at least 1"),
        (lambda b: b["types"]["small"].update(memory="1x"), "types.small.memory: "),
        (lambda b: b["types"]["small"].update(disk="1Ki"), "types.small.disk: '1Ki' is less than 1Mi"),
        (lambda b: b["types"].update({"a/b": b["types"]["small"]}), "types.a/b: the name is not 1 to 63 characters"),
        (lambda b: b["types"]["small"].update(allocatable={"cpu": "1u"}), "types.small.allocatable['cpu'] is '1u'"),
        (lambda b: b.update(hosts=[]), "hosts: is empty"),
        (lambda b: b["hosts"].append(b["hosts"][0]), "hosts[1].name: 'h' names two hosts"),
        (lambda b: b["hosts"][0].update(uri="kvm-1"), "hosts[0].uri: 'kvm-1' is no URI of libvirt"),
        (lambda b: b["hosts"][0].update(zone=""), "hosts[0].zone: '' is not 1 to 63 characters"),
        (lambda b: b["hosts"][0].update(cpus="4"), "hosts[0].cpus: Expected `int`, got `str`"),
        (lambda b: b["hosts"][0].update(overcommit={"cpu": 0}), "hosts[0].overcommit.cpu: 0.0 must be above 0"),
        (lambda b: b["hosts"][0].update(capacity_type="spot"), "hosts[0].capacity_type: 'spot' is not possible"),
        (lambda b: b["hosts"][0].update(price_usd_per_gib_hour=-1), "hosts[0].price_usd_per_gib_hour: -1.0 must be"),
        (
            lambda b: b["hosts"][0].update(price_usd_per_vcpu_hour=0, price_usd_per_gib_hour=0),
            "hosts[0].price_usd_per_vcpu_hour: is 0, as is the price per GiB; only bare_metal may be free of charge",
        ),
        (lambda b: b["hosts"][0].update(labels={"zone": "x"}), "hosts[0].labels: label 'zone' shadows a field"),
    ],
)
def test_a_mistake_is_named_with_its_path(change: Change, text: str, tmp_path: Path) -> None:
    body = copy.deepcopy(document())
    change(body)
    path = written(tmp_path, body)
    with pytest.raises(KvmHostsFault) as fault:
        read_kvm_hosts(path)
    assert str(fault.value).startswith(f"{path}: {text}"), str(fault.value)


@pytest.mark.parametrize(("text", "finding"), [("a: [", "not YAML: "), ("", "Expected `object`, got `null`")])
def test_a_file_that_is_no_document_is_named(text: str, finding: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(KvmHostsFault, match=r"hosts\.yaml") as fault:
        read_kvm_hosts(path)
    assert finding in str(fault.value)
