"""Plays the metadata service of one instance on a free port: tokens, id, role, tags (IMDSv2).

docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html. Without a token: 401.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a-token"
ROLE = "nodes"


@contextmanager
def metadata_service(instance_id: str, tags: Callable[[], Mapping[str, str]], host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the URL of the service of an instance; `tags` returns its tags of now."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._say(200 if self.path == "/latest/api/token" and seconds else 400, TOKEN)

        def do_GET(self) -> None:
            credentials = {"Code": "Success", "AccessKeyId": "testing", "SecretAccessKey": "testing", "Token": "t/+="}
            answers = {
                "instance-id": instance_id,
                "iam/security-credentials/": ROLE,
                f"iam/security-credentials/{ROLE}": json.dumps(credentials, indent=2),
                **{f"tags/instance/{key}": value for key, value in tags().items()},
            }
            name = self.path.removeprefix("/latest/meta-data/")
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                self._say(401, "")
            else:
                self._say(200 if name in answers else 404, answers.get(name, ""))

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            # An agent that is killed closes its connection.
            with suppress(BrokenPipeError):
                self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
