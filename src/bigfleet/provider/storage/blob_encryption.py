"""Encrypts bootstrap blobs at rest, so that a Configure can be driven again after a restart.

AES-256-GCM with the author's key. Machine and operation are bound to the ciphertext, so a row that was moved to another
machine cannot be decrypted. A blob is stored only through this module, and never longer than its Configure runs.
"""

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded
from bigfleet.model.ids import Rng

KEY_BYTES = 32
_NONCE_BYTES = 12


class KeyFault(Exception):
    """The key file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A blob as it is stored."""

    machine_id: str
    operation_id: str
    text: bytes = field(repr=False)


class BlobKey:
    """Seals and opens. `rng` must be the operating system's outside of tests: a nonce must not repeat."""

    def __init__(self, key: bytes, rng: Rng) -> None:
        if len(key) != KEY_BYTES:
            raise KeyFault(f"has {len(key)} bytes, it must have {KEY_BYTES}")
        self._cipher = AESGCM(key)
        self._rng = rng

    def seal(self, blob: bytes, machine_id: str, operation_id: str) -> Sealed:
        """Return the blob encrypted for one operation of one machine."""
        nonce = self._rng.getrandbits(8 * _NONCE_BYTES).to_bytes(_NONCE_BYTES, "big")
        text = nonce + self._cipher.encrypt(nonce, blob, _bound_to(machine_id, operation_id))
        return Sealed(machine_id=machine_id, operation_id=operation_id, text=text)

    def open(self, sealed: Sealed) -> bytes | None:
        """Return the blob, or None when it was sealed with another key, for another operation, or altered."""
        nonce, text = sealed.text[:_NONCE_BYTES], sealed.text[_NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, text, _bound_to(sealed.machine_id, sealed.operation_id))
        except (InvalidTag, ValueError):
            return None


def _bound_to(machine_id: str, operation_id: str) -> bytes:
    # Neither id contains the separator: ids of machines have no control characters.
    return f"{machine_id}\x00{operation_id}".encode()


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raises KeyFault when it cannot be read or is not a key."""
    try:
        key = read_bounded(path, CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise KeyFault(f"cannot be read: {error.strerror or error}; name a file of {KEY_BYTES} bytes") from error
    if len(key) != KEY_BYTES:
        raise KeyFault(f"has {len(key)} bytes, it must have {KEY_BYTES}, raw: head -c 32 /dev/urandom > FILE")
    return key
