"""`bigfleet.provider.run` is a whole main program from one line (docs/spec/provider.md §16, §19)."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bigfleet.cli.runtime import system as runtime
from bigfleet.rpc.wire.gen import provider_pb2, provider_pb2_grpc
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, wait_until_serving

#: A backend without delete, and with plain functions.
TOY = """
from bigfleet.provider.run import run
from bigfleet.model.states import CapacityType
from bigfleet.provider.backend import CONFIGURE_WAITS, ExistingHost, Host, Limits, Slot
from bigfleet.provider.records.kinds import Kind

class Toy:
    provider = "toy"
    limits = Limits(resumable=frozenset({Kind.CONFIGURE}))

    def inventory(self):
        yield Slot(id="toy-0", instance_type="t", zone="z", capacity_type=CapacityType.RESERVED, price_usd_per_hour=1.0)

    def create(self, machine, op):
        return Host(ref="host-" + machine.id)

    def configure(self, machine, cluster, blob, op):
        return None

    def drain(self, machine, grace_seconds, op):
        return None

run(Toy(), readiness=CONFIGURE_WAITS)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text(TOY)
    return path


def test_a_method_with_a_wrong_signature_ends_the_start_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(TOY.replace("def drain(self, machine, grace_seconds, op)", "def drain(self, machine)"))

    done = subprocess.run(
        [sys.executable, str(program), "--state", "s.db", "--metrics-addr", "off"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("wrong.py: Toy.drain must be callable as drain(self, machine, grace_seconds, op): ")


def started(toy: Path, *arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    with (cwd / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, str(toy), *arguments], cwd=cwd, stdout=log, stderr=log)


@contextmanager
def serving(toy: Path, cwd: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel, int]]:
    port, metrics_port = free_port(), free_port()
    flags = ("--addr", f"127.0.0.1:{port}", "--metrics-addr", f"127.0.0.1:{metrics_port}", *arguments)
    process = started(toy, *flags, cwd=cwd)
    try:
        wait_until_serving(f"127.0.0.1:{port}", process, cwd / "log")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield process, channel, metrics_port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_SECONDS)


def ids(channel: grpc.Channel) -> set[str]:
    listing = provider_pb2_grpc.CapacityProviderStub(channel).List(provider_pb2.ListFilter(), timeout=PATIENCE_SECONDS)
    return {machine.id for machine in listing.machines}


def until(is_true: Callable[[], bool]) -> None:
    wait_until(is_true, "it never came true")


def test_a_provider_of_twenty_lines_serves_reflects_measures_and_stops_cleanly(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    with serving(toy, tmp_path, "--state=s.db", "--intent-key", "key") as (process, channel, metrics_port):
        stub = provider_pb2_grpc.CapacityProviderStub(channel)
        ack = stub.Create(provider_pb2.CreateRequest(machine_id="toy-0"), timeout=PATIENCE_SECONDS)
        assert ack.operation_id.startswith("op-")
        until(lambda: stub.Get(provider_pb2.MachineRef(id="toy-0"), timeout=PATIENCE_SECONDS).host.ref == "host-toy-0")
        with pytest.raises(grpc.RpcError) as refused:
            stub.Delete(provider_pb2.DeleteRequest(machine_id="toy-0"), timeout=PATIENCE_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            asked, timeout=PATIENCE_SECONDS
        )
        assert "bigfleet.v1alpha1.CapacityProvider" in str(answer)
        for page, expected in (("metrics", "bigfleet_provider_build_info"), ("healthz", "ok"), ("readyz", "ready")):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{metrics_port}/{page}", timeout=PATIENCE_SECONDS
            ) as response:
                assert expected in response.read().decode()
        command = bigfleet("provider", "admin", "--state", "s.db", "-o", "json", "status")
        told = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
        )
        assert json.loads(told.stdout)["machines"] == {"IDLE": 1}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[-1]["event"] == "provider.stopped"
    audits = [line for line in lines if line["event"] == "admin.command_executed"]
    assert [(line["who"].split()[:2], line["what"]) for line in audits] == [(["uid", str(os.getuid())], "status")]


def test_a_backend_that_hangs_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    hanging = tmp_path / "hanging.py"
    for_ever = "        __import__('threading').Event().wait()\n        return Host"
    hanging.write_text(TOY.replace("        return Host", for_ever))
    with serving(hanging, tmp_path, "--state", "s.db") as (process, channel, _):
        stub = provider_pb2_grpc.CapacityProviderStub(channel)
        stub.Create(provider_pb2.CreateRequest(machine_id="toy-0"), timeout=PATIENCE_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "provider.stopped" in (tmp_path / "log").read_text()


def test_offerings_are_read_again_on_sighup_and_the_fake_is_asked_for_by_name(toy: Path, tmp_path: Path) -> None:
    offering = {"instance_type": "t", "zone": "z", "count": 2, "price_per_hour": 1}
    file = tmp_path / "offers.json"
    file.write_text(json.dumps([offering]))
    flags = ("--use-fake-backend=true", "--offerings", "offers.json", "--reflection=false")
    with serving(toy, tmp_path, *flags) as (process, channel, _):
        assert ids(channel) == {"toy/on-demand/t/z/000", "toy/on-demand/t/z/001"}
        file.write_text(json.dumps([{**offering, "count": 3}]))
        process.send_signal(signal.SIGHUP)
        until(lambda: len(ids(channel)) == 3)
        file.write_text("no longer JSON")
        process.send_signal(signal.SIGHUP)
        until(lambda: "offerings.load_failed" in (tmp_path / "log").read_text())
        assert len(ids(channel)) == 3
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError):
            list(
                reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=PATIENCE_SECONDS)
            )


def test_seeds_stand_in_for_the_backends_own_fleet(toy: Path, tmp_path: Path) -> None:
    with serving(toy, tmp_path, "--state", "s.db", "--seed-count", "5", "--provider", "p") as (_, channel, _):
        assert ids(channel) == {f"p-{number}" for number in range(5)}


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--bad"], 2, "--bad"),
        ([], 2, "--state is missing"),
        (["--state", "s", "--seed-count", "1", "--offerings", "o"], 2, "--seed-count and --offerings"),
        (["--state", "s", "--offerings", "nowhere.json"], 2, "--offerings nowhere.json"),
        (["--state", "s", "--offerings", "bad.json"], 2, "bad.json: entry 0: zone: is missing"),
        (["--state", "s", "--intent-key", "bad.json"], 2, "--intent-key: bad.json"),
        (["--use-fake-backend", "--intent-key", "key"], 2, "--intent-key: this provider"),
        (["--state", "s", "--tls-cert", "x"], 2, "--tls-key"),
        (["--state", "nowhere/s"], 1, "nowhere"),
        (["--state", "bad.json"], 1, "bad.json"),
        (["--use-fake-backend", "yes"], 2, "yes"),
    ],
)
def test_a_wrong_call_is_one_line_and_an_exit_code(
    tmp_path: Path,
    arguments: list[str],
    code: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # It would go on writing to what is captured here, in every test that follows.
    monkeypatch.setattr(runtime, "configure_logging", lambda *_: None)
    (tmp_path / "bad.json").write_text('[{"instance_type": "t", "count": 1}]')
    (tmp_path / "key").write_bytes(bytes(32))
    flags = ["--addr", f"127.0.0.1:{free_port()}", "--metrics-addr", "off", *arguments]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/toy", *flags])
    with pytest.raises(SystemExit) as ended:
        # As `run(Toy(), readiness=CONFIGURE_WAITS)` at the end of TOY does.
        exec(TOY, {"__name__": "toy"})
    told = capsys.readouterr().err
    assert ended.value.code == code, told
    assert named in told
    assert told.startswith("toy")
    assert len(told.strip().splitlines()) == 1


def test_a_second_process_exits_and_names_the_first(toy: Path, tmp_path: Path) -> None:
    with serving(toy, tmp_path, "--state", "s.db") as (process, _, _):
        command = [sys.executable, str(toy), "--state", "s.db", "--metrics-addr", "off", "--addr", "127.0.0.1:0"]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert ended.returncode == 1
        assert f"in use by process {process.pid}" in ended.stderr
