"""Writes the XML of a domain and of its metadata, and reads the latter back.

docs/spec/libvirt-provider.md §3. Text from outside is escaped, and the name of a cluster is percent-encoded, because
XML has no control characters.
"""

from typing import Final
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from bigfleet.provider.backends.libvirt.hypervisor import DomainPlan, DomainRecord

NAMESPACE: Final = "https://bigfleet.dev/libvirt/1"
PREFIX: Final = "bigfleet"
AGENT_CHANNEL: Final = "org.qemu.guest_agent.0"
_BRIDGE: Final = "bridge:"


def metadata_xml(record: DomainRecord, *, namespace: str = "") -> str:
    """Return the element; `namespace` is the declaration that it has inside a domain."""
    name = f"{PREFIX}:machine" if namespace else "machine"
    attributes = {
        "id": record.machine_id,
        "operation": record.operation_id,
        "provider": record.provider,
        "cluster": quote(record.cluster, safe=""),
        "seeded-by": record.seeded_by,
        "configured-by": record.configured_by,
    }
    return f"<{name}{namespace}{''.join(f' {key}={quoteattr(value)}' for key, value in attributes.items())}/>"


def parse_metadata(text: str) -> DomainRecord | None:
    """Return what an element says, or None when it is not one of ours."""
    try:
        # The text comes from libvirt, which has parsed and written it.
        attributes = ElementTree.fromstring(text).attrib  # noqa: S314
        return DomainRecord(
            machine_id=attributes["id"],
            operation_id=attributes["operation"],
            provider=attributes["provider"],
            cluster=unquote(attributes.get("cluster", "")),
            seeded_by=attributes.get("seeded-by", ""),
            configured_by=attributes.get("configured-by", ""),
        )
    except (ElementTree.ParseError, KeyError):
        return None


def domain_xml(plan: DomainPlan) -> str:
    """Return the definition of a domain."""
    declaration = f" xmlns:{PREFIX}={quoteattr(NAMESPACE)}"
    firmware = " firmware='efi'" if plan.firmware == "uefi" else ""
    machine = "<type machine='q35'>hvm</type>" if plan.firmware == "uefi" else "<type>hvm</type>"
    cpu = "<cpu mode='host-passthrough'/>" if plan.virtualisation == "kvm" else ""
    return f"""<domain type={quoteattr(plan.virtualisation)}>
  <name>{escape(plan.name)}</name>
  <uuid>{escape(plan.uuid)}</uuid>
  <title>{escape(plan.record.machine_id)}</title>
  <metadata>{metadata_xml(plan.record, namespace=declaration)}</metadata>
  <memory unit='MiB'>{plan.memory_mib}</memory>
  <vcpu>{plan.vcpus}</vcpu>
  <os{firmware}>{machine}<boot dev='hd'/></os>
  <features><acpi/><apic/></features>
  {cpu}
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    {_disk(plan, plan.overlay, "vda", "qcow2", "")}
    {_disk(plan, plan.seed, "vdb", "raw", "<readonly/>")}
    {_interface(plan.network)}
    {_console(plan)}
    <channel type='unix'><target type='virtio' name='{AGENT_CHANNEL}'/></channel>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
  </devices>
</domain>
"""


def _disk(plan: DomainPlan, volume: str, device: str, driver: str, more: str) -> str:
    """Return a virtio disk. Cloud kernels have no driver for SATA, and cloud-init finds the seed on any disk."""
    return (
        f"<disk type='volume' device='disk'><driver name='qemu' type='{driver}'/>"
        f"<source pool={quoteattr(plan.pool)} volume={quoteattr(volume)}/>"
        f"<target dev='{device}' bus='virtio'/>{more}</disk>"
    )


def _interface(network: str | None) -> str:
    if network is None:
        kind, source = "user", ""
    elif network.startswith(_BRIDGE):
        kind, source = "bridge", f"<source bridge={quoteattr(network.removeprefix(_BRIDGE))}/>"
    else:
        kind, source = "network", f"<source network={quoteattr(network)}/>"
    return f"<interface type='{kind}'>{source}<model type='virtio'/></interface>"


def _console(plan: DomainPlan) -> str:
    log = ""
    if plan.console_log_dir is not None:
        path = f"{plan.console_log_dir.rstrip('/')}/{plan.name}.log"
        log = f"<log file={quoteattr(path)} append='on'/>"
    serial = f"<serial type='pty'>{log}<target port='0'/></serial>"
    return f"{serial}<console type='pty'><target type='serial' port='0'/></console>"


def overlay_xml(name: str, *, image_path: str, image_format: str, disk_mib: int) -> str:
    """Return the definition of a qcow2 volume over an image."""
    return (
        f"<volume><name>{escape(name)}</name><capacity unit='MiB'>{disk_mib}</capacity><allocation>0</allocation>"
        f"<target><format type='qcow2'/></target><backingStore><path>{escape(image_path)}</path>"
        f"<format type={quoteattr(image_format)}/></backingStore></volume>"
    )


def raw_volume_xml(name: str, size_bytes: int) -> str:
    """Return the definition of a raw volume that is only for its owner to read."""
    return (
        f"<volume><name>{escape(name)}</name><capacity unit='bytes'>{size_bytes}</capacity>"
        f"<target><format type='raw'/><permissions><mode>0600</mode></permissions></target></volume>"
    )


def volume_format(text: str) -> str:
    """Return the format of a volume by its XML; raw when it says none."""
    # The text comes from libvirt, which has written it.
    found = ElementTree.fromstring(text).find("./target/format")  # noqa: S314
    return "raw" if found is None else found.get("type", "raw")
