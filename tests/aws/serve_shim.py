"""Serves moto behind the strict shim on a free port of 127.0.0.1, and writes the port into a file.

python -m tests.aws.serve_shim PORT_FILE
"""

import logging
import os
import sys
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.aws.strict_shim import StrictShim


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    shim = StrictShim(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, shim, threaded=True, request_handler=_Handler)
    draft = Path(sys.argv[1] + ".new")
    draft.write_text(str(server.server_port))
    os.replace(draft, sys.argv[1])
    server.serve_forever()


if __name__ == "__main__":
    main()
