"""Defines `python -m tools.image build DIR` and `python -m tools.image lock`."""

import argparse
import os
import sys
from pathlib import Path

from tools.image.build import build
from tools.image.debian import LOCK, RELEASE, newest
from tools.image.faults import ImageFault
from tools.image.wheels import image_extras

_HEAD = f"# Debian {RELEASE}, for the image: `make image-lock` writes the newest versions."


def main(arguments: list[str]) -> int:
    """Build the image, or write the lock file of Debian's packages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.image", description="Build the container image.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write the image as an OCI layout")
    building.add_argument("target", type=Path, metavar="DIR")
    building.add_argument(
        "--extras", metavar="NAMES", help=f"some of the extras {' '.join(image_extras())}; all of them by default"
    )
    commands.add_parser("lock", help="write the newest versions of Debian's packages to the lock file")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "lock":
            lines = [str(pinned) for pinned in newest(os.environ)]
            LOCK.write_text("\n".join([_HEAD, *lines, ""]), encoding="utf-8")
            sys.stdout.write(f"{len(lines)} packages in {LOCK}\n")
            return 0
        extras = None if chosen.extras is None else chosen.extras.split()
        made = build(chosen.target, os.environ, lambda text: sys.stderr.write(f"{text}\n"), extras)
    except ImageFault as fault:
        sys.stderr.write(f"the image cannot be built: {fault}\n")
        return 1
    sys.stdout.write(
        f"{chosen.target}: {made.digest}, {made.files:,} files, {made.unpacked_bytes / 1e6:.0f} MB,"
        f" {made.compressed_bytes / 1e6:.0f} MB compressed\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
