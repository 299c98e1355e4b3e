"""Defines `--tls-cert`, `--tls-key` and `--tls-ca`: all three or none, on every command that serves or dials.

docs/spec/wire.md §3. Nothing here makes a connection.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.runtime.failures import UsageFault

if TYPE_CHECKING:
    from bigfleet.rpc.security.identity import PeerIdentity
    from bigfleet.rpc.security.tls import TlsFiles

#: Their heading in the help of a command.
TLS_SECTION: Final = "TLS"
TLS_OPTIONS: Final = ("--tls-cert", "--tls-key", "--tls-ca")

TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate of this process (PEM); reloaded when it changes.")
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Private key (PEM); reloaded when it changes.")]
TlsCa = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate authority of the fleet (PEM).")]


def read_tls(
    certificate: Path | None, key: Path | None, authority: Path | None, *, bearer: "PeerIdentity | None" = None
) -> "TlsFiles | None":
    """Return what the three flags name, None for plain text when none is given.

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
