"""How proposals reach a person: the read API, the records of `bigfleet get exchanges`, the flag and the policy."""

from pathlib import Path
from typing import Any

import pytest

from bigfleet.cli.get.columns import EXCHANGES
from bigfleet.cli.get.exchange_records import exchange_records
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.shard.command import ShardFlags
from bigfleet.exchange.course import ExchangeEnd, ExchangePhase
from bigfleet.exchange.sentences import end_sentence
from bigfleet.exchange.values import ExchangeMode
from bigfleet.rpc.servers.shardread import ShardReadServicer
from bigfleet.rpc.wire.gen import shardread_pb2
from bigfleet.shard.cluster_policy import PolicyFault, read_policies
from bigfleet.sim.kernel.virtual_time import LoopClock
from tests.shard.exchange.test_execution import Exchanging
from tests.shard.exchange.test_moves import TwoClusters
from tests.shard.exchange.test_proposals import Fleet


async def listed(fleet: Fleet | TwoClusters, cluster: str = "") -> list[shardread_pb2.ClusterExchangesView]:
    """Return what ListExchanges streams."""
    servicer = ShardReadServicer(fleet.world.shard, LoopClock(), fleet.exchanges)
    context: Any = None
    request = shardread_pb2.ListExchangesRequest(cluster_id=cluster)
    return [response.exchanges async for response in servicer.ListExchanges(request, context)]


@pytest.mark.virtual_time
async def test_a_proposal_is_listed_with_every_term() -> None:
    """The message has the terms of which the least gain is the sum."""
    fleet = Fleet()
    await fleet.minutes(17)
    (view,) = await listed(fleet)
    (proposal,) = view.proposals

    assert (view.cluster_id, view.machines, view.cost_usd_per_hour, view.blocked) == ("c1", 2, 6.0, "")
    assert list(proposal.machine_ids) == ["c1-dear0", "c1-dear1"]
    terms = proposal.boot_usd + proposal.double_running_usd + proposal.reclamation_usd
    assert proposal.required_usd == pytest.approx(proposal.margin * terms)
    assert proposal.gain_usd == pytest.approx(proposal.saving_usd_per_hour * proposal.hold_seconds / 3600)
    assert proposal.break_even_seconds == pytest.approx(terms / proposal.saving_usd_per_hour * 3600)
    assert await listed(fleet, "c1") == [view]
    assert await listed(fleet, "c2") == []


@pytest.mark.virtual_time
async def test_the_table_shows_a_proposal_in_one_line() -> None:
    """State, saving, break-even time, what goes and what comes."""
    fleet = Fleet()
    await fleet.minutes(17)
    (view,) = await listed(fleet)
    (record,) = exchange_records(view)

    cells = {column.head: column.cell(record, 0.0) for column in EXCHANGES}
    assert cells["STATE"] == "ready"
    assert cells["SAVES $/H"] == "5.7"
    assert cells["GO"] == "2 × dear OnDemand"
    assert cells["COME"] == "1 × cheap Spot"
    assert record["sentences"][-1].startswith("Ready: the machines drain in 2 waves")


@pytest.mark.virtual_time
async def test_a_cluster_without_a_proposal_says_why() -> None:
    """Before prices count the machines are excluded; the record has the same fields."""
    fleet = Fleet()
    await fleet.minutes(1)
    (view,) = await listed(fleet)
    (record,) = exchange_records(view)

    assert record["excluded"] == {"price": 2}
    assert {column.head: column.cell(record, 0.0) for column in EXCHANGES}["STATE"] == "-"
    assert record["sentences"] == ["No exchange saves money.", "Excluded: 2 (price not known or not settled)."]
    await fleet.minutes(16)
    (proposed,) = exchange_records((await listed(fleet))[0])
    assert record.keys() == proposed.keys()


@pytest.mark.virtual_time
async def test_a_move_is_listed_with_the_cluster_that_takes_it() -> None:
    """Proposed, then as two exchanges that belong together."""
    fleet = TwoClusters(mode=ExchangeMode.PROPOSE)
    await fleet.minutes(20)
    giver, taker = await listed(fleet)
    (proposal,) = giver.proposals
    assert (proposal.kind, proposal.taker) == ("between-clusters", "taker")
    assert (list(proposal.machine_ids), list(proposal.taker_machine_ids)) == (["giver-own0"], ["taker-dear0"])
    assert [each.instance_type for each in proposal.taker_goes] == ["dear"]
    assert list(taker.proposals) == []
    (record,) = exchange_records(giver)
    cells = {column.head: column.cell(record, 0.0) for column in EXCHANGES}
    assert cells["GO"] == "1 × own Reserved to taker, 1 × dear OnDemand there"
    assert (cells["STATE"], cells["SAVES $/H"], cells["COME"]) == ("ready", "2.7", "1 × cheap Spot")

    fleet = TwoClusters()
    await fleet.until_record(2, ExchangePhase.ENDED)
    giver, taker = await listed(fleet)
    (first,), (second,) = giver.runs, taker.runs
    assert (first.taker, first.giver_exchange_id) == ("taker", "")
    assert (second.taker, second.giver_exchange_id) == ("", first.exchange_id)
    given, got = (next(exchange_records(view)) for view in (giver, taker))
    assert {column.head: column.cell(given, 0.0) for column in EXCHANGES}["GO"] == "1 × own Reserved to taker"
    assert (given["giverExchangeId"], got["giverExchangeId"]) == (None, first.exchange_id)
    assert given["sentences"][-1].startswith("Its machines went to taker")
    assert got["sentences"][-1] == f"The machines that come were given for it by exchange {first.exchange_id}."


def test_a_shard_proposes_unless_the_flag_says_otherwise() -> None:
    """Machines move only where somebody asked for it."""
    assert ShardFlags(provider_addr="127.0.0.1:1").process().exchange is ExchangeMode.PROPOSE
    assert ShardFlags(provider_addr="127.0.0.1:1", exchange="off").process().exchange is ExchangeMode.OFF
    assert ShardFlags(provider_addr="127.0.0.1:1", exchange="on").process().exchange is ExchangeMode.ON
    with pytest.raises(UsageFault, match="--exchange: 'auto' is unknown; choose one of off, propose, on"):
        ShardFlags(provider_addr="127.0.0.1:1", exchange="auto").process()


def test_the_policy_of_a_cluster_goes_before_the_flag(tmp_path: Path) -> None:
    """Its own entry, then patterns, then the flag."""
    path = tmp_path / "policy.yaml"
    path.write_text('clusters: {"prod-*": {exchange: off}, prod-1: {exchange: propose}}', encoding="utf-8")
    policies = read_policies(path)

    assert policies.exchange_mode("prod-1", ExchangeMode.OFF) is ExchangeMode.PROPOSE
    assert policies.exchange_mode("prod-2", ExchangeMode.PROPOSE) is ExchangeMode.OFF
    assert policies.exchange_mode("lab", ExchangeMode.PROPOSE) is ExchangeMode.PROPOSE
    path.write_text("clusters: {lab: {exchange: on}}", encoding="utf-8")
    assert read_policies(path).exchange_mode("lab", ExchangeMode.OFF) is ExchangeMode.ON
    path.write_text("clusters: {lab: {exchange: auto}}", encoding="utf-8")
    with pytest.raises(PolicyFault, match="exchange: 'auto' is unknown; write off or propose or on"):
        read_policies(path)


@pytest.mark.virtual_time
async def test_an_exchange_is_listed_until_a_day_after_its_end() -> None:
    """What it promised, how far it is, and what came of it."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    (view,) = await listed(fleet)
    (run,) = view.runs
    assert (run.exchange_id, run.phase, run.end, list(run.came_ids)) == ("x-1-1", "draining", "", ["spot0"])
    (record,) = exchange_records(view)
    cells = {column.head: column.cell(record, 0.0) for column in EXCHANGES}
    assert (cells["STATE"], cells["SAVES $/H"], cells["REALISED $/H"]) == ("draining", "5.7", "-")
    assert (cells["GO"], cells["COME"]) == ("2 × dear OnDemand", "1 × cheap Spot")

    await fleet.minutes(20)
    (view,) = await listed(fleet, "c1")
    (run,) = view.runs
    assert (run.phase, run.end, run.left) == ("ended", "done", 2)
    assert run.realised_usd_per_hour == pytest.approx(5.7)
    record, nothing = exchange_records(view)
    assert {column.head: column.cell(record, 0.0) for column in EXCHANGES}["STATE"] == "done"
    assert record["sentences"] == ["Done: all machines that should go have left."]
    assert record.keys() == nothing.keys()
    assert await listed(fleet, "c2") == []


@pytest.mark.virtual_time
async def test_an_exchange_that_was_abandoned_says_why() -> None:
    """In the table by its reason, in the record in a sentence."""
    fleet = Exchanging()
    await fleet.until(ExchangePhase.DRAINING)
    fleet.world.shard.exchanges.abandon("c1", ExchangeEnd.PRICE_MOVED)
    (view,) = await listed(fleet)
    record = next(exchange_records(view))

    assert {column.head: column.cell(record, 0.0) for column in EXCHANGES}["STATE"] == "abandoned: price-moved"
    assert record["sentences"][0].startswith("Abandoned: prices moved")


def test_every_end_has_a_sentence() -> None:
    """Which is not the name of the end."""
    assert len({end_sentence(end) for end in ExchangeEnd}) == len(ExchangeEnd)
