"""Requires TLS 1.3 in a process: gRPC reads the setting from the environment when it is first imported.

gRPC for Python has no option for it (docs/adr/0113-identity-is-the-certificate.md). This module may import nothing that
imports gRPC.
"""

import os

#: The cipher suites of TLS 1.2 to offer: one that needs a pre-shared key, which no process has, so it is never taken.
#: Those of TLS 1.3 are not chosen by it.
_SUITE_THAT_NOBODY_HAS = "ECDHE-PSK-AES128-CBC-SHA"


def require_tls13() -> None:
    """Let this process and its children make no TLS connection below 1.3; call it before gRPC is imported."""
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _SUITE_THAT_NOBODY_HAS
