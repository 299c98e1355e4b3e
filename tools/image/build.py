"""Builds the image: root file system, bytecode, kernels, layout."""

import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.bill_of_materials import bill_of_materials, known_licences
from tools.image import debian
from tools.image.commands import run
from tools.image.faults import ImageFault
from tools.image.layout import Appearance, Described, write_layout
from tools.image.sandbox import sandboxed
from tools.image.wheels import (
    PYTHON,
    ROOT,
    component_of,
    direct_requirements,
    fetch_wheels,
    make_wheel,
    unpack_wheel,
    write_commands,
)

#: No user of a host or of Debian has it.
USER: Final = 65532
PREFIX: Final = "/opt/bigfleet"
STATE: Final = "/var/lib/bigfleet"
#: Bill of materials, below `PREFIX`.
SBOM: Final = "sbom.cdx.json"
#: Every server of the last ten years has it; a host that lacks an instruction compiles kernels of its own.
CPU: Final = "x86-64-v3"
#: More than this is a mistake: a package that should not be there, or tests of one.
UNPACKED_BYTES_MAX: Final = 420_000_000
_SOURCE: Final = {"PATH": f"{PREFIX}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
#: Of what runs in the image while it is built: the order of sets must be the same each time.
_BUILDING: Final = {**_SOURCE, "HOME": "/tmp", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}  # noqa: S108
_OWN: Final = (
    *(f"{PREFIX[1:]}/{name}" for name in ("bin", "kernels", SBOM)),
    f"{PREFIX[1:]}/lib/python{PYTHON}/site-packages/bigfleet",
)

#: Called with what the build does next.
Say = Callable[[str], object]


def build(target: Path, environment: Mapping[str, str], say: Say, extras: Sequence[str] | None = None) -> Described:
    """Write the image of this checkout as an OCI layout, in place of what `target` is. Raises ImageFault.

    It has some extras of the project, by default all that an image may have. It takes minutes, most of them for
    kernels, and 2 GB in the temporary directory.
    """
    made = {**environment, "SOURCE_DATE_EPOCH": str(_timestamp(environment))}
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    # Now: a commit that is made meanwhile is not what the image is built from.
    revision = _git(["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"], environment)
    if extras is not None:
        # What cannot be is known before anything is downloaded.
        direct_requirements(extras)
    if target.exists() and not (target / "oci-layout").is_file():
        raise ImageFault(f"{target} is there and is no OCI layout; remove it or name another place")
    with tempfile.TemporaryDirectory(prefix="bigfleet-image-") as scratch:
        root = Path(scratch) / "root"
        make_root(root, cache / "bigfleet" / "image", made, say, extras)
        say("compiling kernels")
        compile_kernels(root, made)
        described = write_image(root, Path(scratch) / "layout", made, revision)
        if described.unpacked_bytes > UNPACKED_BYTES_MAX:
            raise ImageFault(
                f"the image has {described.unpacked_bytes:,} bytes, more than {UNPACKED_BYTES_MAX:,}: look for what it"
                " should not have, or raise UNPACKED_BYTES_MAX"
            )
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch) / "layout", target)
    return described


def make_root(
    root: Path, cache: Path, environment: Mapping[str, str], say: Say, extras: Sequence[str] | None = None
) -> None:
    """Make the root file system but for kernels, with some extras, by default all. Raises ImageFault."""
    root.mkdir()
    say("fetching packages of Debian")
    pinned = debian.locked()
    for package in debian.fetch(pinned, cache, environment):
        debian.unpack(package, root, environment)
    debian.make_bundle(root)
    _make_system(root)
    say("fetching packages of Python")
    prefix = root / PREFIX[1:]
    licences = known_licences()
    components = [package.component for package in pinned]
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in fetch_wheels(Path(scratch), environment, extras):
            unpack_wheel(wheel, prefix)
            components.append(component_of(wheel, licences))
    (prefix / SBOM).write_bytes(bill_of_materials(components))
    with tempfile.TemporaryDirectory() as scratch:
        unpack_wheel(make_wheel(Path(scratch), environment), prefix)
    write_commands(prefix, PREFIX, "bigfleet")
    say("compiling bytecode")
    library = f"/usr/lib/python{PYTHON}"
    _run_inside(
        root,
        # A check of each module's time would find it changed: image layers have none of their own.
        [f"{PREFIX}/bin/python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"],
        [library, f"{PREFIX}/lib"],
        environment,
    )


def _make_system(root: Path) -> None:
    """Make what no package brings: users, empty folders, the environment of Python."""
    for folder in ("dev", "proc", "run", "sys", "tmp", "var/tmp", STATE[1:], f"{PREFIX[1:]}/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    files = {
        "etc/passwd": f"root:x:0:0:root:/root:/nologin\nbigfleet:x:{USER}:{USER}:bigfleet:{STATE}:/nologin\n",
        "etc/group": f"root:x:0:\nbigfleet:x:{USER}:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        f"{PREFIX[1:]}/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\n",
    }
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf-8")
    for name in ("python3", f"python{PYTHON}"):
        (root / PREFIX[1:] / "bin" / name).symlink_to(f"/usr/bin/python{PYTHON}")


def compile_kernels(root: Path, environment: Mapping[str, str]) -> None:
    """Compile the kernels inside a root, with its own Python, for `CPU`."""
    words = ["kernels", "build", "--to", f"{PREFIX}/kernels", "--cpu", CPU]
    _run_inside(root, [f"{PREFIX}/bin/bigfleet"], words, environment)
    (root / PREFIX[1:] / "kernels" / ".lock").unlink()


def _run_inside(root: Path, program: list[str], words: list[str], environment: Mapping[str, str]) -> None:
    run(
        sandboxed(root, [*program, *words], _BUILDING),
        "the build needs root, or user namespaces",
        environment=environment,
    )


def write_image(root: Path, target: Path, environment: Mapping[str, str], revision: str) -> Described:
    """Write a root as the image of a revision of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    labels = {
        "title": project["name"],
        "description": project["description"],
        "version": project["version"],
        "licenses": project["license"],
        "revision": revision,
    }
    appearance = Appearance(
        timestamp=int(environment["SOURCE_DATE_EPOCH"]),
        owners={STATE[1:]: (USER, 0o700), "tmp": (0, 0o1777), "var/tmp": (0, 0o1777)},
        config={
            "User": f"{USER}:{USER}",
            "Env": [f"{name}={value}" for name, value in sorted(_SOURCE.items())],
            "Entrypoint": ["bigfleet"],
            "WorkingDir": STATE,
            "Labels": {f"org.opencontainers.image.{name}": value for name, value in labels.items()},
        },
    )
    # What changes most often is last: a registry keeps the others.
    layers: list[Callable[[str], bool]] = [
        lambda path: not path.startswith("opt"),
        lambda path: not path.startswith(_OWN),
        lambda _path: True,
    ]
    return write_layout(root, target, appearance, layers, project["version"])


def _timestamp(environment: Mapping[str, str]) -> int:
    """Return when the commit was made, which is what the image says of its files."""
    return int(environment.get("SOURCE_DATE_EPOCH") or _git(["log", "-1", "--format=%ct"], environment))


def _git(words: list[str], environment: Mapping[str, str]) -> str:
    return run(["git", *words], "build from a checkout", folder=ROOT, environment=environment).strip()
