"""A private key that other users can use is a warning, not the end of a start."""

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from bigfleet.rpc.security.tls import TlsFiles, TlsPaths, monitor_files
from tests.commands import run_here


@pytest.mark.parametrize(
    ("mode", "is_owner", "is_loose"),
    [
        (0o600, True, False),
        (0o400, True, False),
        (0o640, True, True),
        (0o644, True, True),
        (0o440, False, False),
        (0o444, False, True),
        (0o602, False, True),
    ],
)
def test_a_key_that_other_users_can_use_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_owner: bool, is_loose: bool
) -> None:
    """Through a link too, as Kubernetes mounts it; with fsGroup the process is in the group and not the owner."""
    assert run_here("certs", "dev", str(tmp_path)).returncode == 0
    key, link = tmp_path / "admin.key", tmp_path / "tls.key"
    link.symlink_to(key)
    files = TlsFiles(TlsPaths(certificate=tmp_path / "admin.crt", key=link, authority=tmp_path / "ca.crt"))
    key.chmod(mode)
    if not is_owner:
        monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
    with capture_logs() as events:
        monitor_files(files, CollectorRegistry(), "some")

    assert [(event["event"], event["file"], event["mode"]) for event in events] == [
        ("tls.key_mode_loose", str(link), f"{mode:04o}")
    ] * is_loose
