"""Wrong calls of `bigfleet provider libvirt` (docs/spec/libvirt-provider.md); tests/libvirt has real machines."""

from pathlib import Path

import pytest
import yaml

from tests.commands import run_here
from tests.libvirt.providers import HOSTS


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "--hosts is missing"),
        (("--hosts", "hosts.yaml", "--bootstrap", "ssh"), "--bootstrap: 'ssh' is unknown; choose reseed or agent"),
        (("--hosts", "hosts.yaml"), "--kubeconfig-dir is missing: with --bootstrap reseed only the cluster can say"),
        (("--hosts", "hosts.yaml", "--kubeconfig-dir", "none"), "--kubeconfig-dir: none is not a directory"),
        (("--hosts", "none.yaml", "--bootstrap", "agent"), "--hosts {cwd}/none.yaml: No such file or directory"),
        (("--hosts", "odd.yaml", "--bootstrap", "agent"), "--hosts {cwd}/odd.yaml: hosts[0].colour: unknown key"),
        (
            ("--hosts", "hosts.yaml", "--bootstrap", "agent", "--base-user-data", "none"),
            "--base-user-data: none: No such file or directory",
        ),
        (
            ("--hosts", "hosts.yaml", "--bootstrap", "agent", "--base-user-data", "/dev/zero"),
            "--base-user-data: /dev/zero: Is a device",
        ),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(flags: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(HOSTS))
    odd = {**HOSTS, "hosts": [{**HOSTS["hosts"][0], "colour": "red"}]}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(odd))
    done = run_here("provider", "libvirt", "--state", "s.db", *flags, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"bigfleet: {text.format(cwd=tmp_path)}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "s.db").exists()


def test_without_the_binding_the_command_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(HOSTS))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    flags = ("--state", "s.db", "--hosts", "hosts.yaml", "--bootstrap", "agent")
    done = run_here("provider", "libvirt", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "run make libvirt in a checkout, or pip install 'libvirt-python>=10'" in done.stderr
