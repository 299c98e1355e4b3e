"""Defines `bigfleet certs dev`: creates an authority and certificates for every role, to try mutual TLS.

docs/tls.md. Exit 2 for a wrong call and for a directory that cannot be used, 1 if a file cannot be written, else 0. The
authority's key is stored beside the certificates: these certificates are not for production.
"""

import ipaddress
import re
import shlex
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from bigfleet.cli.flags.help_text import HelpGroup
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.terminal import echo
from bigfleet.model.ids import identifier_fault

if TYPE_CHECKING:
    from bigfleet.cli.certs.folder import StoredCredential
    from bigfleet.cli.certs.issuing import Bearer
    from bigfleet.rpc.security.identity import PeerIdentity

app = typer.Typer(cls=HelpGroup, help="Create certificates for mutual TLS.", no_args_is_help=True)

DAYS_MAX = 3650
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_HOST_CHARACTERS_MAX = 253

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the files; created if missing.")]
_Clusters = Annotated[list[str] | None, typer.Option("--cluster", metavar="ID", help="Cluster id; repeatable.")]
_Shards = Annotated[list[str] | None, typer.Option("--shard", metavar="ID", help="Shard id; repeatable.")]
_Providers = Annotated[list[str] | None, typer.Option("--provider", metavar="NAME", help="Provider name; repeatable.")]
_Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Additional host name or address of shards, providers and the coordinator; repeatable.",
    ),
]
_Days = Annotated[int, typer.Option(min=1, max=DAYS_MAX, help="Validity of new certificates in days.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace all files, including the authority.")]


@app.callback()
def certs() -> None:
    """Hold the commands together; each is a command of its own."""


@app.command(cls=SwitchCommand)
def dev(
    folder: _Folder,
    cluster: _Clusters = None,
    shard: _Shards = None,
    provider: _Providers = None,
    host: _Hosts = None,
    days: _Days = 90,
    force: _Force = False,
) -> None:
    """Create a development authority and certificates for all identities.

    Existing files in DIR stay, so that another cluster can be added later.
    """
    from bigfleet.cli.certs.folder import CertificateFolder
    from bigfleet.rpc.security.identity import PeerIdentity, PeerRole

    shards, clusters = shard or ["shard-0"], cluster or ["cluster-0"]
    providers = provider or ["simulated"]
    for flag, names in (("--shard", shards), ("--cluster", clusters), ("--provider", providers)):
        _check_names(flag, names)
    asked_hosts = host or []
    hosts = _hosts(asked_hosts)
    credentials = CertificateFolder(folder, now=datetime.now(UTC), days=days, is_forced=force)
    holders = [
        *(
            (f"shard-{name}", _identified(PeerIdentity(PeerRole.SHARD, name), hosts), _shard_call(name))
            for name in shards
        ),
        *(
            (f"cluster-{name}", _identified(PeerIdentity(PeerRole.CLUSTER, name)), f"the operator of {name}")
            for name in clusters
        ),
        *((f"provider-{name}", _anonymous(hosts), _provider_call(name)) for name in providers),
        ("coordinator", _identified(PeerIdentity(PeerRole.ADMIN), hosts), "bigfleet coordinator"),
        ("admin", _identified(PeerIdentity(PeerRole.ADMIN)), "administrators and tools that change the fleet"),
        ("readonly", _identified(PeerIdentity(PeerRole.READONLY)), "dashboards and tools that only read"),
    ]
    lines = []
    for name, bearer, who in holders:
        must_serve = asked_hosts if bearer.hosts else []
        lines.append(
            _words(who, bearer, credentials.keep(quote(name, safe=""), bearer, must_serve), credentials.authority_path)
        )
    echo(f"authority until {credentials.authority_expires:%Y-%m-%d}: {credentials.authority_path}")
    for words in lines:
        echo(words)
    echo(
        f"\n{credentials.authority_path.with_suffix('.key')} can create any identity: keep it off every other machine."
    )


def _check_names(flag: str, names: list[str]) -> None:
    for name in names:
        fault = identifier_fault(name)
        if fault:
            raise UsageFault(f"{flag} {fault}")
        if not name.isascii():
            raise UsageFault(f"{flag}: {name!r} must be ASCII, as every URI in a certificate")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageFault(f"{flag}: {twice[0]!r} is given twice")


def _hosts(more: list[str]) -> tuple[str, ...]:
    """Return the names of this machine and those given, each once."""
    for host in more:
        if not _is_host(host):
            raise UsageFault(f"--host: {host!r} is neither a host name nor an IP address")
    own = socket.gethostname()
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", *([own] if _is_host(own) else []), *more)))


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= _HOST_CHARACTERS_MAX and _HOST.fullmatch(text) is not None
    return True


def _identified(identity: "PeerIdentity", hosts: tuple[str, ...] = ()) -> "Bearer":
    from bigfleet.cli.certs.issuing import Bearer

    return Bearer(name=f"BigFleet {identity.role.value}", uris=(identity.uri,), hosts=hosts)


def _anonymous(hosts: tuple[str, ...]) -> "Bearer":
    from bigfleet.cli.certs.issuing import Bearer

    # A provider makes no calls, so that it needs no identity; it is known by its host name.
    return Bearer(name="BigFleet provider", hosts=hosts)


def _shard_call(name: str) -> str:
    return f"bigfleet shard --id {shlex.quote(name)}"


def _provider_call(name: str) -> str:
    return f"bigfleet provider simulated --provider {shlex.quote(name)}"


def _words(who: str, bearer: "Bearer", credential: "StoredCredential", authority: Path) -> str:
    identity = ", ".join(bearer.uris) or f"no identity, serves as {', '.join(bearer.hosts)}"
    files = (("--tls-cert", credential.certificate), ("--tls-key", credential.key), ("--tls-ca", authority))
    flags = " ".join(f"{flag} {shlex.quote(str(path))}" for flag, path in files)
    made = "new" if credential.is_new else "kept"
    return f"\n{who}  ({identity}; {made}, until {credential.expires:%Y-%m-%d})\n  {flags}"
