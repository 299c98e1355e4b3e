"""A certificate leads to an authority directly, by intermediate certificates in any order, or not at all."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bigfleet.rpc.security.certificate_chain import INTERMEDIATE_MAX, leads_to


def name(text: str) -> x509.Name:
    """Return a distinguished name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def chain_of(length: int) -> list[x509.Certificate]:
    """Return so many certificates, each signed by the next, the last one by itself."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(length)]
    now = datetime.now(UTC)
    return [
        x509.CertificateBuilder()
        .subject_name(name(f"c{place}"))
        .issuer_name(name(f"c{min(place + 1, length - 1)}"))
        .public_key(keys[place].public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(keys[min(place + 1, length - 1)], hashes.SHA256())
        for place in range(length)
    ]


def test_an_authority_signs_directly_or_by_intermediate_certificates_in_any_order() -> None:
    leaf, lower, upper, root = chain_of(4)

    assert leads_to([leaf, lower, upper], [root])
    assert leads_to([leaf, upper, lower], [root])
    assert leads_to([leaf], [lower])
    assert leads_to([leaf], [leaf])


@pytest.mark.parametrize("given", [[0], [0, 2], [0, 1], []])
def test_a_gap_in_the_chain_leads_nowhere(given: list[int]) -> None:
    chain = chain_of(4)
    stranger = chain_of(1)

    assert not leads_to([chain[place] for place in given] or stranger, [chain[3]])


def test_an_authority_of_the_same_name_with_another_key_has_signed_nothing() -> None:
    leaf, _root = chain_of(2)
    _other_leaf, same_name = chain_of(2)

    assert not leads_to([leaf], [same_name])


def test_a_chain_is_followed_up_to_a_limit() -> None:
    chain = chain_of(INTERMEDIATE_MAX + 3)

    assert leads_to(chain[1:], [chain[-1]])
    assert not leads_to(chain[:-1], [chain[-1]])
