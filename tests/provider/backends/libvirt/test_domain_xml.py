"""What a domain is defined as, and what its metadata says (docs/spec/libvirt-provider.md §3)."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bigfleet.provider.backends.libvirt.domain_xml import (
    NAMESPACE,
    domain_xml,
    metadata_xml,
    parse_metadata,
    volume_format,
)
from bigfleet.provider.backends.libvirt.hypervisor import DomainPlan, DomainRecord

RECORD = DomainRecord(
    machine_id="p/z/h/t/000", operation_id="op-1", provider="p&q", cluster="a <\x01> '\"é", seeded_by="op-2"
)
PLAN = DomainPlan(
    name="bf-1",
    uuid="u",
    record=RECORD,
    vcpus=2,
    memory_mib=512,
    pool="machines",
    overlay="bf-1.qcow2",
    seed="bf-1-seed.iso",
    network="default",
    firmware="bios",
    virtualisation="kvm",
    console_log_dir="/var/log/x/",
)


def test_a_record_is_read_back_as_it_was_written() -> None:
    assert parse_metadata(metadata_xml(RECORD)) == RECORD
    element = ElementTree.fromstring(domain_xml(PLAN)).find(f"metadata/{{{NAMESPACE}}}machine")
    assert element is not None
    assert parse_metadata(ElementTree.tostring(element, "unicode")) == RECORD


@pytest.mark.parametrize("text", ["", "<machine", "<machine/>", "<other a='b'/>"])
def test_metadata_that_is_not_ours_is_none(text: str) -> None:
    assert parse_metadata(text) is None


def test_a_domain_has_its_disks_by_volume_its_console_and_its_agent() -> None:
    root = ElementTree.fromstring(domain_xml(PLAN))
    assert root.get("type") == "kvm"
    assert [(each.get("pool"), each.get("volume")) for each in root.iterfind("devices/disk/source")] == [
        ("machines", "bf-1.qcow2"),
        ("machines", "bf-1-seed.iso"),
    ]
    assert [each.find("readonly") is not None for each in root.iterfind("devices/disk")] == [False, True]
    log = root.find("devices/serial/log")
    assert log is not None
    assert log.get("file") == "/var/log/x/bf-1.log"
    assert root.find("devices/channel/target[@name='org.qemu.guest_agent.0']") is not None


@pytest.mark.parametrize(
    ("network", "kind", "source"),
    [
        (None, "user", None),
        ("default", "network", {"network": "default"}),
        ("bridge:br0", "bridge", {"bridge": "br0"}),
    ],
)
def test_a_network_is_libvirts_or_a_bridge(network: str | None, kind: str, source: dict[str, str] | None) -> None:
    interface = ElementTree.fromstring(domain_xml(replace(PLAN, network=network))).find("devices/interface")
    assert interface is not None
    found = interface.find("source")
    assert (interface.get("type"), None if found is None else dict(found.attrib)) == (kind, source)


def test_firmware_and_emulation_are_as_the_file_says() -> None:
    root = ElementTree.fromstring(domain_xml(replace(PLAN, firmware="uefi", virtualisation="qemu")))
    firmware = root.find("os")
    assert firmware is not None
    assert (root.get("type"), firmware.get("firmware"), root.find("cpu")) == ("qemu", "efi", None)


def test_the_format_of_an_image_is_what_libvirt_says() -> None:
    assert volume_format("<volume><target><format type='qcow2'/></target></volume>") == "qcow2"
    assert volume_format("<volume><target/></volume>") == "raw"
