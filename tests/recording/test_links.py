"""The audit log and the recording follow symbolic links of their own user, and none of another one."""

import errno
import os
from pathlib import Path

import pytest

from bigfleet.recording.growing_file import begin_fresh, numbered, open_locked
from bigfleet.shard.audit.log_file import AuditFile, AuditFileFault

OTHER_USER = 54_321


def link_of_another_user(link: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a link that belongs to a user who is neither this one nor root."""
    link.symlink_to(target)
    if os.geteuid() == 0:
        os.lchown(link, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)


def test_a_link_of_another_user_has_nothing_appended_to_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write in the directory chooses no file of this user, neither the log nor the next one of a rotation."""
    target, log = tmp_path / "authorized_keys", tmp_path / "audit.log"
    target.write_text("mine\n")
    link_of_another_user(log, target, monkeypatch)
    with pytest.raises(AuditFileFault, match="symbolic link of another user"):
        AuditFile(log, size_bytes_max=1_000)
    with pytest.raises(OSError, match="symbolic link of another user"):
        begin_fresh(log, b"x")
    assert target.read_text() == "mine\n"


def test_a_link_of_the_same_user_leads_to_another_disk_also_after_a_rotation(tmp_path: Path) -> None:
    """The old files lie where the current one is, and the link stays one."""
    disk, log = tmp_path / "disk", tmp_path / "audit.log"
    disk.mkdir()
    log.symlink_to(disk / "audit.log")
    first = open_locked(log)
    os.write(first, b"first")
    second = begin_fresh(log, b"second")
    try:
        assert log.is_symlink()
        assert log.read_bytes() == b"second"
        assert numbered(disk / "audit.log", 1).read_bytes() == b"first"
        assert {each.name for each in tmp_path.iterdir()} == {"disk", "audit.log"}
    finally:
        os.close(first)
        os.close(second)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    """They lead to no file."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_locked(tmp_path / "a")
