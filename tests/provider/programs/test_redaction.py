"""No 16 bytes in a row of a secret, or of its base64, are left in a text; ordinary words are."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.provider.programs.redaction import REDACTED, redacted

SECRET = b"#cloud-config\nwrite_files: [{content: 'abcdef.0123456789abcdef', path: /etc/token}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"the disk is full", "the disk is full"),
        (b"", ""),
        (SECRET, REDACTED),
        (b"token " + SECRET[37:60] + b" is bad", f"token {REDACTED} is bad"),
        (b"<" + SECRET[7:23] + b">", f"<{REDACTED}>"),
        (b"<" + SECRET[7:22] + b">", f"<{SECRET[7:22].decode()}>"),
        (b"got " + base64.b64encode(SECRET)[11:40] + b"!", f"got {REDACTED}!"),
        (SECRET[:20] + b"|" + SECRET[30:50], f"{REDACTED}|{REDACTED}"),
        (SECRET[30:50] + SECRET[:20], REDACTED),
        (b"\xff" + SECRET[:20] + b"\xfe", f"\N{REPLACEMENT CHARACTER}{REDACTED}\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_what_is_left(text: bytes, expected: str) -> None:
    assert redacted(text, SECRET) == expected


def test_a_short_secret_is_removed_as_a_whole_and_a_few_bytes_are_none() -> None:
    assert redacted(b"key=s3cret-key.", b"s3cret-key") == f"key={REDACTED}."
    assert redacted(b"abc abc", b"abc") == "abc abc"


def test_the_base64_of_url_safe_alphabets_is_removed() -> None:
    secret = b"\xff\xfe\xfb" * 8
    assert redacted(base64.urlsafe_b64encode(secret), secret) == REDACTED


@given(secret=st.binary(min_size=16, max_size=200), data=st.data())
def test_no_run_of_any_secret_is_left(secret: bytes, data: st.DataObject) -> None:
    forms = [secret, base64.b64encode(secret)]
    text = b""
    for form in data.draw(st.lists(st.sampled_from(forms), max_size=4)):
        begin = data.draw(st.integers(0, len(form)))
        text += data.draw(st.binary(max_size=5)) + form[begin : data.draw(st.integers(begin, len(form)))]
    left = redacted(text, secret).encode("utf-8", "replace")
    for form in forms:
        runs = {form[at : at + 16] for at in range(len(form) - 15)}
        assert not runs & {left[at : at + 16] for at in range(len(left) - 15)}


def test_a_long_secret_that_is_printed_whole_costs_no_search_a_byte() -> None:
    """Each search is a look at up to a mebibyte; a run that was found is followed to its end without another."""
    secret = b"".join(number.to_bytes(4, "big") for number in range(1 << 16))
    assert redacted(secret[50_000:51_000], secret) == REDACTED
    assert redacted(base64.b64encode(secret)[50_000:51_000], secret) == REDACTED
