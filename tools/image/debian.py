"""Fetches the packages of Debian that the image consists of, and unpacks them.

The lock file names each with version and SHA-256. Their scripts are not run: what these would make is made here.
"""

import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.bill_of_materials import Component
from tools.image.commands import run
from tools.image.faults import ImageFault
from tools.unpacking import filtered

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / "deploy" / "image" / "debian.lock"
#: The release that the lock file is of; its Python is that of the image.
RELEASE: Final = "bookworm"
ARCHITECTURE: Final = "amd64"
#: What Python and the packages of requirements.lock load. There is no shell, and no manager of packages.
PACKAGES: Final = (
    "base-files",
    "ca-certificates",
    # The licence of what GCC makes.
    "gcc-12-base",
    "libbz2-1.0",
    "libc6",
    "libcrypt1",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "liblzma5",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libuuid1",
    "python3.11-minimal",
    "zlib1g",
)
#: What is not unpacked. Licences, in usr/share/doc/*/copyright, are.
_LEFT_OUT: Final = re.compile(
    r"usr/share/(base-files|binfmts|bug|gcc|gdb|info|lintian|locale|man)/"
    r"|usr/share/doc/[^/]+/(?!copyright$)"
    r"|usr/lib/x86_64-linux-gnu/(audit|engines-3|gconv)/"
    # They need libraries that the image does not have: for terminals, dbm and NIS.
    r"|usr/lib/python3\.11/lib-dynload/(_curses|_curses_panel|_dbm|nis|readline)\."
    r"|usr/lib/python3\.11/(test|pydoc_data)/"
    # For people who log in.
    r"|etc/(dpkg|issue|issue\.net|profile\.d|update-motd\.d)"
)
_LINE: Final = re.compile(r"^(?P<name>[a-z0-9.+-]+)=(?P<version>\S+) sha256:(?P<digest>[0-9a-f]{64})$")
_AUTHORITIES: Final = "usr/share/ca-certificates/mozilla"
_BUNDLE: Final = "etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, slots=True)
class Pinned:
    """A line of the lock file."""

    name: str
    version: str
    #: SHA-256 of the package's file.
    digest: str

    def __str__(self) -> str:
        """Return the line."""
        return f"{self.name}={self.version} sha256:{self.digest}"

    @property
    def component(self) -> Component:
        """The package for a bill of materials."""
        version = urllib.parse.quote(self.version, safe="")
        purl = f"pkg:deb/debian/{self.name}@{version}?arch={ARCHITECTURE}&distro={RELEASE}"
        return Component(self.name, self.version, purl, (self.digest,))


def locked(lock: Path = LOCK) -> list[Pinned]:
    """Return the packages of the lock file in its order. Raises ImageFault for a line that is none."""
    found = []
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ImageFault(f"{lock}:{number}: {line!r} is not NAME=VERSION sha256:DIGEST")
        found.append(Pinned(match["name"], match["version"], match["digest"]))
    return found


def fetch(wanted: Sequence[Pinned], cache: Path, environment: Mapping[str, str]) -> list[Path]:
    """Return the files of packages, from the cache or else from apt, in their order. Raises ImageFault."""
    cache.mkdir(parents=True, exist_ok=True)
    places = [cache / f"{pinned.digest}.deb" for pinned in wanted]
    missing = [pinned for pinned, place in zip(wanted, places, strict=True) if not _is_sound(place)]
    with _downloaded([f"{pinned.name}={pinned.version}" for pinned in missing], cache, environment) as files:
        for pinned in missing:
            file = files[pinned.name]
            digest = _digest(file)
            if digest != pinned.digest:
                raise ImageFault(
                    f"{pinned.name} {pinned.version} has the digest {digest}, and {LOCK} has {pinned.digest}; find out"
                    " what has changed before you run `make image-lock`"
                )
            file.replace(cache / f"{digest}.deb")
    return places


def newest(environment: Mapping[str, str]) -> list[Pinned]:
    """Return the newest version of each package that apt knows, with its digest. Raises ImageFault."""
    with tempfile.TemporaryDirectory() as scratch, _downloaded(PACKAGES, Path(scratch), environment) as files:
        return [
            Pinned(name, run(["dpkg-deb", "--field", file, "Version"], environment=environment).strip(), _digest(file))
            for name, file in sorted(files.items())
        ]


@contextmanager
def _downloaded(wanted: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """Have apt download packages into a folder that ends with the context; yield their files by their names."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if wanted:
            run(
                # Its own user may not write to the folder.
                ["apt-get", "--option", "APT::Sandbox::User=root", "--quiet", "download", *wanted],
                f"on Debian {RELEASE} for {ARCHITECTURE}, run `apt-get update`, and `make image-lock` if Debian has"
                " replaced a version",
                folder=Path(scratch),
                environment=environment,
            )
        yield {file.name.partition("_")[0]: file for file in Path(scratch).glob("*.deb")}


def _is_sound(cached: Path) -> bool:
    return cached.is_file() and f"{_digest(cached)}.deb" == cached.name


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def unpack(file: Path, root: Path, environment: Mapping[str, str]) -> None:
    """Unpack a package below a root. What it is stays on record where scanners of images look."""
    with subprocess.Popen(  # noqa: S603 - arguments of ours, no shell
        ["dpkg-deb", "--fsys-tarfile", str(file)],  # noqa: S607 - Debian has it on the path
        stdout=subprocess.PIPE,
        env=dict(environment),
    ) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in filtered(archive, "tar"):
                name = member.name.removeprefix("./")
                # Folders are made for what is in them.
                if not member.isdir() and not _LEFT_OUT.match(name):
                    archive.extract(member, root, set_attrs=False)
                    if member.isfile():
                        (root / name).chmod(member.mode)
    if unpacking.returncode:
        raise ImageFault(f"{file} cannot be unpacked: dpkg-deb ended with {unpacking.returncode}")
    described = run(["dpkg-deb", "--field", file], environment=environment)
    (name,) = re.findall(r"^Package: (.*)$", described, re.MULTILINE)
    record = root / "var" / "lib" / "dpkg" / "status.d" / name
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"{described.rstrip()}\nStatus: install ok installed\n", encoding="utf-8")


def make_bundle(root: Path) -> None:
    """Write the file of public authorities, which the script of ca-certificates would write."""
    authorities = root / _AUTHORITIES
    bundle = root / _BUNDLE
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(path.read_bytes() for path in sorted(authorities.glob("*.crt"))))
    shutil.rmtree(authorities)
