"""Writes a root file system as an image in an OCI layout.

Everything follows from the arguments: owners, times and order of the files are set, and compression writes no time.
"""

import gzip
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from tools.unpacking import filtered

_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_COMPRESSION: Final = 6
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Described:
    """What was made."""

    #: Of the manifest: what a registry and `image@sha256:…` call the image.
    digest: str
    #: Of the configuration: equal even where another version of zlib has compressed the layers.
    image_id: str
    #: Bytes of the layout's blobs, as they are downloaded.
    compressed_bytes: int
    #: Bytes of all files.
    unpacked_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Appearance:
    """What the files and the image say of themselves beside their content."""

    #: Seconds since the epoch; every file and the image have it.
    timestamp: int
    #: Owner and mode of paths that differ: every other one is root's.
    owners: Mapping[str, tuple[int, int]]
    #: The configuration's part `config`.
    config: Mapping[str, Any]


def write_layout(
    root: Path, target: Path, appearance: Appearance, layers: Sequence[Callable[[str], bool]], name: str
) -> Described:
    """Write the files below a root, each into the first layer that wants its path, as an image of this name.

    The folder `target` must not exist. A path is relative to the root, without a slash before it.
    """
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    paths = [str(path.relative_to(root)) for path in _sorted_files(root)]
    chosen: list[list[str]] = [[] for _ in layers]
    for path in paths:
        chosen[next(number for number, wants in enumerate(layers) if wants(path))].append(path)
    written = [_write_layer(root, group, blobs, appearance) for group in chosen]
    created = datetime.fromtimestamp(appearance.timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = _write_json(
        blobs,
        _CONFIG,
        {
            "created": created,
            "architecture": "amd64",
            "os": "linux",
            "config": appearance.config,
            "rootfs": {"type": "layers", "diff_ids": [diff for _descriptor, diff in written]},
            "history": [{"created": created, "created_by": "bigfleet tools.image"} for _ in written],
        },
    )
    descriptors = [descriptor for descriptor, _diff in written]
    manifest = _write_json(
        blobs, _MANIFEST, {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": descriptors}
    )
    index = {
        "schemaVersion": 2,
        "mediaType": _INDEX,
        "manifests": [{**manifest, "annotations": {"org.opencontainers.image.ref.name": name}}],
    }
    (target / "index.json").write_bytes(_json(index))
    (target / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return Described(
        digest=manifest["digest"],
        image_id=config["digest"],
        compressed_bytes=sum(path.stat().st_size for path in blobs.iterdir()),
        unpacked_bytes=sum(each.lstat().st_size for each in _sorted_files(root) if stat.S_ISREG(each.lstat().st_mode)),
        files=len(paths),
    )


def unpack_layout(layout: Path, root: Path) -> Mapping[str, Any]:
    """Unpack the only image of a layout below a root, with owners if this is root; return its configuration."""
    (listed,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    manifest = json.loads(read_blob(layout, listed["digest"]))
    for layer in manifest["layers"]:
        with tarfile.open(fileobj=io.BytesIO(read_blob(layout, layer["digest"])), mode="r:gz") as archive:
            filtered(archive, "fully_trusted").extractall(root)  # noqa: S202 - our own, and its digest was compared
    found: Mapping[str, Any] = json.loads(read_blob(layout, manifest["config"]["digest"]))["config"]
    return found


def read_blob(layout: Path, digest: str) -> bytes:
    """Return a blob, whose digest is compared. Raises ValueError when it differs."""
    content = layout.joinpath("blobs", *digest.split(":")).read_bytes()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise ValueError(f"the blob {digest} of {layout} is damaged")
    return content


def _sorted_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)


class _Stream(Protocol):
    """What can be written to."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...


class _Digesting:
    """A stream that hashes what is written to another one."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._hashed = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hashed.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hashed.hexdigest()}"


def _write_layer(root: Path, paths: Iterable[str], blobs: Path, appearance: Appearance) -> tuple[dict[str, Any], str]:
    """Write one layer; return its descriptor and the digest of what it unpacks to."""
    draft = blobs / "layer.new"
    with draft.open("wb") as file:
        compressed = _Digesting(file)
        with gzip.GzipFile("", "wb", _COMPRESSION, compressed, mtime=0) as packing:
            plain = _Digesting(packing)
            with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
                for entry, path in _entries(root, paths, appearance):
                    if entry.isreg():
                        with path.open("rb") as content:
                            archive.addfile(entry, content)
                    else:
                        archive.addfile(entry)
    size = draft.stat().st_size
    draft.replace(blobs / compressed.digest.partition(":")[2])
    return {"mediaType": _LAYER, "digest": compressed.digest, "size": size}, plain.digest


def _entries(root: Path, paths: Iterable[str], appearance: Appearance) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    for name in paths:
        path = root / name
        entry = tarfile.TarInfo(name)
        entry.mtime = appearance.timestamp
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        elif stat.S_ISDIR(mode):
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        else:
            # Hard links of packages become files of their own.
            entry.size, entry.mode = path.stat().st_size, 0o755 if mode & 0o100 else 0o644
        if name in appearance.owners:
            owner, entry.mode = appearance.owners[name]
            entry.uid = entry.gid = owner
        yield entry, path


def _write_json(blobs: Path, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Write a blob and return its descriptor."""
    text = _json(value)
    digest = hashlib.sha256(text).hexdigest()
    (blobs / digest).write_bytes(text)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(text)}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
