"""Defines the flags of all commands that read a live shard: address, identity, output.

Each is written once, as a field; `bigfleet.cli.flags.groups` adds them to a command. This module does not dial or
print.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.flags.tls import TlsCa, TlsCert, TlsKey, read_tls

if TYPE_CHECKING:
    from bigfleet.rpc.security.tls import TlsFiles

ADDRESS: Final = "127.0.0.1:7780"

_Addr = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="BIGFLEET_SHARD_ADDR", help="Address of the shard (its --listen).")
]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="FORM", help="Output format: table, json or yaml.")]
_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")]
_Interval = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Time between two reads of --watch; 2s by default.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFlags:
    """The flags of commands that call a shard: address, identity, output format."""

    addr: _Addr = ADDRESS
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    output: _Output = "table"

    def address(self) -> str:
        """Return HOST:PORT of the shard. Raises UsageFault."""
        from bigfleet.cli.get.flag_values import dialled

        return dialled(self.addr, "--addr")

    def tls(self) -> "TlsFiles | None":
        """Return the TLS files, None for plain text. Raises UsageFault."""
        return read_tls(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking(QueryFlags):
    """The same, once or again and again."""

    watch: _Watch = False
    interval: _Interval = None
