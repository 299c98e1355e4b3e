"""Guards every RPC of a server: checks the caller, then its number of connections, then the request.

docs/spec/wire.md §3 and §4. It knows no service except those that check the caller themselves.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from bigfleet.rpc.aborted_calls import release_frames
from bigfleet.rpc.connection_limits import ConnectionsInUse, TooManyConnections
from bigfleet.rpc.security.identity import SESSION, Denied, Gate

_log = structlog.get_logger("bigfleet.rpc.security.interceptor")

_Context = aio.ServicerContext[Any, Any]
#: The identity and the connection of a call that is counted.
_Entry = tuple[str, str]


class IdentityInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Asks the gate before every RPC of a server; requests are parsed after it has let the caller in.

    `Shard.Session` asks by itself, before it reads the first frame.
    """

    def __init__(self, gate: Gate, connections: ConnectionsInUse | None = None) -> None:
        self._gate = gate
        self._connections = ConnectionsInUse() if connections is None else connections

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the method's handler behind the gate."""
        handler = await continuation(handler_call_details)
        # gRPC answers UNIMPLEMENTED where there is no handler; its stubs do not know that.
        return handler if handler is None else self._guarded(handler, handler_call_details.method)

    def _guarded(self, handler: "grpc.RpcMethodHandler[Any, Any]", rpc: str) -> "grpc.RpcMethodHandler[Any, Any]":
        guard = _Guard(self._gate, self._connections, rpc)
        for kind, make in _HANDLER_KINDS.items():
            answer = getattr(handler, kind)
            if answer is not None:
                parse = handler.request_deserializer
                if handler.request_streaming or parse is None:
                    return make(_behind(answer, guard, _as_is), parse, handler.response_serializer)
                return make(_behind(answer, guard, parse), None, handler.response_serializer)
        raise AssertionError(f"the handler of {rpc} answers nothing")


class _Guard:
    """Admits calls of one RPC and counts the connections that they use."""

    def __init__(self, gate: Gate, connections: ConnectionsInUse, rpc: str) -> None:
        self._gate = gate
        self._connections = connections
        self._rpc = rpc

    async def enter(self, context: _Context) -> _Entry | None:
        """Return what `leave` takes, or end the call of a caller that may not make it."""
        try:
            identity = self._gate.check(context, self._rpc)
        except Denied as denied:
            if self._rpc == SESSION:
                return None
            self._gate.log_refusal(context, self._rpc, denied)
            for on_refused in self._gate.on_role_refused:
                on_refused(self._rpc)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))
            raise AssertionError("abort always raises") from None
        if identity is None:
            return None
        entry = identity.uri, context.peer()
        try:
            self._connections.begin(*entry)
        except TooManyConnections as fault:
            _log.warning("rpc.connection_refused", rpc=self._rpc, identity=identity.uri, peer=context.peer())
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault))
        return entry

    def leave(self, entry: _Entry | None) -> None:
        """Forget the call."""
        if entry is not None:
            self._connections.end(*entry)


_HANDLER_KINDS: Mapping[str, Callable[[Any, Any, Any], "grpc.RpcMethodHandler[Any, Any]"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _as_is(request: Any) -> Any:
    return request


async def _parsed(parse: Callable[[Any], Any], content: Any, context: _Context) -> Any:
    """Return the request, or end the call of one that cannot be read."""
    try:
        return parse(content)
    except (DecodeError, ValueError):
        pass
    # Not within the handler of the error, whose traceback would keep the bytes.
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request could not be read")
    raise AssertionError("abort always raises")


def _behind(answer: Any, guard: _Guard, parse: Callable[[Any], Any]) -> Any:
    """Return a handler of the same kind, generator or coroutine, that admits first and parses then."""
    if inspect.isasyncgenfunction(answer):

        async def stream(content: Any, context: _Context) -> Any:
            entry: _Entry | None = None
            try:
                entry = await guard.enter(context)
                async for message in answer(await _parsed(parse, content, context), context):
                    yield message
            except aio.AbortError as error:
                # gRPC has the status; it raises the error again by itself.
                release_frames(error)
            finally:
                guard.leave(entry)

        return stream

    async def call(content: Any, context: _Context) -> Any:
        entry: _Entry | None = None
        try:
            entry = await guard.enter(context)
            return await answer(await _parsed(parse, content, context), context)
        except aio.AbortError as error:
            release_frames(error)
            return None
        finally:
            guard.leave(entry)

    return call
