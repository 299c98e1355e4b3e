"""Reads the URIs in a certificate, and when it ends, from its DER encoding, not from C strings.

docs/spec/wire.md §3. gRPC reports the names of a peer as C strings, which end at a NUL byte: `bigfleet://admin` and
anything after a NUL byte would be one name. This module does not decide what a name may do.
"""

from datetime import datetime

from cryptography import x509


class UnreadableCertificate(Exception):
    """Bytes that are no certificate, or whose alternative names cannot be read."""


def uris_of_pem(pem: bytes) -> tuple[str, ...]:
    """Return the URIs of the first certificate of a PEM text. Raises UnreadableCertificate."""
    return uris_of(_loaded(pem))


def end_of_pem(pem: bytes) -> datetime:
    """Return when the first certificate of a PEM text ends. Raises UnreadableCertificate."""
    return _loaded(pem).not_valid_after_utc


def _loaded(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except Exception as error:  # which exception depends on where the bytes are wrong
        raise UnreadableCertificate("the certificate cannot be read") from error


def uris_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the URIs among the alternative names of a certificate. Raises UnreadableCertificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        return ()
    except Exception as error:  # duplicates, names that are not ASCII, extensions that are not DER
        raise UnreadableCertificate("the alternative names of the certificate cannot be read") from error
