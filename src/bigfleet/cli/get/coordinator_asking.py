"""Connects commands to a coordinator: defines their flags, and words its rejections.

The leader is found from any replica. This module does not decide what is shown.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bigfleet.cli.get.shared import Looking, QueryFlags
from bigfleet.cli.runtime.failures import CommandFault, RunFault, UsageFault

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from bigfleet.rpc.clients.coordinator import CoordinatorCaller, CoordinatorFault, M

ADDRESS: Final = "127.0.0.1:7790"

_Addr = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", envvar="BIGFLEET_COORDINATOR_ADDR", help="The --listen address of any replica."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingCoordinator(QueryFlags):
    """The flags of commands that call a coordinator: address, identity, output format."""

    addr: _Addr = ADDRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class LookingAtCoordinator(Looking):
    """The same, once or again and again."""

    addr: _Addr = ADDRESS


def caller_of(asking: QueryFlags) -> "CoordinatorCaller":
    """Return the coordinator that the flags name. Raises UsageFault."""
    from bigfleet.rpc.clients.coordinator import CoordinatorCaller

    return CoordinatorCaller(asking.address(), tls=asking.tls())


def asked(caller: "CoordinatorCaller", method: str, request: "Message", answer: "type[M]") -> "M":
    """Return the leader's answer. Raises RunFault, or UsageFault for what no coordinator takes."""
    from bigfleet.rpc.clients.coordinator import CoordinatorFault

    try:
        return caller.call(method, request, answer)
    except CoordinatorFault as fault:
        raise fault_of(fault) from fault


def fault_of(fault: "CoordinatorFault") -> CommandFault:
    """Return the error line: address, cause, remedy."""
    from grpc import StatusCode

    where = f"the coordinator at {fault.address}"
    match fault.code:
        case StatusCode.INVALID_ARGUMENT:
            return UsageFault(f"{where} rejects the request: {fault}")
        case StatusCode.FAILED_PRECONDITION:
            return RunFault(f"{where}: {fault}; it does not know the leader yet; try again")
        case StatusCode.PERMISSION_DENIED:
            return RunFault(f"{where} rejects this identity: {fault}; changes need admin, lists admin or readonly")
        case StatusCode.UNIMPLEMENTED:
            return RunFault(f"{fault.address} is not a coordinator, or has another version: {fault}; check --addr")
        case StatusCode.UNAVAILABLE if "store unreachable" in str(fault) or "outcome unknown" in str(fault):
            return RunFault(f"{where}: {fault}; check the current state before you try again")
        case StatusCode.UNAVAILABLE | StatusCode.DEADLINE_EXCEEDED:
            return RunFault(
                f"cannot reach a coordinator at {fault.address}: {fault}; check that it runs and that --addr or "
                "BIGFLEET_COORDINATOR_ADDR names the address of its --listen"
            )
        case _:
            return RunFault(f"{where}: {fault}")
