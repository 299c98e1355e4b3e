"""What a credential plugin is given, when it runs again, and what is said when it fails."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigfleet.operator.kubernetes.credentials import Credential, CredentialError, CredentialSource
from bigfleet.operator.kubernetes.kubeconfig import load_endpoint

EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin"}


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.unix_seconds = 1_800_000_000

    def monotonic_seconds(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return self.unix_seconds * 1_000_000_000

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


class Plugin:
    """A credential plugin that counts its runs and prints what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = SetClock()
        self.path = folder / "plugin"
        self.path.write_text(
            f"#!{sys.executable}\n"
            "import json, os, pathlib, sys\n"
            "folder = pathlib.Path(__file__).parent\n"
            "seen = {'info': json.loads(os.environ['KUBERNETES_EXEC_INFO']), 'argv': sys.argv[1:],\n"
            "        'own': os.environ.get('OWN'), 'outer': os.environ.get('OUTER')}\n"
            "with (folder / 'runs').open('a') as file: file.write(json.dumps(seen) + '\\n')\n"
            "print((folder / 'prints').read_text())\n"
            "print('not logged in', file=sys.stderr)\n"
            "sys.exit(int((folder / 'code').read_text()))\n"
        )
        self.path.chmod(0o755)
        self.answer({"token": "one"})

    def answer(self, status: Any, code: int = 0, version: str = "v1") -> None:
        document = status if isinstance(status, str) else json.dumps(self.document(status, version))
        (self.folder / "prints").write_text(document)
        (self.folder / "code").write_text(str(code))

    @staticmethod
    def document(status: Any, version: str = "v1") -> dict[str, Any]:
        return {
            "apiVersion": f"client.authentication.k8s.io/{version}",
            "kind": "ExecCredential",
            "status": status,
        }

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (self.folder / "runs").read_text().splitlines()]


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    """A plugin beside the kubeconfig."""
    return Plugin(tmp_path)


def credentials(plugin: Plugin, cluster: dict[str, Any] | None = None, **fields: Any) -> CredentialSource:
    """Return the credentials of a kubeconfig that names the plugin."""
    file = plugin.folder / "config"
    document = {
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api", **(cluster or {})}}],
        "users": [{"name": "u", "user": {"exec": {**EXEC, **fields}}}],
    }
    file.write_text(yaml.safe_dump(document))
    return load_endpoint(clock=plugin.clock, environment={"OUTER": "outer"}, kubeconfig=file).credentials


async def fault(plugin: Plugin, **fields: Any) -> str:
    """Return what is said of a plugin, without the place in the kubeconfig and the command."""
    with pytest.raises(CredentialError) as caught:
        await credentials(plugin, **fields).current()
    place, _, text = str(caught.value).partition(": users[u].user.exec: ")
    assert place == str(plugin.folder / "config")
    return text.replace(repr(str(plugin.folder / "plugin")), "it")


async def test_a_plugin_is_run_once(plugin: Plugin) -> None:
    found = credentials(plugin, args=["--cluster", "x"], env=[{"name": "OWN", "value": "own"}])
    assert await asyncio.gather(*(found.current() for _ in range(5))) == [Credential(token="one")] * 5
    info = {**plugin.document(None), "spec": {"interactive": False}}
    del info["status"]
    assert plugin.runs == [{"info": info, "argv": ["--cluster", "x"], "own": "own", "outer": "outer"}]


async def test_a_plugin_hears_of_the_cluster_if_it_asks(plugin: Plugin) -> None:
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    cluster = {"certificate-authority-data": "Q0E=", "tls-server-name": "k8s", "extensions": [extension]}
    await credentials(plugin, cluster, provideClusterInfo=True).current()
    assert plugin.runs[0]["info"]["spec"]["cluster"] == {
        "server": "https://api",
        "certificate-authority-data": "Q0E=",
        "tls-server-name": "k8s",
        "config": {"audience": "x"},
    }


async def test_a_plugin_is_run_again_when_its_credential_expires(plugin: Plugin) -> None:
    expiry = datetime.fromtimestamp(plugin.clock.unix_seconds + 60, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    plugin.answer({"token": "one", "expirationTimestamp": expiry})
    found = credentials(plugin)
    await found.current()
    plugin.answer({"token": "two"})
    plugin.clock.unix_seconds += 59
    assert (await found.current()).token == "one"
    plugin.clock.unix_seconds += 1
    assert (await found.current()).token == "two"
    plugin.clock.unix_seconds += 1_000_000
    assert (await found.current()).token == "two"
    assert len(plugin.runs) == 2


async def test_a_plugin_is_run_again_when_its_credential_is_refused(plugin: Plugin) -> None:
    found = credentials(plugin)
    refused = await found.current()
    plugin.answer({"token": "two"})
    # Several requests were under way with it.
    for _ in range(3):
        found.invalidate(refused)
        assert (await found.current()).token == "two"
    assert len(plugin.runs) == 2


async def test_a_plugin_may_print_a_certificate(plugin: Plugin) -> None:
    plugin.answer({"clientCertificateData": "CERT", "clientKeyData": "KEY"})
    assert await credentials(plugin).current() == Credential(certificate_pem=b"CERT", key_pem=b"KEY")


async def test_an_older_protocol_is_spoken_if_the_kubeconfig_says_so(plugin: Plugin) -> None:
    plugin.answer({"token": "one"}, version="v1beta1")
    found = credentials(plugin, apiVersion="client.authentication.k8s.io/v1beta1")
    assert (await found.current()).token == "one"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        ({"token": "x"}, 3, "it ended with exit code 3: not logged in; run it by hand to see why"),
        ({}, 0, "it printed neither token nor clientCertificateData; log in with it again"),
        (
            {"clientCertificateData": "x", "token": "t"},
            0,
            "it printed one of clientCertificateData and clientKeyData; it must print both or none",
        ),
        (
            {"token": "x", "expirationTimestamp": "soon"},
            0,
            "it printed expirationTimestamp 'soon'; it must be an RFC 3339 time",
        ),
        (
            '{"kind": "Pod", "apiVersion": "v1"}',
            0,
            "it printed 'Pod' of 'v1'; the kubeconfig asks for an ExecCredential of 'client.authentication.k8s.io/v1'",
        ),
        (
            "please log in",
            0,
            "it printed no ExecCredential: JSON is malformed: invalid character (byte 0); it must print one as JSON",
        ),
    ],
)
async def test_a_plugin_that_fails_is_named(plugin: Plugin, status: Any, code: int, message: str) -> None:
    plugin.answer(status, code)
    assert await fault(plugin) == message


async def test_a_plugin_that_is_absent_comes_with_its_hint(plugin: Plugin) -> None:
    plugin.path.unlink()
    assert await fault(plugin) == (
        "it cannot be started: No such file or directory; install it, or name its path in `command`"
    )
    hint = "install it from https://example.com"
    assert (await fault(plugin, installHint=hint)).endswith(f"; {hint}")


async def test_a_plugin_that_failed_is_asked_again(plugin: Plugin) -> None:
    plugin.answer({}, 1)
    found = credentials(plugin)
    for _ in range(2):
        with pytest.raises(CredentialError):
            await found.current()
    plugin.answer({"token": "two"})
    assert (await found.current()).token == "two"
