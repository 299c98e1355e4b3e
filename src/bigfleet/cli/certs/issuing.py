"""Issues certificates of a development authority: ECDSA P-256, one `bigfleet://` URI for each role.

docs/spec/wire.md §3. Only certificates of shards and providers have host names and may be used by servers, because a
client checks nothing of a server but the host name. This module does not touch a file.
"""

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: Nothing that an authority signs outlives it.
AUTHORITY_DAYS = 3650
#: For peers whose clock is behind.
_BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """Whom a certificate is for."""

    #: Shown as the subject; it has no other effect.
    name: str
    #: The identity; empty for one that has none.
    uris: tuple[str, ...] = ()
    #: Host names and addresses under which it is dialled; a certificate without them cannot serve, and one that has
    #: nothing else cannot call.
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate and its key, both as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority that signs directly."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, now: datetime) -> "Authority":
        """Return a new authority, good for `AUTHORITY_DAYS`."""
        key = ec.generate_private_key(ec.SECP256R1())
        # Of two authorities with one name in a file, TLS would look at the first alone.
        name = _name(f"BigFleet development CA {x509.random_serial_number():x}"[:64])
        builder = (
            _builder(name, name, key, now, now + timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> "Authority":
        """Return the authority of two PEM texts. Raises ValueError when they do not make one."""
        try:
            private = serialization.load_pem_private_key(key, password=None)
        except TypeError as error:
            raise ValueError("the key has a password") from error
        parsed = x509.load_pem_x509_certificate(certificate)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != parsed.public_key():
            raise ValueError("the key is not the certificate's")
        return cls(parsed, private)

    @property
    def pems(self) -> Issued:
        """The authority's own certificate and key."""
        return _pems(self.certificate, self._key)

    def issue(self, bearer: Bearer, now: datetime, days: int) -> Issued:
        """Return a new certificate for the bearer, good for that many days or as long as the authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] if bearer.uris or not bearer.hosts else []
        uses += [ExtendedKeyUsageOID.SERVER_AUTH] if bearer.hosts else []
        names = _alternative_names(bearer)
        builder = (
            _builder(_name(bearer.name), self.certificate.subject, key, now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pems(builder.sign(self._key, hashes.SHA256()), key)

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Return whether the certificate was signed by this authority."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except Exception:  # ValueError, TypeError or InvalidSignature: which, depends on how foreign it is
            return False
        return True


def serves(certificate: x509.Certificate, host: str) -> bool:
    """Return whether the certificate names the host or address."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return _host_name(host) in names


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative_names(bearer: Bearer) -> list[x509.GeneralName]:
    return [*map(x509.UniformResourceIdentifier, bearer.uris), *map(_host_name, bearer.hosts)]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pems(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
