"""Writes tar archives that depend on nothing but names, contents and one time."""

import gzip
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_COMPRESSION: Final = 9


def files_below(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Return the files below a folder by their names in an archive, sorted; links are files like those they lead to."""
    found = (Path(parent) / name for parent, _folders, names in os.walk(folder, followlinks=True) for name in names)
    named = {f"{prefix}{path.relative_to(folder).as_posix()}": path for path in found}
    return {name: named[name] for name in sorted(named)}


def write_tar(target: Path, files: Mapping[str, Path], timestamp: int, *, is_compressed: bool) -> Path:
    """Write files in the given order and return the archive; every file has mode 0644, owner root and the time."""
    with target.open("wb") as written:
        if is_compressed:
            with gzip.GzipFile("", "wb", _COMPRESSION, written, mtime=0) as packing:
                _write(packing, files, timestamp)
        else:
            _write(written, files, timestamp)
    return target


def _write(stream: io.BufferedWriter | gzip.GzipFile, files: Mapping[str, Path], timestamp: int) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = path.stat().st_size, timestamp, 0o644
            with path.open("rb") as content:
                archive.addfile(entry, content)
