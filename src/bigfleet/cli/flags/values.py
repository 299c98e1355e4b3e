"""Parses values of a command line: durations, sizes, shares and addresses, with errors that name what was expected."""

import ipaddress
import math
import re
from collections.abc import Mapping
from pathlib import Path

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.files.durations import duration_seconds
from bigfleet.model.ids import identifier_fault

_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_PORT_MAX = 65535
_SHARE = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20}")
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,9})?|100)%")
LOG_LEVELS = ("debug", "info", "warning", "error")


def check_log_level(level: str) -> None:
    """Raise UsageFault for a level of --log-level that is unknown."""
    if level not in LOG_LEVELS:
        raise UsageFault(f"--log-level: {level!r} is unknown; choose one of {', '.join(LOG_LEVELS)}")


def parse_duration_seconds(text: str, flag: str) -> float:
    """Return the seconds of `2s`, `1m30s`, `500ms` or bare seconds. Raises UsageFault naming the flag."""
    seconds = duration_seconds(text)
    if seconds is None:
        raise UsageFault(f"{flag}: {text!r} is not a duration; write 2s, 1m30s, 500ms or a number of seconds")
    return seconds


def parse_positive_duration_seconds(text: str, flag: str) -> float:
    """Return a duration that is above zero. Raises UsageFault naming the flag."""
    seconds = parse_duration_seconds(text, flag)
    if seconds <= 0:
        raise UsageFault(f"{flag}: {text!r} must be longer than zero")
    return seconds


def parse_duration_or_never_seconds(text: str, flag: str) -> float:
    """Return a duration that is above zero, or infinity for `never`. Raises UsageFault naming the flag."""
    if text == "never":
        return math.inf
    try:
        return parse_positive_duration_seconds(text, flag)
    except UsageFault as fault:
        raise UsageFault(f"{fault}, or never") from None


def parse_size_bytes(text: str, flag: str) -> int:
    """Return the bytes of `256MiB`, `1GiB`, `64KiB` or a bare number above zero. Raises UsageFault naming the flag."""
    found = re.fullmatch(r"([0-9]{1,15})(B|KiB|MiB|GiB)?", text)
    size_bytes = int(found[1]) * _BYTES[found[2] or "B"] if found else 0
    if size_bytes < 1:
        raise UsageFault(f"{flag}: {text!r} is not a size; write 256MiB, 1GiB or a number of bytes above zero")
    return size_bytes


def parse_share(text: str, flag: str) -> float:
    """Return a number from 0 to 1. Raises UsageFault naming the flag."""
    share = float(text) if _SHARE.fullmatch(text) else math.nan
    if not 0 <= share <= 1:
        percent = _PERCENT.fullmatch(text)
        form = f"{float(percent[1]) / 100:g}" if percent else "a number from 0 to 1, such as 0.05"
        raise UsageFault(f"{flag}: {text!r} is not a share; write {form}")
    return share


def check_different_files(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise UsageFault for a file that is written and also read, or written twice; both mappings are by flag."""
    flags: dict[Path, str] = {}
    for flag, path in (*written.items(), *read.items()):
        if path is None:
            continue
        other = flags.get(path.resolve())
        if other is not None:
            raise UsageFault(f"{other} and {flag} name the same file, {path}; name two different files")
        if flag in written:
            flags[path.resolve()] = flag


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `:PORT` (all interfaces). Raises UsageFault naming the flag."""
    host, colon, port_text = text.rpartition(":")
    # Five digits at most: Python refuses to read a number of thousands of them at all.
    is_port = re.fullmatch(r"[0-9]{1,5}", port_text) and int(port_text) <= _PORT_MAX
    if not colon or "/" in host or not is_port or not _is_host(host):
        raise UsageFault(
            f"{flag}: {text!r} is not an address; write HOST:PORT, [IPV6]:PORT or :PORT, a port from 0 to {_PORT_MAX}"
        )
    return host.strip("[]") or "0.0.0.0", int(port_text)  # noqa: S104 - what `:PORT` means


def _is_host(host: str) -> bool:
    """Return whether a host with brackets or colons is an IPv6 address; what else a name can be, the system decides."""
    if not set(host) & set("[]:"):
        return True
    inside = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.IPv6Address(inside)
    except ValueError:
        return False
    return True


def check_dialable(text: str, flag: str) -> str:
    """Return a HOST:PORT as it is, if others can dial it. Raises UsageFault naming the flag."""
    host, port = parse_address(text, flag)
    # A URL, which is what people try first, would be taken for the name of a host that does not exist.
    if text.startswith(":") or "/" in host or identifier_fault(host) is not None or not port:
        raise UsageFault(f"{flag}: {text!r} cannot be dialled; write HOST:PORT with a port above 0")
    return text


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT as one dials it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_optional_address(text: str, flag: str) -> tuple[str, int] | None:
    """Return host and port, or None for `off` or `0`, which close an endpoint. Raises UsageFault naming the flag."""
    return None if text in ("off", "0") else parse_address(text, flag)
