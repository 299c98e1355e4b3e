"""Loads certificates for gRPC at start and when the files change; a bad file never replaces a good one.

docs/spec/wire.md §3. A server asks before each handshake, a client before each new channel; connections that stand are
left alone. Who the peer is, `bigfleet.rpc.security.identity` decides. This module must not log or write down a key.
"""

import ipaddress
import os
import stat
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from prometheus_client import CollectorRegistry, Gauge

from bigfleet.rpc.security.certificate_chain import leads_to
from bigfleet.rpc.security.certificate_names import UnreadableCertificate, uris_of
from bigfleet.rpc.security.identity import Denied, PeerIdentity, identity_in

#: Of a certificate, a key or an authority; bundles of all public authorities have a quarter of it.
FILE_BYTES_MAX = 1024 * 1024

_log = structlog.get_logger("bigfleet.rpc.security.tls")

_GROUP_AND_OTHERS = 0o066
_OTHERS = 0o006
#: The keys that gRPC's TLS can sign with.
_CURVES = (ec.SECP256R1, ec.SECP384R1)


class TlsFault(Exception):
    """Files that cannot be used as credentials; the text names the file and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPaths:
    """Where the three files are, all PEM."""

    #: The certificate, followed by intermediate ones if there are any.
    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and the key that fits it, as read from their files."""

    certificate: bytes
    key: bytes
    uris: tuple[str, ...]
    serial: int
    issued: datetime
    expires: datetime

    @property
    def identity(self) -> PeerIdentity:
        """Whose it is. Raises Denied when it names no identity."""
        return identity_in(self.uris)


class TlsFiles:
    """The certificate, key and authority of a process. Any thread may ask."""

    def __init__(self, paths: TlsPaths, *, bearer: PeerIdentity | None = None) -> None:
        """Read all three. Raises TlsFault.

        `bearer` is the identity that the certificate must name, today and whenever it is replaced; None takes any.
        """
        self._paths = paths
        self._bearer = bearer
        self._lock = threading.Lock()
        self.authority = _read(paths.authority)
        self._authorities = _parse_certificates(paths.authority, self.authority)
        self._seen = self._stamp()
        self._pair = self._load()
        self._has_logged_expiry = False
        #: When a pair that was refused because it is not valid yet is read again.
        self._valid_from: datetime | None = None

    @property
    def bearer(self) -> PeerIdentity | None:
        """The identity that every certificate here must name, if there is one."""
        return self._bearer

    def current(self) -> KeyPair:
        """Return the pair in force, the new one if the files hold another that fits."""
        with self._lock:
            # Before reading: a file that changes meanwhile is read again next time.
            stamp = self._stamp()
            if stamp != self._seen or (self._valid_from is not None and self._valid_from <= datetime.now(UTC)):
                self._seen = stamp
                self._valid_from = None
                self._replace()
            if not self._has_logged_expiry and self._pair.expires <= datetime.now(UTC):
                self._has_logged_expiry = True
                path = str(self._paths.certificate)
                _log.error("tls.certificate_expired", file=path, advice="peers reject it; replace the files")
            return self._pair

    def warn_of_loose_key(self) -> None:
        """Log a key that other users can read or write.

        The group counts only if this user owns the file: a Secret of Kubernetes belongs to root, and its process reads
        it as a member of the group (fsGroup). It is no fault: some systems mount keys so, and a restart must not fail.
        """
        try:
            status = self._paths.key.stat()
        except OSError:
            return
        mode = stat.S_IMODE(status.st_mode)
        if mode & (_GROUP_AND_OTHERS if status.st_uid == os.geteuid() else _OTHERS):
            path = self._paths.key
            _log.warning(
                "tls.key_mode_loose",
                file=str(path),
                mode=f"{mode:04o}",
                advice=f"other users can use the key; run: chmod 0600 {path}, or set defaultMode of the Secret to 0440",
            )

    def _replace(self) -> None:
        try:
            pair = self._load()
            if pair != self._pair:
                self._check_successor(pair)
        except TlsFault as fault:
            _log.error(
                "tls.certificate_rejected",
                error=str(fault),
                advice="the previous certificate stays in force; replace the files",
                serial=f"{self._pair.serial:x}",
                expires=f"{self._pair.expires:%Y-%m-%dT%H:%MZ}",
            )
            return
        if pair != self._pair:
            self._pair = pair
            self._has_logged_expiry = False
            self.warn_of_loose_key()
            _log.info("tls.certificate_loaded", serial=f"{pair.serial:x}", expires=f"{pair.expires:%Y-%m-%dT%H:%MZ}")

    def _check_successor(self, pair: KeyPair) -> None:
        """Raise TlsFault for a new pair that peers reject, so that the one in force stays."""
        path, now = self._paths.certificate, datetime.now(UTC)
        if pair.expires <= now:
            raise TlsFault(f"{path}: expired at {pair.expires:%Y-%m-%dT%H:%M:%SZ}")
        if pair.issued > now:
            self._valid_from = pair.issued
            raise TlsFault(f"{path}: is not valid before {pair.issued:%Y-%m-%dT%H:%M:%SZ}, when it is read again")
        # With an etcd, say, the authority of the peers may be another than that of this process.
        if self._is_of_authority(self._pair) and not self._is_of_authority(pair):
            raise TlsFault(f"{path}: is not signed by an authority of {self._paths.authority}, as the one in force is")

    def _is_of_authority(self, pair: KeyPair) -> bool:
        return leads_to(_parse_certificates(self._paths.certificate, pair.certificate), self._authorities)

    def _load(self) -> KeyPair:
        certificate_path, key_path = self._paths.certificate, self._paths.key
        certificate, key = _read(certificate_path), _read(key_path)
        leaf = _parse_certificates(certificate_path, certificate)[0]
        try:
            private = load_pem_private_key(key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise TlsFault(f"{key_path}: holds no PEM private key without a password") from error
        if not (
            isinstance(private, rsa.RSAPrivateKey)
            or (isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, _CURVES))
        ):
            raise TlsFault(f"{key_path}: the key must be ECDSA P-256, ECDSA P-384 or RSA")
        if private.public_key() != leaf.public_key():
            raise TlsFault(f"{key_path}: not the key of {certificate_path}; name the two files of one pair")
        pair = KeyPair(
            certificate=certificate,
            key=key,
            uris=_uris(certificate_path, leaf),
            serial=leaf.serial_number,
            issued=leaf.not_valid_before_utc,
            expires=leaf.not_valid_after_utc,
        )
        self._check_bearer(pair)
        return pair

    def _check_bearer(self, pair: KeyPair) -> None:
        if self._bearer is None:
            return
        try:
            identity = pair.identity
        except Denied as denied:
            raise TlsFault(f"{self._paths.certificate}: {denied}") from denied
        if identity != self._bearer:
            raise TlsFault(f"{self._paths.certificate}: names {identity.uri}, not {self._bearer.uri}")

    def _stamp(self) -> tuple[object, ...]:
        return _stamp(self._paths.certificate), _stamp(self._paths.key)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that require a client's certificate and look at the files before each handshake."""

    def configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], files.authority)

    in_force = files.current()
    asking = threading.Lock()

    def changed() -> Any:
        """Return the configuration of a new certificate, or None; the types of gRPC know no None."""
        nonlocal in_force
        # gRPC asks from threads of its own, several at a time.
        with asking:
            pair = files.current()
            if pair == in_force:
                return None
            in_force = pair
            return configuration(pair)

    # An answer replaces what handshakes on other threads are just using, which ends the process now and then. So there
    # is one answer for each new certificate, and none for each handshake.
    return grpc.dynamic_ssl_server_credentials(configuration(in_force), changed, require_client_authentication=True)


def channel_credentials(pair: KeyPair, authority: bytes) -> grpc.ChannelCredentials:
    """Return a client's credentials; a channel keeps them, so a new certificate needs a new channel."""
    return grpc.ssl_channel_credentials(authority, pair.key, pair.certificate)


def monitor_files(files: TlsFiles, registry: CollectorRegistry, prefix: str) -> None:
    """Log a key that other users can read, and export when the certificate in force ends and when it was issued.

    An alert compares the time that is left. Asking reads changed files, so a bad one shows at the next scrape.
    """
    files.warn_of_loose_key()
    text = "Unix time at which the certificate in force ends"
    expires = Gauge(f"{prefix}_certificate_expires_timestamp_seconds", text, registry=registry)
    expires.set_function(lambda: files.current().expires.timestamp())
    text = "Unix time from which the certificate in force is valid"
    issued = Gauge(f"{prefix}_certificate_issued_timestamp_seconds", text, registry=registry)
    issued.set_function(lambda: files.current().issued.timestamp())


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> bytes:
    """Return the content of a file; a pipe or a device, which a handshake would wait for, is refused unread."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise TlsFault(f"{path}: is not a file; name a file in PEM format")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise TlsFault(f"{path}: {error.strerror}; name a file that can be read") from error
    if len(content) > FILE_BYTES_MAX:
        raise TlsFault(f"{path}: has more than {FILE_BYTES_MAX} bytes; name a file in PEM format")
    return content


def _stamp(path: Path) -> tuple[object, ...]:
    try:
        status = path.stat()
    except OSError as error:
        return (error.errno,)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _parse_certificates(path: Path, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsFault(f"{path}: holds no PEM certificate; name a file in PEM format") from error


def _uris(path: Path, certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        return uris_of(certificate)
    except UnreadableCertificate as error:
        raise TlsFault(f"{path}: its alternative names cannot be read") from error
