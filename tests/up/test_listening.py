"""Every process of `bigfleet up` listens on loopback only."""

import os
import shutil
import socket
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.up.listening import PROC, listening_sockets
from tests.up.up_process import UpProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: The addresses that a listening process has: one for calls, one for its metrics.
PER_PROCESS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        pytest.param((), ("provider", "shard"), marks=pytest.mark.long),
        pytest.param(
            ("--shards", "2", "--store", "etcd"),
            ("provider", "etcd", "coordinator", "shard-0", "shard-1"),
            marks=pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd"),
        ),
    ],
    ids=["one shard", "several shards"],
)
def test_a_demonstration_listens_on_loopback_only(
    flags: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Each process that it starts listens, and none at an address that other machines reach."""
    with UpProcess(tmp_path / "state", "--machines", "30", *flags) as up:
        up.wait_until(lambda: "machines;" in up.output, "a first line of the view")
        listening = {name: listening_sockets(up.child(name) or 0) for name in names}
        everywhere = listening_sockets(up.pid)
        up.interrupt()
        up.finish()

    assert {name for name, found in listening.items() if len(found) < PER_PROCESS} == set(), listening
    assert set().union(*listening.values()) <= everywhere
    assert [str(address) for address, _ in everywhere if not address.is_loopback] == []


@pytest.mark.parametrize(
    ("family", "host", "shown"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "0.0.0.0"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "::"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_every_listening_socket_is_found(family: socket.AddressFamily, host: str, shown: str) -> None:
    """Of both families, at its address; one that does not listen is not."""
    if family is socket.AF_INET6 and not (PROC / "net" / "if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as opened:
        opened.bind((host, 0))
        port = opened.getsockname()[1]
        assert (ip_address(shown), port) not in listening_sockets(os.getpid())
        opened.listen()
        assert (ip_address(shown), port) in listening_sockets(os.getpid())
