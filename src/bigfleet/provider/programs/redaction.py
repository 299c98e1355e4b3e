"""Removes a secret from texts that others may read: the bytes themselves and their base64.

docs/spec/exec-provider.md §6. A program gets the bootstrap blob on standard input and may print it. A secret is never
stored longer than the call that has it.
"""

import base64
from typing import Final

REDACTED: Final = "[redacted]"
#: So many bytes in a row that also occur in the secret are a part of it; fewer may be an ordinary word.
RUN_BYTES: Final = 16
#: Any run contains a block of this size that begins at a multiple of it in the secret.
_BLOCK_BYTES: Final = 8
#: A shorter secret is no secret: its bytes are in ordinary words.
_SECRET_BYTES_MIN: Final = 8


def redacted(text: bytes, secret: bytes) -> str:
    """Return the text as UTF-8 without any 16 bytes in a row of the secret, or of its base64 of either alphabet.

    A secret of 8 to 15 bytes is removed as a whole. Bytes that are no UTF-8 become U+FFFD.
    """
    if len(secret) < _SECRET_BYTES_MIN or not text:
        return text.decode("utf-8", "replace")
    is_secret = bytearray(len(text))
    for form in {secret, base64.b64encode(secret), base64.urlsafe_b64encode(secret)}:
        for begin, end in _runs(text, form):
            is_secret[begin:end] = b"\x01" * (end - begin)
    parts: list[str] = []
    begin = 0
    for position in range(1, len(text) + 1):
        if position == len(text) or is_secret[position] != is_secret[begin]:
            parts.append(REDACTED if is_secret[begin] else text[begin:position].decode("utf-8", "replace"))
            begin = position
    return "".join(parts)


def _runs(text: bytes, secret: bytes) -> list[tuple[int, int]]:
    """Return begin and end of each part of the text that is a run of the secret."""
    if len(secret) < RUN_BYTES:
        return _whole(text, secret)
    blocks = {secret[at : at + _BLOCK_BYTES] for at in range(0, len(secret) - _BLOCK_BYTES + 1, _BLOCK_BYTES)}
    found = []
    begin = 0
    while begin <= len(text) - RUN_BYTES:
        # To search a long secret for every window would take a second; few windows hold one of its blocks.
        window = text[begin : begin + RUN_BYTES]
        is_candidate = any(window[at : at + _BLOCK_BYTES] in blocks for at in range(_BLOCK_BYTES))
        at = secret.find(window) if is_candidate else -1
        if at < 0:
            begin += 1
            continue
        length = RUN_BYTES
        while text[begin + length : begin + length + 1] == secret[at + length : at + length + 1] != b"":
            length += 1
        found.append((begin, begin + length))
        # A window that ends one byte later is looked at as well: it may be a run of another place of the secret.
        begin += length - RUN_BYTES + 1
    return found


def _whole(text: bytes, secret: bytes) -> list[tuple[int, int]]:
    found = []
    at = text.find(secret)
    while at >= 0:
        found.append((at, at + len(secret)))
        at = text.find(secret, at + 1)
    return found
