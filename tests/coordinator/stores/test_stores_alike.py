"""Both stores do what a plain dictionary does (docs/spec/coordinator.md §13): rows, refusals, what a restart finds."""

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.commands import Command, CommandRefused, apply
from bigfleet.coordinator.stores.protocol import LeaderInfo, StateStore
from bigfleet.coordinator.stores.sqlite import SqliteStateStore
from bigfleet.coordinator.tables import Tables
from bigfleet.rpc.etcd.client import EtcdClient
from bigfleet.rpc.etcd.store import EtcdStore
from tests.coordinator.stores.etcd_process import Cluster
from tests.coordinator.stores.random_commands import COMMANDS
from tests.engine.proof import in_proportion

ME = LeaderInfo("r0", "r0:7790")
_numbers = itertools.count()

Open = Callable[[], StateStore]


async def compare(open_store: Open, lives: list[list[Command]]) -> None:
    """Run commands over several lives of a store, each ended by closing it, beside the model."""
    model, last_term = Tables(), 0
    for commands in lives:
        store = open_store()
        won = await store.campaign()
        assert won.tables == model
        assert won.term > last_term
        last_term = won.term
        for command in commands:
            expected: Tables | str
            try:
                expected = apply(model, command)
            except CommandRefused as refused:
                expected = str(refused)
            told: Tables | str
            try:
                told = await store.commit(command)
            except CommandRefused as refused:
                told = str(refused)
            assert told == expected
            model = expected if isinstance(expected, Tables) else model
        assert await store.load() == model
        await store.close()


LIVES = st.lists(st.lists(COMMANDS, max_size=15), min_size=1, max_size=3)


@pytest.mark.rule("coordinator 2/1")
@settings(max_examples=in_proportion(160))
@given(LIVES)
def test_a_file_is_the_model(lives: list[list[Command]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "c.db"
        asyncio.run(compare(lambda: SqliteStateStore(path, leader=ME), lives))


@pytest.mark.rule("coordinator 2/1")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=LIVES)
def test_etcd_is_the_model(member: Cluster, lives: list[list[Command]]) -> None:
    prefix = f"install-{next(_numbers)}"

    def opened() -> StateStore:
        client = EtcdClient(member.endpoints)
        return EtcdStore(client, prefix=prefix, me=ME, lease_ttl_seconds=30, clock=SystemClock())

    asyncio.run(compare(opened, lives))
