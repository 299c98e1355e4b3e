"""The root file system of the image, without kernels: what it holds, and that its user can run it.

`make release-check` runs these tests with the whole image of a release.
"""

import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.deploy.images import built, needs_root, printed_inside, run_inside, unpack_release
from tests.release.installed import RELEASE_VARIABLE
from tools.image.build import make_root
from tools.image.layout import unpack_layout
from tools.image.wheels import ROOT

pytestmark = pytest.mark.slow

_PACKAGES = "/opt/bigfleet/lib/python3.11/site-packages"
#: Run by the Python of the image: prints modules whose bytecode is missing or names another place.
_BYTECODE = """
import importlib.util, marshal, pathlib
for top in ("/usr/lib/python3.11", "/opt/bigfleet/lib"):
    for source in pathlib.Path(top).rglob("*.py"):
        compiled = pathlib.Path(importlib.util.cache_from_source(str(source)))
        if not compiled.is_file():
            print("not compiled:", source)
        elif marshal.loads(compiled.read_bytes()[16:]).co_filename != str(source):
            print("names another place:", source)
"""
#: Prints the extension modules of Python, and the modules of ours, that cannot be imported. No kernel is compiled.
_IMPORTS = """
import os
os.environ["NUMBA_DISABLE_JIT"] = "1"
import importlib, pathlib, pkgutil, bigfleet
names = [path.name.partition(".")[0] for path in pathlib.Path("/usr/lib/python3.11/lib-dynload").glob("*.so")]
# The first need hypothesis, which is for tests; the second needs libvirt, which the image does not have; the others run
# when they are imported.
others = ("provider.testing", "backends.libvirt.binding", "__main__")
for found in pkgutil.walk_packages(bigfleet.__path__, "bigfleet.", onerror=lambda name: print("cannot be read:", name)):
    names.append(found.name)
for name in names:
    if any(word in name for word in others):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
print(len(names))
"""
#: Makes every client that `bigfleet provider aws` makes; prints the services, and which version botocore found of each.
_CLIENTS = r"""
import inspect, re
from bigfleet.provider.backends.aws import boto
session = boto.AwsSession(region="eu-central-1")
for service in sorted(set(re.findall(r'\.client\("(\w+)"\)', inspect.getsource(boto)))):
    print(service, session.client(service).meta.service_model.api_version)
"""
#: Prints a traceback in colours, which needs a lexer for Python.
_TRACEBACK = """
from rich.console import Console
from rich.traceback import install
install(console=Console(force_terminal=True))
raise ValueError("in colours")
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system."""
    folder = tmp_path_factory.mktemp("image")
    if os.environ.get(RELEASE_VARIABLE):
        unpack_layout(unpack_release(folder / "layout"), folder / "root")
        return folder / "root"

    def make() -> Path:
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1000000000"}
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        make_root(folder / "root", cache / "bigfleet" / "image", environment, print)
        return folder / "root"

    return built(make)


def files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@needs_root
def test_its_user_runs_it_on_a_file_system_that_is_read_only(root: Path) -> None:
    assert printed_inside(root, "bigfleet", "--version").strip() == f"bigfleet {importlib.metadata.version('bigfleet')}"
    assert printed_inside(root, "python3", "-c", "import os; print(os.getuid(), os.getgid())").split() == ["65532"] * 2
    refused = run_inside(root, "python3", "-c", "open('/opt/bigfleet/x', 'w')")
    assert "Read-only file system" in refused.stderr


@needs_root
def test_every_command_is_there_and_imports(root: Path) -> None:
    *faults, count = printed_inside(root, "python3", "-W", "ignore", "-c", _IMPORTS).splitlines()

    assert faults == []
    assert int(count) > 100


@needs_root
def test_every_module_is_bytecode_of_its_place_in_the_image(root: Path) -> None:
    assert printed_inside(root, "python3", "-c", _BYTECODE) == ""


@needs_root
def test_every_client_of_aws_is_made_as_with_the_whole_of_botocore(root: Path) -> None:
    """The image has the descriptions of a few services."""
    whole = subprocess.run([sys.executable, "-c", _CLIENTS], capture_output=True, text=True, check=True).stdout

    assert {line.partition(" ")[0] for line in whole.splitlines()} == {"ec2", "pricing", "s3", "sqs", "sts"}
    assert printed_inside(root, "python3", "-c", _CLIENTS) == whole


@needs_root
def test_a_traceback_in_colours_needs_no_lexer_that_is_left_out(root: Path) -> None:
    shown = run_inside(root, "python3", "-c", _TRACEBACK).stdout

    assert "in colours" in shown
    assert "\x1b[" in shown


def test_it_has_no_installer_no_compiler_and_no_shell(root: Path) -> None:
    programs = sorted(
        str(path.relative_to(root))
        for path in files(root)
        if path.stat().st_mode & 0o111 and "bin" in path.relative_to(root).parts
    )

    assert programs == ["opt/bigfleet/bin/bigfleet", "opt/bigfleet/bin/hail-dedicated", "usr/bin/python3.11"]
    packages = {path.name.partition("-")[0] for path in (root / _PACKAGES[1:]).iterdir()}
    assert {"bigfleet", "numba", "uvloop"} <= packages
    assert not packages & {"pip", "setuptools", "hatchling", "editables", "pytest", "hypothesis", "tests"}
    assert not (root / "usr/lib/python3.11/ensurepip").exists()


def test_nothing_of_the_host_is_in_it(root: Path) -> None:
    traces = (str(ROOT).encode(), str(root).encode())

    assert [str(path) for path in files(root) if any(trace in path.read_bytes() for trace in traces)] == []


def test_no_file_gives_rights_and_no_link_leads_nowhere(root: Path) -> None:
    links = [path for path in root.rglob("*") if path.is_symlink()]

    assert [path for path in files(root) if path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)] == []
    assert links
    assert [path for path in links if not os.path.lexists(target_in(root, path))] == []


def target_in(root: Path, link: Path) -> Path:
    """Return where a link leads, as a process sees it whose root this is."""
    led = Path("/", link.parent.relative_to(root), link.readlink())
    return root / str(led).lstrip("/")


def test_licences_and_versions_of_what_it_holds_stay_in_it(root: Path) -> None:
    """Where scanners of images look for the packages of Debian."""
    recorded = {path.name: path.read_text(encoding="utf-8") for path in (root / "var/lib/dpkg/status.d").iterdir()}

    assert "\nVersion: 3.11." in recorded["python3.11-minimal"]
    assert [name for name in recorded if not (root / "usr/share/doc" / name / "copyright").exists()] == []
    assert (root / "usr/share/common-licenses/GPL-2").is_file()
    assert list((root / _PACKAGES[1:]).glob("bigfleet-*.dist-info/licenses/LICENSE"))
    assert (root / "etc/ssl/certs/ca-certificates.crt").read_bytes().count(b"BEGIN CERTIFICATE") > 100


def test_its_bill_of_materials_lists_exactly_what_it_holds(root: Path) -> None:
    listed = json.loads((root / "opt/bigfleet/sbom.cdx.json").read_text(encoding="utf-8"))["components"]
    folder = root / _PACKAGES[1:]
    python = {
        (canonicalize_name(found.name), found.version)
        for found in importlib.metadata.distributions(path=[str(folder)])
        if found.name != "bigfleet"
    }
    texts = [path.read_text(encoding="utf-8") for path in (root / "var/lib/dpkg/status.d").iterdir()]
    system = {tuple(re.findall(r"^(?:Package|Version): (.*)$", text, re.MULTILINE)) for text in texts}

    assert {(each["name"], each["version"]) for each in listed if each["purl"].startswith("pkg:pypi/")} == python
    assert {(each["name"], each["version"]) for each in listed if each["purl"].startswith("pkg:deb/")} == system
    assert len(python) > 40
    assert len(listed) == len(python) + len(system)
    assert {hashed["alg"] for each in listed for hashed in each["hashes"]} == {"SHA-256"}
    assert [each["name"] for each in listed if "pypi" in each["purl"] and "licenses" not in each] == []
