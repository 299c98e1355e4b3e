"""Builds the Kubernetes control plane of tests and demos from `tools/controlplane`; `make controlplane` runs it.

The program is cached outside of the checkout, under a name that holds a digest of everything that it is built from, so
that it is built once for each version. A second build of the same version waits for the first. An incomplete program
never gets the final name.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MODULE: Final = Path(__file__).resolve().parent / "controlplane"
#: What decides which program is built; the flags of the linker are in this file.
SOURCES: Final = ("go.mod", "go.sum", "main.go")
#: `/version` of the API server says this; it is the version of k8s.io/kubernetes in go.mod.
KUBERNETES_VERSION: Final = "v1.37.1"
_VERSION_PACKAGE: Final = "k8s.io/component-base/version"
_DIGEST_CHARACTERS: Final = 16
#: How much of the compiler's words a failure repeats.
_TAIL_LINES: Final = 20


class ControlPlaneBuildFault(Exception):
    """The program cannot be built; the message says why and what to do."""


def linker_flags() -> str:
    """Return the value of `-ldflags`: no debug information, and the version that the programs report."""
    major, minor, _patch = KUBERNETES_VERSION.removeprefix("v").split(".")
    stamped = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{name}={value}" for name, value in stamped.items())])


def digest(module: Path = MODULE) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 over the sources and the linker's flags."""
    hashed = hashlib.sha256(linker_flags().encode())
    for name in SOURCES:
        hashed.update(name.encode() + b"\0" + (module / name).read_bytes() + b"\0")
    return hashed.hexdigest()[:_DIGEST_CHARACTERS]


def program_path(environment: Mapping[str, str], module: Path = MODULE) -> Path:
    """Return where the program of this version is cached, whether it exists or not."""
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache) / "bigfleet" / f"controlplane-{digest(module)}"


def build(target: Path, environment: Mapping[str, str], module: Path = MODULE) -> None:
    """Build the program unless it exists. Takes 10 to 30 minutes and 3.2 GB of memory when nothing is compiled yet.

    Raises ControlPlaneBuildFault.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if os.access(target, os.X_OK):
            return
        go = shutil.which("go", path=environment.get("PATH"))
        if go is None:
            raise ControlPlaneBuildFault("go is not on the PATH; install Go 1.26 or newer (https://go.dev/doc/install)")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as scratch:
            built = Path(scratch) / "controlplane"
            command = (go, "build", "-trimpath", "-ldflags", linker_flags(), "-o", str(built), ".")
            done = subprocess.run(  # noqa: S603 - arguments of ours, no shell
                command,
                cwd=module,
                env={**environment, "CGO_ENABLED": "0"},
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode != 0:
                said = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:]) or "it said nothing"
                raise ControlPlaneBuildFault(f"go build in {module} failed with exit {done.returncode}:\n{said}")
            built.replace(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file, for as long as the context lasts."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Build the program and print its path, or print the path alone; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.build_controlplane", description="Build the Kubernetes control plane."
    )
    parser.add_argument("--path", action="store_true", help="print where the program is cached and build nothing")
    asked = parser.parse_args(arguments)
    target = program_path(os.environ)
    if not asked.path:
        if not target.exists():
            sys.stderr.write(f"building {target}: 10 to 30 minutes, once for each version\n")
        try:
            build(target, os.environ)
        except ControlPlaneBuildFault as fault:
            sys.stderr.write(f"the Kubernetes control plane cannot be built: {fault}\n")
            return 1
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
