"""Lists the programs of a control plane, and writes their command lines and the files that they read.

This module does not start a process.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

LOOPBACK: Final = "127.0.0.1"
#: Of the tokens of service accounts; what asks for a token of another audience is refused.
ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
_ETCD_QUOTA_BYTES: Final = 4 << 30
_KEY_BITS: Final = 2048


class Component(Enum):
    """One program of a control plane, in the order in which they start; the value is its name."""

    ETCD = "etcd"
    API_SERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanePorts:
    """The loopback ports of one control plane."""

    etcd: int
    etcd_peer: int
    api_server: int
    controller_manager: int
    scheduler: int

    @property
    def api_url(self) -> str:
        """The address of the API server."""
        return f"https://{LOOPBACK}:{self.api_server}"


@dataclass(frozen=True, slots=True)
class PlaneFiles:
    """Where the files of one control plane are."""

    folder: Path

    @property
    def etcd_data(self) -> Path:
        """The objects of the cluster; the folder is created by etcd."""
        return self.folder / "etcd"

    @property
    def logs(self) -> Path:
        """One log for each component."""
        return self.folder / "logs"

    @property
    def certificate(self) -> Path:
        """The certificate of the API server with the authority that signed it; the API server writes it."""
        return self.certificates(Component.API_SERVER) / "apiserver.crt"

    @property
    def service_account_key(self) -> Path:
        """Signs the tokens of service accounts."""
        return self.folder / "service-account.key"

    @property
    def tokens(self) -> Path:
        """The API server's list of static tokens."""
        return self.folder / "tokens.csv"

    @property
    def audit_policy(self) -> Path:
        """Says what the API server writes to its audit log."""
        return self.folder / "audit-policy.json"

    @property
    def audit_log(self) -> Path:
        """The audit log of the API server, one JSON object a line."""
        return self.folder / "audit.log"

    def log(self, component: Component) -> Path:
        """Return the log of one component."""
        return self.logs / f"{component.value}.log"

    def kubeconfig(self, user: str) -> Path:
        """Return the kubeconfig of one user."""
        return self.folder / f"{user}.kubeconfig"

    def certificates(self, component: Component) -> Path:
        """Return the folder where a component writes its own certificate."""
        return self.folder / "certificates" / component.value


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticUser:
    """A user of the API server with a token that never expires."""

    #: The name of its kubeconfig, and its UID.
    short_name: str
    name: str
    groups: tuple[str, ...] = ()


ADMIN: Final = StaticUser(short_name="admin", name="admin", groups=("system:masters",))
STATIC_USERS: Final = (
    ADMIN,
    StaticUser(short_name="controller-manager", name="system:kube-controller-manager"),
    StaticUser(short_name="scheduler", name="system:kube-scheduler"),
)


def write_service_account_key(path: Path) -> None:
    """Write a new RSA key that only its owner may read."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=_KEY_BITS)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(pem)


def write_tokens(path: Path, tokens: Mapping[str, str]) -> None:
    """Write the list of static tokens; `tokens` has one for the short name of each static user."""
    lines = []
    for user in STATIC_USERS:
        groups = f',"{",".join(user.groups)}"' if user.groups else ""
        lines.append(f"{tokens[user.short_name]},{user.name},{user.short_name}{groups}\n")
    path.touch(mode=0o600)
    path.write_text("".join(lines), encoding="utf-8")


def write_kubeconfig(path: Path, *, url: str, certificate: bytes, token: str) -> None:
    """Write a kubeconfig for one token; it contains everything that a client needs."""
    name = "bigfleet"
    authority = base64.b64encode(certificate).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": name, "user": {"token": token}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_audit_policy(path: Path) -> None:
    """Write a policy under which each request that changes an object leaves one line when it has been answered.

    Evictions leave their bodies too. Reads, Leases and Events leave nothing.
    """
    evictions = {"group": "", "resources": ["pods/eviction"]}
    unlisted = [
        {"group": "coordination.k8s.io", "resources": ["leases"]},
        {"group": "", "resources": ["events"]},
        {"group": "events.k8s.io", "resources": ["events"]},
    ]
    changes = ["create", "update", "patch", "delete", "deletecollection"]
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [
            {"level": "None", "resources": unlisted},
            {"level": "RequestResponse", "verbs": ["create"], "resources": [evictions]},
            {"level": "Metadata", "verbs": changes},
            {"level": "None"},
        ],
    }
    path.write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")


def etcd_flags(files: PlaneFiles, ports: PlanePorts) -> list[str]:
    """Return the arguments of etcd. It does not wait for the disk: nothing of it has to outlive the host."""
    client = f"http://{LOOPBACK}:{ports.etcd}"
    peer = f"http://{LOOPBACK}:{ports.etcd_peer}"
    return [
        f"--data-dir={files.etcd_data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        f"--quota-backend-bytes={_ETCD_QUOTA_BYTES}",
    ]


def api_server_flags(files: PlaneFiles, ports: PlanePorts, *, audit: bool) -> list[str]:
    """Return the arguments of the API server. It signs its own certificate, and keeps it over restarts."""
    audit_flags = [f"--audit-policy-file={files.audit_policy}", f"--audit-log-path={files.audit_log}"]
    return [
        f"--etcd-servers=http://{LOOPBACK}:{ports.etcd}",
        f"--bind-address={LOOPBACK}",
        f"--advertise-address={LOOPBACK}",
        f"--secure-port={ports.api_server}",
        f"--cert-dir={files.certificates(Component.API_SERVER)}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=Node,RBAC",
        f"--token-auth-file={files.tokens}",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={files.service_account_key}",
        f"--service-account-signing-key-file={files.service_account_key}",
        f"--api-audiences={ISSUER}",
        "--enable-bootstrap-token-auth",
        "--allow-privileged",
        "--endpoint-reconciler-type=none",
        *(audit_flags if audit else []),
    ]


def controller_manager_flags(files: PlaneFiles, ports: PlanePorts) -> list[str]:
    """Return the arguments of the controller manager; bootstrap tokens are signed, and deleted when they expire."""
    return [
        *_client_flags(files, Component.CONTROLLER_MANAGER, "controller-manager", ports.controller_manager),
        f"--service-account-private-key-file={files.service_account_key}",
        f"--root-ca-file={files.certificate}",
        "--use-service-account-credentials",
        "--controllers=*,bootstrap-signer-controller,token-cleaner-controller",
    ]


def scheduler_flags(files: PlaneFiles, ports: PlanePorts) -> list[str]:
    """Return the arguments of the scheduler, which has its default configuration."""
    return _client_flags(files, Component.SCHEDULER, "scheduler", ports.scheduler)


def _client_flags(files: PlaneFiles, component: Component, user: str, port: int) -> list[str]:
    config = files.kubeconfig(user)
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={port}",
        f"--cert-dir={files.certificates(component)}",
        "--leader-elect=false",
    ]
