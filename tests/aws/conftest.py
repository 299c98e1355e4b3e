"""Starts the strict shim once for the tests of this folder, and gives each test one that knows nothing yet."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.client import CREDENTIALS, ShimClient
from tests.patience import wait_until


@pytest.fixture(scope="session")
def shim_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Yield the URLs of a server that ends with the session: one with IPv4, and one with IPv6 where the host has it."""
    folder = tmp_path_factory.mktemp("shim")
    urls, log = folder / "urls", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.aws.serve_shim", str(urls)],
            env={**os.environ, **CREDENTIALS},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: urls.exists() or process.poll() is not None, log.read_text)
        assert process.poll() is None, log.read_text()
        yield urls.read_text().splitlines()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def shim(shim_urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShimClient:
    """Return a shim without faults and instances; botocore finds credentials that moto takes, and no others."""
    for name, value in {**CREDENTIALS, "AWS_CONFIG_FILE": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    client = ShimClient(*shim_urls)
    client.reset()
    return client
