"""Writes the seed of cloud-init: an ISO 9660 image with the label CIDATA and the files meta-data and user-data.

docs/spec/libvirt-provider.md §4. The names are there twice, as ISO 9660 and as Joliet: without extensions Linux shows
the former in lower case, and every other system reads the latter. All seeds have one size, so that one replaces the
bytes of another in place.
"""

import json
import struct
from collections.abc import Mapping
from typing import Final

_SECTOR: Final = 2048
#: A blob of 1 MiB fits.
SEED_BYTES: Final = 768 * _SECTOR
USER_DATA_BYTES_MAX: Final = 1 << 20
_LABEL: Final = "CIDATA"
_PRIMARY, _JOLIET, _END, _TABLES, _ROOT, _JOLIET_ROOT, _FILES = 16, 17, 18, 19, 23, 24, 25
#: No date: equal content has equal bytes.
_NO_DATE: Final = b"0" * 16 + b"\0"


def seed_image(*, instance_id: str, host_name: str, user_data: bytes) -> bytes:
    """Return the image. Raises ValueError for user data above USER_DATA_BYTES_MAX."""
    if len(user_data) > USER_DATA_BYTES_MAX:
        raise ValueError(f"user data has {len(user_data)} bytes, at most {USER_DATA_BYTES_MAX} are possible")
    # JSON is YAML.
    meta_data = json.dumps({"instance-id": instance_id, "local-hostname": host_name}).encode() + b"\n"
    return _iso({"meta-data": meta_data, "user-data": user_data})


def _iso(files: Mapping[str, bytes]) -> bytes:
    places: dict[str, tuple[int, int]] = {}
    sector = _FILES
    for name, content in files.items():
        places[name] = (sector, len(content))
        sector += -(-len(content) // _SECTOR)
    total = SEED_BYTES // _SECTOR
    assert sector <= total, "the limit of the user data leaves room"
    image = bytearray(SEED_BYTES)

    def put(at: int, content: bytes) -> None:
        image[at * _SECTOR : at * _SECTOR + len(content)] = content

    put(_PRIMARY, _descriptor(1, _LABEL.encode(), b" ", _ROOT, _TABLES, total))
    put(_JOLIET, _descriptor(2, _LABEL.encode("utf-16-be"), b"\0 ", _JOLIET_ROOT, _TABLES + 2, total))
    put(_END, b"\xffCD001\x01")
    for at, root in ((_TABLES, _ROOT), (_TABLES + 2, _JOLIET_ROOT)):
        put(at, b"\x01\0" + struct.pack("<IH", root, 1) + b"\0\0")
        put(at + 1, b"\x01\0" + struct.pack(">IH", root, 1) + b"\0\0")
    primary = {f"{name.upper()}.;1".encode(): place for name, place in places.items()}
    put(_ROOT, _directory(_ROOT, primary))
    put(_JOLIET_ROOT, _directory(_JOLIET_ROOT, {f"{name};1".encode("utf-16-be"): p for name, p in places.items()}))
    for name, content in files.items():
        put(places[name][0], content)
    return bytes(image)


def _both(value: int) -> bytes:
    return struct.pack("<I", value) + struct.pack(">I", value)


def _both_short(value: int) -> bytes:
    return struct.pack("<H", value) + struct.pack(">H", value)


def _entry(name: bytes, sector: int, size: int, *, is_directory: bool) -> bytes:
    length = 33 + len(name) + (1 - len(name) % 2)
    head = bytes([length, 0]) + _both(sector) + _both(size) + bytes(7)
    return (head + bytes([2 if is_directory else 0, 0, 0]) + _both_short(1) + bytes([len(name)]) + name).ljust(
        length, b"\0"
    )


def _directory(own: int, files: Mapping[bytes, tuple[int, int]]) -> bytes:
    entries = [_entry(name, own, _SECTOR, is_directory=True) for name in (b"\0", b"\x01")]
    entries += [_entry(name, sector, size, is_directory=False) for name, (sector, size) in sorted(files.items())]
    return b"".join(entries)


def _descriptor(kind: int, label: bytes, blank: bytes, root: int, tables: int, total: int) -> bytes:
    """Return a volume descriptor; kind 2 is Joliet's, whose text is UCS-2."""

    def text(content: bytes, length: int) -> bytes:
        return (content + blank * length)[: length // len(blank) * len(blank)].ljust(length, b"\0")

    escapes = b"%/E" if kind == 2 else b""
    return b"".join(
        (
            bytes([kind]) + b"CD001\x01\0",
            text(b"", 32) + text(label, 32) + bytes(8),
            _both(total) + escapes.ljust(32, b"\0"),
            _both_short(1) + _both_short(1) + _both_short(_SECTOR) + _both(10),
            struct.pack("<II", tables, 0) + struct.pack(">II", tables + 1, 0),
            _entry(b"\0", root, _SECTOR, is_directory=True),
            text(b"", 128 * 4) + text(b"", 37 * 3),
            _NO_DATE * 4 + b"\x01\0",
        )
    )
