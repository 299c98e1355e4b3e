"""Fetches the wheels that requirements-image.lock pins, makes BigFleet's own, and unpacks them."""

import configparser
import ensurepip
import hashlib
import importlib.util
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.bill_of_materials import Component, python_component
from tools.image.commands import run
from tools.image.faults import ImageFault

ROOT: Final = Path(__file__).resolve().parents[2]
#: What running BigFleet needs, with the extras that an image may have.
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
PROJECT: Final = "bigfleet"
_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9._-]+)==[^\s;]+(?:\s*;\s*(.*?))?\s*\\?$")
#: A package that needs another one, in the comments of a lock file; `-c FILE` names none.
_PARENT: Final = re.compile(r"^(?: *#)? +([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)
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


@dataclass(frozen=True, slots=True)
class _Locked:
    """A package of a lock file."""

    name: str
    #: Its lines, hashes included.
    block: str
    #: The packages that need it; `bigfleet` is the project itself.
    needed_by: frozenset[str]


def image_requirements(lock: str, wanted: Collection[str]) -> str:
    """Return the part of a lock file that `wanted`, the project's own requirements, lead to, hashes included.

    It applies to the image's Python and system.
    """
    packages = list(_applicable(lock))
    found = {package.name for package in packages if package.name in wanted and PROJECT in package.needed_by}
    more = found
    while more:
        more = {package.name for package in packages if package.needed_by & found} - found
        found |= more
    return "".join(package.block for package in packages if package.name in found)


def _applicable(lock: str) -> Iterator[_Locked]:
    """Yield the packages of a lock file that apply to the image's Python and system."""
    for block in re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE):
        match = _REQUIREMENT.match(block.partition("\n")[0])
        if match and (not match[2] or Marker(match[2]).evaluate(dict(_MARKERS))):
            parents = frozenset(canonicalize_name(name) for name in _PARENT.findall(block.partition("# via")[2]))
            yield _Locked(canonicalize_name(match[1]), block, parents)


def image_extras() -> list[str]:
    """Return the extras of the project whose packages the lock file of the image has."""
    in_lock = {package.name for package in _applicable(LOCK.read_text(encoding="utf-8"))}
    return [
        name for name, requirements in _project()["optional-dependencies"].items() if _names(requirements) <= in_lock
    ]


def direct_requirements(extras: Iterable[str]) -> set[str]:
    """Return the names of what the project and its extras need. Raises ImageFault for an extra without packages."""
    known = image_extras()
    found = _names(_project()["dependencies"])
    for extra in extras:
        if extra not in known:
            raise ImageFault(f"the image cannot have the extra {extra!r}; {LOCK.name} has those of {', '.join(known)}")
        found |= _names(_project()["optional-dependencies"][extra])
    return found


def _project() -> Mapping[str, Any]:
    described: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return described


def _names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def fetch_wheels(folder: Path, environment: Mapping[str, str], extras: Iterable[str] | None = None) -> list[Path]:
    """Fetch the wheels for the image's Python into a folder; return them by name. Raises ImageFault.

    They are those of the project and of some extras, by default of all that the image may have.
    """
    requirements = folder / "requirements.txt"
    wanted = direct_requirements(image_extras() if extras is None else extras)
    requirements.write_text(image_requirements(LOCK.read_text(encoding="utf-8"), wanted), encoding="utf-8")
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    run(
        [
            *pip_command(),
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


def pip_command() -> list[str]:
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
