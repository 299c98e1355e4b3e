"""The shipped agent as a real process: orders from a metadata service, data from the shim's S3, its answers.

What this cannot show: that S3 takes curl's signature, and that an image's systemd starts the unit that is written. No
test asks a systemd of this host for anything.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backends.aws.agent import bucket_url, render_agent
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.testing.cores import settled
from tests.aws.client import BUCKET, REGION, ShimClient
from tests.aws.metadata_service import metadata_service
from tests.aws.over_http import MACHINE, PREFIX, served
from tests.patience import wait_until_async

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("curl") is None and os.environ.get("BIGFLEET_REQUIRE_CURL") != "1", reason="curl is not installed"
    ),
]

#: Writes the node's name, and joins a moment later.
JOINS = b"""#!/bin/sh
echo node-7.internal >"$BIGFLEET_STATE/node-name"
(sleep 1; touch "$FOLDER/joined") &
"""


def tags_of(shim: ShimClient, instance_id: str) -> Mapping[str, str]:
    (reservation,) = shim.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"]
    return {each["Key"]: each["Value"] for each in reservation["Instances"][0].get("Tags", [])}


class Machine:
    """An instance of the shim with an agent of its own."""

    def __init__(
        self, shim: ShimClient, folder: Path, instance_id: str, metadata_url: str, *, endpoint_url: str = ""
    ) -> None:
        self.state, self.hooks, self.units, self.systemd = (
            folder / name for name in ("state", "hooks", "units", "systemd")
        )
        self.programs, self.systemctl_calls = folder / "programs", folder / "systemctl-calls"
        for each in (self.hooks, self.units, self.programs):
            each.mkdir(exist_ok=True)
        # No systemd of this host is asked for anything.
        self._program("systemctl", f'echo "$*" >>{self.systemctl_calls}')
        url = bucket_url(BUCKET, PREFIX, region=REGION, endpoint_url=endpoint_url or shim.url)
        script = folder / "user-data"
        script.write_text(render_agent(url, region=REGION, interval_seconds=0.1, metadata_url=metadata_url))
        self._environment = {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "BIGFLEET_STATE": str(self.state),
            "BIGFLEET_HOOKS": str(self.hooks),
            "BIGFLEET_SYSTEMD": str(self.systemd),
            "BIGFLEET_UNITS": str(self.units),
            "FOLDER": str(folder),
        }
        self.script, self._instance_id = script, instance_id

    def install(self) -> None:
        """Do what cloud-init does at the first boot: the agent runs on by itself."""
        subprocess.run(["sh", str(self.script)], env=self._environment, check=True, timeout=60)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the agent in a group of its own, and end it."""
        self.state.mkdir(exist_ok=True)
        process = subprocess.Popen(
            ["sh", str(self.script), "run"], env=self._environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def hook(self, name: str, body: str) -> None:
        """Put a hook on the image."""
        _write_program(self.hooks / name, body)

    def _program(self, name: str, body: str) -> None:
        _write_program(self.programs / name, body)


def _write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition while the provider on this loop goes on."""

    async def holds() -> bool:
        return bool(await asyncio.to_thread(condition))

    await wait_until_async(holds, poll_seconds=0.1)


async def created(core: CapacityCore) -> str:
    await core.create(MACHINE)
    record = await settled(core, MACHINE)
    assert record.state is MachineState.IDLE
    return record.machine.host.ref


async def test_the_agent_runs_the_data_and_names_the_node(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url:
            machine = Machine(shim, tmp_path, ref, url)
            machine.hook("ready", 'test -e "$FOLDER/joined"')
            machine.hook("drain", 'echo "$1 $2" > "$FOLDER/drained"')
            with machine.running():
                await core.configure(MACHINE, "team-a", JOINS, {})
                record = await settled(core, MACHINE)
                assert (record.state, record.machine.node_name) == (MachineState.CONFIGURED, "node-7.internal")
                assert (tmp_path / "joined").exists()
                assert not (machine.state / "blob").exists()

                await core.drain(MACHINE, 7)
                assert (await settled(core, MACHINE)).state is MachineState.IDLE
                assert (tmp_path / "drained").read_text() == "team-a 7\n"
    keys = [each["Key"] for each in shim.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert len(keys) == 2
    assert all(key.endswith(".result") for key in keys)


async def test_data_that_fails_is_run_once_and_fails_the_configure_with_its_exit_code(
    shim: ShimClient, tmp_path: Path
) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url, Machine(shim, tmp_path, ref, url).running():
            blob = b'#!/bin/sh\necho x >>"$FOLDER/ran"\necho secret >&2\nexit 42\n'
            await core.configure(MACHINE, "team-a", blob, {})
            error = (await settled(core, MACHINE)).machine.last_error
            assert error == f"BACKEND: AwsRefused: the bootstrap on {ref} ended with exit code 42; see its log there"
            assert (tmp_path / "ran").read_text() == "x\n"


@pytest.mark.parametrize("blob", [b"", b"#!/bin/sh\n".ljust(1024 * 1024, b"\n")])
async def test_the_smallest_and_the_largest_data_run(blob: bytes, shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url, Machine(shim, tmp_path, ref, url).running():
            await core.configure(MACHINE, "team-a", blob, {})
            record = await settled(core, MACHINE)
            assert record.state is MachineState.CONFIGURED, record.machine.last_error


async def test_data_that_is_not_what_was_ordered_is_not_run(shim: ShimClient, tmp_path: Path) -> None:
    """Another one who may write to the bucket cannot run a program on the machine."""
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        await core.configure(MACHINE, "team-a", b'#!/bin/sh\ntouch "$FOLDER/right"\n', {})
        await until(lambda: "bigfleet:configure" in tags_of(shim, ref))
        operation_id = tags_of(shim, ref)["bigfleet:configure"].partition(" ")[0]
        s3, key = shim.client("s3"), f"{PREFIX}/{ref}/{operation_id}"
        right = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        s3.put_object(Bucket=BUCKET, Key=key, Body=b'#!/bin/sh\ntouch "$FOLDER/wrong"\n')
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url, Machine(shim, tmp_path, ref, url).running():
            before = shim.calls("s3:GET")
            # Its own looks for a result are GETs as well.
            await until(lambda: shim.calls("s3:GET") > before + 40)
            assert not (tmp_path / "wrong").exists()
            s3.put_object(Bucket=BUCKET, Key=key, Body=right)
            assert (await settled(core, MACHINE)).state is MachineState.CONFIGURED
        assert (tmp_path / "right").exists()
        assert not (tmp_path / "wrong").exists()


async def test_an_agent_that_was_killed_answers_after_its_restart_without_running_the_data_again(
    shim: ShimClient, tmp_path: Path
) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url:
            machine = Machine(shim, tmp_path, ref, url)
            # Its answer is lost, and then the agent.
            shim.fault("s3:PUT", drop="before", skip=1, times=1000)
            with machine.running():
                await core.configure(MACHINE, "team-a", b'#!/bin/sh\necho x >>"$FOLDER/ran"\n', {})
                await until(lambda: list(machine.state.glob("ran.*")))
            shim.control("disarm")
            with machine.running():
                assert (await settled(core, MACHINE)).state is MachineState.CONFIGURED
            assert (tmp_path / "ran").read_text() == "x\n"


async def test_user_data_installs_an_agent_that_runs_on_where_there_is_no_systemd(
    shim: ShimClient, tmp_path: Path
) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url:
            machine = Machine(shim, tmp_path, ref, url)
            machine.install()
            blob = b'#!/bin/sh\nps -o sid= -p $$ | tr -d " " >"$FOLDER/session"\n'
            await core.configure(MACHINE, "team-a", blob, {})
            try:
                assert (await settled(core, MACHINE)).state is MachineState.CONFIGURED
            finally:
                os.killpg(int((tmp_path / "session").read_text()), signal.SIGKILL)
    assert not machine.systemctl_calls.exists()
    assert list(machine.units.iterdir()) == []


def test_user_data_installs_a_unit_where_there_is_systemd(shim: ShimClient, tmp_path: Path) -> None:
    machine = Machine(shim, tmp_path, "i-1", "http://127.0.0.1:9")
    machine.systemd.mkdir()
    machine.install()
    assert machine.systemctl_calls.read_text().splitlines() == ["daemon-reload", "enable --now --quiet bigfleet-agent"]
    (unit,) = machine.units.iterdir()
    assert unit.name == "bigfleet-agent.service"
    assert f"ExecStart={machine.state / 'agent'} run\nRestart=always\nKillMode=process\n" in unit.read_text()
    # What it runs is a copy that outlives cloud-init's.
    assert (machine.state / "agent").read_text() == machine.script.read_text()
    assert os.access(machine.state / "agent", os.X_OK)
    if shutil.which("systemd-analyze"):
        subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], check=True, timeout=60)


async def test_a_drain_without_a_hook_stops_the_units_of_a_node(shim: ShimClient, tmp_path: Path) -> None:
    shim.bucket()
    async with served(shim, tmp_path) as core:
        ref = await created(core)
        with metadata_service(ref, lambda: tags_of(shim, ref)) as url:
            machine = Machine(shim, tmp_path, ref, url)
            with machine.running():
                await core.configure(MACHINE, "team-a", b"#!/bin/sh\n", {})
                assert (await settled(core, MACHINE)).state is MachineState.CONFIGURED
                await core.drain(MACHINE, 0)
                assert (await settled(core, MACHINE)).state is MachineState.IDLE
    assert machine.systemctl_calls.read_text().splitlines() == ["stop kubelet", "stop k3s-agent"]


async def test_addresses_of_ipv6_are_read_as_they_are(shim: ShimClient, tmp_path: Path) -> None:
    if not shim.url_ipv6:
        pytest.skip("this host has no ::1")
    shim.bucket()
    async with served(shim, tmp_path, endpoint_url=shim.url_ipv6) as core:
        ref = await created(core)
        with (
            metadata_service(ref, lambda: tags_of(shim, ref), "::1") as url,
            Machine(shim, tmp_path, ref, url, endpoint_url=shim.url_ipv6).running(),
        ):
            await core.configure(MACHINE, "team-a", JOINS, {})
            record = await settled(core, MACHINE)
    assert (record.state, record.machine.node_name) == (MachineState.CONFIGURED, "node-7.internal")


def test_the_agent_fits_into_user_data_many_times() -> None:
    url = bucket_url("a" * 63, "p" * 200, region="ap-southeast-4", endpoint_url=None)
    assert len(render_agent(url, region="ap-southeast-4", interval_seconds=5.0)) < 16_384 / 2
