"""`bigfleet operator`: its flags, its files, and what is said when one of them is wrong."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.cli.main import RootGroup
from bigfleet.cli.operator.command import OperatorFlags
from bigfleet.cli.operator.token_mode import TokenMode
from bigfleet.cli.runtime.failures import UsageFault
from tests.commands import run_here

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "operator.md"
NEEDED: dict[str, Any] = {"cluster_id": "blue", "shard_addr": "shard:7780", "bootstrap_stub": True}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """Return a kubeconfig of a server that does not run."""
    path = tmp_path / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev"}}],
        "clusters": [{"name": "dev", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "dev", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_the_flags_are_those_of_the_specification() -> None:
    section = SPEC.read_text(encoding="utf-8").split("## 1. Processes")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| --")]
    listed = {name.strip() for row in rows for name in row.split("|")[1].split(",")}

    assert listed == {f"--{field.name.replace('_', '-')}" for field in fields(OperatorFlags)}


def test_a_token_mode_is_read() -> None:
    flags = OperatorFlags(**NEEDED)
    flags.check()
    assert flags.process().token_mode is TokenMode.NONE

    account = {"bootstrap_token": "tokenrequest", "bootstrap_service_account": "kube-system/node"}
    given = {**NEEDED, "bootstrap_stub": False, "bootstrap_template": Path("t.j2"), **account}
    flags = OperatorFlags(**given)
    flags.check()
    assert flags.process().token_mode is TokenMode.SERVICE_ACCOUNT
    assert flags.process().service_account == ("kube-system", "node")


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"cluster_id": ""}, "--cluster-id is missing"),
        ({"shard_addr": ""}, "--shard-addr is missing"),
        ({"log_level": "loud"}, "--log-level: 'loud' is unknown"),
        ({"qps": -1.0}, "--qps: -1.0 is not a rate"),
        ({"namespace": "A B"}, "--namespace: 'A B' is not the name of a namespace"),
        ({"namespace": "a" * 64}, "is not the name of a namespace"),
        ({"lease_name": ""}, "--lease-name: '' is not the name of a Lease"),
        ({"lease_name": "A/B"}, "--lease-name: 'A/B' is not the name of a Lease"),
        ({"lease_name": f"{'a' * 254}"}, "is not the name of a Lease"),
        ({"bootstrap_token": "cookie"}, "--bootstrap-token: 'cookie' is unknown; choose one of none, secret, token"),
        ({"bootstrap_token": "secret"}, "--bootstrap-token and --bootstrap-stub contradict each other"),
        ({"bootstrap_stub": False}, "--bootstrap-template is missing"),
        ({"bootstrap_service_account": "a/b"}, "--bootstrap-service-account applies to"),
    ],
)
def test_a_wrong_flag_is_named(wrong: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageFault) as caught:
        OperatorFlags(**{**NEEDED, **wrong}).check()

    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bigfleet-operator", "a", "a.b-c.d", "0" * 253])
def test_names_that_api_servers_accept_are_accepted(name: str) -> None:
    OperatorFlags(**NEEDED, lease_name=name, namespace="bigfleet-system").check()


@pytest.mark.parametrize(
    ("arguments", "code", "end"),
    [
        (("--kubeconfig", "{folder}/absent"), 2, "No such file or directory; name a kubeconfig"),
        (("--kubeconfig", "{folder}/binary"), 2, "is not YAML: "),
        (("--tls-cert", "{folder}/absent", "--tls-key", "k", "--tls-ca", "c"), 2, "TLS: c: No such file or directory"),
    ],
)
def test_mistakes_of_a_person_are_one_line(
    arguments: tuple[str, ...], code: int, end: str, kubeconfig: Path, tmp_path: Path
) -> None:
    assert kubeconfig.parent == tmp_path
    (tmp_path / "binary").write_bytes(b"\xff\xfebin")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    needed = ("--cluster-id", "c", "--shard-addr", "h:1", "--bootstrap-stub", "--metrics-addr", "off")
    done = run_here("operator", *needed, *given)

    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("bigfleet: ")
    assert end in line


def test_the_command_is_listed() -> None:
    assert "operator" in RootGroup.sources
