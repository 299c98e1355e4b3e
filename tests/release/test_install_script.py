"""tools/install.sh: with the uv that there is, with one that it fetches, and with pip where neither works.

Programs that log how they are called stand for Python, pip and uv.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("sh", "mktemp", "mkdir", "mv", "rm", "tail", "cat", "chmod", "cp")

#: It makes an environment whose Python is itself; its pip fetches a uv, which logs as well.
PYTHON = """#!/bin/sh
echo "python $*" >> "$LOG"
case "$*" in
  -c*) exit "${OLD:-0}" ;;
  *"pip --version") [ -z "${NO_PIP:-}" ] ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *--target*)
    [ -z "${NO_INDEX:-}" ] || { echo "ERROR: no index answers" >&2; exit 1; }
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin" && cp "$UV" "$2/bin/uv" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >> "$LOG"
[ -z "${UV_FAILS:-}" ] || exit 2
case "$*" in venv*) for venv; do :; done; mkdir -p "$venv/bin" ;; esac
"""
Install = Callable[..., "subprocess.CompletedProcess[str]"]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Return what runs the script in a folder of its own, on a machine with these programs and no other."""
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(found)
    executable(tmp_path / "bin" / "python", PYTHON)
    executable(tmp_path / "uv", UV)

    def run(
        *words: str, lock: str = "requirements.lock", has_uv: bool = False, **settings: str
    ) -> "subprocess.CompletedProcess[str]":
        if has_uv:
            shutil.copy(tmp_path / "uv", tmp_path / "bin" / "uv")
        return subprocess.run(
            ["sh", str(ROOT / "tools/install.sh"), "python", lock, ".venv", *words],
            cwd=tmp_path,
            env={"PATH": str(tmp_path / "bin"), "LOG": str(tmp_path / "log"), "UV": str(tmp_path / "uv"), **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def calls(folder: Path, program: str) -> list[str]:
    """Return the calls of a program, without options that only make it quiet."""
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return [line.replace("--quiet ", "") for line in lines if line.startswith(program)]


BY_UV = [
    "uv venv --allow-existing --python python .venv",
    "uv pip install --python .venv/bin/python --no-compile-bytecode --require-hashes --requirements requirements.lock",
    "uv pip install --python .venv/bin/python --no-deps --no-build-isolation --editable .",
]


def test_a_uv_that_is_there_is_used_and_nothing_is_fetched(install: Install, tmp_path: Path) -> None:
    done = install("--project", has_uv=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "installing requirements.lock into .venv\n", "")
    assert calls(tmp_path, "uv") == BY_UV
    assert not [call for call in calls(tmp_path, "python") if "pip" in call]


def test_without_a_project_packages_are_added_to_the_environment_that_there_is(
    install: Install, tmp_path: Path
) -> None:
    assert install(has_uv=True).returncode == 0
    assert calls(tmp_path, "uv") == BY_UV[:2]

    executable(tmp_path / ".venv/bin/python", PYTHON)
    assert install().returncode == 0
    assert calls(tmp_path, "uv") == [*BY_UV[:2], BY_UV[1]]


@pytest.mark.parametrize("settings", [{}, {"NO_PIP": "1"}], ids=["pip", "a new environment has pip"])
def test_a_pinned_uv_is_fetched_once(install: Install, tmp_path: Path, settings: dict[str, str]) -> None:
    for _ in range(2):
        done = install("--project", **settings)
        assert (done.returncode, done.stderr) == (0, "")

    (fetched,) = [call for call in calls(tmp_path, "python") if "--target" in call]
    assert {"--require-hashes", "--only-binary", "requirements-uv.lock"} <= set(fetched.split())
    assert calls(tmp_path, "uv") == [*BY_UV, *BY_UV]
    assert [path.name for path in (tmp_path / ".cache").rglob("*")] == ["uv", "uv"]


def test_pip_installs_where_no_uv_can_be_fetched(install: Install, tmp_path: Path) -> None:
    done = install("--project", NO_INDEX="1")

    said = "uv could not be fetched, and pip takes ten times as long:\nERROR: no index answers\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert [call.split("--disable-pip-version-check ")[1] for call in calls(tmp_path, "python -m pip install")][1:] == [
        "--no-compile --require-hashes --requirement requirements.lock",
        "--no-deps --no-build-isolation --editable .",
    ]


def test_pip_installs_where_uv_fails(install: Install, tmp_path: Path) -> None:
    """As behind a proxy that only pip knows."""
    done = install(has_uv=True, UV_FAILS="1")

    assert (done.returncode, done.stderr) == (0, "uv could not install requirements.lock; pip tries it\n")
    assert len(calls(tmp_path, "python -m pip install")) == 1


@pytest.mark.parametrize(("has_uv", "option"), [(True, "--compile-bytecode"), (False, "--compile")])
def test_what_develops_bigfleet_is_compiled(install: Install, tmp_path: Path, has_uv: bool, option: str) -> None:
    """Each process of the tests imports most of it."""
    assert install(lock="requirements-dev.lock", has_uv=has_uv, NO_INDEX="1").returncode == 0

    (installed,) = [line for line in calls(tmp_path, "") if line.endswith("requirements-dev.lock")]
    assert option in installed.split()


def test_an_old_python_is_refused_before_anything_is_done(install: Install, tmp_path: Path) -> None:
    done = install(OLD="1")

    said = "BigFleet needs Python 3.11 or newer; python is older. Try: make PYTHON=python3.12\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert len(calls(tmp_path, "")) == 1
