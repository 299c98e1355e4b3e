"""tools/image: which packages an image gets, and that equal files make equal images."""

import hashlib
import json
import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.bill_of_materials import bill_of_materials
from tools.image import build, debian
from tools.image.__main__ import main
from tools.image.debian import Pinned, fetch, locked
from tools.image.faults import ImageFault
from tools.image.layout import Appearance, read_blob, unpack_layout, write_layout
from tools.image.wheels import (
    LOCK,
    ROOT,
    component_of,
    direct_requirements,
    image_extras,
    image_requirements,
    unpack_wheel,
    write_commands,
)

# ---- packages of Python ----------------------------------------------------------------------------------------------

LOCKED = """\
direct==1.0 \\
    --hash=sha256:aa
    # via bigfleet (pyproject.toml)
indirect==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:bb \\
    --hash=sha256:bc
    # via
    #   -c requirements-dev.lock
    #   direct
indirect==3.0 ; python_full_version >= '3.12' \\
    --hash=sha256:cc
    # via direct
windows==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:dd
    # via direct
"""


def test_an_image_gets_what_applies_to_its_python_and_system_with_all_hashes() -> None:
    found = image_requirements(LOCKED, {"direct"})

    assert [line for line in found.splitlines() if "==" in line] == [
        "direct==1.0 \\",
        "indirect==2.0 ; python_full_version < '3.12' \\",
    ]
    assert [word for word in found.split() if word.startswith("--hash")] == [
        f"--hash=sha256:{digest}" for digest in ("aa", "bb", "bc")
    ]


def names_for(extras: list[str]) -> set[str]:
    """Return the packages of an image with some extras."""
    found = image_requirements(LOCK.read_text(encoding="utf-8"), direct_requirements(extras))
    return {line.partition("==")[0] for line in found.splitlines() if line[:1].isalnum()}


def test_every_dependency_of_the_project_is_found_in_its_lock_file_and_nothing_that_builds_it() -> None:
    names = names_for(["uvloop", "aws"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["uvloop"], *extras["aws"]]

    assert {each.partition(">")[0] for each in wanted} <= names
    assert not names & {"hatchling", "editables", "pip", "setuptools", "colorama", "pytest"}


def test_an_image_has_what_its_extras_lead_to_and_no_more() -> None:
    whole, of_aws, of_uvloop, neither = (names_for(each) for each in (["aws", "uvloop"], ["aws"], ["uvloop"], []))

    assert whole - of_uvloop == {"boto3", "botocore", "s3transfer", "jmespath", "python-dateutil", "six", "urllib3"}
    assert whole - of_aws == {"uvloop"}
    assert neither == of_aws & of_uvloop


def test_all_that_the_lock_file_has_for_the_image_is_reached() -> None:
    """An extra that is not named, or a package that nothing needs, would be left out without a word."""
    lock = LOCK.read_text(encoding="utf-8")
    locked = {match[1] for match in re.finditer(r"^([a-z0-9._-]+)==\S+(?! ;.*win32)", lock, re.MULTILINE)}

    assert image_extras() == ["aws", "uvloop"]
    assert names_for(image_extras()) == locked - {"colorama"}


@pytest.mark.parametrize("extra", ["libvirt", "awz"])
def test_an_extra_that_the_image_cannot_have_is_refused_before_anything_is_fetched(tmp_path: Path, extra: str) -> None:
    with pytest.raises(ImageFault, match=f"the image cannot have the extra '{extra}'; .* has those of aws, uvloop"):
        build.build(tmp_path / "image", os.environ, fail, ["aws", extra])


@pytest.mark.parametrize(
    ("setting", "words"),
    [([], ""), (["EXTRAS=uvloop aws"], ' --extras "uvloop aws"'), (["EXTRAS="], ' --extras ""')],
)
def test_make_takes_the_extras(setting: list[str], words: str) -> None:
    make = ["make", "--dry-run", "--assume-old=.venv/.synced", "image", *setting]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1].rstrip().endswith(f"-m tools.image build build/image{words}")


def test_a_build_that_cannot_be_says_so_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(tmp_path / "image"), "--extras", "aws libvirt"]) == 1
    assert "the image cannot be built: the image cannot have the extra 'libvirt'" in capsys.readouterr().err


def fail(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with all kinds of entries."""
    path = tmp_path / "numpy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "numpy/__init__.py",
            "numpy/core/tests/test_core.py",
            "numpy/core.pyi",
            "numpy-1.0.data/purelib/more.py",
            "numpy-1.0.data/headers/numpy.h",
        ):
            archive.writestr(name, "")
        archive.writestr("numpy-1.0.dist-info/entry_points.txt", "[console_scripts]\nf2py = numpy.f2py:main\n")
    return path


def test_a_wheel_is_unpacked_without_tests_and_what_compiling_against_it_needs(tmp_path: Path, wheel: Path) -> None:
    unpack_wheel(wheel, tmp_path / "prefix")
    packages = tmp_path / "prefix/lib/python3.11/site-packages"

    assert sorted(str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()) == [
        "more.py",
        "numpy-1.0.dist-info/entry_points.txt",
        "numpy/__init__.py",
    ]


def test_of_aws_the_newest_version_of_each_service_that_is_called_is_unpacked(tmp_path: Path) -> None:
    """Several versions of one service are large, and botocore reads the newest one."""
    path = tmp_path / "botocore-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (
            "ec2/2016-11-15/service-2.json.gz",
            "ec2/2016-09-15/service-2.json.gz",
            "ec2/2016-11-15/examples-1.json",
            "s3/2006-03-01/service-2.json.gz",
            "rds/2014-10-31/service-2.json.gz",
            "endpoints.json",
        ):
            archive.writestr(f"botocore/data/{name}", "")
    unpack_wheel(path, tmp_path / "prefix")
    data = tmp_path / "prefix/lib/python3.11/site-packages/botocore/data"

    assert sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()) == [
        "ec2/2016-11-15/service-2.json.gz",
        "endpoints.json",
        "s3/2006-03-01/service-2.json.gz",
    ]


def test_a_package_is_listed_with_what_its_file_and_its_name_say(tmp_path: Path) -> None:
    path = tmp_path / "Some.Package-1.0-py3-none-any.whl"
    path.write_bytes(CONTENT)
    listed = json.loads(
        bill_of_materials([component_of(path, {"some-package": "MIT"}), Pinned("libx", "1:2-3", DIGEST).component])
    )["components"]

    assert [(each["name"], each["version"], each["purl"]) for each in listed] == [
        ("libx", "1:2-3", "pkg:deb/debian/libx@1%3A2-3?arch=amd64&distro=bookworm"),
        ("some-package", "1.0", "pkg:pypi/some-package@1.0"),
    ]
    digests = [hashlib.sha256(CONTENT).hexdigest()]
    assert [[hashed["content"] for hashed in each["hashes"]] for each in listed] == [[DIGEST], digests]
    assert listed[1]["licenses"] == [{"license": {"id": "MIT"}}]


def test_a_command_runs_the_python_of_the_image(tmp_path: Path, wheel: Path) -> None:
    unpack_wheel(wheel, tmp_path)
    (tmp_path / "bin").mkdir()

    assert write_commands(tmp_path, "/opt/place", "numpy") == ["f2py"]
    command = tmp_path / "bin" / "f2py"
    assert command.read_text().splitlines() == [
        "#!/opt/place/bin/python3",
        "import sys",
        "",
        "from numpy.f2py import main",
        "",
        'if __name__ == "__main__":',
        "    sys.exit(main())",
    ]
    assert os.access(command, os.X_OK)


# ---- packages of Debian ----------------------------------------------------------------------------------------------

CONTENT = b"a package"
DIGEST = "5f3e5dc8d5cd6fc40f7d1d6b5ff86bd1eb7a4cc6dc0d5ccf9fa7a2d7a0b4e0c5"


def apt(folder: Path, *, script: str) -> dict[str, str]:
    """Return an environment whose apt-get is a script."""
    program = folder / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin"}


def digest_of(folder: Path) -> str:
    path = folder / "some"
    path.write_bytes(CONTENT)
    return debian._digest(path)


def test_the_lock_file_has_exactly_the_packages_of_the_image() -> None:
    assert tuple(pinned.name for pinned in locked()) == debian.PACKAGES


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "debian.lock"
    lock.write_text("# a comment\n\nlibc6=2.36\n")

    with pytest.raises(ImageFault, match=r"debian\.lock:3: 'libc6=2\.36' is not NAME=VERSION sha256:DIGEST"):
        locked(lock)


def test_a_package_is_downloaded_once_and_found_by_its_digest(tmp_path: Path) -> None:
    pinned = Pinned("libx", "1:2", digest_of(tmp_path))
    environment = apt(tmp_path, script=f'echo "$@" >> {tmp_path}/asked; printf "a package" > libx_1%3a2_amd64.deb')

    (first,) = fetch([pinned], tmp_path / "cache", environment)
    (second,) = fetch([pinned], tmp_path / "cache", environment)

    assert first == second
    assert first.read_bytes() == CONTENT
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("download libx=1:2")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


def test_a_damaged_package_of_the_cache_is_downloaded_again(tmp_path: Path) -> None:
    pinned = Pinned("libx", "2", digest_of(tmp_path))
    environment = apt(tmp_path, script='printf "a package" > libx_2_amd64.deb')
    (file,) = fetch([pinned], tmp_path / "cache", environment)
    file.write_bytes(b"damaged")

    fetch([pinned], tmp_path / "cache", environment)

    assert file.read_bytes() == CONTENT


def test_a_package_with_another_digest_is_refused(tmp_path: Path) -> None:
    environment = apt(tmp_path, script='printf "another" > libx_2_amd64.deb')

    with pytest.raises(ImageFault, match=r"libx 2 has the digest .*, and .*debian\.lock has 5f3e5dc8"):
        fetch([Pinned("libx", "2", DIGEST)], tmp_path / "cache", environment)


def test_a_version_that_debian_has_replaced_is_named_with_the_remedy(tmp_path: Path) -> None:
    environment = apt(tmp_path, script="echo \"E: Version '2' for 'libx' was not found\"; exit 100")

    with pytest.raises(ImageFault, match=r"(?s)ended with 100.*make image-lock.*Version '2' for 'libx' was not found"):
        fetch([Pinned("libx", "2", DIGEST)], tmp_path / "cache", environment)


def test_a_host_without_apt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageFault, match="apt-get is not on the PATH; on Debian bookworm"):
        fetch([Pinned("libx", "2", DIGEST)], tmp_path / "cache", {"PATH": str(tmp_path)})


# ---- layout ----------------------------------------------------------------------------------------------------------


def small_root(folder: Path, names: tuple[str, ...] = ("etc/passwd", "opt/run", "var/lib/x/state")) -> Path:
    """Make a root with files in this order."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "opt" / "run").chmod(0o700)
    (folder / "link").symlink_to("opt/run")
    return folder


def appearance(**changes: int) -> Appearance:
    return Appearance(
        timestamp=changes.get("timestamp", 1_000_000_000),
        owners={"var/lib/x": (65532, 0o700)},
        config={"Entrypoint": ["run"]},
    )


LAYERS = (lambda path: not path.startswith("opt"), lambda _path: True)


def test_equal_files_make_equal_images_wherever_and_whenever_they_were_written(tmp_path: Path) -> None:
    names = ("etc/passwd", "opt/run", "var/lib/x/state")
    one = small_root(tmp_path / "one", names)
    two = small_root(tmp_path / "two", names[::-1])
    for path in two.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)

    first = write_layout(one, tmp_path / "first", appearance(), LAYERS, "1")
    second = write_layout(two, tmp_path / "second", appearance(), LAYERS, "1")

    assert first == second
    assert (tmp_path / "first/index.json").read_bytes() == (tmp_path / "second/index.json").read_bytes()


@pytest.mark.parametrize("change", ["content", "mode", "link", "name", "time"])
def test_any_other_file_makes_another_image(tmp_path: Path, change: str) -> None:
    root = small_root(tmp_path / "root")
    first = write_layout(root, tmp_path / "first", appearance(), LAYERS, "1")
    if change == "content":
        (root / "etc/passwd").write_text("other")
    elif change == "mode":
        (root / "opt/run").chmod(0o600)
    elif change == "link":
        (root / "link").unlink()
        (root / "link").symlink_to("etc")
    elif change == "name":
        (root / "etc/passwd").rename(root / "etc/group")
    second = write_layout(root, tmp_path / "second", appearance(timestamp=int(change == "time")), LAYERS, "1")

    assert first.digest != second.digest
    assert first.image_id != second.image_id


def test_an_image_unpacks_to_its_files_with_owners_and_modes(tmp_path: Path) -> None:
    write_layout(small_root(tmp_path / "root"), tmp_path / "layout", appearance(), LAYERS, "1")
    config = unpack_layout(tmp_path / "layout", tmp_path / "back")

    assert config == {"Entrypoint": ["run"]}
    assert (tmp_path / "back/etc/passwd").read_text() == "etc/passwd"
    assert (tmp_path / "back/link").readlink() == Path("opt/run")
    modes = {
        name: (tmp_path / "back" / name).stat().st_mode & 0o7777 for name in ("opt/run", "etc/passwd", "var/lib/x")
    }
    assert modes == {"opt/run": 0o755, "etc/passwd": 0o644, "var/lib/x": 0o700}
    if os.geteuid() == 0:
        assert (tmp_path / "back/var/lib/x").stat().st_uid == 65532
        assert (tmp_path / "back/opt").stat().st_uid == 0


def test_a_layout_is_as_the_specification_says(tmp_path: Path) -> None:
    made = write_layout(small_root(tmp_path / "root"), tmp_path / "layout", appearance(), LAYERS, "1.2")
    index = json.loads((tmp_path / "layout/index.json").read_text())
    manifest = json.loads(read_blob(tmp_path / "layout", made.digest))
    config = json.loads(read_blob(tmp_path / "layout", made.image_id))

    assert json.loads((tmp_path / "layout/oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert index["manifests"][0]["annotations"] == {"org.opencontainers.image.ref.name": "1.2"}
    assert manifest["config"]["digest"] == made.image_id
    assert config["created"] == "2001-09-09T01:46:40Z"
    assert len(manifest["layers"]) == len(config["rootfs"]["diff_ids"]) == len(LAYERS)
    assert made.files == len(list((tmp_path / "root").rglob("*")))
    assert not list((tmp_path / "layout").rglob("*.new"))


def test_a_damaged_blob_is_named(tmp_path: Path) -> None:
    made = write_layout(small_root(tmp_path / "root"), tmp_path / "layout", appearance(), LAYERS, "1")
    blob = (tmp_path / "layout/blobs/sha256") / made.digest.partition(":")[2]
    blob.write_bytes(blob.read_bytes() + b" ")

    with pytest.raises(ValueError, match=f"the blob {made.digest} of .* is damaged"):
        unpack_layout(tmp_path / "layout", tmp_path / "back")


def test_an_image_names_the_commit_that_was_there_when_its_build_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes minutes, in which others may be made."""
    revisions = ["first"]

    def make_root(root: Path, *_arguments: object) -> None:
        small_root(root)
        revisions.append("second")

    monkeypatch.setattr(build, "make_root", make_root)
    monkeypatch.setattr(build, "compile_kernels", lambda *_arguments: None)
    monkeypatch.setattr(build, "_git", lambda *_arguments: revisions[-1])
    made = build.build(tmp_path / "layout", {"SOURCE_DATE_EPOCH": "1", "HOME": str(tmp_path)}, print)
    config = json.loads(read_blob(tmp_path / "layout", made.image_id))["config"]

    assert config["Labels"]["org.opencontainers.image.revision"] == "first"
