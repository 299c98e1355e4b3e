"""What a control plane says when it cannot start, and the files it writes; a real one is tested in tests/kubernetes."""

import json
import random
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from bigfleet.cli.runtime.system import SystemClock, SystemIds
from bigfleet.demo.kubernetes.audit_log import read_audit_log
from bigfleet.demo.kubernetes.components import (
    Component,
    PlaneFiles,
    PlanePorts,
    api_server_flags,
    write_kubeconfig,
    write_tokens,
)
from bigfleet.demo.kubernetes.control_plane import (
    PROGRAM_VARIABLE,
    ControlPlane,
    ControlPlaneError,
    ControlPlaneSettings,
    free_ports,
    program_from,
)

#: As etcd, says so on its standard error and fails; as any other component, runs until it is killed. If all failed, the
#: one that is seen first would be a matter of luck.
FAILS = '#!/bin/sh\n[ "$1" = etcd ] || exec sleep 3600\necho "$1: bind: address already in use" >&2\nexit 7\n'
#: Runs until it is killed, and serves nothing.
HANGS = "#!/bin/sh\nexec sleep 3600\n"
PORTS = PlanePorts(etcd=1, etcd_peer=2, api_server=3, controller_manager=4, scheduler=5)


def script(folder: Path, text: str) -> Path:
    """Write an executable script."""
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o700)
    return path


def lives(pid: int) -> bool:
    """Return whether a process that was started runs still."""
    assert pid > 0
    return Path(f"/proc/{pid}").exists()


def plane(program: Path, folder: Path, *, ready_seconds_max: float = 60.0) -> ControlPlane:
    """Return a plane that has not been started."""
    settings = ControlPlaneSettings(program=program, folder=folder, ready_seconds_max=ready_seconds_max)
    return ControlPlane(settings, clock=SystemClock(), ids=SystemIds(), rng=random.Random())


# ---- errors --------------------------------------------------------------------------------------------------------


async def test_a_component_that_ends_is_named_with_its_exit_and_the_end_of_its_log(tmp_path: Path) -> None:
    failing = plane(script(tmp_path, FAILS), tmp_path / "plane")

    with pytest.raises(ControlPlaneError) as raised:
        await failing.start()

    message = str(raised.value)
    assert "etcd ended before it was ready (exit 7)" in message
    assert "etcd: bind: address already in use" in message
    assert str(tmp_path / "plane" / "logs" / "etcd.log") in message


async def test_a_component_that_never_serves_is_given_up_and_nothing_stays_behind(tmp_path: Path) -> None:
    hanging = plane(script(tmp_path, HANGS), tmp_path / "plane", ready_seconds_max=0.2)

    with pytest.raises(ControlPlaneError, match=r"kube-apiserver wrote no certificate in 0\.2 s"):
        await hanging.start()

    assert [lives(hanging.pid(each)) for each in (Component.ETCD, Component.API_SERVER)] == [False, False]


async def test_a_program_that_does_not_exist_is_refused_with_what_to_do(tmp_path: Path) -> None:
    absent = plane(tmp_path / "absent", tmp_path / "plane")

    with pytest.raises(ControlPlaneError, match=r"absent cannot be run: No such file or directory; run `make control"):
        await absent.start()


async def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "plane"
    folder.mkdir()
    (folder / "precious").touch()

    with pytest.raises(ControlPlaneError, match="is not empty; a control plane starts in an empty folder"):
        await plane(script(tmp_path, HANGS), folder).start()

    assert [each.name for each in folder.iterdir()] == ["precious"]


async def test_a_request_to_a_plane_that_is_not_there_names_the_request(tmp_path: Path) -> None:
    with pytest.raises(ControlPlaneError, match=r"GET https://127\.0\.0\.1:\d+/version was not answered: "):
        await plane(script(tmp_path, HANGS), tmp_path / "plane").request("GET", "/version")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, f"{PROGRAM_VARIABLE} is not set; run `make controlplane`"),
        ({PROGRAM_VARIABLE: "/no/such/program"}, '"/no/such/program" is not a program; run `make controlplane`'),
        ({PROGRAM_VARIABLE: "/tmp"}, '"/tmp" is not a program'),
    ],
)
def test_a_program_that_is_not_named_is_asked_for(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ControlPlaneError, match=message):
        program_from(environment)


def test_the_program_is_the_one_that_the_environment_names(tmp_path: Path) -> None:
    program = script(tmp_path, HANGS)

    assert program_from({PROGRAM_VARIABLE: str(program)}) == program


# ---- ports ---------------------------------------------------------------------------------------------------------


def test_ports_differ_and_are_below_the_ephemeral_ones() -> None:
    with ExitStack() as claims:
        ports = free_ports(random.Random(1), 50, claims)

    assert len(set(ports)) == 50
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_port_that_is_in_use_is_not_taken() -> None:
    with ExitStack() as claims:
        first = free_ports(random.Random(1), 1, claims)
    with ExitStack() as claims, socket.socket() as taken:
        taken.bind(("127.0.0.1", first[0]))

        assert free_ports(random.Random(1), 1, claims) != first


def test_a_port_is_claimed_before_anything_listens_on_it() -> None:
    """Several planes choose their ports at the same time, and listen seconds later."""
    with ExitStack() as claims:
        first = free_ports(random.Random(1), 3, claims)
        with ExitStack() as others:
            assert not set(first) & set(free_ports(random.Random(1), 3, others))
    with ExitStack() as claims:
        assert free_ports(random.Random(1), 3, claims) == first


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_kubeconfig_contains_everything_and_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.kubeconfig"
    write_kubeconfig(path, url="https://127.0.0.1:3", certificate=b"PEM", token="secret")
    config = json.loads(path.read_text())

    assert config["current-context"] == config["contexts"][0]["name"]
    assert config["clusters"][0]["cluster"] == {
        "server": "https://127.0.0.1:3",
        "certificate-authority-data": "UEVN",
    }
    assert config["users"][0]["user"] == {"token": "secret"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_list_of_tokens_names_users_and_their_groups(tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    write_tokens(path, {"admin": "a", "controller-manager": "b", "scheduler": "c"})

    assert path.read_text().splitlines() == [
        'a,admin,admin,"system:masters"',
        "b,system:kube-controller-manager,controller-manager",
        "c,system:kube-scheduler,scheduler",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("audit", [True, False])
def test_the_api_server_writes_an_audit_log_if_it_is_asked_to(tmp_path: Path, audit: bool) -> None:
    flags = api_server_flags(PlaneFiles(tmp_path), PORTS, audit=audit)

    assert (f"--audit-log-path={tmp_path / 'audit.log'}" in flags) == audit


def test_an_audit_log_is_read_in_order_and_without_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    event = {
        "verb": "create",
        "user": {"username": "system:serviceaccount:a:b"},
        "objectRef": {"resource": "pods", "namespace": "d", "name": "p", "subresource": "eviction"},
        "responseStatus": {"code": 429, "reason": "TooManyRequests"},
    }
    other = {"verb": "patch", "objectRef": {"resource": "nodes", "name": "n"}, "responseStatus": {"code": 200}}
    path.write_text(f"{json.dumps(event)}\n{json.dumps(other)}\n" + '{"verb": "cre')

    first, second = read_audit_log(path)

    assert (first.is_eviction, first.user.username, first.object_ref.name) == (True, "system:serviceaccount:a:b", "p")
    assert first.response_status.code == 429
    assert (second.is_eviction, second.verb) == (False, "patch")


def test_an_audit_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    assert read_audit_log(tmp_path / "audit.log") == []


def test_components_have_the_names_of_their_programs() -> None:
    assert [each.value for each in Component] == [
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
    ]
