"""Makes inputs that parsers fall over: deep nesting, long numbers, repeated keys, aliases, bytes that are no text."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final


def _csv(size_bytes: int) -> bytes:
    return b'a,b\n"' + b"x" * size_bytes


def _aliases(size_bytes: int) -> bytes:
    """Return YAML of which each line doubles the one before; the first line is `a`."""
    lines = [b"a0: &a0 [x, x]"]
    lines += [b"a%d: &a%d [*a%d, *a%d]" % (n, n, n - 1, n - 1) for n in range(1, max(2, min(size_bytes // 32, 60)))]
    return b"\n".join(lines)


def _wide_varint(size_bytes: int) -> bytes:
    return b"\x0a" + b"\xff" * size_bytes


def _nested_messages(size_bytes: int) -> bytes:
    """Return a field 1 that holds a field 1 that holds a field 1, and so on."""
    content = b""
    while len(content) < min(size_bytes, 20_000):
        content = b"\x0a" + _varint(len(content)) + content
    return content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


#: By name: what returns an attack of about so many bytes.
ATTACKS: Final[Mapping[str, Callable[[int], bytes]]] = {
    "open brackets": lambda n: b"[" * n,
    "closed brackets": lambda n: b"[" * (n // 2) + b"]" * (n // 2),
    "nested objects": lambda n: b'{"a":' * (n // 6) + b"1" + b"}" * (n // 6),
    "nested in an object": lambda n: b'{"metadata":{"name":"n","x":' + b"[" * n + b"]" * n + b"}}",
    "block sequences": lambda n: b"- " * (n // 2) + b"a",
    "block mappings": lambda n: b"".join(b" " * depth + b"a:\n" for depth in range(int((2 * n) ** 0.5))),
    "digits": lambda n: b"9" * n,
    "digits in JSON": lambda n: b'{"version":' + b"9" * n + b"}",
    "digits in YAML": lambda n: b"- id: " + b"9" * n,
    "octal in YAML": lambda n: b"a: 0" + b"7" * n,
    "an exponent": lambda n: b"1e" + b"9" * min(n, 60),
    "a date that is none": lambda _n: b"a: 2026-99-99\nb: 2026-02-30T99:99:99Z",
    "repeated keys": lambda n: b"{" + b",".join([b'"a":1'] * (n // 6)) + b"}",
    "different keys": lambda n: b"{" + b",".join(b'"%d":1' % number for number in range(n // 10)) + b"}",
    "commas": lambda n: b"[" + b"0," * (n // 2) + b"0]",
    "lines": lambda n: b"\n" * n,
    "lines of YAML": lambda n: b"a: 1\n" * (n // 5),
    "escapes": lambda n: b'"' + b"\\u0041" * (n // 6) + b'"',
    "half a surrogate pair": lambda _n: b'{"a":"\\ud800"}',
    "bytes that are no text": lambda n: b"\xff\xfe" * (n // 2),
    "zeros": lambda n: b"\x00" * n,
    "a byte order mark": lambda _n: b"\xef\xbb\xbf{}",
    "quotes": _csv,
    "aliases": _aliases,
    "merged aliases": lambda n: b"a: &a {x: 1}\nb: {" + b", ".join([b"<<: *a"] * (n // 8)) + b"}",
    "an alias of itself": lambda _n: b"a: &a [*a]",
    "a tag": lambda _n: b"!!python/object/apply:os.system [true]",
    "template brackets": lambda n: b"{{" + b"(" * n + b")" * n + b"}}",
    "template blocks": lambda n: b"{% if a %}" * (n // 10),
    "template sums": lambda n: b"{{ 1" + b"+1" * (n // 2) + b" }}",
    "a number of bytes without end": _wide_varint,
    "nested messages": _nested_messages,
    "nothing": lambda _n: b"",
    "white space": lambda n: b" " * n,
    "a word": lambda n: b"a" * n,
    "slashes": lambda n: b"bigfleet://" + b"/" * n,
    "control characters": lambda _n: b'{"a":"\\u0000\\u001b[2J"}\n\x1b[2J',
}


def attacks(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield every attack of about that size with its name; those that have one size are the same for all."""
    for name, make in ATTACKS.items():
        yield name, make(size_bytes)
