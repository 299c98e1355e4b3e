"""Manages the directory of a development authority: checks existing files and creates missing ones.

Each identity has `NAME.crt` and `NAME.key`. Only the owner can read a key. Files are written atomically. An existing
file is overwritten only with --force, which replaces all of them.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from bigfleet.cli.certs.issuing import Authority, Bearer, Issued, serves
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded

AUTHORITY: Final = "ca"
_FORCE_ADVICE: Final = "--force creates all files again"
_AWAY: Final = f"remove it with its key, or {_FORCE_ADVICE}"
_READ_ADVICE: Final = "put a readable file in its place, or remove it and use --force, which creates all files again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCredential:
    """One certificate that is in the directory now."""

    certificate: Path
    key: Path
    expires: datetime
    #: False for one that was there before.
    is_new: bool


class CertificateFolder:
    """A directory with an authority and the certificates that it signed."""

    def __init__(self, path: Path, *, now: datetime, days: int, is_forced: bool) -> None:
        """Open or make the directory and its authority. Raises UsageFault for one that cannot be used."""
        self._path = path
        self._now = now
        self._days = days
        self._is_forced = is_forced
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageFault(f"{path}: {error.strerror}; choose a directory that can be written") from error
        self._authority = self._open_authority()

    @property
    def authority_path(self) -> Path:
        """The file that every process takes as --tls-ca."""
        return self._files(AUTHORITY)[0]

    @property
    def authority_expires(self) -> datetime:
        """When the authority ends, and with it everything that it signed."""
        return self._authority.certificate.not_valid_after_utc

    def keep(self, name: str, bearer: Bearer, must_serve: Iterable[str] = ()) -> StoredCredential:
        """Return the bearer's certificate, made now unless it is there.

        Raises UsageFault for one that is there and is not ours, has expired, or lacks a host of `must_serve`.
        """
        certificate, key = self._files(name)
        if not self._has(name):
            issued = self._authority.issue(bearer, self._now, self._days)
            self._write(name, issued)
            parsed = x509.load_pem_x509_certificate(issued.certificate)
            return StoredCredential(certificate=certificate, key=key, expires=parsed.not_valid_after_utc, is_new=True)
        try:
            parsed = x509.load_pem_x509_certificate(_read(certificate))
        except ValueError as error:
            raise UsageFault(f"{certificate}: holds no PEM certificate; {_AWAY}") from error
        if not self._authority.has_issued(parsed):
            raise UsageFault(f"{certificate}: {self.authority_path} did not sign it; {_AWAY}")
        if parsed.not_valid_after_utc <= self._now:
            raise UsageFault(f"{certificate}: has expired; {_AWAY}")
        lacking = [host for host in must_serve if not serves(parsed, host)]
        if lacking:
            raise UsageFault(f"{certificate}: does not name the host {lacking[0]}; {_AWAY}")
        return StoredCredential(certificate=certificate, key=key, expires=parsed.not_valid_after_utc, is_new=False)

    def _open_authority(self) -> Authority:
        if not self._has(AUTHORITY):
            authority = Authority.create(self._now)
            self._write(AUTHORITY, authority.pems)
            return authority
        certificate, key = self._files(AUTHORITY)
        try:
            authority = Authority.load(_read(certificate), _read(key))
        except ValueError as error:
            raise UsageFault(f"{certificate} and {key} make no authority of ours: {error}; {_FORCE_ADVICE}") from error
        if authority.certificate.not_valid_after_utc <= self._now:
            raise UsageFault(f"{certificate}: the authority has expired; {_FORCE_ADVICE}")
        return authority

    def _has(self, name: str) -> bool:
        """Return whether a pair is there and stays. Raises UsageFault for half of one."""
        if self._is_forced:
            return False
        certificate, key = self._files(name)
        if certificate.exists() != key.exists():
            here, gone = (certificate, key) if certificate.exists() else (key, certificate)
            raise UsageFault(f"{here} exists and {gone} does not; remove {here}, or {_FORCE_ADVICE}")
        return certificate.exists()

    def _files(self, name: str) -> tuple[Path, Path]:
        return self._path / f"{name}.crt", self._path / f"{name}.key"

    def _write(self, name: str, issued: Issued) -> None:
        certificate, key = self._files(name)
        _write(key, issued.key, mode=0o600)
        _write(certificate, issued.certificate, mode=0o644)


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise UsageFault(f"{path}: {error.strerror}; {_READ_ADVICE}") from error


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file beside its place and move it there; its mode holds from its first byte on."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RunFault(f"{path}: {error.strerror}; choose a directory that can be written") from error
