"""The units of deploy/systemd: what systemd makes of them, and whether their command lines and files fit together."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigfleet.cli.main import app
from bigfleet.cli.provider import process as provider_process
from tests.deploy.command_lines import UnknownFlag, parsed_flags
from tests.deploy.systemd_units import (
    PROGRAM,
    SERVICES,
    UNITS,
    command_line,
    drop_ins_of,
    environment_of,
    file_of,
    instance_of,
    one,
    settings,
)
from tests.patience import PATIENCE_SECONDS

#: `systemd-analyze security` calls more than this "MEDIUM" or worse from 5 on; ours are at 1.4.
EXPOSURE_MAX = 2.0

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("BIGFLEET_REQUIRE_SYSTEMD") != "1",
    reason="systemd-analyze is not installed",
)


def installed_command(service: str) -> list[str]:
    """Return the words of an installation with the example's environment."""
    places = {"%i": instance_of(service), "%S": "/var/lib", "%L": "/var/log", "%d": "/run/credentials/x"}
    return command_line(service, places, environment_of(service))


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_is_one_that_the_command_knows(service: str) -> None:
    program, *words = installed_command(service)

    assert program == PROGRAM
    assert parsed_flags(words)["tls_cert"] == Path("/run/credentials/x/tls.crt")
    assert not [word for word in words if re.search(r"[%$]", word)], "something is not replaced"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["shard", "--idd=3", "--provider-addr=x:1"], "--idd"),
        (["shard", "--provider-addr=x:1", "--execute-concurrency=many"], "integer"),
        (["shard"], "--provider-addr is missing"),
        (["shard", "--provider-addr=x:1", "more"], "'more' is no flag"),
        (["coordinator", "--lease-ttl"], "requires an argument"),
        (["nothing"], "'nothing' is no flag"),
    ],
)
def test_a_flag_that_is_unknown_is_found(words: list[str], fault: str) -> None:
    with pytest.raises(UnknownFlag, match=fault):
        parsed_flags(words)


@pytest.mark.parametrize("service", SERVICES)
def test_every_example_says_only_what_the_unit_uses(service: str) -> None:
    used = set(re.findall(r"\$\{?(\w+)", one(service, "ExecStart")))

    assert set(environment_of(service)) == used
    assert one(service, "EnvironmentFile") == f"/etc/bigfleet/{SERVICES[service]}".replace(
        f"-{instance_of(service)}.env", "-%i.env" if instance_of(service) else ".env"
    )


@pytest.mark.parametrize("service", SERVICES)
def test_every_file_is_in_a_directory_that_systemd_makes(service: str) -> None:
    """The rest of the system is read-only for the process."""
    directories = {"%S": "StateDirectory", "%L": "LogsDirectory", "%C": "CacheDirectory"}
    text = " ".join([one(service, "ExecStart"), *settings(service).get("Environment", ())])
    for root, folder in re.findall(r"(%[SLC])/([^/\s]+)", text):
        assert one(service, directories[root]) == folder
        assert one(service, f"{directories[root]}Mode") == "0700"
    credentials = {value.partition(":")[0] for value in settings(service)["LoadCredential"]}

    # A hosts file cannot say %d.
    text += "".join(path.read_text() for path in drop_ins_of(service)).replace(f"/run/credentials/{service}", "%d")

    assert set(re.findall(r"%d/([\w.-]+)", text)) == credentials
    assert credentials >= {"tls.crt", "tls.key", "ca.crt"}


def test_certs_dev_writes_the_files_that_the_units_load(tmp_path: Path) -> None:
    providers = [f"--provider={name}" for name in ("simulated", "rack", "kvm")]
    made = CliRunner().invoke(app, ["certs", "dev", str(tmp_path), *providers])
    assert made.exit_code == 0, made.output
    loaded = [
        Path(value.partition(":")[2].replace("%i", instance_of(service)))
        for service in SERVICES
        for value in settings(service)["LoadCredential"]
    ]
    certificates = {path.name for path in loaded if path.parent == Path("/etc/bigfleet/tls")}

    # Drop-ins also load a password and a key of ssh.
    assert {path.name for path in loaded if path.name not in certificates} == {"password", "ssh-key"}
    assert len(certificates) == 2 * len(SERVICES) + 1
    assert certificates <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("service", SERVICES)
def test_a_stop_has_more_time_than_the_process_takes_for_it(service: str) -> None:
    assert float(one(service, "TimeoutStopSec")) > provider_process._STOP_SECONDS_MAX


@pytest.mark.parametrize("service", SERVICES)
def test_a_reload_ends_no_process(service: str) -> None:
    """A coordinator handles no SIGHUP, and a shard only with a file that it opens or reads again."""
    reloads = "ExecReload" in settings(service)

    assert reloads == ("coordinator" not in service)
    assert "shard" not in service or "--audit-log=" in one(service, "ExecStart")


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_sees_when_it_started(service: str) -> None:
    """The metric process_start_time_seconds needs /proc/stat, which ProcSubset=pid hides."""
    assert "ProcSubset" not in settings(service)


# ---- what systemd says -----------------------------------------------------------------------------------------------


def staged(folder: Path, *, text: str = "", by: str = "") -> Path:
    """Return a folder with all units as installed, for a program that exists; `text` is replaced in each."""
    for source in UNITS.glob("bigfleet*"):
        content = source.read_text().replace(PROGRAM, shutil.which("true") or PROGRAM).replace(text, by)
        for service in SERVICES:
            if file_of(service) == source:
                (folder / service).write_text(content)
                for drop_in in drop_ins_of(service):
                    (folder / f"{service}.d").mkdir(exist_ok=True)
                    shutil.copy(drop_in, folder / f"{service}.d")
        (folder / source.name).write_text(content)
    return folder


def analyze(folder: Path, *words: str) -> str:
    """Return what `systemd-analyze` prints, with the units of the folder before those of the system."""
    done = subprocess.run(
        ["systemd-analyze", *words],
        cwd=folder,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return done.stdout


@needs_systemd
@pytest.mark.parametrize("service", [*SERVICES, "bigfleet.slice"])
def test_systemd_has_nothing_to_say_of_a_unit(tmp_path: Path, service: str) -> None:
    """Its exit code is 1 for more than faults: what it prints counts."""
    assert analyze(staged(tmp_path), "verify", f"./{service}") == ""


@needs_systemd
@pytest.mark.parametrize(
    ("text", "by", "fault"),
    [
        ("WatchdogSec=", "WatchDogSec=", "'WatchDogSec'"),
        ("Restart=always", "Restart=allways", "Failed to parse service restart specifier"),
        ("ExecStart=", "Environment=X=", "no ExecStart="),
    ],
)
def test_systemd_finds_a_fault_that_is_planted(tmp_path: Path, text: str, by: str, fault: str) -> None:
    said = analyze(staged(tmp_path, text=text, by=by), "verify", "./bigfleet-coordinator.service")

    assert fault in said


@needs_systemd
def test_systemd_finds_a_fault_of_a_drop_in(tmp_path: Path) -> None:
    (drop_in,) = (staged(tmp_path) / "bigfleet-provider@kvm.service.d").iterdir()
    drop_in.write_text(drop_in.read_text().replace("User=", "Usr="))

    assert "Unknown key 'Usr'" in analyze(tmp_path, "verify", "./bigfleet-provider@kvm.service")


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_the_exposure_of_a_service_is_low(tmp_path: Path, service: str) -> None:
    said = analyze(staged(tmp_path), "security", "--offline=true", f"./{service}")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)

    assert found is not None, said
    assert float(found[1]) <= EXPOSURE_MAX


@needs_systemd
def test_the_group_and_the_directories_are_made(tmp_path: Path) -> None:
    """By the tools that packages and administrators use, below a root of the test."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    for words in (
        ["systemd-sysusers", f"--root={tmp_path}", str(UNITS / "sysusers.conf")],
        ["systemd-sysusers", f"--root={tmp_path}", str(UNITS / "examples" / "sysusers-kvm.conf")],
        ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(UNITS / "tmpfiles.conf")],
    ):
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stderr

    groups = {name: users for name, _x, _id, users in fields(tmp_path / "etc" / "group")}
    assert (groups["bigfleet"], groups["libvirt"]) == ("", "bigfleet-kvm")
    users = [one("bigfleet-provider@kvm.service", "User")]
    assert users == [fields_of[0] for fields_of in fields(tmp_path / "etc" / "passwd") if fields_of[0] != "root"]
    modes = {name: (tmp_path / "etc" / name).stat().st_mode & 0o777 for name in ("bigfleet", "bigfleet/tls")}
    assert modes == {"bigfleet": 0o750, "bigfleet/tls": 0o700}


def fields(path: Path) -> list[list[str]]:
    """Return the fields of each line of a database of users or groups."""
    return [line.split(":") for line in path.read_text().splitlines()]
