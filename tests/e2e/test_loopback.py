"""Without TLS and --insecure, shard, coordinator and provider accept connections from loopback only."""

import socket
import urllib.request
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port, serving

#: An address of this machine at which a server that listens on 127.0.0.1 is not reached.
OTHER_ADDRESS = "127.0.0.2"
NAMES = ["shard", "coordinator", "provider"]


def is_reached(host: str, port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(PATIENCE_SECONDS)
        return caller.connect_ex((host, port)) == 0


def says(http: str, line: str) -> bool:
    """Return whether the metrics have a line; they may be served after the port is."""
    try:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=PATIENCE_SECONDS) as answer:
            return line in answer.read().decode().splitlines()
    except OSError:
        return False


def command(name: str, place: Path) -> tuple[str, ...]:
    if name == "shard":
        return ("shard", "--fake-provider", "4", "--data-dir", str(place / "data"))
    if name == "provider":
        return ("provider", "simulated", "--state", f"{place}/p.db")
    return ("coordinator", "--store", f"sqlite://{place}/c.db")


def listen_flag(name: str) -> str:
    return "--addr" if name == "provider" else "--listen"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_port_alone_is_reached_from_this_machine_only(name: str, tmp_path: Path) -> None:
    port, http = free_port(), f"127.0.0.1:{free_port()}"
    flags = (*command(name, tmp_path), listen_flag(name), f":{port}", "--metrics-addr", http)
    with serving(f"127.0.0.1:{port}", tmp_path / "log", *flags):
        assert is_reached("127.0.0.1", port)
        assert not is_reached(OTHER_ADDRESS, port)
        wait_until(lambda: says(http, f"bigfleet_{name}_insecure 0.0"), "the gauge")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_insecure_serves_every_address_and_says_so(name: str, tmp_path: Path) -> None:
    port, http = free_port(), f"127.0.0.1:{free_port()}"
    flags = (*command(name, tmp_path), listen_flag(name), f":{port}", "--metrics-addr", http, "--insecure")
    with serving(f"127.0.0.1:{port}", tmp_path / "log", *flags):
        assert is_reached(OTHER_ADDRESS, port)
        wait_until(lambda: says(http, f"bigfleet_{name}_insecure 1.0"), "the gauge")
    assert "rpc.plain_text_enabled" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("address", ["0.0.0.0:7780", "[::]:7780", "192.0.2.7:7780", "shard.example.com:7780"])
def test_an_address_that_others_reach_needs_tls_or_the_flag(name: str, address: str, tmp_path: Path) -> None:
    done = run_here(*command(name, tmp_path), listen_flag(name), address, "--metrics-addr", "off")

    assert done.returncode == 2
    assert f"{listen_flag(name)}: other hosts can reach {address} without TLS" in done.stderr
    assert "--insecure" in done.stderr
