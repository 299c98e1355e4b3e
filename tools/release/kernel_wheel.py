"""Makes the wheel bigfleet-kernels of a set of compiled kernels.

The wheel installs the package bigfleet_kernels, which is the set and nothing else. Its metadata wants exactly the
versions of Numba, llvmlite and NumPy, and the minor version of Python, that the set was made with; its tag is that of
Numba's own wheel. Equal sets make equal wheels.
"""

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bigfleet.cli.runtime.kernel_cache import SHIPPED_PACKAGE
from bigfleet.cli.runtime.kernel_set import KERNELS, LEVELS, MANIFEST, Manifest, read_manifest, source_digest
from tools.release.faults import ReleaseFault

_COMPRESSION: Final = 9
_MODULE: Final = '"""Holds the compiled kernels of BigFleet, which finds them by this package."""\n'
_REBUILD: Final = "build the set from this commit: bigfleet kernels build --to DIR --cpu x86-64-v3"


def make_kernel_wheel(
    kernels: Path, folder: Path, *, version: str, licence: bytes, timestamp: int, is_portable: bool = True
) -> Path:
    """Write the wheel of a set into a folder and return it.

    `timestamp` is the time of all entries, in seconds since the epoch, and `is_portable` refuses a set for the
    processor of one host. Raises ReleaseFault for a set that is not whole, or not of these sources.
    """
    manifest = _checked(kernels, is_portable=is_portable)
    python = f"cp{manifest.target.python.replace('.', '')}"
    platforms = _platforms(manifest)
    tag = f"{python}-{python}-{'.'.join(platforms)}"
    distribution = f"{SHIPPED_PACKAGE}-{version}.dist-info"
    entries = {
        f"{SHIPPED_PACKAGE}/__init__.py": _MODULE.encode(),
        f"{SHIPPED_PACKAGE}/{MANIFEST}": (kernels / MANIFEST).read_bytes(),
        **{f"{SHIPPED_PACKAGE}/{name}": (kernels / name).read_bytes() for name in manifest.files},
        f"{distribution}/METADATA": _metadata(manifest, version).encode(),
        f"{distribution}/WHEEL": _wheel_file(python, platforms).encode(),
        f"{distribution}/licenses/LICENSE": licence,
    }
    entries[f"{distribution}/RECORD"] = _record(entries, f"{distribution}/RECORD").encode()
    target = folder / f"{SHIPPED_PACKAGE}-{version}-{tag}.whl"
    target.write_bytes(_zipped(entries, timestamp))
    return target


def _checked(kernels: Path, *, is_portable: bool) -> Manifest:
    manifest = read_manifest(kernels)
    if isinstance(manifest, str):
        raise ReleaseFault(f"{kernels} is no set of kernels: {manifest}; {_REBUILD}")
    if manifest.target.sources != source_digest():
        raise ReleaseFault(f"{kernels} was made from other sources; {_REBUILD}")
    if is_portable and (manifest.target.cpu not in LEVELS or manifest.target.features):
        raise ReleaseFault(f"{kernels} was made for the processor {manifest.target.cpu} and its features; {_REBUILD}")
    if manifest.count != KERNELS:
        raise ReleaseFault(f"{kernels} has {manifest.count} of {KERNELS} kernels; {_REBUILD}")
    for name, digest in manifest.files.items():
        if hashlib.sha256((kernels / name).read_bytes()).hexdigest() != digest:
            raise ReleaseFault(f"{kernels / name} is damaged; {_REBUILD}")
    return manifest


def _platforms(manifest: Manifest) -> list[str]:
    """Return the platforms of Numba's own wheel: kernels run where that Numba runs."""
    numba = importlib.metadata.distribution("numba")
    if numba.version != manifest.target.numba:
        raise ReleaseFault(
            f"the set was made with numba {manifest.target.numba}, and numba {numba.version} is installed here;"
            " install requirements.lock"
        )
    lines = (numba.read_text("WHEEL") or "").splitlines()
    return sorted({line.rpartition("-")[2] for line in lines if line.startswith("Tag: ")})


def _metadata(manifest: Manifest, version: str) -> str:
    made = manifest.target
    return "\n".join(
        [
            "Metadata-Version: 2.4",
            "Name: bigfleet-kernels",
            f"Version: {version}",
            f"Summary: Compiled kernels of BigFleet {version}, for {made.cpu}",
            "License-Expression: Apache-2.0",
            "License-File: LICENSE",
            f"Requires-Python: =={made.python}.*",
            f"Requires-Dist: llvmlite=={made.llvmlite}",
            f"Requires-Dist: numba=={made.numba}",
            f"Requires-Dist: numpy=={made.numpy}",
            "",
        ]
    )


def _wheel_file(python: str, platforms: list[str]) -> str:
    tags = "".join(f"Tag: {python}-{python}-{platform}\n" for platform in platforms)
    return f"Wheel-Version: 1.0\nGenerator: bigfleet tools.release\nRoot-Is-Purelib: false\n{tags}"


def _record(entries: Mapping[str, bytes], own: str) -> str:
    def lines() -> Iterator[str]:
        for name, content in entries.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            yield f"{name},sha256={digest},{len(content)}\n"
        yield f"{own},,\n"

    return "".join(lines())


def _zipped(entries: Mapping[str, bytes], timestamp: int) -> bytes:
    written = io.BytesIO()
    when = datetime.fromtimestamp(timestamp, UTC)
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in entries.items():
            entry = zipfile.ZipInfo(name, (when.year, when.month, when.day, when.hour, when.minute, when.second))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content, compresslevel=_COMPRESSION)
    return written.getvalue()
