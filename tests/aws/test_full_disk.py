"""`bigfleet provider aws` while the disk of its state is full, at each step of each verb.

docs/spec/provider.md §11. The disk is a real file system that has no block left.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.aws.client import BUCKET, ShimClient
from tests.aws.command import Provider
from tests.aws.over_http import MACHINE, PREFIX
from tests.cli.provider.provider_client import STATES, TRANSITIONAL, VERBS, ProviderClient
from tests.e2e.disks.small_disk import SmallDisk, needs_small_disk, small_disk
from tests.patience import wait_until
from tests.processes import free_port

#: The call that changes most, of each verb.
EFFECTS = {
    "create": "ec2:RunInstances",
    "configure": "ec2:CreateTags",
    "drain": "ec2:CreateReplaceRootVolumeTask",
    "delete": "ec2:TerminateInstances",
}
pytestmark = [pytest.mark.slow, needs_small_disk]
#: The other verbs take the same way through the kit.
verbs = pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=[] if v == "create" else pytest.mark.long) for v in VERBS]
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a disk with room."""
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def provider(shim: ShimClient, disk: SmallDisk, tmp_path: Path) -> Provider:
    """Return a provider with its state on the disk, and agents on its instances."""
    shim.bucket()
    shim.control("agent", bucket=BUCKET, prefix=PREFIX)
    return Provider(shim, tmp_path, f"127.0.0.1:{free_port()}", "--reconcile-interval=1h", disk=disk)


def check_end(shim: ShimClient, client: ProviderClient, verb: str) -> None:
    """Assert that the machine is where the verb was to bring it, with its one instance and one new root volume."""
    machine = client.settled(MACHINE)
    assert machine.state == STATES[verb], machine.last_error
    refs = [each["InstanceId"] for each in shim.live()]
    assert refs == ([] if verb == "delete" else [machine.host.ref])
    assert len(shim.control("roots")) == (1 if verb in ("drain", "delete") else 0)


def fill_in_the_middle(shim: ShimClient, client: ProviderClient, provider: Provider, disk: SmallDisk, verb: str) -> str:
    """Fill the disk while the verb's call is at AWS, and return the operation once its result has no room."""
    shim.fault(EFFECTS[verb], drop="after", is_stalled=True)
    operation_id = client.accept(verb, MACHINE)
    wait_until(lambda: shim.control("stalled"), provider.log.read_text)
    disk.fill()
    shim.control("release")
    check_commit_failed(provider)
    assert client.get(MACHINE).state == TRANSITIONAL[verb]
    return operation_id


def check_commit_failed(provider: Provider) -> None:
    """Wait for a commit that the disk refused, whose log line names the file."""
    wait_until(lambda: provider.events("store.commit_failed"), provider.log.read_text)
    for line in provider.events("store.commit_failed"):
        assert str(line["error"]).startswith(f"{provider.state}: "), line


@verbs
def test_a_full_disk_refuses_the_call_and_aws_is_not_called(
    verb: str, shim: ShimClient, disk: SmallDisk, provider: Provider
) -> None:
    with provider.served() as (client, _pid):
        client.live_until(verb, MACHINE)
        before, calls = client.get(MACHINE), shim.control("calls")
        disk.fill()
        with pytest.raises(grpc.RpcError) as refused:
            client.accept(verb, MACHINE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        check_commit_failed(provider)
        assert client.get(MACHINE) == before
        assert shim.control("calls") == calls
        disk.make_room()
        wait_until(lambda: provider.events("store.became_available"), provider.log.read_text)
        client.accept(verb, MACHINE)
        check_end(shim, client, verb)


@verbs
def test_a_result_waits_for_room_and_nothing_is_made_twice(
    verb: str, shim: ShimClient, disk: SmallDisk, provider: Provider
) -> None:
    with provider.served() as (client, _pid):
        client.live_until(verb, MACHINE)
        operation_id = fill_in_the_middle(shim, client, provider, disk, verb)
        disk.make_room()
        check_end(shim, client, verb)
        assert client.accept(verb, MACHINE) == operation_id


@verbs
def test_a_result_that_no_disk_took_is_found_after_a_kill(
    verb: str, shim: ShimClient, disk: SmallDisk, provider: Provider
) -> None:
    with provider.served() as (client, pid):
        client.live_until(verb, MACHINE)
        operation_id = fill_in_the_middle(shim, client, provider, disk, verb)
        os.kill(pid, signal.SIGKILL)
    disk.make_room()
    with provider.served() as (client, _pid):
        check_end(shim, client, verb)
        assert client.accept(verb, MACHINE) == operation_id
