"""A state file belongs to one account and region: with others its hosts would look lost."""

from pathlib import Path

import pytest

from bigfleet.model.states import MachineState
from bigfleet.provider.backend import Backend
from bigfleet.provider.backends.aws.identity import Place
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.backends.multiplex import Multiplex
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.records.refusal import StartRefused
from bigfleet.provider.storage.sqlite import SqliteProviderStore, back_up_provider
from bigfleet.provider.storage.store import MemoryStore
from bigfleet.provider.testing.cores import settled
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.provider.backends.aws.memory_aws import MACHINE, MemoryEc2, make_backend
from tests.provider.harness import make_core, started

pytestmark = pytest.mark.virtual_time
HERE = {"account": "111111111111", "region": "us-east-1"}
STORED = {"aws.account": "111111111111", "aws.region": "us-east-1"}
OPTIONS = CoreOptions(is_inline=True, reconcile_interval_seconds=10.0, failed_hold_seconds=100.0)


@pytest.fixture
def ec2() -> MemoryEc2:
    return MemoryEc2(LoopClock())


def opened(folder: Path, ec2: MemoryEc2, *, state: str = "s.db", **place: str) -> CapacityCore:
    store = SqliteProviderStore(folder / state, is_power_safe=False)
    return make_core(make_backend(folder, ec2, place=Place(**place)), store=store, options=OPTIONS)


def stored(folder: Path, state: str = "s.db") -> dict[str, str]:
    store = SqliteProviderStore(folder / state, is_power_safe=False)
    identity = dict(store.load(b"12345678").identity)
    store.close()
    return {key: identity[key] for key in STORED if key in identity}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"account": "222222222222"}, "account 222222222222, region us-east-1"),
        ({"region": "us-west-2"}, "account 111111111111, region us-west-2"),
    ],
)
async def test_a_state_of_another_account_or_region_ends_the_start_and_changes_nothing(
    change: dict[str, str], text: str, tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(opened(tmp_path, ec2, **HERE))
    await core.create(MACHINE)
    host = (await settled(core, MACHINE)).machine.host.ref
    await core.stop()

    other = MemoryEc2(ec2.clock)
    refused = opened(tmp_path, other, **{**HERE, **change})
    with pytest.raises(StartRefused) as raised:
        await refused.start()
    await refused.stop()
    assert str(raised.value) == (
        f"--state: the machines of this file are in account 111111111111, region us-east-1, and the provider was "
        f"started for {text}; start it with the credentials and the --region of the file, or name another file"
    )
    assert other.calls == {}
    again = await started(opened(tmp_path, ec2, **HERE))
    assert (await again.get(MACHINE)).machine.host.ref == host
    await again.stop()


async def test_a_state_of_a_former_version_takes_account_and_region_at_its_next_start(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    core = await started(opened(tmp_path, ec2))
    await core.create(MACHINE)
    assert (await settled(core, MACHINE)).state is MachineState.IDLE
    await core.stop()
    assert stored(tmp_path) == {}
    core = await started(opened(tmp_path, ec2, **HERE))
    await core.stop()
    assert stored(tmp_path) == STORED


async def test_an_aws_that_does_not_answer_at_the_start_is_asked_for_the_account_before_any_call(
    tmp_path: Path, ec2: MemoryEc2
) -> None:
    await (await started(opened(tmp_path, ec2, **HERE))).stop()
    assert ec2.account_required == ""
    core = await started(opened(tmp_path, ec2, region="us-east-1"))
    assert ec2.account_required == "111111111111"
    await core.stop()
    assert stored(tmp_path) == STORED


async def test_a_backup_has_the_account_and_region(tmp_path: Path, ec2: MemoryEc2) -> None:
    await (await started(opened(tmp_path, ec2, **HERE))).stop()
    back_up_provider(tmp_path / "s.db", tmp_path / "b.db")
    assert stored(tmp_path, "b.db") == STORED


async def test_a_store_that_takes_no_commit_ends_a_start_that_has_to_store_them(tmp_path: Path, ec2: MemoryEc2) -> None:
    core = make_core(
        make_backend(tmp_path, ec2, place=Place(**HERE)), store=MemoryStore(is_failing=True), options=OPTIONS
    )
    with pytest.raises(StartRefused, match="the state takes no commit"):
        await core.start()
    await core.stop()


async def test_the_parts_of_a_multiplex_store_their_places_apart(tmp_path: Path, ec2: MemoryEc2) -> None:
    parts: dict[str, Backend] = {"aws/": make_backend(tmp_path, ec2, place=Place(**HERE)), "fake-": FakeBackend(1)}
    multiplex = Multiplex(parts)
    found = multiplex.identify({})
    assert {key: found[key] for key in found if key.endswith(("account", "region"))} == {
        f"aws/{key}": value for key, value in STORED.items()
    }
    assert multiplex.identify(found) == found
    with pytest.raises(StartRefused):
        multiplex.identify({**found, "aws/aws.region": "us-west-2"})
