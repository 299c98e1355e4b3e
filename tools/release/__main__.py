"""Defines `python -m tools.release`: build, check, kernel-wheel. Exit 1 for a release that is not sound."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.image.faults import ImageFault
from tools.image.wheels import ROOT
from tools.release.build import build_release
from tools.release.check import check_release
from tools.release.checksums import read_private_key
from tools.release.commit import current_commit
from tools.release.faults import ReleaseFault
from tools.release.kernel_wheel import make_kernel_wheel


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run one command and return the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        for line in _run(chosen, environment):
            sys.stdout.write(f"{line}\n")
    except (ReleaseFault, ImageFault) as fault:
        sys.stderr.write(f"{chosen.command}: {fault}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Build and check a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write the artefacts of this commit, with checksums")
    building.add_argument("folder", type=Path, metavar="DIR")
    building.add_argument("--image", type=Path, required=True, metavar="LAYOUT", help="what `make image` wrote")
    building.add_argument("--sbom", type=Path, required=True, metavar="FILE", help="what `make sbom` wrote")
    building.add_argument(
        "--key", type=Path, metavar="FILE", help="private key of Ed25519 (PEM) that signs the checksums"
    )
    checking = commands.add_parser("check", help="verify checksums and signature; build the sources again")
    checking.add_argument("folder", type=Path, metavar="DIR")
    checking.add_argument("--public-key", type=Path, metavar="FILE", help="key of Ed25519 (PEM) that must have signed")
    kernels = commands.add_parser("kernel-wheel", help="make the wheel of a set from `bigfleet kernels build --to SET`")
    kernels.add_argument("kernels", type=Path, metavar="SET")
    kernels.add_argument("folder", type=Path, metavar="DIR")
    return parser


def _run(chosen: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    match chosen.command:
        case "build":
            key = read_private_key(chosen.key) if chosen.key else None
            commit = current_commit(ROOT, environment)
            return build_release(
                chosen.folder, commit, image=chosen.image, sbom=chosen.sbom, key=key, environment=environment
            )
        case "check":
            return check_release(chosen.folder, chosen.public_key, environment)
        case _:
            commit = current_commit(ROOT, environment)
            chosen.folder.mkdir(parents=True, exist_ok=True)
            licence = (ROOT / "LICENSE").read_bytes()
            made = make_kernel_wheel(
                chosen.kernels, chosen.folder, version=commit.version, licence=licence, timestamp=commit.timestamp
            )
            return [str(made)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
