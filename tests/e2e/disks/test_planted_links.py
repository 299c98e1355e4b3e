"""Symbolic links that another user put where a process keeps its state: no other file is created, changed or locked."""

import shutil
from pathlib import Path

import pytest

from tests.processes import free_port, run_bigfleet

pytestmark = pytest.mark.slow

PRECIOUS = "precious\n"


def commands(place: Path) -> dict[str, tuple[str, ...]]:
    """Return the command of each process by the name of a file of its state."""
    listen = f"127.0.0.1:{free_port()}"
    shard = ("shard", "--fake-provider", "2", "--data-dir", str(place), "--listen", listen, "--metrics-addr", "off")
    coordinator = ("coordinator", "--store", f"sqlite:///{place}/c.db", "--listen", listen, "--metrics-addr", "off")
    provider = ("provider", "simulated", "--state", f"{place}/p.db", "--addr", listen, "--metrics-addr", "off")
    return {
        "shard.db": shard,
        "shard.lock": shard,
        "shard.db.commits": shard,
        "c.db": coordinator,
        "c.db.holder": coordinator,
        "c.db.commits": coordinator,
        "p.db": provider,
        "p.db.lock": provider,
        "p.db.commits": provider,
    }


@pytest.mark.parametrize(
    "is_dangling", [False, pytest.param(True, marks=pytest.mark.long)], ids=["to a file", "to nothing"]
)
def test_a_process_does_not_start_on_a_symbolic_link(tmp_path: Path, *, is_dangling: bool) -> None:
    """It says so, exits, and leaves what the link leads to as it was."""
    place, victim = tmp_path / "state", tmp_path / "victim"
    for name, command in commands(place).items():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / name).symlink_to(victim)
        if not is_dangling:
            victim.write_text(PRECIOUS, encoding="utf-8")
        done = run_bigfleet(*command)

        assert done.returncode == 1, (name, done.stderr)
        assert f"{name} is a symbolic link" in done.stderr
        assert "Traceback" not in done.stderr
        assert victim.exists() != is_dangling, name
        assert is_dangling or victim.read_text(encoding="utf-8") == PRECIOUS
