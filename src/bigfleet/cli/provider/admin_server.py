"""Serves the admin socket of a provider: HTTP over a Unix socket beside the state file, for the file's owner only.

docs/spec/provider.md §14, docs/adr/0116-the-admin-socket.md. The kernel reports the caller's user (SO_PEERCRED); the
request itself has no identity. `bigfleet.provider.kit.administration` decides, this module does not.
"""

import asyncio
import os
import pwd
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from bigfleet.cli.provider.admin_socket import admin_path, socket_address
from bigfleet.cli.runtime.failures import RunFault
from bigfleet.cli.runtime.system import serving
from bigfleet.provider.kit.administration import Administration, AdminRefused
from bigfleet.provider.records.refusal import StoreDown

_CREDENTIALS = struct.Struct("3i")
_BODY_BYTES_MAX = 64 * 1024


class _PeerProtocol(H11Protocol):
    """Names to the application which user is at the other end, in place of an address that Unix sockets lack."""

    def connection_made(  # type: ignore[override]  # as uvicorn's own narrows it: a socket is a Transport
        self, transport: asyncio.Transport
    ) -> None:
        """Ask the kernel before the first byte is read."""
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process_id, user_id, _group_id = _CREDENTIALS.unpack(raw)
        self.client = (_user(user_id), process_id)


def _user(user_id: int) -> str:
    try:
        return f"uid {user_id} ({pwd.getpwuid(user_id).pw_name})"
    except KeyError:
        return f"uid {user_id}"


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    machine_id: str = ""
    to: str = ""
    confirm_out_of_service: bool = False


def admin_application(administration: Administration, extra: Callable[[], Mapping[str, object]]) -> Starlette:
    """Return the commands as `POST /<command>`; `extra` is what the substrate adds to the status."""

    async def answer(request: Request) -> JSONResponse:
        who = request.client.host if request.client is not None else "unknown"
        try:
            body = msgspec.json.decode(await _bounded(request) or b"{}", type=_Body)
            return JSONResponse(await _do(administration, extra, request.path_params["command"], who, body))
        except AdminRefused as refused:
            return JSONResponse({"error": str(refused)}, status_code=409)
        except StoreDown as down:
            return JSONResponse({"error": f"the store takes no commits: {down}; nothing happened"}, status_code=503)
        except msgspec.MsgspecError as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    return Starlette(routes=[Route("/{command}", answer, methods=["POST"])])


async def _bounded(request: Request) -> bytes:
    body = await request.body()
    if len(body) > _BODY_BYTES_MAX:
        raise AdminRefused(f"the request has {len(body)} bytes, at most {_BODY_BYTES_MAX} are taken")
    return body


async def _do(
    administration: Administration,
    extra: Callable[[], Mapping[str, object]],
    command: str,
    who: str,
    body: _Body,
) -> dict[str, Any]:
    match command:
        case "status":
            return {**administration.status(who), "substrate": dict(extra())}
        case "quarantine":
            return {"faults": administration.quarantine(who)}
        case "accept-losses":
            return {"accepted": administration.accept_losses(who)}
        case "reset-cursors":
            return dict(await administration.reset_cursors(who))
        case "recover":
            done = await administration.recover(
                who, body.machine_id, body.to, is_out_of_service=body.confirm_out_of_service
            )
            return dict(done)
    raise AdminRefused(f"no command {command!r}")


@asynccontextmanager
async def serve_admin(
    state_path: Path | None, administration: Administration, extra: Callable[[], Mapping[str, object]]
) -> AsyncIterator[None]:
    """Serve the admin socket while the context lasts; without a state file there is none.

    Raises RunFault when it cannot be made.
    """
    if state_path is None:
        yield
        return
    path = admin_path(state_path)
    listening = _listen(path)
    # At once: who finds the socket may connect, and waits until the server takes it.
    listening.listen()
    config = uvicorn.Config(
        admin_application(administration, extra),
        http=_PeerProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=1,
    )
    try:
        async with serving(config, listening):
            yield
    finally:
        path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    """Return a socket that its owner alone may connect to."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        # The state file is locked: the process that left this socket behind has ended.
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            # Before bind: at no moment may anybody else connect.
            former_mask = os.umask(0o177)
            try:
                listening.bind(address)
            finally:
                os.umask(former_mask)
    except OSError as error:
        listening.close()
        raise RunFault(
            f"--state: the admin socket {path} cannot be created: {error.strerror}; "
            "move --state to a directory that can be written"
        ) from error
    return listening
