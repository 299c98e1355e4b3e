"""The seed of cloud-init is an image that ISO 9660 readers understand (docs/spec/libvirt-provider.md §4)."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from bigfleet.provider.backends.libvirt.seed import SEED_BYTES, USER_DATA_BYTES_MAX, seed_image

SECTOR = 2048


def image(user_data: bytes) -> bytes:
    return seed_image(instance_id="op-1", host_name="bf-x", user_data=user_data)


def read(content: bytes, descriptor: int) -> dict[bytes, bytes]:
    """Return the files of an image by the names that one of its descriptors gives them."""
    (root,) = struct.unpack_from("<I", content, descriptor * SECTOR + 156 + 2)
    files, at = {}, root * SECTOR
    while content[at]:
        length, flags, size_of_name = content[at], content[at + 25], content[at + 32]
        sector, size = struct.unpack_from("<I", content, at + 2)[0], struct.unpack_from("<I", content, at + 10)[0]
        if not flags & 2:
            files[content[at + 33 : at + 33 + size_of_name]] = content[sector * SECTOR : sector * SECTOR + size]
        at += length
    return files


@pytest.mark.parametrize("size", [0, 1, SECTOR, SECTOR + 1, USER_DATA_BYTES_MAX])
def test_both_directories_name_both_files(size: int) -> None:
    user_data = (bytes(range(251)) * (size // 251 + 1))[:size]
    content = image(user_data)
    meta_data = b'{"instance-id": "op-1", "local-hostname": "bf-x"}\n'
    assert len(content) == SEED_BYTES
    assert read(content, 16) == {b"META-DATA.;1": meta_data, b"USER-DATA.;1": user_data}
    joliet = {name.decode("utf-16-be"): body for name, body in read(content, 17).items()}
    assert joliet == {"meta-data;1": meta_data, "user-data;1": user_data}


def test_user_data_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="user data has 1048577 bytes, at most 1048576 are possible"):
        image(bytes(USER_DATA_BYTES_MAX + 1))


@pytest.mark.skipif(shutil.which("isoinfo") is None, reason="needs isoinfo, of the package genisoimage")
def test_isoinfo_reads_it(tmp_path: Path) -> None:
    (tmp_path / "seed.iso").write_bytes(image(b"#cloud-config\n"))

    def isoinfo(*arguments: str) -> str:
        return subprocess.run(
            ["isoinfo", "-i", str(tmp_path / "seed.iso"), *arguments], capture_output=True, text=True, check=True
        ).stdout

    description = isoinfo("-d")
    assert "Volume id: CIDATA" in description
    assert "Joliet with UCS level 3 found" in description
    assert isoinfo("-J", "-x", "/user-data;1") == "#cloud-config\n"
