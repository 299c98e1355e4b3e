"""The command line of `bigfleet provider simulated` (docs/spec/provider.md §19)."""

import functools
from pathlib import Path

import pytest
import typer

from bigfleet.cli.provider.command import app
from bigfleet.cli.provider.simulated import SimulatedWorld
from bigfleet.cli.runtime import system as runtime
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.provider.kit.options import CoreOptions


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state file is locked before the files of a world are read; how a process logs would stay with later tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "configure_logging", lambda *_arguments: None)


def run(*arguments: str) -> object:
    return typer.main.get_command(app).main(["simulated", *arguments], "bigfleet provider", standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--state is missing"),
        (["--state", "s", "--state-sync", "maybe"], "--state-sync"),
        (["--state", "s", "--provider", "a b"], "--provider"),
        (["--state", "s", "--time-scale", "0"], "--time-scale"),
        (["--state", "s", "--addr", "nowhere"], "--addr"),
        (["--state", "s", "--metrics-addr", "9101"], "--metrics-addr"),
        (["--state", "s", "--transition-timeout", "soon"], "--transition-timeout"),
        (["--state", "s", "--reconcile-interval", "0s"], "--reconcile-interval"),
        (["--state", "s", "--failed-hold", "-1"], "--failed-hold"),
        (["--state", "s", "--log-level", "loud"], "--log-level"),
        (["--state", "s", "--seed-count", "3", "--world", "w.yaml"], "--seed-count"),
        (["--state", "s", "--world", "nowhere.yaml"], "--world nowhere.yaml"),
        (["--state", "s", "--catalog", "nowhere.csv"], "--catalog nowhere.csv"),
    ],
)
def test_a_wrong_call_names_its_flag(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--unknown"], "--unknown"),
        (["--seed", "x"], "--seed"),
        (["--calm=perhaps"], "--calm"),
        (["--calm", "no"], "no"),
    ],
)
def test_what_the_parser_refuses_exits_with_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        typer.main.get_command(app).main(["simulated", *arguments], "bigfleet provider")
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "is_calm", "reflects"),
    [
        (["--calm"], True, True),
        (["--calm=true", "--reflection=false"], True, False),
        (["--calm=false"], False, True),
        (["--no-reflection"], False, False),
    ],
)
def test_switches_and_durations_reach_the_process(
    arguments: list[str], is_calm: bool, reflects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigfleet.cli.provider import process as provider_process
    from bigfleet.cli.provider.process_settings import ProviderProcessSettings

    taken: dict[str, object] = {}

    async def serve(process: object, options: object, open_substrate: functools.partial[object]) -> int:
        taken.update(process=process, options=options, simulation=open_substrate.keywords["simulation"])
        return 0

    monkeypatch.setattr(provider_process, "serve_process", serve)
    run("--state", str(tmp_path / "s.db"), "--failed-hold=1m30s", "--metrics-addr", "off", *arguments)
    process, options, simulation = taken["process"], taken["options"], taken["simulation"]
    assert isinstance(process, ProviderProcessSettings)
    assert isinstance(options, CoreOptions)
    assert isinstance(simulation, SimulatedWorld)
    assert (simulation.is_calm, process.reflect, process.metrics_address) == (is_calm, reflects, None)
    assert options.failed_hold_seconds == 90
