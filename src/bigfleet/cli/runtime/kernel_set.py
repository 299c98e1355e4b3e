"""Describes a set of compiled kernels on disk: what it was made from, and whether this process can use it.

A set is a directory with `manifest.json` and the files that Numba writes. It is used whole or not at all: a missing or
damaged file, other sources, another version of Python, Numba, LLVM or NumPy, and a processor that lacks an instruction
each make it unusable, with a reason. The manifest is written last.
"""

import functools
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

MANIFEST: Final = "manifest.json"
#: Functions that Numba compiles; each has an index file in a complete set.
KERNELS: Final = 51
#: What `examine` says of a directory without a manifest.
INCOMPLETE: Final = "there is no manifest.json"

#: Beside the columnar engine.
_MODULES: Final = ("model/states.py", "planner/compiled.py", "recording/kernel.py")
_DIGEST_CHARACTERS: Final = 16
_V2: Final = ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3: Final = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
#: Processors that a set can be made for beside the one at hand, and what a host must have to run it.
LEVELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "x86-64-v2": _V2,
        "x86-64-v3": _V3,
        "x86-64-v4": (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
    }
)


class KernelTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What compiled kernels depend on. Equal targets can use each other's files, wherever these are."""

    #: Digest of every module that holds kernels.
    sources: str
    #: Major and minor version: patch releases have one binary interface, as wheels rely on.
    python: str
    numba: str
    llvmlite: str
    numpy: str
    #: As LLVM names it, or one of `LEVELS`.
    cpu: str
    #: Instructions beyond those of `cpu`, as LLVM writes them.
    features: str

    @property
    def key(self) -> str:
        """A short digest of all fields."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:_DIGEST_CHARACTERS]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `manifest.json` says of a set."""

    target: KernelTarget
    #: Functions that are compiled.
    count: int
    #: SHA-256 of each file, by its path in the set.
    files: dict[str, str]


def current_target(cpu: str | None = None) -> KernelTarget:
    """Return the target of this process, or of one of `LEVELS`. Loads Numba, which takes about half a second."""
    import llvmlite
    import llvmlite.binding
    import numba
    import numpy as np

    config: Any = numba.config
    codegen: Any = import_module("numba.core.codegen")
    own_features = config.CPU_FEATURES
    if own_features is None:
        own_features = codegen.get_host_cpu_features()
    own_cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    return KernelTarget(
        sources=source_digest(),
        python=".".join(platform.python_version_tuple()[:2]),
        numba=numba.__version__,
        llvmlite=llvmlite.__version__,
        numpy=np.__version__,
        cpu=cpu or own_cpu,
        features="" if cpu else own_features,
    )


def read_manifest(directory: Path) -> Manifest | str:
    """Return the manifest of a set, or why there is none."""
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return INCOMPLETE
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    try:
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        return f"{MANIFEST} is damaged: {error}"


def examine(directory: Path, wanted: KernelTarget) -> Manifest | str:
    """Return the manifest of a set that this process can use, or why it cannot.

    `wanted` is the target of this process. A set that was made for one of `LEVELS` can be used where the host has every
    instruction of that level.
    """
    found = read_manifest(directory)
    if isinstance(found, str):
        return found
    target = found.target
    if target.sources != wanted.sources:
        return "it was made from other sources; build it again with `bigfleet kernels build`"
    for field in ("python", "numba", "llvmlite", "numpy"):
        made, here = getattr(target, field), getattr(wanted, field)
        if made != here:
            return f"it was made with {field} {made}, and this is {field} {here}"
    fault = _cpu_fault(target, wanted)
    if fault:
        return fault
    for name, digest in found.files.items():
        try:
            content = (directory / name).read_bytes()
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if hashlib.sha256(content).hexdigest() != digest:
            return f"{name} is damaged"
    return found


def _cpu_fault(target: KernelTarget, wanted: KernelTarget) -> str:
    if (target.cpu, target.features) == (wanted.cpu, wanted.features):
        return ""
    asked = os.environ.get("NUMBA_CPU_NAME")
    if asked and asked != target.cpu:
        return f"it was made for the processor {target.cpu}, and NUMBA_CPU_NAME asks for {asked}"
    if target.cpu not in LEVELS or target.features:
        return f"it was made for the processor {target.cpu} or its features, and this process compiles for {wanted.cpu}"
    missing = missing_features(target.cpu)
    return f"it was made for {target.cpu}, and this processor lacks {', '.join(missing)}" if missing else ""


def missing_features(level: str) -> list[str]:
    """Return the instructions of one of `LEVELS` that this host lacks."""
    import llvmlite.binding

    if platform.machine() != "x86_64":
        return [f"x86-64 (it is {platform.machine()})"]
    host = llvmlite.binding.get_host_cpu_features()
    return [feature for feature in LEVELS[level] if not host.get(feature)]


def write_manifest(directory: Path, target: KernelTarget) -> Manifest:
    """Declare the set complete: write the manifest of the files that it has now, and return it."""
    contents = dict(_files_of(directory))
    count = sum(name.endswith(".nbi") for name in contents)
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in contents.items()}
    manifest = Manifest(target, count, digests)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    draft = directory / f"{MANIFEST}.new"
    draft.write_bytes(text + b"\n")
    draft.replace(directory / MANIFEST)
    return manifest


def _files_of(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(directory.rglob("*.nb[ci]")):
        yield str(path.relative_to(directory)), path


def source_modules() -> dict[str, Traversable]:
    """Return the modules that kernels are made of, by their paths in the package: kernels, and the values they fix."""
    found: dict[str, Traversable] = {}
    root = files("bigfleet")
    waiting = [("engine/columnar", root / "engine" / "columnar")]
    while waiting:
        name, folder = waiting.pop()
        for entry in folder.iterdir():
            path = f"{name}/{entry.name}"
            if entry.is_dir():
                waiting.append((path, entry))
            elif entry.name.endswith(".py"):
                found[path] = entry
    return found | {name: root.joinpath(*name.split("/")) for name in _MODULES}


@functools.cache
def source_digest() -> str:
    """Return a digest of `source_modules`, names and contents, as they were when this process asked first."""
    digest = hashlib.sha256()
    for name, module in sorted(source_modules().items()):
        digest.update(name.encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGEST_CHARACTERS]
