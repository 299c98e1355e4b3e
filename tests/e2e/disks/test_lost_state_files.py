"""State files that are deleted, replaced, moved or truncated under a running process: it is unready and says why."""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.coordinator.coordinator_process import coordinator
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import free_port, serving

pytestmark = pytest.mark.slow

#: Returns status and text of a path of a process's HTTP endpoints.
Page = Callable[[str], tuple[int, str]]


def page_of(port: int) -> Page:
    """Return the reader of a port."""

    def read(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    return read


@contextmanager
def shard(state: Path) -> Iterator[Page]:
    """Run a shard whose state file is in the directory of `state`."""
    address, http, log = f"127.0.0.1:{free_port()}", free_port(), state.parent.with_suffix(".log")
    flags = ("--listen", address, "--metrics-addr", f"127.0.0.1:{http}", "--fake-provider", "4")
    with serving(address, log, "shard", *flags, "--data-dir", str(state.parent)):
        yield page_of(http)


@contextmanager
def provider(state: Path) -> Iterator[Page]:
    """Run a simulated provider on a state file."""
    address, http, log = f"127.0.0.1:{free_port()}", free_port(), state.parent.with_suffix(".log")
    flags = ("--addr", address, "--metrics-addr", f"127.0.0.1:{http}", "--seed-count", "4")
    state.parent.mkdir(exist_ok=True)
    with serving(address, log, "provider", "simulated", *flags, "--state", str(state)):
        yield page_of(http)


@contextmanager
def leader(state: Path) -> Iterator[Page]:
    """Run a coordinator on a SQLite file."""
    with coordinator(state.parent.parent, "--store", f"sqlite://{state}") as running:
        yield running.page


def deleted(state: Path) -> None:
    """Delete the whole directory."""
    shutil.rmtree(state.parent)


def replaced(state: Path) -> None:
    """Put a copy in the place of the file, as a restore under a running process does."""
    copy = state.with_name("copy")
    shutil.copy(state, copy)
    copy.replace(state)


def truncated(state: Path) -> None:
    """Take the file's content."""
    os.truncate(state, 0)


#: A name, the program that uses the file, the prefix of its metrics.
PROGRAMS = {
    "shard.db": (shard, "bigfleet_shard"),
    "provider.db": (provider, "bigfleet_provider"),
    "coordinator.db": (leader, "bigfleet_coordinator"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("attack", "finding"),
    [(deleted, "was deleted"), (replaced, "was replaced"), (truncated, "was truncated")],
    ids=["deleted", "replaced", "truncated"],
)
def test_a_process_whose_state_is_taken_away_says_so(
    tmp_path: Path, name: str, attack: Callable[[Path], None], finding: str
) -> None:
    """Over HTTP and as a metric, within a few looks at the files."""
    program, prefix = PROGRAMS[name]
    state = tmp_path / "state" / name
    with program(state) as page:
        wait_until(lambda: page("/readyz")[0] == 200, "never ready")
        assert f"{prefix}_state_file_lost 0.0" in page("/metrics")[1]

        attack(state)

        wait_until(lambda: page("/readyz")[0] == 503, "a process without its state stays ready")
        assert f"{name} {finding}" in page("/readyz")[1]
        assert f"{prefix}_state_file_lost 1.0" in page("/metrics")[1]


def test_a_file_that_comes_back_makes_the_process_ready(tmp_path: Path) -> None:
    """A file that somebody moved away and back has lost nothing."""
    state = tmp_path / "state" / "shard.db"
    with shard(state) as page:
        wait_until(lambda: page("/readyz")[0] == 200, "never ready")
        state.rename(tmp_path / "aside")
        wait_until(lambda: page("/readyz")[0] == 503, "a process without its state stays ready")
        (tmp_path / "aside").rename(state)
        wait_until(lambda: page("/readyz")[0] == 200, "never ready again")

    log = state.parent.with_suffix(".log").read_text()
    assert [log.count(f'"event":"store.file_{what}"') for what in ("lost", "recovered")] == [1, 1]


@pytest.mark.parametrize("name", ["shard.db", "provider.db"])
def test_a_process_that_lost_its_directory_leaves_all_that_its_successor_needs(tmp_path: Path, name: str) -> None:
    """The steps of /readyz, carried out on real processes: it is rescued, renamed, and the next start is ready."""
    program, _prefix = PROGRAMS[name]
    state = tmp_path / "state" / name
    with program(state) as page:
        wait_until(lambda: page("/readyz")[0] == 200, "never ready")
        deleted(state)
        wait_until(lambda: f"rename {name}.rescue to {name}" in page("/readyz")[1], "never rescued")

    state.with_name(f"{name}.rescue").rename(state)

    with program(state) as page:
        wait_until(lambda: page("/readyz")[0] == 200, "the rescued state is not ready")


def test_a_coordinator_that_lost_its_file_still_gives_a_snapshot(tmp_path: Path) -> None:
    """As its advice says: the tables are in memory."""
    state = tmp_path / "state" / "c.db"
    with coordinator(tmp_path, "--store", f"sqlite://{state}") as running:
        wait_until(lambda: running.page("/readyz")[0] == 200, "never ready")
        deleted(state)
        wait_until(lambda: "bigfleet snapshot save" in running.page("/readyz")[1], "no advice")

        saved = running.run("snapshot", "save", str(tmp_path / "saved"))

    assert saved.returncode == 0, saved.stderr


def test_a_provider_accepts_nothing_that_it_cannot_keep(tmp_path: Path) -> None:
    """Its commits are refused, so that no result is reported that is lost with the process."""
    from bigfleet.provider.records.refusal import StoreDown
    from bigfleet.provider.storage.sqlite import SqliteProviderStore
    from bigfleet.provider.storage.store import Batch

    state = tmp_path / "provider.db"
    store = SqliteProviderStore(state)
    store.load(bytes(8))
    store.commit(Batch(head=1, floor=0))
    state.unlink()

    with pytest.raises(StoreDown, match="was deleted"):
        store.commit(Batch(head=2, floor=0))
    store.close()
