"""Serves moto behind the strict shim on free ports of 127.0.0.1 and ::1, and writes their URLs into a file.

python -m tests.aws.serve_shim URLS_FILE
"""

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tests.aws.strict_shim import StrictShim


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    shim = StrictShim(DomainDispatcherApplication(create_backend_app))
    servers = [_server("127.0.0.1", shim)]
    # A container may have no IPv6.
    with suppress(OSError):
        servers.append(_server("::1", shim))
    draft = Path(sys.argv[1] + ".new")
    draft.write_text("\n".join(_url(server) for server in servers))
    os.replace(draft, sys.argv[1])
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()


def _server(host: str, shim: StrictShim) -> BaseWSGIServer:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By itself werkzeug ends the process when it cannot listen.
    with socket.create_server((host, 0), family=family, backlog=128) as listening:
        return make_server(host, 0, shim, threaded=True, request_handler=_Handler, fd=os.dup(listening.fileno()))


def _url(server: BaseWSGIServer) -> str:
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"http://{host}:{server.socket.getsockname()[1]}"


if __name__ == "__main__":
    main()
