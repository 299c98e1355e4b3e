"""Tables of a coordinator that reports fill have bounds (docs/spec/coordinator.md §4)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator import leader as leader_module
from bigfleet.coordinator.ephemeral_state import ReceivedReport
from bigfleet.coordinator.leader import BOUND_AT_ONCE_MAX, BadReport, Leader
from bigfleet.model.ids import ClusterId, ShardId
from tests.coordinator.handover.handover_world import Backend, HandClock, HeldStore, run
from tests.coordinator.replica_world import sqlite_store

BOUND = 5


@pytest.fixture
def leader() -> Leader:
    store = HeldStore(Backend(), 1)
    return Leader(store, run(store.campaign()), clock=HandClock(), report_cycle_seconds=30.0)


def said(leader: Leader, shard: str, cycle: int, *clusters: str) -> ReceivedReport:
    fields: dict[str, Any] = {"address": f"{shard}:1", "echoed_term": leader.term}
    return ReceivedReport(
        shard_id=ShardId(shard), epoch=1, cycle=cycle, clusters=frozenset(map(ClusterId, clusters)), **fields
    )


def test_a_report_of_one_shard_too_many_is_rejected(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller in plain text that reported under ever new names filled the tables, which are kept for good."""
    monkeypatch.setattr(leader_module, "SHARDS_MAX", BOUND)
    for number in range(BOUND):
        run(leader.report(said(leader, f"s{number}", 1)))
    with pytest.raises(BadReport, match="5 shards are registered"):
        run(leader.report(said(leader, "one-more", 1)))
    assert len(leader.tables.shards) == BOUND
    assert run(leader.report(said(leader, "s0", 2))).acknowledged


def test_clusters_beyond_the_bound_are_not_bound(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report itself is taken."""
    monkeypatch.setattr(leader_module, "CLUSTERS_BOUND_MAX", BOUND)
    assert run(leader.report(said(leader, "s0", 1, *(f"c{number}" for number in range(3 * BOUND))))).acknowledged
    assert len(leader.tables.clusters) == BOUND


def test_conflicts_that_were_logged_are_forgotten_at_their_bound(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "LOGGED_CONFLICTS_MAX", BOUND)
    names = [f"c{number}" for number in range(3 * BOUND)]
    run(leader.report(said(leader, "s0", 1, *names)))
    run(leader.report(said(leader, "s1", 1, *names)))
    assert 0 < len(leader._logged_conflicts) <= BOUND


async def test_thousands_of_new_clusters_are_bound_in_a_few_transactions_with_turns_for_others(tmp_path: Path) -> None:
    """Each had one of its own, and a store in a file let no other task run before the last one."""
    store = sqlite_store(tmp_path / "c.db")
    won = await store.campaign()
    leader = Leader(store, won, clock=SystemClock(), report_cycle_seconds=30.0)
    before, turns = store.revision(), 0

    async def ticker() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(ticker())
    await leader.report(said(leader, "s0", 1, *(f"c{number}" for number in range(2000))))
    others.cancel()

    assert len(leader.tables.clusters) == 2000
    # One transaction registers the shard.
    assert store.revision() - before == 1 + 2000 // BOUND_AT_ONCE_MAX
    assert turns >= 2000 // BOUND_AT_ONCE_MAX - 1
    await store.close()


def test_a_cluster_of_another_shard_keeps_its_binding_among_new_ones(leader: Leader) -> None:
    run(leader.report(said(leader, "s0", 1, "c1")))
    run(leader.report(said(leader, "s1", 1, "c0", "c1", "c2")))

    owners = {cluster: row.shard_id for cluster, row in leader.tables.clusters.items()}
    assert owners == {"c0": "s1", "c1": "s0", "c2": "s1"}
