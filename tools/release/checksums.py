"""Writes, signs and verifies the checksums of a release.

`SHA256SUMS` has one line for each file, as `sha256sum --check` reads it. `SHA256SUMS.sig` is the Ed25519 signature of
its bytes, as `openssl pkeyutl -verify -rawin` reads it.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tools.release.faults import ReleaseFault

CHECKSUMS: Final = "SHA256SUMS"
SIGNATURE: Final = "SHA256SUMS.sig"
_LINE: Final = re.compile(r"([0-9a-f]{64})  (\S+)")
_CHUNK_BYTES: Final = 1 << 20
_MAKE_KEY: Final = "make one: openssl genpkey -algorithm ed25519 -out KEY"


def write_checksums(folder: Path) -> None:
    """Write the checksums of every file of a release, in the order of the names."""
    files = _files(folder)
    text = "".join(f"{_digest(files[name])}  {name}\n" for name in sorted(files))
    (folder / CHECKSUMS).write_text(text, encoding="utf-8")


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the key of a PEM file. Raises ReleaseFault when it is none, or not one of Ed25519."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ReleaseFault(f"{path} cannot be read: {error.strerror}") from None
    except TypeError:
        raise ReleaseFault(f"{path} is encrypted; decrypt it: openssl pkey -in {path} -out KEY") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ReleaseFault(f"{path} is no private key; {_MAKE_KEY}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ReleaseFault(f"{path} is no key of Ed25519; {_MAKE_KEY}")
    return key


def sign(folder: Path, key: Ed25519PrivateKey) -> None:
    """Sign the checksums of a release."""
    (folder / SIGNATURE).write_bytes(key.sign((folder / CHECKSUMS).read_bytes()))


def verify_signature(folder: Path, public_key: Path) -> None:
    """Raise ReleaseFault unless the checksums are signed by the key of a PEM file."""
    try:
        key = serialization.load_pem_public_key(public_key.read_bytes())
        signature = (folder / SIGNATURE).read_bytes()
        signed = (folder / CHECKSUMS).read_bytes()
    except OSError as error:
        raise ReleaseFault(f"{error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ReleaseFault(f"{public_key} is no public key; make it: openssl pkey -in KEY -pubout -out PUB") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ReleaseFault(f"{public_key} is no key of Ed25519")
    try:
        key.verify(signature, signed)
    except InvalidSignature:
        raise ReleaseFault(f"{folder / CHECKSUMS} is not signed by {public_key}: do not use the release") from None


def verify_checksums(folder: Path) -> list[str]:
    """Return the names of the files of a release, each as it was written.

    Raises ReleaseFault for a file that is missing, damaged or not listed.
    """
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReleaseFault(f"{folder} is no release: {CHECKSUMS}: {error.strerror}") from None
    files = _files(folder)
    listed: list[str] = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ReleaseFault(f"{folder / CHECKSUMS}:{number}: {line!r} is not DIGEST  NAME")
        if match[2] not in files:
            raise ReleaseFault(f"{folder / match[2]} is missing; copy the release again")
        if _digest(files[match[2]]) != match[1]:
            raise ReleaseFault(f"{folder / match[2]} is damaged; copy the release again")
        listed.append(match[2])
    foreign = sorted(files.keys() - set(listed))
    if foreign:
        raise ReleaseFault(f"{folder / foreign[0]} is not listed in {CHECKSUMS}; it is not of this release")
    return listed


def _files(folder: Path) -> dict[str, Path]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name not in (CHECKSUMS, SIGNATURE)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
