"""Implements `Hypervisor` over a connection of libvirt's Python binding; no other module imports it.

docs/spec/libvirt-provider.md §2, §7. Keep-alive messages end a connection whose daemon hangs, which ends the call that
waits for it. One thread of the process serves keep-alive and events of all connections.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import libvirt
import libvirt_qemu
import structlog

from bigfleet.provider.backends.libvirt.domain_xml import (
    NAMESPACE,
    PREFIX,
    domain_xml,
    metadata_xml,
    overlay_xml,
    parse_metadata,
    raw_volume_xml,
    volume_format,
)
from bigfleet.provider.backends.libvirt.hypervisor import (
    AgentSilent,
    DomainFacts,
    DomainPlan,
    DomainRecord,
    HostDown,
    HostError,
    HostFull,
)

_log = structlog.get_logger("bigfleet.provider.backends.libvirt.binding")

_KEEP_ALIVE_SECONDS: Final = 5
_KEEP_ALIVE_COUNT: Final = 3
_UPLOAD_BYTES: Final = 256 << 10
_NO_SPACE: Final = "No space left on device"
_AGENT_SILENT: Final = (
    libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
    libvirt.VIR_ERR_AGENT_UNSYNCED,
    libvirt.VIR_ERR_OPERATION_INVALID,
    libvirt.VIR_ERR_OPERATION_TIMEOUT,
)
_UNDEFINE: Final = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)
_event_loop = threading.Lock()
_is_event_loop_running = False


def _run_event_loop() -> None:
    """Start the thread of events, once a process, before the first connection."""
    global _is_event_loop_running
    with _event_loop:
        if _is_event_loop_running:
            return
        # It prints each error to standard error otherwise.
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        libvirt.virEventRegisterDefaultImpl()

        def run() -> None:
            while True:
                libvirt.virEventRunDefaultImpl()

        threading.Thread(target=run, name="libvirt-events", daemon=True).start()
        _is_event_loop_running = True


def connect(uri: str, on_change: Callable[[str], None]) -> "LibvirtHypervisor":
    """Return a connection; `on_change` is called with the name of a domain that changed. Raises HostDown."""
    _run_event_loop()
    try:
        connection = libvirt.open(uri)
        connection.setKeepAlive(_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_COUNT)
        hypervisor = LibvirtHypervisor(connection, uri)
        connection.domainEventRegisterAny(
            None,
            libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE,
            lambda _connection, domain, _event, _detail, _opaque: on_change(domain.name()),
            None,
        )
    except libvirt.libvirtError as error:
        raise HostDown(f"{uri}: {error}") from error
    return hypervisor


class LibvirtHypervisor:
    """One connection. Every method raises what `Hypervisor` says."""

    def __init__(self, connection: Any, uri: str) -> None:
        self._connection = connection
        self._uri = uri

    @contextmanager
    def _translated(self, *, missing: int | None = None) -> Iterator[None]:
        """Raise the backend's errors in place of libvirt's; `missing` is the one that is a success."""
        try:
            yield
        except libvirt.libvirtError as error:
            if missing is None or error.get_error_code() != missing:
                raise self._error(error) from error

    def _looked_up(self, look: Callable[[str], Any], name: str, *, missing: int) -> Any:
        """Return what libvirt knows by a name, or None."""
        try:
            return look(name)
        except libvirt.libvirtError as error:
            if error.get_error_code() == missing:
                return None
            raise self._error(error) from error

    def _error(self, error: Any) -> HostError:
        text = " ".join(str(error).split())
        if not self._is_alive():
            return HostDown(f"{self._uri}: {text}")
        return HostFull(text) if _NO_SPACE in text else HostError(text)

    def _is_alive(self) -> bool:
        try:
            return bool(self._connection.isAlive())
        except libvirt.libvirtError:
            return False

    # ---- domains -----------------------------------------------------------------------------------------------------

    def domains(self) -> Sequence[DomainFacts]:
        """Return every domain of the host; one that goes meanwhile is left out."""
        facts: list[DomainFacts] = []
        with self._translated():
            for domain in self._connection.listAllDomains():
                with self._translated(missing=libvirt.VIR_ERR_NO_DOMAIN):
                    facts.append(self._facts(domain))
        return facts

    def _facts(self, domain: Any) -> DomainFacts:
        state, memory_kib, _used, vcpus, _time = domain.info()
        return DomainFacts(
            name=domain.name(),
            uuid=domain.UUIDString(),
            is_active=state not in (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED),
            vcpus=vcpus,
            memory_mib=memory_kib // 1024,
            record=self._record(domain),
        )

    def _record(self, domain: Any) -> DomainRecord | None:
        try:
            return parse_metadata(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0))
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA:
                return None
            raise

    def _domain(self, name: str) -> Any:
        """Return libvirt's domain, or None."""
        return self._looked_up(self._connection.lookupByName, name, missing=libvirt.VIR_ERR_NO_DOMAIN)

    def _known(self, name: str) -> Any:
        domain = self._domain(name)
        if domain is None:
            raise HostError(f"domain {name} is not there")
        return domain

    def domain(self, name: str) -> DomainFacts | None:
        """Return a domain by name, or None."""
        domain = self._domain(name)
        if domain is not None:
            with self._translated(missing=libvirt.VIR_ERR_NO_DOMAIN):
                return self._facts(domain)
        return None

    def define(self, plan: DomainPlan) -> None:
        """Define a domain."""
        with self._translated():
            self._connection.defineXMLFlags(domain_xml(plan), libvirt.VIR_DOMAIN_DEFINE_VALIDATE)

    def start(self, name: str) -> None:
        """Start a domain that is off."""
        domain = self._known(name)
        with self._translated():
            domain.create()

    def request_shutdown(self, name: str) -> None:
        """Press the power button."""
        domain = self._domain(name)
        if domain is not None:
            with self._translated(missing=libvirt.VIR_ERR_OPERATION_INVALID):
                domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)

    def destroy(self, name: str) -> None:
        """Switch a domain off."""
        domain = self._domain(name)
        if domain is not None:
            with self._translated(missing=libvirt.VIR_ERR_OPERATION_INVALID):
                domain.destroy()

    def undefine(self, name: str) -> None:
        """Remove a domain."""
        domain = self._domain(name)
        if domain is not None:
            with self._translated(missing=libvirt.VIR_ERR_NO_DOMAIN):
                domain.undefineFlags(_UNDEFINE)

    def write_record(self, name: str, record: DomainRecord) -> None:
        """Replace the metadata, of the definition and of what runs."""
        domain = self._known(name)
        with self._translated():
            flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
            if domain.isActive():
                flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE
            domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, metadata_xml(record), PREFIX, NAMESPACE, flags)

    # ---- volumes -----------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> Any:
        with self._translated():
            return self._connection.storagePoolLookupByName(name)

    def _volume(self, pool: str, name: str) -> Any:
        """Return libvirt's volume, or None. What others did to the directory of the pool is seen after a refresh."""
        look = self._pool(pool).storageVolLookupByName
        return self._looked_up(look, name, missing=libvirt.VIR_ERR_NO_STORAGE_VOL)

    def volume_key(self, pool: str, name: str) -> str | None:
        """Return the key of a volume, or None."""
        volume = self._volume(pool, name)
        if volume is None:
            return None
        with self._translated():
            key: str = volume.key()
            return key

    def make_overlay(self, pool: str, name: str, *, image: str, disk_mib: int) -> None:
        """Make a qcow2 volume over an image, whose format libvirt knows."""
        found, base = self._pool(pool), self._volume(pool, image)
        if base is None:
            raise HostError(f"pool {pool} has no volume {image}; put the image there, and refresh the pool")
        with self._translated():
            xml = overlay_xml(
                name, image_path=base.path(), image_format=volume_format(base.XMLDesc()), disk_mib=disk_mib
            )
            found.createXML(xml)

    def write_volume(self, pool: str, name: str, content: bytes) -> None:
        """Write a raw volume in place; make it when it is not there."""
        volume = self._volume(pool, name)
        if volume is None:
            found = self._pool(pool)
            with self._translated():
                volume = found.createXML(raw_volume_xml(name, len(content)))
        with self._translated():
            stream = self._connection.newStream()
            try:
                volume.upload(stream, 0, len(content))
                at = 0
                while at < len(content):
                    at += stream.send(content[at : at + _UPLOAD_BYTES])
                stream.finish()
            except BaseException:
                stream.abort()
                raise

    def delete_volume(self, pool: str, name: str) -> None:
        """Delete a volume."""
        volume = self._volume(pool, name)
        if volume is not None:
            with self._translated(missing=libvirt.VIR_ERR_NO_STORAGE_VOL):
                volume.delete()

    # ---- guests ------------------------------------------------------------------------------------------------------

    def ask_agent(self, name: str, command: str, arguments: Mapping[str, Any], *, seconds: int) -> Any:
        """Return what the guest agent answers."""
        domain = self._known(name)
        question = json.dumps({"execute": command, **({"arguments": dict(arguments)} if arguments else {})})
        try:
            with self._translated():
                answer = libvirt_qemu.qemuAgentCommand(domain, question, seconds, 0)
        except HostError as error:
            cause = error.__cause__
            is_silent = isinstance(cause, libvirt.libvirtError) and cause.get_error_code() in _AGENT_SILENT
            if is_silent and not isinstance(error, HostDown):
                raise AgentSilent(str(error)) from error
            raise
        return json.loads(answer)["return"]

    def close(self) -> None:
        """Close the connection."""
        try:
            self._connection.close()
        except libvirt.libvirtError as error:
            _log.warning("host.close_failed", uri=self._uri, error=" ".join(str(error).split()))
