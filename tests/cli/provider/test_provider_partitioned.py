"""`bigfleet provider partitioned` as a process: wrong calls, a kill that keeps rooms, hosts read again, certification.

docs/spec/provider.md §19, §22, §23.
"""

import json
import shlex
import signal
import subprocess
from pathlib import Path

import grpc
import pytest

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.commands import run_here
from tests.conformance.certifications import certification_of
from tests.guides import executable
from tests.patience import wait_until
from tests.processes import bigfleet, free_port, is_running, serving
from tests.provider.backends.partitioned.hosts import document, node

CERTIFY_SECONDS_MAX = 600.0
FAST = ("--time-scale=0.001", "--metrics-addr=off")

WRONG_CALLS = [
    ((), "--hosts is missing"),
    (("--hosts", "h.json", "--seed-count", "4"), "--hosts and --seed-count contradict each other"),
    (("--hosts", "h.json", "--driver", "magic"), "--driver: 'magic' is unknown; choose simulated or exec:PROGRAM"),
    (
        ("--hosts", "h.json", "--driver", "exec:./none"),
        "--driver: './none' is not an executable program; name its path",
    ),
    (
        ("--hosts", "h.json", "--driver", "exec:true", "--time-scale", "1"),
        "--time-scale applies to the simulated driver",
    ),
    (("--hosts", "h.json", "--time-scale", "0"), "--time-scale: 0.0 must be above 0"),
    (("--hosts", "none.json"), "--hosts none.json: No such file or directory"),
    (("--hosts", "h.json"), "--hosts h.json: bigfleet.nodes.m.zone: is missing"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "text"), WRONG_CALLS)
def test_a_wrong_call_or_file_exits_with_2_and_one_line(flags: tuple[str, ...], text: str, tmp_path: Path) -> None:
    body = document({"n": node("g"), "m": node("g")})
    del body["bigfleet"]["nodes"]["m"]
    (tmp_path / "h.json").write_text(json.dumps(body))
    done = run_here("provider", "partitioned", "--state", "s.db", *flags, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"bigfleet: {text}")
    assert len(done.stderr.splitlines()) == 1


def listed(provider: CapacityProviderStub, *states: "pb.MachineState.ValueType") -> dict[str, str]:
    """Return the host of each machine in these states."""
    return {each.id: each.host.ref for each in provider.List(pb.ListFilter(states=states)).machines}


def test_a_killed_provider_comes_back_with_its_rooms_and_reads_its_hosts_again(tmp_path: Path) -> None:
    hosts, address = tmp_path / "h.json", f"127.0.0.1:{free_port()}"
    hosts.write_text(json.dumps(document({"n": node("g"), "m": node("g", filled=3)})))
    flags = ("--hosts", str(hosts), "--state", str(tmp_path / "s.db"), "--addr", address, *FAST)
    command = ("provider", "partitioned", *flags)
    log = tmp_path / "log"
    with serving(address, log, *command) as process, grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        provider.Create(pb.CreateRequest(machine_id="partitioned/g/z/half/000"))
        wait_until(lambda: listed(provider, pb.MACHINE_STATE_IDLE), "no machine became idle")
        accepted = provider.Create(pb.CreateRequest(machine_id="partitioned/g/z/quarter/000"))
        slots = listed(provider, pb.MACHINE_STATE_SPECULATIVE)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert accepted.machine.state == pb.MACHINE_STATE_CREATING

    with serving(address, log, *command) as process, grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        wait_until(lambda: len(listed(provider, pb.MACHINE_STATE_IDLE)) == 2, "two machines never were idle")
        assert listed(provider, pb.MACHINE_STATE_IDLE) == {
            "partitioned/g/z/half/000": "n/g-z-half-000",
            "partitioned/g/z/quarter/000": "m/g-z-quarter-000",
        }
        assert listed(provider, pb.MACHINE_STATE_SPECULATIVE).keys() == slots.keys()
        assert "partitioned/g/z/half/001" in slots
        hosts.write_text("{")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "hosts.load_failed" in log.read_text(), log.read_text)
        assert listed(provider, pb.MACHINE_STATE_SPECULATIVE).keys() == slots.keys()
        hosts.write_text(json.dumps(document({"n": node("g", drained=True), "m": node("g", filled=3)})))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: not listed(provider, pb.MACHINE_STATE_SPECULATIVE), "an offer was left")
        assert len(listed(provider, pb.MACHINE_STATE_IDLE)) == 2
    assert '"note":"score: ([0,0,1],40), ' in log.read_text()


#: A driver whose create reads its question, says who it is, and waits.
WAITING = """#!/bin/sh
cd "$(dirname "$0")"
case $1 in
inventory) echo '{"instances": []}' ;;
create) cat > /dev/null; echo $$ > "draft.$$"; mv "draft.$$" "creates.$$"; exec sleep 600 ;;
*) echo '{}' ;;
esac
"""


@pytest.mark.slow
def test_a_program_of_a_killed_provider_is_ended_before_the_next_start_serves(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(json.dumps(document({"n": node("g")})))
    program, address, log = executable(tmp_path / "driver", WAITING), f"127.0.0.1:{free_port()}", tmp_path / "log"
    flags = ("--hosts", str(tmp_path / "h.json"), "--driver", f"exec:{program}", "--metrics-addr=off")
    command = ("provider", "partitioned", *flags, "--state", str(tmp_path / "s.db"), "--addr", address)
    with serving(address, log, *command) as process, grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        provider.Create(pb.CreateRequest(machine_id=min(listed(provider))))
        wait_until(lambda: list(tmp_path.glob("creates.*")), log.read_text)
        (created,) = tmp_path.glob("creates.*")
        running = int(created.read_text())
        assert is_running(running)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(address, log, *command):
        assert not is_running(running)


@pytest.mark.slow
def test_the_suite_certifies_it_for_core_cloud_delta_and_durable(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    certification = certification_of(request)
    place = "--metrics-addr off --seed-count={seeds} --addr {addr} --state {state}"
    launch = f"{shlex.join(bigfleet('provider', 'partitioned', '--time-scale', '0.001'))} {place}"
    fault = f"{shlex.join(bigfleet('provider', 'fault'))} {place}"
    command = ("--profile", certification.flag, "--launch", launch, "--launch-fault", fault, "--out", "out")
    # Longer than `run_bigfleet` waits: it starts a provider a dozen times and waits for what is timed out on purpose.
    done = subprocess.run(
        bigfleet("conformance", *command),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CERTIFY_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    certification.expect_report(tmp_path / "out")
