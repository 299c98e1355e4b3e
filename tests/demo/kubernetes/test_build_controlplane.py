"""The build of the control plane: its cached name, and what happens without Go or when Go fails."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tools.build_controlplane import (
    KUBERNETES_VERSION,
    MODULE,
    SOURCES,
    ControlPlaneBuildFault,
    build,
    digest,
    linker_flags,
    main,
    program_path,
)

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def go(folder: Path, text: str) -> dict[str, str]:
    """Return an environment in which `go` is a script."""
    path = folder / "go"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}


#: Writes what it was called with where `-o` says.
BUILDS = 'while [ "$1" != -o ]; do shift; done; echo "cgo=$CGO_ENABLED" > "$2"; chmod 700 "$2"'


@pytest.mark.parametrize("changed", SOURCES)
def test_a_change_of_any_source_changes_the_name(tmp_path: Path, changed: str) -> None:
    shutil.copytree(MODULE, tmp_path / "module")
    same = digest(tmp_path / "module")
    with (tmp_path / "module" / changed).open("a") as file:
        file.write("// changed\n")

    assert same == digest()
    assert digest(tmp_path / "module") != same
    assert re.fullmatch("[0-9a-f]{16}", same)


def test_the_program_is_cached_in_the_cache_directory_of_the_user() -> None:
    name = f"controlplane-{digest()}"

    assert program_path({"HOME": "/home/me"}) == Path("/home/me/.cache/bigfleet") / name
    assert program_path({"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"}) == Path("/cache/bigfleet") / name


def test_the_version_that_is_reported_is_the_one_that_is_built() -> None:
    modules = (MODULE / "go.mod").read_text()

    assert f"\tk8s.io/kubernetes {KUBERNETES_VERSION}\n" in modules
    assert f"gitVersion={KUBERNETES_VERSION}" in linker_flags()


def test_a_build_leaves_the_program_and_nothing_incomplete(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "controlplane-x"
    build(target, go(tmp_path, BUILDS))

    assert target.read_text() == "cgo=0\n"
    assert sorted(each.name for each in target.parent.iterdir()) == ["controlplane-x", "controlplane-x.lock"]


def test_a_program_that_is_cached_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "controlplane-x"
    target.write_text("cached")
    target.chmod(0o700)
    build(target, go(tmp_path, "exit 1"))

    assert target.read_text() == "cached"


def test_a_build_that_fails_says_what_go_said_and_leaves_no_program(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "controlplane-x"
    with pytest.raises(ControlPlaneBuildFault, match=r"failed with exit 3:\nproxy: 403 Forbidden"):
        build(target, go(tmp_path, 'echo "proxy: 403 Forbidden" >&2; exit 3'))

    assert [each.name for each in target.parent.iterdir()] == ["controlplane-x.lock"]


def test_without_go_the_fault_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ControlPlaneBuildFault, match=r"go is not on the PATH; install Go 1\.26 or newer"):
        build(tmp_path / "controlplane-x", {"PATH": str(tmp_path)})


def test_the_command_fails_without_a_traceback_when_it_cannot_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert main([]) == 1
    assert "the Kubernetes control plane cannot be built: go is not on the PATH" in capsys.readouterr().err


def test_the_path_alone_is_printed_without_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert main(["--path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/bigfleet/controlplane-{digest()}\n"


def test_no_other_target_runs_the_tests_on_a_real_plane() -> None:
    """`make test`, `make test-slow` and `make test-long` leave them out."""
    expressions = re.findall(r'pytest .*-m ("[^"]+"|\w+)', (ROOT / "Makefile").read_text())

    assert len(expressions) == 5
    assert [each for each in expressions if "not kubernetes" not in each] == [
        '"kubernetes and not slow"',
        '"kubernetes and slow"',
    ]
