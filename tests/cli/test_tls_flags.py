"""`--tls-cert`, `--tls-key`, `--tls-ca` and `--certify` on the commands that take them (docs/spec/wire.md §3)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from bigfleet.cli.certs.command import app as certs_app
from bigfleet.cli.provider.command import app as provider_app
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.shard.command import shard

Run = Callable[..., object]


def run_shard(*arguments: str) -> object:
    """Call `bigfleet shard` as far as its flags."""
    app = typer.Typer()
    app.command()(shard)
    command = typer.main.get_command(app)
    return command.main(["--provider-addr", ":1", *arguments], "bigfleet shard", standalone_mode=False)


def run_provider(*arguments: str) -> object:
    """Call `bigfleet provider simulated` as far as its flags."""
    command = typer.main.get_command(provider_app)
    return command.main(["simulated", "--state", "s", *arguments], "bigfleet provider", standalone_mode=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates as `bigfleet certs dev` makes them."""
    place = tmp_path_factory.mktemp("certs")
    typer.main.get_command(certs_app).main(["dev", str(place)], "bigfleet certs", standalone_mode=False)
    return place


def flags(folder: Path, name: str) -> dict[str, str]:
    """Return the three flags of a holder."""
    return {
        "--tls-cert": str(folder / f"{name}.crt"),
        "--tls-key": str(folder / f"{name}.key"),
        "--tls-ca": str(folder / "ca.crt"),
    }


def words(given: dict[str, str]) -> list[str]:
    """Return flags as arguments."""
    return [word for pair in given.items() for word in pair]


@pytest.mark.rule("shard 1/3")
@pytest.mark.parametrize("run", [run_shard, run_provider])
@pytest.mark.parametrize(
    "given",
    [
        ("--tls-cert",),
        ("--tls-key",),
        ("--tls-ca",),
        ("--tls-cert", "--tls-key"),
        ("--tls-cert", "--tls-ca"),
        ("--tls-key", "--tls-ca"),
    ],
    ids=" ".join,
)
def test_one_or_two_of_the_three_are_refused(folder: Path, run: Run, given: tuple[str, ...]) -> None:
    """By the name of what is missing; never half of TLS."""
    every = flags(folder, "shard-shard-0")
    with pytest.raises(UsageFault) as caught:
        run(*words({flag: every[flag] for flag in given}))
    told = str(caught.value).partition(" missing: ")[0]
    assert set(told.split(" and ")) == set(every) - set(given)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("run", [run_shard, run_provider])
@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key", "--tls-ca"])
def test_a_file_that_is_not_there_is_named(folder: Path, run: Run, flag: str) -> None:
    """With what the system says."""
    given = flags(folder, "shard-shard-0") | {flag: str(folder / "nowhere")}
    with pytest.raises(UsageFault, match="nowhere: No such file"):
        run(*words(given))


@pytest.mark.parametrize("holder", ["admin", "cluster-cluster-0", "provider-simulated"])
def test_a_shard_takes_its_own_certificate_only(folder: Path, holder: str) -> None:
    """`--id` and the certificate agree (docs/spec/shard.md §1)."""
    with pytest.raises(UsageFault, match=rf"{holder}\.crt"):
        run_shard(*words(flags(folder, holder)))


@pytest.mark.rule("shard 1/4")
def test_a_shard_of_another_id_is_refused(folder: Path) -> None:
    """The message names both."""
    with pytest.raises(UsageFault, match="names bigfleet://shard/shard-0, not bigfleet://shard/s2"):
        run_shard("--id", "s2", *words(flags(folder, "shard-shard-0")))


def test_certify_without_tls_is_refused() -> None:
    """There is nothing that it would allow."""
    with pytest.raises(UsageFault, match="--certify"):
        run_provider("--certify")
