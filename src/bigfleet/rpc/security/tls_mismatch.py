"""Says why a connection failed if only one of its two sides uses TLS, or if a certificate does not fit, and what to do.

gRPC has one status for all of it, and a text that names no side. This module only reads that text.
"""

from typing import Final

_FLAGS: Final = "--tls-cert, --tls-key and --tls-ca"
_NOT_CONNECTED: Final = "failed to connect"
#: What a text of a TLS client contains, and what it means.
_SECURE: Final = (
    ("WRONG_VERSION_NUMBER", f"the server likely serves plain text: set {_FLAGS} there, or leave them out here"),
    ("CERTIFICATE_VERIFY_FAILED", "another authority than that of --tls-ca signed the server's certificate"),
    ("Hostname Verification Check failed", "the server's certificate is for another name than the one that is dialled"),
    ("Socket closed", "the server likely rejects this certificate: the --tls-ca there must have signed --tls-cert"),
)
_PLAIN: Final = (("Socket closed", f"the server likely serves TLS: set {_FLAGS} here"),)


def tls_advice(details: str, *, is_secure: bool) -> str:
    """Return the cause and the remedy for the text of a failed call, "" if it is not about TLS.

    `is_secure` says whether the client uses TLS.
    """
    if _NOT_CONNECTED not in details:
        return ""
    return next((advice for part, advice in (_SECURE if is_secure else _PLAIN) if part in details), "")


def with_tls_advice(details: str, *, is_secure: bool) -> str:
    """Return the text of a failed call, behind the advice if there is one."""
    advice = tls_advice(details, is_secure=is_secure)
    return f"{advice} ({details})" if advice else details
