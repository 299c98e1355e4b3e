"""Fetches the wheels that requirements-image.lock pins, makes BigFleet's own, and unpacks them."""

import configparser
import ensurepip
import hashlib
import importlib.util
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

from tools.bill_of_materials import Component, python_component
from tools.image.commands import run
from tools.image.faults import ImageFault

ROOT: Final = Path(__file__).resolve().parents[2]
#: What running BigFleet needs, with the extras `aws` and `uvloop`.
LOCK: Final = ROOT / "requirements-image.lock"
PYTHON: Final = "3.11"
#: Oldest first; the C library of Debian 12 is 2.36.
_PLATFORMS: Final = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)))
_MARKERS: Final = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.2",
    "python_version": PYTHON,
    "sys_platform": "linux",
}
_REQUIREMENT: Final = re.compile(r"^[A-Za-z0-9._-]+==[^\s;]+(?:\s*;\s*(.*?))?\s*\\?$")
#: What the image does not run: packages' own tests, headers to compile against them, services of AWS that are not
#: called, pools of threads whose libraries the image does not have, and colours for languages other than Python.
_LEFT_OUT: Final = re.compile(
    r"(numba|llvmlite|numpy)/(.*/)?tests/|numpy/(f2py|distutils|_core/include|_core/lib)/|numba/cuda/|.*\.(pyi|pxd|pyx|c|h|cpp|hpp)$"
    r"|numpy/_core/(_simd|_\w+_tests)\.|numba/np/ufunc/(omp|tbb)pool\."
    r"|boto3/data/|boto3/examples/|botocore/data/(?!(ec2|pricing|s3|sqs|sts)/)[^/]+/|botocore/data/.*/examples-1\.json$"
    r"|pygments/lexers/(?!(__init__|_mapping|python|special)\.py$)"
)
#: botocore uses the newest version of a service that it finds.
_API_VERSION: Final = re.compile(r"(?P<service>botocore/data/[^/]+)/(?P<version>\d{4}-\d\d-\d\d)/")
_DATA: Final = re.compile(r"[^/]+\.data/(?P<scheme>[a-z]+)/(?P<rest>.+)")


def image_requirements(lock: str) -> str:
    """Return the part of a lock file that applies to the image's Python and system, hashes included."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    found = ((_REQUIREMENT.match(block.partition("\n")[0]), block) for block in blocks)
    return "".join(
        block for match, block in found if match and (not match[1] or Marker(match[1]).evaluate(dict(_MARKERS)))
    )


def fetch_wheels(folder: Path, environment: Mapping[str, str]) -> list[Path]:
    """Fetch the wheels for the image's Python into a folder; return them by name. Raises ImageFault."""
    requirements = folder / "requirements.txt"
    requirements.write_text(image_requirements(LOCK.read_text(encoding="utf-8")), encoding="utf-8")
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    run(
        [
            *_pip(),
            *("download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON, *platforms),
            *("--dest", folder, "--requirement", requirements),
        ],
        environment=environment,
    )
    return sorted(folder.glob("*.whl"))


def component_of(wheel: Path, licences: Mapping[str, str]) -> Component:
    """Return the package of a wheel for a bill of materials."""
    name, version, _build, _tags = parse_wheel_filename(wheel.name)
    return python_component(name, str(version), (hashlib.sha256(wheel.read_bytes()).hexdigest(),), licences)


def _pip() -> list[str]:
    """Return how pip is run: the one of this environment, else the one that Python brings."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    bundled = sorted(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    if not bundled:
        raise ImageFault("pip is not there; install it")
    return [sys.executable, str(bundled[-1] / "pip")]


def make_wheel(folder: Path, environment: Mapping[str, str]) -> Path:
    """Build the wheel of this checkout into a folder and return it. Raises ImageFault."""
    run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        folder=ROOT,
        environment=environment,
    )
    (wheel,) = folder.glob("bigfleet-*.whl")
    return wheel


def unpack_wheel(wheel: Path, prefix: Path) -> None:
    """Unpack a wheel below the prefix of an environment, with its commands.

    Raises ImageFault for a wheel that asks for more than modules and commands.
    """
    packages = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        newest = _newest_versions(archive.namelist())
        for entry in archive.infolist():
            name = entry.filename
            data = _DATA.fullmatch(name)
            if data is not None:
                if data["scheme"] not in ("purelib", "platlib"):
                    # Commands that are not entry points, manuals, headers: none is needed.
                    continue
                name = data["rest"]
            if entry.is_dir() or _LEFT_OUT.match(name) or not _is_newest(name, newest):
                continue
            target = packages / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as copied:
                shutil.copyfileobj(source, copied)


def _newest_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the newest version of each service of AWS that files describe."""
    newest: dict[str, str] = {}
    for match in filter(None, map(_API_VERSION.match, names)):
        newest[match["service"]] = max(match["version"], newest.get(match["service"], ""))
    return newest


def _is_newest(name: str, newest: Mapping[str, str]) -> bool:
    """Return whether a file describes no version of a service, or its newest."""
    match = _API_VERSION.match(name)
    return match is None or match["version"] == newest[match["service"]]


def write_commands(prefix: Path, place: str, distribution: str) -> list[str]:
    """Write the commands of a distribution that was unpacked, and return their names.

    `place` is where the prefix will be.
    """
    packages = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    (described,) = packages.glob(f"{distribution}-*.dist-info/entry_points.txt")
    names = []
    for name, module, function in _entry_points(described.read_text(encoding="utf-8")):
        command = prefix / "bin" / name
        command.write_text(
            f"#!{place}/bin/python3\nimport sys\n\nfrom {module} import {function}\n\n"
            # A process that it starts with `spawn` imports it.
            f'if __name__ == "__main__":\n    sys.exit({function}())\n',
            encoding="utf-8",
        )
        command.chmod(0o755)
        names.append(name)
    return names


def _entry_points(text: str) -> Iterator[tuple[str, str, str]]:
    parsed = configparser.ConfigParser(delimiters="=")
    parsed.read_string(text)
    for name, value in parsed["console_scripts"].items():
        module, _colon, function = value.partition(":")
        yield name, module, function
