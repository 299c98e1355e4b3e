"""The flags of `bigfleet conformance`: what they take, and one line with the flag for what they do not."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.conformance.settings import parse_command, parse_only, parse_profiles, parse_target, profiles_asked
from bigfleet.cli.main import app
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.conformance.profiles import ConformanceProfile

TARGET = ("--target", "127.0.0.1:9100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--target is missing"),
        (("--target", "nowhere"), "--target: 'nowhere' is not an address"),
        (("--target", ":9100"), "--target: ':9100' cannot be dialled; write HOST:PORT"),
        (("--target", "127.0.0.1:0"), "--target: '127.0.0.1:0' cannot be dialled"),
        ((*TARGET, "--profile", "core,cloudy"), "--profile: 'cloudy' is unknown; choose among core, cloud"),
        ((*TARGET, "--profile", "core,"), "--profile: 'core,' has an empty name"),
        ((*TARGET, "--only", "LIFE-1,LIFE-99"), "--only: no behaviour LIFE-99"),
        ((*TARGET, "--only", "LIFE-8", "--profile", "core"), "--only: LIFE-8 belongs to profile cloud; add it"),
        ((*TARGET, "--patience", "0"), "--patience: '0' must be longer than zero"),
        ((*TARGET, "--scale-count", "500"), "--scale-count: 500 machines prove nothing about pages of 500"),
        ((*TARGET, "--soak", "soon"), "--soak: 'soon' is not a duration"),
        (("--launch", "provider --state {state}"), "--launch: has no {addr}"),
        (("--launch", "provider {addr}"), "--launch: has no {state}"),
        (("--launch-fault", "provider '{addr}"), "--launch-fault: No closing quotation"),
        (("--launch", ""), "--launch: is empty"),
        ((*TARGET, "--blob", "no/such/file"), "--blob no/such/file: No such file or directory"),
        ((*TARGET, "--tls-cert", "a.pem"), "--tls-key and --tls-ca missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_call_names_the_flag(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["conformance", *arguments])

    assert isinstance(done.exception, UsageFault)
    assert done.exception.exit_code == 2
    assert message in str(done.exception)


def test_an_out_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["conformance", *TARGET, "--out", str(tmp_path / "file" / "out")])

    assert isinstance(done.exception, UsageFault)
    assert "--out" in str(done.exception)
    assert "name a folder" in str(done.exception)


def test_all_is_every_profile() -> None:
    assert parse_profiles("all") == frozenset(ConformanceProfile)
    assert parse_profiles("core, spot") == {ConformanceProfile.CORE, ConformanceProfile.SPOT}


def test_ids_choose_their_profiles_where_none_are_named() -> None:
    only = parse_only("life-1, LIFE-8")

    assert only == {"LIFE-1", "LIFE-8"}
    assert profiles_asked(None, only) == {ConformanceProfile.CORE, ConformanceProfile.CLOUD}
    assert profiles_asked("core,cloud,delta", only) == {
        ConformanceProfile.CORE,
        ConformanceProfile.CLOUD,
        ConformanceProfile.DELTA,
    }
    assert profiles_asked(None, None) == {ConformanceProfile.CORE, ConformanceProfile.CLOUD}


def test_a_command_is_split_as_a_shell_would_and_keeps_its_placeholders() -> None:
    assert parse_command("run 'a b' --addr={addr} {state} $HOME;", "--launch") == (
        "run",
        "a b",
        "--addr={addr}",
        "{state}",
        "$HOME;",
    )
    assert parse_command(None, "--launch") is None
    assert parse_target("[::1]:9100") == "[::1]:9100"
