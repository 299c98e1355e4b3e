"""The shipped agent as a real process: orders from a metadata service, data from the shim's S3, its answers.

What this cannot show: that S3 takes curl's signature, and that an image's systemd runs the agent.
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
    pytest.mark.skipif(shutil.which("curl") is None, reason="the agent needs curl"),
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

    def __init__(self, shim: ShimClient, folder: Path, instance_id: str, metadata_url: str) -> None:
        self.state, self.hooks = folder / "state", folder / "hooks"
        self.hooks.mkdir(exist_ok=True)
        url = bucket_url(BUCKET, PREFIX, region=REGION, endpoint_url=shim.url)
        script = folder / "user-data"
        script.write_text(render_agent(url, region=REGION, interval_seconds=0.1, metadata_url=metadata_url))
        self._environment = {
            "PATH": os.environ["PATH"],
            "BIGFLEET_STATE": str(self.state),
            "BIGFLEET_HOOKS": str(self.hooks),
            "FOLDER": str(folder),
        }
        self._script, self._instance_id = script, instance_id

    def install(self) -> None:
        """Do what cloud-init does at the first boot: the agent runs on by itself."""
        subprocess.run(["sh", str(self._script)], env=self._environment, check=True, timeout=60)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the agent in a group of its own, and end it."""
        self.state.mkdir(exist_ok=True)
        process = subprocess.Popen(
            ["sh", str(self._script), "run"], env=self._environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def hook(self, name: str, body: str) -> None:
        """Put a hook on the image."""
        (self.hooks / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.hooks / name).chmod(0o755)


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


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="the agent would install a unit on this host")
async def test_user_data_installs_an_agent_that_runs_on(shim: ShimClient, tmp_path: Path) -> None:
    """Where there is no systemd; with it a unit is written, which no test here can start."""
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


def test_the_agent_fits_into_user_data_many_times() -> None:
    url = bucket_url("a" * 63, "p" * 200, region="ap-southeast-4", endpoint_url=None)
    assert len(render_agent(url, region="ap-southeast-4", interval_seconds=5.0)) < 16_384 / 2
