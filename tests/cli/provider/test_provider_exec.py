"""`bigfleet provider exec` as a process: wrong calls, a kill in the middle of a Create, certified examples.

docs/spec/exec-provider.md. The examples are those that `bigfleet provider new --kind exec` writes.
"""

import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from bigfleet.cli.provider.new import EXAMPLES
from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.cli.provider.bmc_stubs import write_stubs
from tests.cli.provider.exec_examples import PLACES, certify, example
from tests.commands import run_here
from tests.conformance.certifications import certification_of
from tests.guides import executable
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.processes import bigfleet, free_port, serving


@pytest.fixture
def rack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the ipmi example, its hosts, and stubs for its tools."""
    folder = tmp_path / "rack"
    example("ipmi.sh", folder)
    names = [f"rack-{number:03d}" for number in range(256)]
    (folder / "hosts").write_text(
        "# name bmc type zone cpus memory\n" + "".join(f"{n} {n} r640 row-1 8 64Gi\n" for n in names)
    )
    (folder / "password").write_text("secret")
    for name, value in write_stubs(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return folder


# ---- wrong calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "--program is missing"),
        (("--program", "./none"), "--program: './none' is not an executable program; name its path, and chmod +x it"),
        (("--program", "./plain"), "--program: './plain' is not an executable program"),
        (("--program", "true", "--ready", "soon"), "--ready: 'soon' is unknown; choose program, inventory or"),
        (("--program", "true", "--concurrency", "0"), "--concurrency: 0 is out of range; write 1 to 1000"),
        (("--program", "true", "--addr", "here"), "--addr: 'here' is not an address"),
        (("--program", "true"), "--program /"),
        (("--program", "./few"), "--ready program: the program has no verb ready"),
        (("--program", "./few", "--ready=inventory", "--seed-count=4"), "--ready inventory: the program has no verb"),
        (("--program", "./few", "--ready=configure"), "--program "),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(flags: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    verbs = ["create", "configure", "drain", *(["inventory"] if flags == ("--program", "./few") else [])]
    answer = json.dumps({"api": 1, "provider": "few", "verbs": verbs, "reset": "none"})
    executable(tmp_path / "few", f"#!/bin/sh\necho '{answer}'\n")
    done = run_here("provider", "exec", "--state", "s.db", *flags, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"bigfleet: {text}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "s.db").exists()


def test_new_writes_a_program_and_nothing_over_another(tmp_path: Path) -> None:
    for name in EXAMPLES:
        assert os.access(example(name, tmp_path / "p"), os.X_OK)
    again = run_here("provider", "new", "--kind", "exec", str(tmp_path / "p"))
    assert (again.returncode, again.stdout) == (2, "")
    assert "folder.sh exists and is not overwritten" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x", "--kind", "exec", "--example", "a.sh"), "--example: 'a.sh' is unknown; choose from folder.sh"),
        (("x", "--kind", "exec", "--directory", "y"), "--directory belongs to --kind python"),
        (("x", "--example", "folder.sh"), "--example belongs to --kind exec"),
        (("x", "--kind", "go"), "--kind: 'go' is unknown; choose python or exec"),
    ],
)
def test_what_new_does_not_know_is_refused(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = run_here("provider", "new", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"bigfleet: {text}")
    assert list(tmp_path.iterdir()) == []


# ---- kills and configuration errors ----------------------------------------------------------------------------

#: Makes hosts as files, says how often it was asked, and waits in its first create until there is a file `go`.
SLOW = """#!/bin/sh
cd "$(dirname "$0")"
case $1 in
describe) echo '{"api": 1, "provider": "slow", "verbs": ["inventory", "create", "configure", "drain"], "reset": "none",
                 "resumable": ["create"]}' ;;
inventory)
    if [ -e misconfigured ]; then echo 'no credentials' >&2; exit 78; fi
    echo '{"slot": {"id": "slow-0", "instance_type": "t", "zone": "z", "capacity_type": "bare_metal"}}'
    if [ -e host ]; then echo '{"host": {"id": "slow-0", "host_ref": "'$(cat host)'"}}'; fi
    echo '{"end": true}' ;;
create)
    question=$(cat)
    printf '%s\\n' "$question" >> asked
    printf '%s' "$question" | jq -r .operation.id > "draft.$$"
    ln "draft.$$" host || true
    while ! [ -e go ]; do sleep 0.05; done
    printf '{"host_ref": "%s"}' "$(cat host)" ;;
esac
"""


def test_a_create_that_a_kill_interrupted_is_run_again_with_its_id_and_makes_one_host(tmp_path: Path) -> None:
    program, address = executable(tmp_path / "slow", SLOW), f"127.0.0.1:{free_port()}"
    flags = ("--state", str(tmp_path / "s.db"), "--addr", address, "--metrics-addr=off", "--ready=configure")
    command, log = ("provider", "exec", "--program", str(program), *flags), tmp_path / "log"
    asked = tmp_path / "asked"
    with serving(address, log, *command) as process, grpc.insecure_channel(address) as channel:
        operation_id = CapacityProviderStub(channel).Create(pb.CreateRequest(machine_id="slow-0")).operation_id
        wait_until(asked.exists, log.read_text)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(address, log, *command), grpc.insecure_channel(address) as channel:
        provider = CapacityProviderStub(channel)
        wait_until(lambda: len(asked.read_text().splitlines()) == 2, log.read_text)
        # The first one was ended after it had made the host, which the second one finds.
        (tmp_path / "go").touch()
        machine = pb.MachineRef(id="slow-0")
        wait_until(lambda: provider.Get(machine).state == pb.MACHINE_STATE_IDLE, log.read_text)
        assert provider.Get(machine).host.ref == operation_id
    questions = [json.loads(line)["operation"] for line in asked.read_text().splitlines()]
    assert [(each["id"], each["attempt"]) for each in questions] == [(operation_id, 1), (operation_id, 2)]


def content(folder: Path) -> dict[Path, bytes]:
    """Return each file with its content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["folder.sh", "folder.py", "ipmi.sh"])
@pytest.mark.parametrize("asked", ["", '{"machine": {"id": "rack-000"'])
def test_an_example_that_reads_no_complete_question_changes_nothing(
    name: str, asked: str, rack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider may be killed before it has sent the question."""
    program = rack / name if name == "ipmi.sh" else example(name, tmp_path / "example")
    monkeypatch.setenv("FOLDER", str(tmp_path / "machines"))

    def run(verb: str, question: str) -> int:
        return subprocess.run(
            [program, verb], input=question, text=True, capture_output=True, timeout=PATIENCE_SECONDS, check=False
        ).returncode

    machine = {"id": "rack-000", "cluster": "team-a", "host_ref": "rack-000"}
    question = json.dumps({"machine": machine, "operation": {"id": "op-1"}, "blob": "IyEvYmluL3NoCg=="})
    assert (run("create", question), run("configure", question)) == (0, 0)
    before = content(tmp_path)
    assert run("create", asked) != 0
    for verb in ("configure", "drain", "delete"):
        run(verb, asked)
    assert content(tmp_path) == before


def exec_command(program: Path, state: Path, address: str, port: int) -> tuple[str, ...]:
    """Return the command of a provider that runs a program and looks for its machines often."""
    flags = ("--state", str(state), "--addr", address, f"--metrics-addr=127.0.0.1:{port}")
    return ("provider", "exec", "--program", str(program), *flags, "--ready=configure", "--reconcile-interval=100ms")


def readiness(port: int) -> tuple[int, str]:
    """Return status and text of /readyz."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_configuration_error_of_the_program_is_shown_by_readyz_until_it_is_mended(tmp_path: Path) -> None:
    program, address, port = executable(tmp_path / "slow", SLOW), f"127.0.0.1:{free_port()}", free_port()
    with serving(address, tmp_path / "log", *exec_command(program, tmp_path / "s.db", address, port)):
        wait_until(lambda: readiness(port)[0] == 200, "it never became ready")
        (tmp_path / "misconfigured").touch()
        wait_until(lambda: readiness(port)[0] == 503, "it stayed ready")
        assert "the program is configured wrongly: inventory: no credentials" in readiness(port)[1]
        (tmp_path / "misconfigured").unlink()
        wait_until(lambda: readiness(port)[0] == 200, "it never became ready again")


def test_a_program_that_is_missing_is_shown_by_readyz_until_it_is_back(tmp_path: Path) -> None:
    program, address, port = executable(tmp_path / "slow", SLOW), f"127.0.0.1:{free_port()}", free_port()
    with serving(address, tmp_path / "log", *exec_command(program, tmp_path / "s.db", address, port)):
        wait_until(lambda: readiness(port)[0] == 200, "it never became ready")
        program.rename(tmp_path / "away")
        wait_until(lambda: readiness(port)[0] == 503, "it stayed ready")
        assert f"the program cannot be started: {program}: No such file" in readiness(port)[1]
        (tmp_path / "away").rename(program)
        wait_until(lambda: readiness(port)[0] == 200, "it never became ready again")


# ---- certification ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["folder.sh", "folder.py"])
def test_the_folder_examples_are_certified(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program = example(name, tmp_path)
    served = shlex.join(bigfleet("provider", "exec", "--program", str(program)))
    launch = f"env FOLDER={{state}}.machines SLOTS={{seeds}} {served} {PLACES}"
    certify(certification_of(request), tmp_path / "out", launch)


@pytest.mark.long
def test_the_ipmi_example_is_certified_with_stubs(rack: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    served = shlex.join(bigfleet("provider", "exec", "--program", str(rack / "ipmi.sh")))
    folders = "RACK_CLAIMS={state}.claims RACK_SEEDS={state}.seeds"
    certify(certification_of(request), tmp_path / "out", f"env {folders} {served} {PLACES}")
    # What booting hosts fetch is gone with the last drain, the blobs with it.
    assert not list(Path(tmp_path).rglob("user-data"))
