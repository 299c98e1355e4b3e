"""Reads from /proc at which addresses a process and its descendants listen."""

import os
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_LISTENING: Final = "0A"
#: The kernel writes addresses as words of this machine's byte order.
_WORD_DIGITS: Final = 8

Address = tuple[IPv4Address | IPv6Address, int]


def descendants(pid: int) -> set[int]:
    """Return a process and all that it and its children have started and that still run below it."""
    parents = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of a program may have spaces and brackets.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, added = {pid}, {pid}
    while added:
        added = {child for child, parent in parents.items() if parent in added} - found
        found |= added
    return found


def listening_sockets(pid: int) -> set[Address]:
    """Return address and port of each TCP socket on which a process or a descendant listens."""
    inodes = {inode for each in descendants(pid) for inode in _socket_inodes(each)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(PROC / str(pid) / "fd"):
            with suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


def _address(text: str) -> IPv4Address | IPv6Address:
    words = [text[start : start + _WORD_DIGITS] for start in range(0, len(text), _WORD_DIGITS)]
    address = ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
