"""The flags that every command about a live shard has: whom to ask, who asks, and how the answer is shown.

Each is written once, as a field; `taking` gives them to a command after its own. A frozen object of them is what the
command gets. Nothing here dials or prints.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, get_type_hints

import typer

from bigfleet.cli.tls_flags import TlsCa, TlsCert, TlsKey, read_tls

if TYPE_CHECKING:
    from bigfleet.rpc.tls import TlsFiles

ADDRESS: Final = "127.0.0.1:7780"

_Addr = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="BIGFLEET_SHARD_ADDR", help="The shard's --listen address.")
]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="FORM", help="table, json or yaml.")]
_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")]
_Interval = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Time between two looks of --watch; 2s by default.")
]

Options = TypeVar("Options")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Whom to ask, as whom, and in which form the answer is written."""

    addr: _Addr = ADDRESS
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    output: _Output = "table"

    def address(self) -> str:
        """Return HOST:PORT of the shard. Raises UsageFault."""
        from bigfleet.cli.get.wanted import dialled

        return dialled(self.addr, "--addr")

    def tls(self) -> "TlsFiles | None":
        """Return what the TLS flags name, None for plain text. Raises UsageFault."""
        return read_tls(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking(Asking):
    """The same, once or again and again."""

    watch: _Watch = False
    interval: _Interval = None


def taking(
    options: type[Options],
) -> Callable[[Callable[Concatenate[Options, P], None]], Callable[..., None]]:
    """Make a command of a function whose first argument is `options`: their fields become flags after its own."""

    def decorate(function: Callable[Concatenate[Options, P], None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options)  # type: ignore[arg-type]  # only dataclasses are handed in
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(inspect.signature(function).parameters.values())[1:]
        ]

        @wraps(function)
        def command(**values: Any) -> None:
            taken = {parameter.name: values.pop(parameter.name) for parameter in shared}
            function(options(**taken), **values)  # type: ignore[call-arg]  # the rest is the function's own

        parameters = [*own, *shared]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate
