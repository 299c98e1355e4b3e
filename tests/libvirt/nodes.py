"""An API server for nodes: one is Ready when the console of its guest shows that it joined."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PREFIX = "/api/v1/nodes/"


def _node(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": name, "resourceVersion": "1"},
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def _missing(name: str) -> dict[str, object]:
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
    return {**status, "message": f'nodes "{name}" not found', "details": {"name": name, "kind": "nodes"}}


@contextmanager
def node_server(directory: Path, clusters: list[str], is_ready: Callable[[str], bool]) -> Iterator[None]:
    """Serve the clusters while the context lasts, and write a kubeconfig for each into the directory."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix(PREFIX)
            found = self.path.startswith(PREFIX) and is_ready(name)
            body = json.dumps(_node(name) if found else _missing(name)).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    for cluster in clusters:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        (directory / f"{cluster}.kubeconfig").write_text(json.dumps(content))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
