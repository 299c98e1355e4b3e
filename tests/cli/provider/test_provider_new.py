"""`bigfleet provider new`: a project that passes its own tests and the strict type checker, and overwrites nothing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bigfleet.cli.provider.new import name_fault, write_project
from bigfleet.cli.runtime.failures import RunFault, UsageFault
from tests.commands import run_here
from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port, run_bigfleet, wait_until_serving

FILES = ["pyproject.toml", "README.md", "my_cloud.py", "tests/test_my_cloud.py"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project that the command wrote."""
    folder = tmp_path_factory.mktemp("new") / "deep" / "project"
    done = run_bigfleet("provider", "new", "my_cloud", "--directory", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:-1] == [str(folder / name) for name in FILES]
    assert str(folder / "README.md") in done.stdout.splitlines()[-1]
    return folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module in a folder, without the settings of this repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_its_own_tests_pass_the_conformance_suite_among_them(project: Path) -> None:
    done = run_in(project, "pytest", "-q", "-p", "no:cacheprovider")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout


@pytest.mark.slow
def test_it_satisfies_the_strict_type_checker(project: Path, pytestconfig: pytest.Config) -> None:
    cache = pytestconfig.cache
    assert cache is not None
    done = run_in(
        project, "mypy", "--strict", "--cache-dir", str(cache.mkdir("mypy-of-projects")), "my_cloud.py", "tests"
    )

    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 2 source files\n"), done.stdout


def test_it_is_written_as_this_repository_is(project: Path) -> None:
    rules = ("--isolated", "--no-cache", "--line-length", "120")
    checked = run_in(project, "ruff", "check", *rules, "--select", "E,F,W,I,B,C4,PIE,PT,RET,RUF,SIM,UP", ".")
    formatted = run_in(project, "ruff", "format", *rules, "--check", ".")

    assert checked.returncode == 0, checked.stdout
    assert formatted.returncode == 0, formatted.stdout


def test_it_serves(project: Path, tmp_path: Path) -> None:
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    command = [sys.executable, "my_cloud.py", "--addr", address, "--state", str(tmp_path / "s"), "--metrics-addr=off"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=project, stdout=output, stderr=output)
    try:
        wait_until_serving(address, process, log)
    finally:
        process.terminate()

    assert process.wait(PATIENCE_SECONDS) == 0


def test_its_names_fit_together(project: Path) -> None:
    settings = tomllib.loads((project / "pyproject.toml").read_text())

    assert settings["project"]["name"] == "my-cloud-provider"
    assert settings["project"]["scripts"] == {"my-cloud-provider": "my_cloud:main"}
    assert "class MyCloudBackend:" in (project / "my_cloud.py").read_text()
    assert not any("$" in (project / name).read_text() for name in FILES)


def test_nothing_is_written_over(project: Path) -> None:
    before = {name: (project / name).read_bytes() for name in FILES}
    done = run_here("provider", "new", "my_cloud", "--directory", str(project))

    assert (done.returncode, done.stdout) == (2, "")
    assert f"--directory: {project / 'pyproject.toml'} exists" in done.stderr
    assert {name: (project / name).read_bytes() for name in FILES} == before


def test_one_file_in_the_way_keeps_all_others_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_acme.py").symlink_to("nowhere")
    with pytest.raises(UsageFault, match=r"test_acme\.py exists"):
        write_project("acme", tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["tests"]


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFault, match=r"--directory: .*file.*; name another folder"):
        write_project("acme", tmp_path / "file" / "project")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-cloud", "is no module name: it takes lower-case letters, digits and single _"),
        ("my-cloud", "a letter first; write my_cloud"),
        ("MyCloud", "a letter first; write mycloud"),
        ("9lives", "a letter first, such as mycloud"),
        ("wölke", "a letter first, such as mycloud"),
        ("", "a letter first, such as mycloud"),
        ("../escape", "a letter first; write escape"),
        ("a" * 41, "has 41 characters, at most 40 are allowed"),
        ("class", "is a word of Python; choose another, such as class_provider"),
        ("json", "would hide the module of that name; choose another, such as json_provider"),
        ("grpc", "would hide the module of that name"),
        ("tests", "would hide the module of that name"),
    ],
)
def test_a_wrong_name_is_told_with_what_would_do(name: str, message: str) -> None:
    assert message in (name_fault(name) or "it was taken")


def test_a_wrong_name_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    done = run_here("provider", "new", "My-Cloud", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("bigfleet: NAME: 'My-Cloud' is no module name")
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_the_project_is_in_a_folder_of_its_name(tmp_path: Path) -> None:
    done = run_here("provider", "new", "acme", cwd=tmp_path)

    assert done.returncode == 0
    assert (tmp_path / "acme" / "acme.py").is_file()
