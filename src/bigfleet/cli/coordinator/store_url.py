"""Parses `--store`: etcd endpoints with a prefix, or a SQLite file (docs/spec/coordinator.md §1).

Each mistake is a UsageFault that names the flag. A SQLite file is opened and locked here; etcd is not called yet.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from bigfleet.cli.flags.values import parse_address
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.coordinator.stores.protocol import LeaderInfo
from bigfleet.coordinator.stores.sqlite import SqliteStateStore, StoreFault
from bigfleet.model.clock import Clock
from bigfleet.rpc.etcd.client import EtcdClient
from bigfleet.rpc.etcd.store import EtcdStore
from bigfleet.rpc.security.tls import TlsFault, TlsFiles, TlsPaths

_ADVICE = "write etcd://HOST:PORT,HOST:PORT/PREFIX or sqlite:///PATH"
_ENDPOINT = re.compile(r"(?:[^\s:/,\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """Endpoints as host:port, and the prefix of all keys, without a slash at its end."""

    endpoints: tuple[str, ...]
    prefix: str


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """A file."""

    path: Path


def parse_store(text: str, flag: str = "--store") -> EtcdUrl | SqliteUrl:
    """Return what a URL names. Raises UsageFault."""
    if not text:
        raise UsageFault(f"{flag} is missing: {_ADVICE}")
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "sqlite" and len(rest) > 1 and rest.startswith("/"):
        return SqliteUrl(Path(rest))
    if separator and scheme == "etcd":
        hosts, _, prefix = rest.partition("/")
        endpoints = tuple(hosts.split(","))
        prefix = prefix.strip("/")
        are_addresses = all(
            _ENDPOINT.fullmatch(endpoint) and parse_address(endpoint, flag)[1] for endpoint in endpoints
        )
        if are_addresses and prefix:
            return EtcdUrl(endpoints, f"/{prefix}")
    raise UsageFault(f"{flag}: {text!r} is not a store; {_ADVICE}")


def read_store_tls(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    """Return the files for etcd, None for plain text. Raises UsageFault unless all three fit, or none is given."""
    given = {"--store-tls-cert": certificate, "--store-tls-key": key, "--store-tls-ca": authority}
    missing = [flag for flag, path in given.items() if path is None]
    if certificate is None or key is None or authority is None:
        if len(missing) < len(given):
            raise UsageFault(f"{' and '.join(missing)} missing: TLS towards etcd needs all three of --store-tls-*")
        return None
    try:
        return TlsFiles(TlsPaths(certificate=certificate, key=key, authority=authority))
    except TlsFault as fault:
        raise UsageFault(f"TLS towards etcd: {fault}") from fault


def open_store(
    url: EtcdUrl | SqliteUrl, *, me: LeaderInfo, tls: TlsFiles | None, lease_ttl_seconds: int, clock: Clock
) -> EtcdStore | SqliteStateStore:
    """Return the store, on a running event loop. Raises RunFault for a file that cannot be used."""
    if isinstance(url, EtcdUrl):
        client = EtcdClient(url.endpoints, tls)
        return EtcdStore(client, prefix=url.prefix, me=me, lease_ttl_seconds=lease_ttl_seconds, clock=clock)
    try:
        return SqliteStateStore(url.path, leader=me)
    except StoreFault as fault:
        raise RunFault(f"--store: {fault}") from fault
