"""Which API server and which credentials a process finds, and what it says when it finds none."""

import base64
import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.operator.kubernetes.credentials import Credential
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint
from bigfleet.operator.kubernetes.kubeconfig import KubeconfigError, load_endpoint
from bigfleet.sim.kernel.virtual_time import LoopClock

PASSWORDS = "API servers have refused passwords since Kubernetes 1.19; use a token or a client certificate"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def config(*, user: Any = None, **cluster: Any) -> dict[str, Any]:
    """Return a kubeconfig with one context `dev`."""
    return {
        "kind": "Config",
        "apiVersion": "v1",
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api:6443/", **cluster}}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a kubeconfig that is not there yet."""
    return tmp_path / "config"


def load(file: Path | None, document: Any = None, /, **options: Any) -> ApiEndpoint:
    if file is not None and document is not None:
        file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    options = {"environment": {}, "service_account": Path("/absent"), **options}
    return load_endpoint(clock=LoopClock(), kubeconfig=file, **options)


def fault(file: Path, document: Any, **options: Any) -> str:
    """Return what is said of a kubeconfig, without the path of the file."""
    with pytest.raises(KubeconfigError) as caught:
        load(file, document, **options)
    text = str(caught.value)
    assert text.startswith(str(file))
    return text.removeprefix(str(file)).removeprefix(": ")


async def test_a_context_names_server_user_and_namespace(file: Path) -> None:
    found = load(file, config())
    assert (found.server, found.namespace, found.verifies) == ("https://api:6443", "team", True)
    assert found.source == f"context dev of {file}"
    assert await found.credentials.current() == Credential(token="t")


async def test_certificates_come_from_data_or_files(file: Path) -> None:
    (file.parent / "key.pem").write_text("KEY")
    user = {"client-certificate-data": encoded("CERT"), "client-key": "key.pem"}
    found = load(file, config(user=user, **{"certificate-authority-data": encoded("CA")}))
    assert found.authority is not None
    assert found.authority.read() == b"CA"
    assert await found.credentials.current() == Credential(certificate_pem=b"CERT", key_pem=b"KEY")
    # A key that was rotated is read again.
    (file.parent / "key.pem").write_text("OTHER KEY")
    assert (await found.credentials.current()).key_pem == b"OTHER KEY"


async def test_a_token_file_outranks_a_token_and_is_read_again(file: Path) -> None:
    token = file.parent / "token"
    token.write_text("one\n")
    credentials = load(file, config(user={"token": "t", "tokenFile": "token"})).credentials
    assert (await credentials.current()).token == "one"
    token.write_text("another\n")
    assert (await credentials.current()).token == "another"
    # One that is being swapped leaves the last one valid.
    token.unlink()
    assert (await credentials.current()).token == "another"


def test_a_token_is_in_no_text(file: Path) -> None:
    found = load(file, config(user={"token": "hidden"}))
    assert "hidden" not in repr(found)
    assert "hidden" not in repr(Credential(token="hidden"))


def test_trust_and_proxy_are_the_clusters(file: Path) -> None:
    found = load(
        file,
        config(
            user=None, **{"insecure-skip-tls-verify": True, "tls-server-name": "k8s", "proxy-url": "http://proxy:3128"}
        ),
    )
    assert (found.verifies, found.tls_server_name, found.proxy_url) == (False, "k8s", "http://proxy:3128")


def test_another_context_may_be_given(file: Path) -> None:
    document = config()
    document["contexts"].append({"name": "prod", "context": {"cluster": "c"}})
    assert load(file, document, context="prod").namespace == "default"
    text = fault(file, document, context="test")
    assert text == "the context given is 'test', and contexts has no such entry; there are: dev, prod"


async def test_several_files_are_merged_and_the_first_wins(tmp_path: Path) -> None:
    one, two, absent = tmp_path / "one", tmp_path / "sub" / "two", tmp_path / "absent"
    two.parent.mkdir()
    (two.parent / "token").write_text("beside")
    first, second = config(), config(user={"tokenFile": "token"})
    first["users"] = []
    first["clusters"][0]["cluster"]["server"] = "https://first"
    second["current-context"] = "other"
    one.write_text(yaml.safe_dump(first))
    two.write_text(yaml.safe_dump(second))
    found = load(None, environment={"KUBECONFIG": f"{absent}:{one}:{two}"})
    assert found.server == "https://first"
    # A relative path starts at the folder of the file that names it.
    assert (await found.credentials.current()).token == "beside"


def test_an_environment_that_names_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KubeconfigError, match=r"KUBECONFIG names .*/absent: no such file; correct or unset it"):
        load(None, environment={"KUBECONFIG": str(tmp_path / "absent")})


# ---- in a cluster ------------------------------------------------------------------------------------------------


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    """The folder that a pod finds its identity in."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("pod")
    (folder / "ca.crt").write_text("CA")
    (folder / "namespace").write_text("bigfleet")
    return folder


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
async def test_a_pod_finds_its_own_cluster(service_account: Path, host: str, server: str) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    found = load(None, environment=environment, service_account=service_account)
    assert (found.server, found.namespace) == (server, "bigfleet")
    assert found.authority is not None
    assert found.authority.read() == b"CA"
    assert (await found.credentials.current()).token == "pod"
    (service_account / "token").write_text("pod, later")
    assert (await found.credentials.current()).token == "pod, later"


def test_a_pod_without_its_authority_is_refused(service_account: Path) -> None:
    (service_account / "ca.crt").unlink()
    with pytest.raises(KubeconfigError, match=r"service account: .*/ca.crt cannot be read: No such file"):
        load(None, environment={"KUBERNETES_SERVICE_HOST": "x"}, service_account=service_account)


def test_the_order_is_file_then_environment_then_pod_then_home(service_account: Path, tmp_path: Path) -> None:
    def written(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(config()))
        return path

    given, named = written("given"), written("named")
    home = written(".kube/config")
    environment = {"KUBECONFIG": str(named), "KUBERNETES_SERVICE_HOST": "x", "HOME": str(tmp_path)}
    sources = [load(given, environment=environment, service_account=service_account).source]
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        sources.append(load(None, environment=environment, service_account=service_account).source)
        del environment[name]
    sources.append(load(None, environment=environment, service_account=service_account).source)
    assert sources == [
        f"context dev of {given}",
        f"context dev of {named}",
        "the cluster of this pod",
        f"context dev of {home}",
    ]


def test_where_it_was_looked_for_is_said(tmp_path: Path) -> None:
    with pytest.raises(KubeconfigError, match=r"KUBECONFIG is not set, .* no ~/.kube/config; give --kubeconfig FILE"):
        load(None, environment={"HOME": str(tmp_path)})


# ---- faults ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_absent_is_named(file: Path) -> None:
    assert fault(file, None) == (
        "cannot be read: No such file or directory; name a kubeconfig that this process may read"
    )


def test_files_without_an_end_are_refused(file: Path) -> None:
    """A device or a sparse file would take all memory."""
    token = file.with_name("token")
    token.touch()
    os.truncate(token, 1 << 40)

    assert fault(file, config(user={"tokenFile": "token"})) == (
        f"users[u].user.tokenFile: {token} cannot be read: Has more than 1,048,576 bytes; "
        "name a file that this process may read"
    )
    file.unlink()
    file.symlink_to("/dev/zero")
    assert fault(file, None) == "cannot be read: Is a device; name a kubeconfig that this process may read"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", ":2: is not YAML: did not find expected node content; correct it, or write it again"),
        ("[" * 5_000, "is not YAML: more than 100 levels are nested; correct it, or write it again"),
        ("- a", "holds no mapping; it must be a kubeconfig (kind: Config)"),
        ("kind: Pod", "kind: 'Pod' is no kubeconfig; it must be Config"),
        ("", "current-context: is missing; set it: kubectl config use-context NAME"),
        ("current-context: 3", "current-context: 3 is no text; put it in quotes"),
        ("current-context: dev\ncontexts: {}", "contexts: is no list; write its entries with dashes"),
        (
            "current-context: dev\ncontexts: [3]",
            "contexts[0]: has no name; write `name: …` and `context: …`",
        ),
        (
            "current-context: dev\ncontexts: [{name: dev, context: [3]}]",
            "contexts[dev].context: is no mapping; write its fields as `name: value`",
        ),
        (
            "current-context: dev",
            "current-context is 'dev', and contexts has no such entry; there are: none",
        ),
        (
            "current-context: dev\ncontexts: [{name: dev}]",
            "contexts[dev].context.cluster: is missing; name an entry of clusters",
        ),
        (
            "current-context: dev\ncontexts: [{name: dev, context: {cluster: x}}]",
            "context 'dev' names cluster 'x', and clusters has no such entry; there are: none",
        ),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_refused(file: Path, text: str, message: str) -> None:
    found = fault(file, text)
    assert found == message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_byte_order_mark_tells_the_encoding(file: Path, encoding: str) -> None:
    """PowerShell writes UTF-16 with a mark; without one a file is UTF-8."""
    file.write_bytes(yaml.safe_dump(config()).encode(encoding))

    if encoding == "utf-16-le":
        with pytest.raises(KubeconfigError, match="is not YAML"):
            load(file)
    else:
        assert load(file).server == "https://api:6443"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"server": ""}, "server: is missing; write the URL of the API server, such as https://10.0.0.1:6443"),
        (
            {"server": "api:6443"},
            "server: 'api:6443' is not a URL of a server; write one such as https://10.0.0.1:6443",
        ),
        (
            {"server": "https://api:port"},
            "server: 'https://api:port' is not a URL of a server; write one such as https://10.0.0.1:6443",
        ),
        ({"server": "https://me:secret@api"}, f"server: holds a user name; {PASSWORDS}"),
        ({"certificate-authority-data": "%"}, "certificate-authority-data: is not base64; copy it again"),
        (
            {"certificate-authority-data": encoded("x"), "insecure-skip-tls-verify": True},
            "insecure-skip-tls-verify: contradicts certificate-authority; remove one of them",
        ),
        (
            {"insecure-skip-tls-verify": "yes"},
            "insecure-skip-tls-verify: 'yes' is neither true nor false; write one of them",
        ),
        (
            {"proxy-url": "socks5://proxy"},
            "proxy-url: 'socks5://proxy' is not supported; only http:// and https:// proxies are",
        ),
        (
            {"proxy-url": "http://[::1"},
            "proxy-url: 'http://[::1' is not supported; only http:// and https:// proxies are",
        ),
        ({"colour": "red"}, "colour: is not supported; remove it"),
    ],
)
def test_a_cluster_with_a_fault_is_refused(file: Path, cluster: dict[str, Any], message: str) -> None:
    assert fault(file, config(**cluster)) == f"clusters[c].cluster.{message}"


EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "login"}


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"username": "me"}, f".username: is not supported; {PASSWORDS}"),
        (
            {"auth-provider": {"name": "gcp"}},
            ".auth-provider: is not supported; kubectl has dropped it as well; "
            "use the provider's credential plugin under `exec`",
        ),
        (
            {"as-groups": ["x"]},
            ".as-groups: is not supported; act as a user of its own in place of an impersonated one",
        ),
        ({"token": 5}, ".token: 5 is no text; put it in quotes"),
        (
            {"client-certificate-data": encoded("x")},
            ".client-key: is missing; a client certificate and its key are given together",
        ),
        (
            {"exec": EXEC, "token": "t"},
            ".exec: is given together with a token or a client certificate; remove one of them",
        ),
        ({"exec": {}}, ".exec.apiVersion: is missing; write client.authentication.k8s.io/v1"),
        (
            {"exec": {**EXEC, "apiVersion": "client.authentication.k8s.io/v1alpha1"}},
            ".exec.apiVersion: 'client.authentication.k8s.io/v1alpha1' is not supported; "
            "use a plugin that knows client.authentication.k8s.io/v1",
        ),
        (
            {"exec": {**EXEC, "interactiveMode": "Always"}},
            ".exec.interactiveMode: 'Always' is not supported: no person is there to answer; use Never",
        ),
        (
            {"exec": {"apiVersion": EXEC["apiVersion"]}},
            ".exec.command: is missing; name the program that prints the credential",
        ),
        ({"exec": {**EXEC, "args": [1]}}, ".exec.args: holds something that is no text; put each argument in quotes"),
        (
            {"exec": {**EXEC, "env": [{"name": "A", "value": 1}]}},
            ".exec.env[0]: must have `name` and `value`, both text",
        ),
        ({"exec": {**EXEC, "shell": True}}, ".exec.shell: is not supported; remove it"),
    ],
)
def test_a_user_with_a_fault_is_refused(file: Path, user: dict[str, Any], message: str) -> None:
    assert fault(file, config(user=user)) == f"users[u].user{message}"


def test_a_file_that_a_kubeconfig_names_must_be_readable(file: Path) -> None:
    text = fault(file, config(user={"tokenFile": "absent"}))
    assert text == (
        f"users[u].user.tokenFile: {file.parent / 'absent'} cannot be read: No such file or directory; "
        "name a file that this process may read"
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["https://[", "a:b", "/absent"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within a document."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from places(inner, (*path, position))


FULL = config(
    user={"exec": {**EXEC, "args": ["a"], "env": [{"name": "A", "value": "b"}], "provideClusterInfo": True}},
    **{
        "certificate-authority-data": encoded("CA"),
        "tls-server-name": "k8s",
        "proxy-url": "http://proxy",
        "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"a": "b"}}],
    },
)


@given(place=st.sampled_from(list(places(FULL))), value=VALUES)
def test_whatever_a_kubeconfig_holds_is_understood_or_refused_by_name(place: tuple[Any, ...], value: Any) -> None:
    """One value of a valid file is replaced by any other."""
    document: Any = copy.deepcopy({"": FULL})
    target, last = document, ""
    for name in place:
        target, last = target[last], name
    target[last] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        path.write_text(yaml.safe_dump(document[""]), encoding="utf-8", errors="surrogatepass")
        try:
            found = load(path)
        except KubeconfigError as error:
            assert str(error).startswith(str(path))  # noqa: PT017 - either end is right
        else:
            assert found.server.startswith("http")
