"""Describes where an API server is and how it is reached: address, trust, credentials, proxy.

`bigfleet.operator.kubernetes.kubeconfig` makes one from a file or from inside a cluster. This module does no I/O.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bigfleet.operator.kubernetes.credentials import Content, CredentialSource, StoredCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """The API server of one cluster as one user."""

    #: Without a slash at its end, such as `https://10.0.0.1:6443`.
    server: str
    #: Names it in logs, such as `context dev of /home/me/.kube/config`.
    source: str
    credentials: CredentialSource = field(default_factory=StoredCredentials)
    #: Certificates (PEM) that the server's own must go back to; None means those that the system trusts.
    authority: Content | None = None
    verifies: bool = True
    #: The name that the server's certificate must have; "" is that of the address.
    tls_server_name: str = ""
    #: "" is none.
    proxy_url: str = ""
    #: The namespace of the context, or of the pod.
    namespace: str = "default"


def proxy_from_environment(server: str, environment: Mapping[str, str]) -> str:
    """Return the proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY name for a server, "" for none.

    NO_PROXY lists names (with their subdomains; after a dot these alone), addresses and networks such as 10.0.0.0/8, or
    `*`. A server on this machine is never reached through a proxy.
    """
    address = urlsplit(server)
    scheme = address.scheme or "https"
    proxy = environment.get(f"{scheme}_proxy") or environment.get(f"{scheme.upper()}_PROXY") or ""
    host = (address.hostname or "").rstrip(".")
    if not proxy or host == "localhost" or _is_loopback(host):
        return ""
    for entry in (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(","):
        if _is_exempt(host, address.port, entry.strip().lower()):
            return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_exempt(host: str, port: int | None, entry: str) -> bool:
    """Return whether one entry of NO_PROXY names the host."""
    if not entry:
        return False
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, colon, entry_port = entry.rpartition(":")
    if colon and entry_port.isdigit() and ":" not in name:
        if port is not None and int(entry_port) != port:
            return False
        entry = name
    entry = entry.removeprefix("*").strip("[]")
    if entry.startswith("."):
        return host.endswith(entry)
    return host == entry or host.endswith(f".{entry}")
