"""The command before a real process over real gRPC: verdicts, exit codes, restarts, reports."""

import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio

from bigfleet.conformance.ports import (
    ABSENT,
    CallToken,
    Configure,
    Create,
    Delete,
    Drain,
    Get,
    List,
    Request,
    Status,
)
from bigfleet.model.states import MachineState
from bigfleet.rpc.clients.conformance import GrpcConnection, message_of
from bigfleet.rpc.servers.provider import SERVICE
from tests.commands import run_here
from tests.processes import bigfleet, free_port, run_bigfleet, serving

PROVIDER = shlex.join(
    bigfleet("provider", "simulated", "--calm", "--time-scale", "0.001", "--metrics-addr", "off", "--seed-count")
)
LAUNCH = f"{PROVIDER} {{seeds}} --addr {{addr}} --state {{state}}"


@pytest.mark.slow
def test_a_running_provider_is_certified(tmp_path: Path) -> None:
    """By the profiles that are asked for when none is named, on a provider that runs already."""
    address = f"127.0.0.1:{free_port()}"
    provider = ("provider", "simulated", "--calm", "--time-scale", "0.001", "--seed-count", "256")
    places = ("--addr", address, "--state", str(tmp_path / "state"), "--metrics-addr", "off")
    out = str(tmp_path / "out")
    with serving(address, tmp_path / "log", *provider, *places):
        done = run_bigfleet("conformance", "--target", address, "--out", out)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2].startswith("CERTIFIED: ")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["verdict"], report["target"], report["seed"]) == ("CERTIFIED", address, 1)
    assert report["profiles"] == ["cloud", "core"]
    assert done.stdout.splitlines()[-1] == "core: CERTIFIED, cloud: CERTIFIED"
    assert report["faults"] == {}
    assert {behaviour["outcome"] for behaviour in report["behaviours"]} == {"passed"}
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert len(list(suite.iter("testcase"))) == len(report["behaviours"])
    assert list(suite.iter("failure")) == []


def test_a_provider_with_certificates_is_certified_by_an_admin(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert run_here("certs", "dev", str(certs), "--shard", "s1").returncode == 0
    flags = {
        holder: (
            "--tls-cert",
            f"{certs}/{holder}.crt",
            "--tls-key",
            f"{certs}/{holder}.key",
            "--tls-ca",
            f"{certs}/ca.crt",
        )
        for holder in ("provider-simulated", "admin")
    }
    launch = f"{LAUNCH} --certify {shlex.join(flags['provider-simulated'])}"
    done = run_bigfleet("conformance", "--launch", launch, "--profile", "cloud", *flags["admin"])

    assert (done.returncode, done.stderr) == (0, "")


def test_a_launched_provider_is_tried_and_what_is_left_out_is_incomplete(tmp_path: Path) -> None:
    only = "LIFE-4,EDGE-13,FENCE-3,RACE-6,META-1,META-3,FUZZ-4"
    done = run_here("conformance", "--launch", LAUNCH, "--only", only, "--out", str(tmp_path))

    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-2].startswith("INCOMPLETE: 7 passed")
    assert (tmp_path / "provider-main.log").read_text() != ""


def test_a_failure_is_told_in_full(tmp_path: Path) -> None:
    """No provider settles within a microsecond; its machines are handed back all the same."""
    arguments = ("--only", "RACE-7", "--seed", "9", "--patience", "0.000001", "--out", str(tmp_path))
    done = run_here("conformance", "--launch", LAUNCH, *arguments)

    assert done.returncode == 1
    assert "seed 9; again with --seed 9 --only RACE-7" in done.stdout
    assert "Create(" in done.stdout
    assert done.stdout.splitlines()[-2].startswith("FAILED: 1 failed")
    report = json.loads((tmp_path / "report.json").read_text())
    (failed,) = [behaviour for behaviour in report["behaviours"] if behaviour["outcome"] == "failed"]
    assert failed["calls"] != []
    assert "settles within" in failed["reason"]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert len(list(suite.iter("failure"))) == len(report["behaviours"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "127.0.0.1:1"), "127.0.0.1:1: List was not answered (UNAVAILABLE"),
        (("--launch", "/nowhere/provider {addr} {state}"), "/nowhere/provider: No such file or directory"),
        (("--launch", "/bin/false {addr} {state}"), "/bin/false ended with 1; it said nothing"),
        (("--launch", "/bin/ls --{addr} {state}"), "/bin/ls ended with 2; its last words: "),
    ],
    ids=["nobody listens", "no such program", "it ends", "it ends and says why"],
)
def test_a_run_that_cannot_be_set_up_exits_2(arguments: tuple[str, str], message: str) -> None:
    done = run_here("conformance", *arguments)

    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_later_lane_that_cannot_start_exits_2_after_telling_what_the_others_showed(tmp_path: Path) -> None:
    arguments = ("--launch-fault", "/nowhere/provider {addr} {state}", "--only", "EDGE-8,FAULT-1")
    done = run_here("conformance", "--launch", LAUNCH, *arguments, "--out", str(tmp_path))

    fault = "/nowhere/provider: No such file or directory; name a program that can be run"
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"bigfleet: {fault}"])
    assert done.stdout.splitlines()[-2].startswith("INCOMPLETE: 1 passed")
    report = json.loads((tmp_path / "report.json").read_text())
    ended = {behaviour["id"]: behaviour for behaviour in report["behaviours"]}
    assert ended["EDGE-8"]["outcome"] == "passed"
    assert (ended["FAULT-1"]["outcome"], ended["FAULT-1"]["reason"]) == ("not run", fault)
    assert (report["verdict"], report["faults"]) == ("INCOMPLETE", {"fault": fault})
    assert (tmp_path / "junit.xml").exists()


def test_a_starved_provider_exits_2() -> None:
    done = run_here("conformance", "--launch", LAUNCH.replace("{seeds}", "8"), "--profile", "core")

    assert done.returncode == 2
    assert "8 SPECULATIVE slots, 64 are needed" in done.stderr


async def _garbage(_request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
    context.set_trailing_metadata((("why", "for fun"),))
    return b"\xff\xff\xff"


async def _refuse(_request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
    await context.abort(grpc.StatusCode.DATA_LOSS, "all gone", (("shard-hint", "s-1"), ("blob-bin", b"\x01")))
    raise AssertionError("abort always raises")


async def test_a_client_hands_on_statuses_and_trailing_details_and_survives_garbage() -> None:
    server = aio.server()
    handlers = {
        "Get": grpc.unary_unary_rpc_method_handler(_garbage),
        "Create": grpc.unary_unary_rpc_method_handler(_refuse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = GrpcConnection(f"127.0.0.1:{port}")
    try:
        garbled = await connection.call(Get("m"))
        refused = await connection.call(Create("m"))
        unknown = await connection.call(Drain("m"))
    finally:
        await connection.close()
        await server.stop(None)

    assert (garbled.status, garbled.details) == (Status.UNKNOWN, "the answer is no Machine")
    assert (refused.status, refused.details) == (Status.DATA_LOSS, "all gone")
    assert refused.trailing == (("shard-hint", "s-1"), ("blob-bin", "01"))
    assert unknown.status is Status.UNIMPLEMENTED


TOKEN = CallToken("s", -3, 4)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (Get("m"), {"id": "m"}),
        (
            List((MachineState.IDLE, MachineState.FAILED), 3, b"x"),
            {"states": [3, 8], "max_results": 3, "since_revision": b"x"},
        ),
        (Create("m", TOKEN), {"machine_id": "m", "shard_id": "s", "shard_epoch": -3, "sequence_number": 4}),
        (
            Configure("m", "c", {"k": ""}, b"b", TOKEN),
            {
                "machine_id": "m",
                "cluster_id": "c",
                "bootstrap_blob": b"b",
                "shard_metadata": {"k": ""},
                "shard_id": "s",
                "shard_epoch": -3,
                "sequence_number": 4,
            },
        ),
        (
            Drain("m", -1, TOKEN),
            {
                "machine_id": "m",
                "grace_period_seconds": -1,
                "shard_id": "s",
                "shard_epoch": -3,
                "sequence_number": 4,
            },
        ),
        (Delete("m", ABSENT), {"machine_id": "m"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_says_on_the_wire_what_it_says(request_: Request, fields: dict[str, object]) -> None:
    message: Message = message_of(request_)
    said = {
        field.name: dict(value) if field.name == "shard_metadata" else list(value) if field.name == "states" else value
        for field, value in message.ListFields()
    }

    assert said == fields
