"""Finds the API server and the credentials of a process: in a kubeconfig, or inside a cluster.

Several files of $KUBECONFIG are merged as kubectl merges them: the first file that names an entry wins. A field that
is not supported is refused by name, because ignoring it would mean another server or another user than is meant.
"""

import base64
import binascii
import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from bigfleet.files.bounded import read_bounded
from bigfleet.files.yaml_loading import load_yaml
from bigfleet.model.clock import Clock
from bigfleet.operator.kubernetes.credentials import (
    PLUGIN_API_VERSIONS,
    Content,
    CredentialError,
    CredentialSource,
    FileContent,
    InlineContent,
    PluginCommand,
    PluginCredentials,
    StoredCredentials,
)
from bigfleet.operator.kubernetes.endpoint import ApiEndpoint, proxy_from_environment

#: Of one file of $KUBECONFIG or --kubeconfig.
KUBECONFIG_BYTES_MAX = 16 * 1024 * 1024
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CLUSTER_FIELDS = {
    "server",
    "certificate-authority",
    "certificate-authority-data",
    "insecure-skip-tls-verify",
    "tls-server-name",
    "proxy-url",
    # Nothing is ever compressed.
    "disable-compression",
    "extensions",
}
_USER_FIELDS = {
    "token",
    "tokenFile",
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
    "exec",
    "extensions",
}
_EXEC_FIELDS = {"apiVersion", "command", "args", "env", "installHint", "provideClusterInfo", "interactiveMode"}
_CONTEXT_FIELDS = {"cluster", "user", "namespace", "extensions"}
#: What stands in for a field that is refused.
_INSTEAD = {
    "username": "API servers have refused passwords since Kubernetes 1.19; use a token or a client certificate",
    "password": "API servers have refused passwords since Kubernetes 1.19; use a token or a client certificate",
    "auth-provider": "kubectl has dropped it as well; use the provider's credential plugin under `exec`",
    "as": "act as a user of its own in place of an impersonated one",
}


class KubeconfigError(Exception):
    """No API server can be found; the message says where it was looked for, what is wrong, and what to do."""


def load_endpoint(
    *,
    clock: Clock,
    environment: Mapping[str, str],
    kubeconfig: Path | None = None,
    context: str = "",
    service_account: Path = SERVICE_ACCOUNT,
) -> ApiEndpoint:
    """Return the API server to talk to.

    The first that exists: the file given, the files of $KUBECONFIG, the cluster that this process runs in,
    ~/.kube/config. `context` "" is the current one. Raises KubeconfigError.
    """
    if kubeconfig is not None:
        return _from_files([kubeconfig], context, clock, environment)
    named = [Path(text).expanduser() for text in environment.get("KUBECONFIG", "").split(":") if text]
    if named:
        present = [path for path in named if path.exists()]
        if not present:
            raise KubeconfigError(f"KUBECONFIG names {', '.join(map(str, named))}: no such file; correct or unset it")
        return _from_files(present, context, clock, environment)
    if environment.get("KUBERNETES_SERVICE_HOST") and (service_account / "token").exists():
        return _in_cluster(environment, service_account)
    home = environment.get("HOME", "")
    default = Path(home) / ".kube" / "config"
    if home and default.exists():
        return _from_files([default], context, clock, environment)
    raise KubeconfigError(
        "no API server is named: KUBECONFIG is not set, this is no pod with a service account "
        f"({service_account}/token), and there is no ~/.kube/config; give --kubeconfig FILE"
    )


def _in_cluster(environment: Mapping[str, str], service_account: Path) -> ApiEndpoint:
    host = environment["KUBERNETES_SERVICE_HOST"]
    server = f"https://{f'[{host}]' if ':' in host else host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"
    namespace = FileContent(service_account / "namespace", place="service account")
    authority = FileContent(service_account / "ca.crt", place="service account")
    token = FileContent(service_account / "token", place="service account")
    try:
        # Read once now, so that what is missing is found at start.
        authority.read()
        token.read()
        own_namespace = namespace.read().decode("utf-8", "replace").strip()
    except CredentialError as error:
        raise KubeconfigError(str(error)) from error
    return ApiEndpoint(
        server=server,
        source="the cluster of this pod",
        credentials=StoredCredentials(token=token),
        authority=authority,
        proxy_url=proxy_from_environment(server, environment),
        namespace=own_namespace or "default",
    )


# ---- kubeconfig files -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A mapping of a kubeconfig, and where it is."""

    file: Path
    #: Within the file, such as `users[dev].user`; "" is the file itself.
    place: str
    fields: Mapping[str, object]

    def fault(self, field: str, what: str) -> KubeconfigError:
        at = f"{self.place}.{field}" if self.place and field else self.place or field
        return KubeconfigError(f"{self.file}: {at}: {what}" if at else f"{self.file}: {what}")

    def text(self, field: str) -> str:
        """Return a text, "" when it is absent."""
        value = self.fields.get(field)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.fault(field, f"{value!r} is no text; put it in quotes")
        return value

    def required(self, field: str, advice: str) -> str:
        value = self.text(field)
        if not value:
            raise self.fault(field, f"is missing; {advice}")
        return value

    def flag(self, field: str) -> bool:
        value = self.fields.get(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fault(field, f"{value!r} is neither true nor false; write one of them")
        return value

    def items(self, field: str) -> list[object]:
        value = self.fields.get(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(field, "is no list; write its entries with dashes")
        return value

    def inner(self, field: str) -> "_Entry | None":
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(field, "is no mapping; write its fields as `name: value`")
        return _Entry(self.file, f"{self.place}.{field}" if self.place else field, value)

    def refuse_others(self, known: Iterable[str]) -> None:
        """Raise KubeconfigError for a field that is not among the known ones and says something."""
        for name in self.fields:
            if name not in known and self.fields[name] not in (None, "", [], {}, False):
                stem = "as" if name.startswith("as-") else name
                raise self.fault(name, f"is not supported; {_INSTEAD.get(stem, 'remove it')}")

    def content(self, field: str) -> Content | None:
        """Return what `field-data` holds or the file that `field` names; data wins, as for kubectl."""
        data = self.text(f"{field}-data")
        if data:
            try:
                return InlineContent(base64.b64decode(data.encode(), validate=True))
            except (binascii.Error, ValueError):
                raise self.fault(f"{field}-data", "is not base64; copy it again") from None
        path = self.text(field)
        return self.file_content(field, path) if path else None

    def file_content(self, field: str, path: str) -> FileContent:
        """Return the content of a file; a relative path starts at the kubeconfig's folder. It must be readable now."""
        content = FileContent(
            self.file.parent / Path(path).expanduser(),
            place=f"{self.file}: {self.place}.{field}",
        )
        try:
            content.read()
        except CredentialError as error:
            raise KubeconfigError(str(error)) from error
        return content


def _text_of(content: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark, as PowerShell writes it."""
    is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf_16 else "utf-8-sig")


def _read(path: Path) -> _Entry:
    try:
        document = load_yaml(_text_of(read_bounded(path, KUBECONFIG_BYTES_MAX)), is_strict=False)
    except OSError as error:
        raise KubeconfigError(
            f"{path}: cannot be read: {error.strerror or error}; name a kubeconfig that this process may read"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise KubeconfigError(f"{path}{line}: is not YAML: {problem}; correct it, or write it again") from error
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise KubeconfigError(f"{path}: holds no mapping; it must be a kubeconfig (kind: Config)")
    kind = document.get("kind")
    if kind not in (None, "Config"):
        raise KubeconfigError(f"{path}: kind: {kind!r} is no kubeconfig; it must be Config")
    return _Entry(path, "", document)


def _entry(files: list[_Entry], section: str, inner: str, name: str, wanted_by: str) -> _Entry:
    """Return the first entry of that name in `clusters`, `users` or `contexts`. Raises KubeconfigError."""
    names: list[str] = []
    for file in files:
        for position, each in enumerate(file.items(section)):
            if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
                raise file.fault(f"{section}[{position}]", f"has no name; write `name: …` and `{inner}: …`")
            names.append(each["name"])
            if each["name"] == name:
                found = _Entry(file.file, f"{section}[{name}]", each).inner(inner)
                return found or _Entry(file.file, f"{section}[{name}].{inner}", {})
    listed = ", ".join(names) or "none"
    where = ", ".join(str(file.file) for file in files)
    raise KubeconfigError(f"{where}: {wanted_by} {name!r}, and {section} has no such entry; there are: {listed}")


def _from_files(paths: list[Path], context: str, clock: Clock, environment: Mapping[str, str]) -> ApiEndpoint:
    files = [_read(path) for path in paths]
    wanted_by = "the context given is"
    if not context:
        context = next((name for file in files if (name := file.text("current-context"))), "")
        wanted_by = "current-context is"
    where = ", ".join(map(str, paths))
    if not context:
        raise KubeconfigError(f"{where}: current-context: is missing; set it: kubectl config use-context NAME")
    chosen = _entry(files, "contexts", "context", context, wanted_by)
    chosen.refuse_others(_CONTEXT_FIELDS)
    cluster_name = chosen.required("cluster", "name an entry of clusters")
    cluster = _entry(files, "clusters", "cluster", cluster_name, f"context {context!r} names cluster")
    cluster.refuse_others(_CLUSTER_FIELDS)
    server = _server(cluster)
    authority = cluster.content("certificate-authority")
    verifies = not cluster.flag("insecure-skip-tls-verify")
    if authority is not None and not verifies:
        raise cluster.fault("insecure-skip-tls-verify", "contradicts certificate-authority; remove one of them")
    user_name = chosen.text("user")
    credentials: CredentialSource = StoredCredentials()
    if user_name:
        user = _entry(files, "users", "user", user_name, f"context {context!r} names user")
        credentials = _credentials(user, cluster, authority, clock, environment)
    return ApiEndpoint(
        server=server,
        source=f"context {context} of {where}",
        credentials=credentials,
        authority=authority,
        verifies=verifies,
        tls_server_name=cluster.text("tls-server-name"),
        proxy_url=_proxy(cluster) or proxy_from_environment(server, environment),
        namespace=chosen.text("namespace") or "default",
    )


def _server(cluster: _Entry) -> str:
    server = cluster.required("server", "write the URL of the API server, such as https://10.0.0.1:6443")
    try:
        parts = urlsplit(server)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise cluster.fault("server", f"{server!r} is not a URL of a server; write one such as https://10.0.0.1:6443")
    if parts.username is not None:
        raise cluster.fault("server", f"holds a user name; {_INSTEAD['password']}")
    return server.rstrip("/")


def _proxy(cluster: _Entry) -> str:
    proxy = cluster.text("proxy-url")
    try:
        parts = urlsplit(proxy)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if proxy and not valid:
        raise cluster.fault("proxy-url", f"{proxy!r} is not supported; only http:// and https:// proxies are")
    return proxy


def _credentials(
    user: _Entry, cluster: _Entry, authority: Content | None, clock: Clock, environment: Mapping[str, str]
) -> CredentialSource:
    user.refuse_others(_USER_FIELDS)
    plugin = user.inner("exec")
    token: Content | None = None
    token_file, token_text = user.text("tokenFile"), user.text("token")
    if token_file:
        token = user.file_content("tokenFile", token_file)
    elif token_text:
        token = InlineContent(token_text.encode())
    certificate, key = user.content("client-certificate"), user.content("client-key")
    if (certificate is None) != (key is None):
        missing = "client-key" if key is None else "client-certificate"
        raise user.fault(missing, "is missing; a client certificate and its key are given together")
    if plugin is None:
        return StoredCredentials(token=token, certificate=certificate, key=key)
    if token is not None or certificate is not None:
        raise plugin.fault("", "is given together with a token or a client certificate; remove one of them")
    return PluginCredentials(_plugin(plugin, cluster, authority, environment), clock=clock)


def _plugin(
    plugin: _Entry, cluster: _Entry, authority: Content | None, environment: Mapping[str, str]
) -> PluginCommand:
    plugin.refuse_others(_EXEC_FIELDS)
    api_version = plugin.required("apiVersion", f"write {PLUGIN_API_VERSIONS[0]}")
    if api_version not in PLUGIN_API_VERSIONS:
        raise plugin.fault(
            "apiVersion", f"{api_version!r} is not supported; use a plugin that knows {PLUGIN_API_VERSIONS[0]}"
        )
    mode = plugin.text("interactiveMode") or "IfAvailable"
    if mode not in ("Never", "IfAvailable"):
        raise plugin.fault("interactiveMode", f"{mode!r} is not supported: no person is there to answer; use Never")
    command = plugin.required("command", "name the program that prints the credential")
    if "/" in command:
        command = str(plugin.file.parent / Path(command).expanduser())
    arguments = plugin.items("args")
    if not all(isinstance(each, str) for each in arguments):
        raise plugin.fault("args", "holds something that is no text; put each argument in quotes")
    own: dict[str, str] = {}
    for position, each in enumerate(plugin.items("env")):
        name = each.get("name") if isinstance(each, Mapping) else None
        value = each.get("value", "") if isinstance(each, Mapping) else None
        if not isinstance(name, str) or not isinstance(value, str):
            raise plugin.fault(f"env[{position}]", "must have `name` and `value`, both text")
        own[name] = value
    return PluginCommand(
        place=f"{plugin.file}: {plugin.place}",
        api_version=api_version,
        command=command,
        arguments=tuple(str(each) for each in arguments),
        environment={**environment, **own},
        install_hint=plugin.text("installHint"),
        cluster=_cluster_info(cluster, authority) if plugin.flag("provideClusterInfo") else None,
    )


def _cluster_info(cluster: _Entry, authority: Content | None) -> dict[str, object]:
    """Return `spec.cluster` of the ExecCredential that a plugin is given."""
    info: dict[str, object] = {"server": _server(cluster)}
    if authority is not None:
        info["certificate-authority-data"] = base64.b64encode(authority.read()).decode()
    for field in ("tls-server-name", "proxy-url"):
        if text := cluster.text(field):
            info[field] = text
    if cluster.flag("insecure-skip-tls-verify"):
        info["insecure-skip-tls-verify"] = True
    for extension in cluster.items("extensions"):
        if isinstance(extension, Mapping) and extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info
