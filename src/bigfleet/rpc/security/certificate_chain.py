"""Decides whether a certificate leads to an authority, by the signatures of its chain.

Names, uses and times are checked by TLS in each handshake. This module must not accept a chain that TLS rejects for its
signatures; it rejects none that TLS accepts.
"""

from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

#: Certificates between the first one and its authority.
INTERMEDIATE_MAX: Final = 10


def leads_to(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> bool:
    """Return whether the first certificate is signed by an authority, directly or by others of the chain."""
    current, others = chain[0], list(chain[1:])
    for _ in range(INTERMEDIATE_MAX + 1):
        if current in authorities or any(_has_signed(authority, current) for authority in authorities):
            return True
        issuer = next((other for other in others if _has_signed(other, current)), None)
        if issuer is None:
            return False
        others.remove(issuer)
        current = issuer
    return False


def _has_signed(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
