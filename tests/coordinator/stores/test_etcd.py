"""The coordinator on a real etcd, with what can go wrong there (docs/spec/coordinator.md §3, §12)."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from bigfleet.cli.runtime.system import SystemClock
from bigfleet.coordinator.commands import AddShard, BindCluster, CommandRefused, RemoveShard, SetQuota, UpsertProvider
from bigfleet.coordinator.stores.protocol import TERM_STEP, LeaderInfo, NotLeader, OutcomeUnknown, StoreUnavailable
from bigfleet.coordinator.tables import QuotaKey, ShardRow, Tables
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.rpc.etcd import store as store_module
from bigfleet.rpc.etcd.client import EtcdClient, EtcdUnavailable, NoAnswer, end_of_prefix, put
from bigfleet.rpc.etcd.store import EtcdStore
from tests.coordinator.stores.etcd_process import Cluster, Proxy, until
from tests.patience import PATIENCE_SECONDS

EAST, WEST = ShardId("east-0"), ShardId("west/0 %")
#: Long enough for a leader that a busy machine keeps from renewing it in time.
TTL_SECONDS = 5


def replica(endpoints: list[str], name: str = "r0", ttl_seconds: int = TTL_SECONDS) -> EtcdStore:
    return EtcdStore(
        EtcdClient(endpoints),
        prefix="bigfleet",
        me=LeaderInfo(name, f"{name}:7790"),
        lease_ttl_seconds=ttl_seconds,
        clock=SystemClock(),
    )


@pytest.mark.rule("coordinator 3/1", "coordinator 3/2")
async def test_rows_outlive_leaders_and_terms_rise(member: Cluster) -> None:
    first = replica(member.endpoints)
    won = await first.campaign()
    await first.commit(AddShard(EAST, "east:7780", 3, 10))
    await first.commit(AddShard(WEST, "west:7780", 4, 11))
    await first.commit(BindCluster(ClusterId("c1"), WEST, 12))
    await first.commit(SetQuota(QuotaKey("aws", "eu/west 1"), {EAST: 5}))
    await first.commit(UpsertProvider("aws", "p:9100", "eu/west 1"))
    tables = await first.load()
    await first.close()

    second = replica(member.endpoints, "r1")
    async with asyncio.timeout(PATIENCE_SECONDS):
        again = await second.campaign()

    assert again.term > won.term
    assert again.tables == tables
    assert again.tables.shards[WEST] == ShardRow("west:7780", 11, 4)
    await second.commit(RemoveShard(WEST))
    assert (await second.load()).clusters == {}
    await second.close()


async def test_no_key_hangs_on_a_lease_that_has_ended(member: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ends between its grant and the election costs a round; the key cannot be left behind."""
    store = replica(member.endpoints)
    client = store._client
    lease = await client.grant(TTL_SECONDS)
    await client.revoke(lease)
    with pytest.raises(NoAnswer, match="requested lease not found"):
        await client.txn([], [put(b"bigfleet/election", b"{}", lease)])
    assert not (await client.range(b"bigfleet/election")).items

    grant, granted = client.grant, []

    async def grant_and_end_the_first(ttl_seconds: int) -> int:
        granted.append(await grant(ttl_seconds))
        if len(granted) == 1:
            await client.revoke(granted[0])
        return granted[-1]

    monkeypatch.setattr(client, "grant", grant_and_end_the_first)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await store.campaign()).term > 0
    assert len(granted) == 2
    await store.close()


@pytest.mark.parametrize("key_is_of", ["an expired lease", "the process before a restart"])
async def test_a_replica_waits_for_its_own_old_key_to_go_and_names_no_leader(
    member: Cluster, monkeypatch: pytest.MonkeyPatch, key_is_of: str
) -> None:
    store = replica(member.endpoints, ttl_seconds=2)
    client = store._client
    keep_alive, wait_until_changed = client.keep_alive, client.wait_until_changed
    asked: list[int] = []
    leaders: list[LeaderInfo | None] = []

    async def refuse_the_first(lease: int) -> bool:
        asked.append(lease)
        return lease != asked[0] and await keep_alive(lease)

    async def see_who_leads(key: bytes, revision: int) -> None:
        leaders.append(store.leader())
        await wait_until_changed(key, revision)

    if key_is_of == "an expired lease":
        monkeypatch.setattr(client, "keep_alive", refuse_the_first)
    else:
        lease = await client.grant(2)
        await client.txn([], [put(b"bigfleet/election", b'{"replica":"r0","address":"r0:7790"}', lease)])
    monkeypatch.setattr(client, "wait_until_changed", see_who_leads)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await store.campaign()

    assert leaders
    assert set(leaders) == {None}
    if asked:
        # Once for the key that has to go, before its lease ends by itself; later for the one that leads.
        assert asked.count(asked[0]) == 1
    assert store.leader() == LeaderInfo("r0", "r0:7790")
    await store.close()


@pytest.mark.rule("coordinator 3/10")
async def test_a_follower_knows_the_leader_and_takes_over_at_once_when_it_resigns(member: Cluster) -> None:
    first, second = replica(member.endpoints, "r0", 60), replica(member.endpoints, "r1", 60)
    won = await first.campaign()
    following = asyncio.create_task(second.campaign())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await until(lambda: second.leader() == LeaderInfo("r0", "r0:7790"))
        await first.resign()
        # The lease of sixty seconds is not waited for.
        again = await following

    assert again.term > won.term
    assert await first.lost() == "leadership was given up"
    with pytest.raises(NotLeader):
        await first.commit(AddShard(EAST, "east:7780", 3, 10))
    await first.close()
    await second.close()


@pytest.mark.rule("coordinator 1/6")
@pytest.mark.parametrize("outage", ["kill", "stop"])
async def test_a_follower_whose_store_is_away_knows_no_leader_after_the_lease_time_and_logs_it(
    member: Cluster, outage: str
) -> None:
    """So its /readyz is 503, whether etcd refuses connections or hangs; it knows the leader again when etcd is back."""
    (process,) = member.members
    first, second = replica(member.endpoints, "r0"), replica(member.endpoints, "r1")
    await first.campaign()
    following = asyncio.create_task(second.campaign())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await until(lambda: second.leader() == LeaderInfo("r0", "r0:7790"))

        with capture_logs() as logs:
            getattr(process, outage)()
            await until(lambda: second.leader() is None)
            await until(lambda: any(line["event"] == "etcd.campaign_failed" for line in logs))

        if outage == "kill":
            process.start(member.members)
        else:
            process.go_on()
        await until(lambda: second.leader() is not None)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await first.close()
    await second.close()


async def test_a_follower_of_a_leader_that_lives_knows_it_all_the_time(member: Cluster) -> None:
    """The watch is silent while the leader is the same, which is no outage."""
    first, second = replica(member.endpoints, "r0"), replica(member.endpoints, "r1", ttl_seconds=2)
    await first.campaign()
    following = asyncio.create_task(second.campaign())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await until(lambda: second.leader() is not None)
    known = []
    for _ in range(30):
        await asyncio.sleep(0.2)
        known.append(second.leader())

    assert known.count(LeaderInfo("r0", "r0:7790")) > len(known) / 2
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await first.close()
    await second.close()


@pytest.mark.rule("coordinator 3/8")
async def test_a_leader_that_was_cut_off_writes_nothing_and_steps_down(member: Cluster) -> None:
    """It believes that it leads until its own clock says otherwise; its writes fail at once when they arrive."""
    proxy = Proxy(member.members[0].client_port)
    await proxy.start()
    cut_off, other = replica([f"127.0.0.1:{proxy.port}"], "r0"), replica(member.endpoints, "r1")
    await cut_off.campaign()
    await cut_off.commit(AddShard(EAST, "east:7780", 3, 10))
    proxy.cut()
    late = asyncio.create_task(cut_off.commit(AddShard(WEST, "west:7780", 1, 11)))
    async with asyncio.timeout(PATIENCE_SECONDS):
        won = await other.campaign()
        assert list(won.tables.shards) == [EAST]
        why = await cut_off.lost()
        with pytest.raises((OutcomeUnknown, NotLeader, StoreUnavailable)):
            await late
    proxy.mend()

    assert "not renewed" in why
    await other.commit(SetQuota(QuotaKey("aws", "eu"), {EAST: 1}))
    assert list((await other.load()).shards) == [EAST]
    await cut_off.close()
    await other.close()
    await proxy.close()


class StandingClock(SystemClock):
    """A clock by which no time passes: whoever reads it never finds its lease to be over."""

    def monotonic_seconds(self) -> float:
        return 1_000.0


@pytest.mark.rule("coordinator 3/3", "coordinator 12/6")
@pytest.mark.slow
async def test_a_leader_beyond_a_partition_that_still_believes_has_its_writes_refused(three: Cluster) -> None:
    """Its own clock never tells it to step down; what it writes once the network is back fails at the guard."""
    proxy = Proxy(three.members[0].client_port)
    await proxy.start()
    client = EtcdClient([f"127.0.0.1:{proxy.port}"])
    believing = EtcdStore(
        client, prefix="bigfleet", me=LeaderInfo("r0", "r0:7790"), lease_ttl_seconds=TTL_SECONDS, clock=StandingClock()
    )
    other = replica(three.endpoints[1:], "r1")
    first = await believing.campaign()
    await believing.commit(AddShard(EAST, "east:7780", 3, 10))
    proxy.cut()
    async with asyncio.timeout(PATIENCE_SECONDS):
        won = await other.campaign()
        await other.commit(SetQuota(QuotaKey("aws", "eu"), {EAST: 1}))
        assert believing.leader() == LeaderInfo("r0", "r0:7790")
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            await believing.commit(AddShard(WEST, "west:7780", 1, 11))
        late = asyncio.create_task(believing.commit(AddShard(WEST, "west:7780", 1, 11)))
        proxy.mend()
        with pytest.raises((NotLeader, OutcomeUnknown, StoreUnavailable)):
            await late
        await believing.lost()
        with pytest.raises(NotLeader):
            await believing.commit(AddShard(WEST, "west:7780", 1, 11))

    assert won.term > first.term
    tables = await other.load()
    assert (list(tables.shards), list(tables.quotas)) == ([EAST], [QuotaKey("aws", "eu")])
    await believing.close()
    await other.close()
    await proxy.close()


@pytest.mark.rule("coordinator 3/3")
async def test_a_leader_whose_key_was_taken_cannot_write_even_if_it_has_not_noticed(member: Cluster) -> None:
    store = replica(member.endpoints, ttl_seconds=60)
    await store.campaign()
    raw = EtcdClient(member.endpoints)
    # As after a lease that ended while the process was paused: the key is gone and somebody else's.
    for task in store._tasks:
        task.cancel()
    election = await raw.range(b"bigfleet/election")
    await raw.revoke(election.items[0].lease)
    await raw.txn([], [put(b"bigfleet/election", b'{"replica": "other", "address": "o:1"}')])

    with pytest.raises(NotLeader):
        await store.commit(AddShard(EAST, "east:7780", 3, 10))
    assert await store.lost() == "the election key is another's"
    assert (await raw.range(b"bigfleet/shards/", end_of_prefix(b"bigfleet/shards/"))).items == ()
    await raw.close()
    await store.close()


@pytest.mark.rule("coordinator 3/8")
async def test_leadership_is_lost_as_soon_as_the_key_goes(member: Cluster) -> None:
    store = replica(member.endpoints, ttl_seconds=60)
    await store.campaign()
    raw = EtcdClient(member.endpoints)
    election = await raw.range(b"bigfleet/election")
    await raw.revoke(election.items[0].lease)

    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await store.lost() == "the election key has gone"
    assert store.leader() is None
    await raw.close()
    await store.close()


async def test_a_store_that_restarts_keeps_rows_and_leadership_that_lasted(member: Cluster) -> None:
    store = replica(member.endpoints, ttl_seconds=30)
    won = await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    member.members[0].kill()
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        await store.commit(AddShard(WEST, "west:7780", 3, 10))
    with pytest.raises(StoreUnavailable):
        await store.load()
    member.start()
    await member.ready()

    await store.commit(AddShard(WEST, "west:7780", 3, 10))
    assert set((await store.load()).shards) == {EAST, WEST}
    await store.close()
    second = replica(member.endpoints)
    assert (await second.campaign()).term > won.term
    await second.close()


async def test_a_leader_whose_etcd_was_wiped_writes_nothing_and_the_next_one_begins_empty(member: Cluster) -> None:
    """It does not write the rows that it remembers into an empty store; its key is gone, so it does not lead."""
    store = replica(member.endpoints, ttl_seconds=60)
    first = await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    member.members[0].wipe()
    member.start()
    await member.ready()

    with pytest.raises((NotLeader, OutcomeUnknown, StoreUnavailable)):
        await store.commit(AddShard(WEST, "west:7780", 3, 10))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await store.lost()
    second = replica(member.endpoints, name="r1")
    won = await second.campaign()
    assert (await second.load()).shards == {}
    # Which shards may have accepted: test_coordinator_rpcs.py has what the leader does about that.
    assert won.term == first.term
    await store.close()
    await second.close()


async def test_a_leader_whose_etcd_was_paused_beyond_its_lease_does_not_write_afterwards(member: Cluster) -> None:
    """A paused etcd answers nothing; when it goes on the lease may be over, and then the leader steps down."""
    store = replica(member.endpoints, ttl_seconds=2)
    await store.campaign()
    member.members[0].stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await store.lost()
    with pytest.raises(NotLeader):
        await store.commit(AddShard(WEST, "west:7780", 3, 10))
    member.members[0].go_on()
    await member.ready()

    assert (await store.load()).shards == {}
    assert (await store.campaign()).term > 1
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    await store.close()


@pytest.mark.rule("coordinator 3/9")
async def test_a_term_that_shards_have_outrun_is_raised(member: Cluster) -> None:
    store = replica(member.endpoints)
    won = await store.campaign()
    raised = await store.raise_term(won.term + 500)
    await store.close()
    second = replica(member.endpoints)

    assert raised == won.term + 500 + TERM_STEP
    assert (await second.campaign()).term > raised
    await second.close()


@pytest.mark.rule("coordinator 3/5")
async def test_a_command_that_others_outran_is_applied_to_what_they_wrote(member: Cluster) -> None:
    store = replica(member.endpoints)
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    raw = EtcdClient(member.endpoints)
    row = b'{"address":"moved:7780","epoch":9,"registered_at_unix_nanos":10}'
    await raw.txn([], [put(b"bigfleet/shards/east-0", row)])
    await store.commit(RemoveShard(EAST))
    with pytest.raises(CommandRefused):
        await store.commit(RemoveShard(EAST))

    assert await store.load() == Tables()
    await raw.close()
    await store.close()


@pytest.mark.rule("coordinator 3/7")
async def test_more_rows_than_one_transaction_holds(member: Cluster) -> None:
    """A shard goes with all its clusters; its own row is the last to go."""
    store = replica(member.endpoints)
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    for number in range(300):
        await store.commit(BindCluster(ClusterId(f"c-{number}"), EAST, 1))
    await store.commit(RemoveShard(EAST))

    assert await store.load() == Tables()
    await store.close()


@pytest.mark.rule("coordinator 3/7")
async def test_a_removal_that_ended_between_two_transactions_goes_on_when_it_is_repeated(
    member: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is left that names a shard which is not registered: no command could change such a row."""
    monkeypatch.setattr(store_module, "_EDITS_MAX", 2)
    store = replica(member.endpoints)
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    for number in range(3):
        await store.commit(BindCluster(ClusterId(f"c-{number}"), EAST, 1))
    client: Any = store._client
    write = client.txn
    written: list[Any] = []

    async def only_the_first(*operations: Any) -> Any:
        if written:
            raise EtcdUnavailable("no endpoint answers")
        written.append(await write(*operations))
        return written[0]

    with monkeypatch.context() as broken:
        broken.setattr(client, "txn", only_the_first)
        with pytest.raises(StoreUnavailable):
            await store.commit(RemoveShard(EAST))
    tables = await store.load()
    assert (list(tables.shards), list(tables.clusters)) == ([EAST], ["c-2"])
    await store.close()

    second = replica(member.endpoints, "r1")
    await second.campaign()
    await second.commit(RemoveShard(EAST))
    assert await second.load() == Tables()
    await second.close()


async def test_a_row_that_does_not_read_back_is_named(member: Cluster) -> None:
    store = replica(member.endpoints)
    await store.campaign()
    raw = EtcdClient(member.endpoints)
    await raw.txn([], [put(b"bigfleet/shards/east-0", b"noise")])
    with pytest.raises(StoreUnavailable, match="shards/east-0"):
        await store.load()
    await raw.close()
    await store.close()


@pytest.mark.rule("coordinator 3/2")
async def test_another_prefix_is_another_install(member: Cluster) -> None:
    raw = EtcdClient(member.endpoints)
    await raw.txn([], [put(b"bigfleet2/shards/x", b"theirs"), put(b"bigfleet", b"theirs")])
    store = replica(member.endpoints)

    assert (await store.campaign()).tables == Tables()
    await raw.close()
    await store.close()


@pytest.mark.rule("coordinator 3/11")
@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_a_member_that_dies_costs_nothing_that_was_written(three: Cluster, victim: str) -> None:
    store = replica(three.endpoints, ttl_seconds=15)
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    leading = await three.led_by()
    dead = leading if victim == "leader" else next(member for member in three.members if member is not leading)
    dead.kill()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await store.commit(AddShard(WEST, "west:7780", 3, 10))
                break
            except CommandRefused:
                # An attempt whose outcome was unknown had come through.
                break
            except (StoreUnavailable, OutcomeUnknown):
                continue

    assert set((await store.load()).shards) == {EAST, WEST}
    await store.close()


@pytest.mark.rule("coordinator 12/4")
@pytest.mark.slow
async def test_without_a_quorum_nobody_writes_and_with_it_again_somebody_does(three: Cluster) -> None:
    store = replica(three.endpoints)
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    for member in three.members[:2]:
        member.kill()
    with pytest.raises((StoreUnavailable, OutcomeUnknown, NotLeader)):
        await store.commit(AddShard(WEST, "west:7780", 3, 10))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await store.lost()
        three.start()
        await three.ready()
        won = await store.campaign()

    assert EAST in won.tables.shards
    await store.close()


class LossyClient(EtcdClient):
    """A client whose transactions get no answer: they come through, or they never arrive."""

    comes_through = True
    losses = 0
    is_cut_off = False

    async def txn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.losses:
            return await super().txn(*args, **kwargs)
        self.losses -= 1
        if self.comes_through:
            await super().txn(*args, **kwargs)
        raise NoAnswer("the answer is lost")

    async def range(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_cut_off:
            raise EtcdUnavailable("nobody answers")
        return await super().range(*args, **kwargs)


@pytest.mark.rule("coordinator 3/6", "coordinator 12/5")
@pytest.mark.parametrize("comes_through", [True, False], ids=["it came through", "it never arrived"])
async def test_a_write_without_an_answer_is_read_back_and_done_once(member: Cluster, *, comes_through: bool) -> None:
    client = LossyClient(member.endpoints)
    store = EtcdStore(
        client, prefix="bigfleet", me=LeaderInfo("r0", ""), lease_ttl_seconds=TTL_SECONDS, clock=SystemClock()
    )
    await store.campaign()
    await store.commit(AddShard(EAST, "east:7780", 3, 10))
    client.comes_through, client.losses = comes_through, 1

    tables = await store.commit(SetQuota(QuotaKey("aws", "eu"), {EAST: 7}))

    assert dict(tables.quotas[QuotaKey("aws", "eu")].slots_of) == {EAST: 7}
    assert await store.load() == tables
    await store.close()


@pytest.mark.rule("coordinator 3/6", "coordinator 12/5")
async def test_a_write_that_cannot_be_read_back_either_is_told_as_unknown(member: Cluster) -> None:
    client = LossyClient(member.endpoints)
    store = EtcdStore(
        client, prefix="bigfleet", me=LeaderInfo("r0", ""), lease_ttl_seconds=TTL_SECONDS, clock=SystemClock()
    )
    await store.campaign()
    client.losses, client.is_cut_off = 1, True
    with pytest.raises(OutcomeUnknown, match="the answer is lost; reading it back: nobody answers"):
        await store.commit(AddShard(EAST, "east:7780", 3, 10))
    client.is_cut_off = False

    # It had come: the same command again finds its row as it should be.
    assert list((await store.commit(AddShard(EAST, "east:7780", 3, 10))).shards) == [EAST]
    await store.close()
