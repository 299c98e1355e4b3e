"""Defines `--tls-cert`, `--tls-key` and `--tls-ca`: all three or none, on every command that serves or dials.

docs/spec/wire.md §3. This module does not make a connection.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.values import parse_address
from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from bigfleet.rpc.security.identity import PeerIdentity
    from bigfleet.rpc.security.tls import TlsFiles

#: Their heading in the help of a command.
TLS_SECTION: Final = "TLS"
TLS_OPTIONS: Final = ("--tls-cert", "--tls-key", "--tls-ca")
#: Options of servers, which accept plain text from other hosts only with --insecure.
SERVER_TLS_OPTIONS: Final = (*TLS_OPTIONS, "--insecure")
_LOOPBACK: Final = "127.0.0.1"

TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate of this process (PEM); reloaded when it changes.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Private key (PEM); reloaded when it changes.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Serve plain text also at an address that other hosts can reach.")
]
TlsCa = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate authority of the fleet (PEM).")]


def read_tls(
    certificate: Path | None, key: Path | None, authority: Path | None, *, bearer: "PeerIdentity | None" = None
) -> "TlsFiles | None":
    """Return the TLS files of the three flags, None for plain text if none is given.

    `bearer` is the identity that the certificate must name. Raises UsageFault for one or two flags and for wrong files.
    """
    from bigfleet.rpc.security.tls import TlsFault, TlsFiles, TlsPaths

    given = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority}
    missing = [flag for flag, path in given.items() if path is None]
    if certificate is None or key is None or authority is None:
        if len(missing) < len(given):
            raise UsageFault(f"{' and '.join(missing)} missing: TLS needs --tls-cert, --tls-key and --tls-ca, or none")
        return None
    try:
        return TlsFiles(TlsPaths(certificate=certificate, key=key, authority=authority), bearer=bearer)
    except TlsFault as fault:
        raise UsageFault(f"TLS: {fault}") from fault


def parse_listen_address(text: str, flag: str, tls: "TlsFiles | None", *, is_insecure: bool) -> tuple[str, int]:
    """Return host and port to listen on; `:PORT` without TLS is a loopback address unless it `is_insecure`.

    Raises UsageFault for an address that other hosts can reach without TLS.
    """
    from bigfleet.rpc.security.tls import is_loopback

    host, port = parse_address(text, flag)
    if tls is not None or is_insecure or is_loopback(host):
        return host, port
    if text.startswith(":"):
        return _LOOPBACK, port
    raise UsageFault(
        f"{flag}: other hosts can reach {text} without TLS and call every RPC; set --tls-cert, --tls-key and --tls-ca, "
        f"listen on {_LOOPBACK}:{port}, or allow it with --insecure"
    )
