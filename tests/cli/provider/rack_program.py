"""A program for `bigfleet provider exec` that stops where a test says, and a provider that runs it.

Its one machine is files in a folder: `host` holds the host's reference, `cluster` the cluster that it serves. `asked`
has a line for each call of a verb that changes something, `effects` one for each change that was made, `ended` one for
each program that has nothing left to do but to answer, `overlaps` one for each call during which a program that stopped
still ran. A file `hold-MOMENT-VERB` stops the first attempt there until it is gone. A file `late-VERB` lets the answer
of a verb come only after its deadline.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from bigfleet.rpc.wire.gen import provider_pb2 as pb
from bigfleet.rpc.wire.gen.provider_pb2_grpc import CapacityProviderStub
from tests.cli.provider.provider_client import CLUSTER, STATES, VERBS, ProviderClient
from tests.e2e.disks.small_disk import SmallDisk
from tests.guides import executable
from tests.patience import wait_until
from tests.processes import bigfleet, free_port, serving_command

MACHINE = "rack-0"
BEFORE, AFTER = "before", "after"

_SCRIPT = """#!/bin/sh
set -eu
cd "$(dirname "$0")"
verb=$1
case $verb in
describe) exec cat describe.json ;;
inventory)
    echo '{"slot": {"id": "rack-0", "instance_type": "t", "zone": "z", "capacity_type": "bare_metal"}}'
    if [ -e host ]; then echo "{\\"host\\": {\\"id\\": \\"rack-0\\", \\"host_ref\\": \\"$(cat host)\\"}}"; fi
    echo '{"end": true}'
    exit ;;
esac
is_running() { [ -e "/proc/$1/stat" ] && ! grep -q ') [ZX] ' "/proc/$1/stat"; }
for stopped in stopped-*; do
    if [ -e "$stopped" ] && is_running "$(cat "$stopped")"; then echo "$verb $stopped" >> overlaps; fi
done
question=$(cat)
cluster=$(printf '%s' "$question" | jq -r .machine.cluster)
case $verb in
ready)
    is_ready=false
    if [ -e cluster ] && [ "$(cat cluster)" = "$cluster" ]; then is_ready=true; fi
    echo "{\\"ready\\": $is_ready}"
    exit ;;
adopt)
    if ! [ -e host ]; then echo '{"found": "no_host"}'
    elif ! [ -e cluster ]; then echo "{\\"found\\": \\"clean\\", \\"host_ref\\": \\"$(cat host)\\"}"
    elif [ "$(cat cluster)" = "$cluster" ]; then echo '{"found": "serving"}'
    else echo '{"found": "dirty"}'; fi
    exit ;;
esac
id=$(printf '%s' "$question" | jq -r .operation.id)
attempt=$(printf '%s' "$question" | jq -r .operation.attempt)
stop_here() {
    if [ "$attempt" = 1 ] && [ -e "hold-$1-$verb" ]; then
        echo $$ > "draft-stopped.$$"
        mv "draft-stopped.$$" "stopped-$1-$verb"
        while [ -e "hold-$1-$verb" ]; do sleep 0.05; done
    fi
}
changed() { echo "$verb $id" >> effects; }
printf '%s' "$question" | jq -c --arg verb "$verb" '.operation + {$verb, blob} | del(.seconds_left)' >> asked
stop_here before
# Each of these is one step that only one of two programs can make, and the second one finds it done.
case $verb in
create)
    echo "host-of-$id" > "draft.$$"
    if ln "draft.$$" host 2>/dev/null; then changed; fi
    rm "draft.$$" ;;
configure)
    echo "$cluster" > "draft.$$"
    if ln "draft.$$" cluster 2>/dev/null; then changed; fi
    rm "draft.$$" ;;
drain) if mv cluster "former.$id" 2>/dev/null; then changed; fi ;;
delete) if mv host "former.$id" 2>/dev/null; then changed; fi ;;
compensate)
    case $(printf '%s' "$question" | jq -r .late.verb) in
    create) if mv host "undone.$id" 2>/dev/null; then changed; fi ;;
    configure) if mv cluster "undone.$id" 2>/dev/null; then changed; fi ;;
    esac ;;
esac
stop_here after
echo $$ >> ended
if [ -e "late-$verb" ]; then
    # SIGTERM comes before the deadline. The program succeeds then, and its output stays open beyond the deadline.
    setsid sleep 30 &
    trap 'is_asked=1' TERM
    is_asked=0
    while [ $is_asked = 0 ]; do sleep 0.05 || :; done
fi
if [ "$verb" = create ]; then echo "{\\"host_ref\\": \\"$(cat host)\\"}"; fi
"""


@dataclass(frozen=True)
class Question:
    """One call of a verb that changes something."""

    verb: str
    id: str
    attempt: int
    blob: str | None


class Rack:
    """The program, and what became of its machine."""

    def __init__(self, folder: Path, *, resumable: bool = True, compensates: bool = False) -> None:
        folder.mkdir()
        self._folder, self._compensates = folder, compensates
        self.program = executable(folder / "rack", _SCRIPT)
        self.describe(resumable=resumable)

    def describe(self, *, resumable: bool, **timeouts: str) -> None:
        """Let the program say at the next start what is resumable, and how long a verb may take."""
        said = {
            "api": 1,
            "provider": "rack",
            "verbs": ["inventory", "ready", "adopt", *VERBS, *(["compensate"] if self._compensates else [])],
            "reset": "reimage",
            "resumable": VERBS if resumable else [],
            "limits": {verb: {"timeout": timeout} for verb, timeout in timeouts.items()},
        }
        (self._folder / "describe.json").write_text(json.dumps(said))

    # ---- what was asked and done ---------------------------------------------------------------------------------

    def asked(self, verb: str) -> list[Question]:
        """Return the calls of a verb in their order."""
        questions = [Question(**json.loads(line)) for line in self._lines("asked")]
        return [each for each in questions if each.verb == verb]

    def effects(self, verb: str) -> list[str]:
        """Return the operation of each change that a verb made."""
        return [line.split()[1] for line in self._lines("effects") if line.split()[0] == verb]

    @property
    def overlaps(self) -> list[str]:
        """Return the calls that found a program of before still running."""
        return self._lines("overlaps")

    @property
    def host(self) -> str:
        """The reference of the host, "" without one."""
        return self._content("host")

    @property
    def cluster(self) -> str:
        """The cluster that the host serves, "" for none."""
        return self._content("cluster")

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _content(self, name: str) -> str:
        return "".join(self._lines(name))

    # ---- stops ---------------------------------------------------------------------------------------------------

    def hold(self, moment: str, verb: str) -> None:
        """Let the first attempt of a verb stop before or after its change."""
        (self._folder / f"hold-{moment}-{verb}").touch()

    def wait_until_stopped(self, moment: str, verb: str) -> int:
        """Return the process id of the program that stopped."""
        stopped = self._folder / f"stopped-{moment}-{verb}"
        wait_until(stopped.exists, f"{verb} never came {moment} its effect")
        return int(stopped.read_text())

    def go_on(self, moment: str, verb: str) -> None:
        """Let the program that stopped go on."""
        (self._folder / f"hold-{moment}-{verb}").unlink()

    def answer_late(self, verb: str) -> None:
        """Let a verb make its change in time, and its answer come only after its deadline."""
        (self._folder / f"late-{verb}").touch()

    def wait_until_ended(self, program: int) -> None:
        """Wait until a program that stopped has come to its end."""
        wait_until(partial(self._has_ended, program), "the program of before the kill never ended")

    def _has_ended(self, program: int) -> bool:
        return str(program) in self._lines("ended")

    # ---- the end -------------------------------------------------------------------------------------------------

    def check_end(self, verb: str, machine: pb.Machine) -> None:
        """Assert that the machine is where the verb was to bring it, and so is what the program made."""
        assert machine.state == STATES[verb], machine.last_error
        assert machine.host.ref == self.host
        assert bool(self.host) is (verb != "delete")
        assert machine.cluster == self.cluster == (CLUSTER if verb == "configure" else "")


class ExecProvider:
    """`bigfleet provider exec` with its state in a folder, which is killed and started again."""

    def __init__(
        self, folder: Path, program: Path, *more: str, disk: SmallDisk | None = None, state: Path | None = None
    ) -> None:
        """`folder` is the test's. The state is on the disk, if there is one, unless it is said where."""
        self.log = folder / "log"
        self.state = state or (folder if disk is None else disk.folder) / "s.db"
        self.address = f"127.0.0.1:{free_port()}"
        flags = (f"--state={self.state}", f"--addr={self.address}", "--metrics-addr=off", *more)
        command = bigfleet("provider", "exec", f"--program={program}", *flags)
        self.command = command if disk is None else disk.command(command)

    @contextmanager
    def served(self) -> Iterator[tuple[ProviderClient, int]]:
        """Yield a client and the process id while it serves."""
        with (
            serving_command(self.address, self.log, self.command) as process,
            grpc.insecure_channel(self.address) as channel,
        ):
            yield ProviderClient(CapacityProviderStub(channel), self.log), process.pid

    def kill_helper(self) -> None:
        """Kill the process that ends programs when the provider dies."""
        name, state = b"orphan_killer_process.py", str(self.state).encode()
        helpers = [
            path
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if name in (content := _content_of(path)) and state in content
        ]
        (helper,) = helpers
        os.kill(int(helper.parent.name), signal.SIGKILL)
        wait_until(lambda: not _content_of(helper), "the helper was not ended")

    def events(self, event: str) -> list[dict[str, object]]:
        """Return the log lines of an event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]


def _content_of(path: Path) -> bytes:
    """Return the content of a file of a process, b"" once that has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def intent_key(folder: Path) -> str:
    """Return the flag with which the data of a Configure survives a restart."""
    key = folder / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    return f"--intent-key={key}"
