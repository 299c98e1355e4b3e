"""The rules of the coordinator's tables (docs/spec/coordinator.md §2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.coordinator.commands import (
    QUOTA_MOVE_RETENTION_NANOS,
    AddShard,
    BindCluster,
    Command,
    CommandRefused,
    DropDomain,
    MoveQuota,
    ReleaseDomain,
    RemoveShard,
    ReturnQuota,
    Rule,
    SetDomainOwner,
    SetQuota,
    UpdateShard,
    UpsertProvider,
    apply,
    edits,
)
from bigfleet.coordinator.tables import ClusterRow, DomainState, ProviderRow, QuotaKey, Table, Tables
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Domain
from tests.coordinator.stores.random_commands import AWS, COMMANDS, EAST, NORTH, WEST, ZONE, ZONE_A, ZONE_B


def after(*commands: Command, start: Tables | None = None) -> Tables:
    tables = start or Tables()
    for command in commands:
        tables = apply(tables, command)
    return tables


def two_shards() -> Tables:
    return after(AddShard(EAST, "east:7780", 3, 10), AddShard(WEST, "west:7780", 5, 11))


def refused(command: Command, tables: Tables) -> tuple[Rule, str]:
    with pytest.raises(CommandRefused) as raised:
        edits(command, tables)
    return raised.value.rule, str(raised.value)


@pytest.mark.rule("coordinator 2/2")
def test_a_shard_is_added_once() -> None:
    tables = two_shards()

    assert list(tables.shards) == [EAST, WEST]
    assert refused(AddShard(EAST, "x:1", 9, 12), tables) == (
        Rule.SHARD_EXISTS,
        "shard 'east-0' is registered already",
    )
    assert refused(AddShard(ShardId(""), "x:1", 9, 12), tables)[0] is Rule.EMPTY_KEY


@pytest.mark.rule("coordinator 2/2")
def test_a_shard_that_says_the_same_again_is_no_write() -> None:
    assert edits(UpdateShard(EAST, "east:7780", 3), two_shards()) == ()


@pytest.mark.rule("coordinator 2/2")
def test_an_epoch_never_falls() -> None:
    tables = after(UpdateShard(EAST, "elsewhere:7780", 4), start=two_shards())

    assert (tables.shards[EAST].address, tables.shards[EAST].epoch) == ("elsewhere:7780", 4)
    assert tables.shards[EAST].registered_at_unix_nanos == 10
    assert refused(UpdateShard(EAST, "east:7780", 3), tables)[0] is Rule.EPOCH_FELL
    assert refused(UpdateShard(NORTH, "north:7780", 3), tables)[0] is Rule.SHARD_NOT_FOUND


@pytest.mark.rule("coordinator 2/3")
def test_removing_a_shard_removes_all_that_points_to_it_and_nothing_else() -> None:
    tables = after(
        BindCluster(ClusterId("c1"), EAST, 1),
        BindCluster(ClusterId("c2"), WEST, 1),
        SetDomainOwner(ZONE_A, EAST),
        SetDomainOwner(ZONE_B, WEST),
        SetQuota(AWS, {EAST: 100, WEST: 300}),
        SetQuota(QuotaKey("gcp", "europe-west1"), {EAST: 7}),
        RemoveShard(EAST),
        start=two_shards(),
    )

    assert list(tables.shards) == [WEST]
    assert tables.clusters == {"c2": ClusterRow(WEST, 1)}
    assert list(tables.domains) == [ZONE_B]
    assert {key: dict(row.slots_of) for key, row in tables.quotas.items()} == {AWS: {WEST: 300}}
    assert refused(RemoveShard(EAST), tables)[0] is Rule.SHARD_NOT_FOUND


@pytest.mark.rule("coordinator 2/3")
def test_a_shard_s_own_row_is_the_last_to_go() -> None:
    """A removal that ends in between can be repeated."""
    tables = after(
        BindCluster(ClusterId("c1"), EAST, 1),
        SetDomainOwner(ZONE_A, EAST),
        SetQuota(AWS, {EAST: 100}),
        start=two_shards(),
    )
    removal = edits(RemoveShard(EAST), tables)

    assert [edit.key.table for edit in removal] == [Table.CLUSTERS, Table.DOMAINS, Table.QUOTAS, Table.SHARDS]
    for done in range(len(removal)):
        assert apply(tables.with_edits(removal[:done]), RemoveShard(EAST)) == apply(tables, RemoveShard(EAST))


@pytest.mark.rule("coordinator 2/4")
def test_a_cluster_is_bound_for_ever_by_the_first() -> None:
    tables = after(BindCluster(ClusterId("c1"), EAST, 1), start=two_shards())

    assert edits(BindCluster(ClusterId("c1"), EAST, 99), tables) == ()
    assert refused(BindCluster(ClusterId("c1"), WEST, 2), tables) == (
        Rule.CLUSTER_ALREADY_BOUND,
        "cluster 'c1' is bound to shard 'east-0'",
    )
    # The shard is looked at before the binding.
    assert refused(BindCluster(ClusterId("c1"), NORTH, 2), tables)[0] is Rule.SHARD_NOT_FOUND


@pytest.mark.rule("coordinator 2/5")
def test_a_domain_has_one_owner_until_its_shard_has_left_it() -> None:
    tables = after(SetDomainOwner(ZONE_A, EAST), start=two_shards())

    assert edits(SetDomainOwner(ZONE_A, EAST), tables) == ()
    assert refused(SetDomainOwner(ZONE_A, WEST), tables)[1] == f"{ZONE}=a belongs to shard 'east-0'"
    assert refused(DropDomain(ZONE_A), tables)[0] is Rule.STILL_ASSIGNED

    leaving = apply(tables, ReleaseDomain(ZONE_A))
    assert leaving.domains[ZONE_A].state is DomainState.RELEASING
    assert edits(ReleaseDomain(ZONE_A), leaving) == ()
    assert refused(SetDomainOwner(ZONE_A, WEST), leaving)[1] == f"{ZONE}=a is still being released by shard 'east-0'"

    free = apply(leaving, DropDomain(ZONE_A))
    assert edits(DropDomain(ZONE_A), free) == edits(ReleaseDomain(ZONE_A), free) == ()
    assert apply(free, SetDomainOwner(ZONE_A, WEST)).domains[ZONE_A].shard_id == WEST


@pytest.mark.rule("coordinator 2/5")
def test_a_shard_that_is_releasing_a_domain_is_refused_it_until_the_row_is_gone() -> None:
    leaving = after(SetDomainOwner(ZONE_A, EAST), ReleaseDomain(ZONE_A), start=two_shards())

    assert refused(SetDomainOwner(ZONE_A, EAST), leaving)[0] is Rule.DOMAIN_ALREADY_ASSIGNED


@pytest.mark.rule("coordinator 2/6")
def test_the_shards_of_one_provider_share_one_topology_key() -> None:
    """Otherwise a machine could lie in two domains."""
    tables = after(SetDomainOwner(ZONE_A, EAST), start=two_shards())
    racks = Domain("topology.bigfleet/rack", "r1")

    assert refused(SetDomainOwner(racks, EAST), tables)[0] is Rule.SECOND_KEY
    assert refused(SetDomainOwner(racks, WEST, frozenset({EAST})), tables)[0] is Rule.SECOND_KEY
    # Behind another provider there are other machines.
    assert apply(tables, SetDomainOwner(racks, WEST)).domains[racks].shard_id == WEST


@pytest.mark.rule("coordinator 2/9")
@pytest.mark.parametrize(
    ("command", "rule"),
    [
        (SetDomainOwner(Domain("", "a"), EAST), Rule.EMPTY_KEY),
        (SetDomainOwner(Domain(ZONE, ""), EAST), Rule.EMPTY_KEY),
        (SetDomainOwner(ZONE_A, NORTH), Rule.SHARD_NOT_FOUND),
        (BindCluster(ClusterId(""), EAST, 1), Rule.EMPTY_KEY),
        (SetQuota(QuotaKey("", "r"), {}), Rule.EMPTY_KEY),
        (SetQuota(QuotaKey("p", ""), {}), Rule.EMPTY_KEY),
        (SetQuota(AWS, {NORTH: 1}), Rule.SHARD_NOT_FOUND),
        (SetQuota(AWS, {EAST: -1}), Rule.NEGATIVE_SLOTS),
        (UpsertProvider("", "h:1", "r"), Rule.EMPTY_KEY),
        (SetDomainOwner(Domain(ZONE, "a\0b"), EAST), Rule.BAD_KEY),
        (SetDomainOwner(Domain("z\0", "a"), EAST), Rule.BAD_KEY),
        (BindCluster(ClusterId("c\0"), EAST, 1), Rule.BAD_KEY),
        (SetQuota(QuotaKey("p", "r\0"), {}), Rule.BAD_KEY),
        (UpsertProvider("p\0", "h:1", "r"), Rule.BAD_KEY),
        (UpsertProvider("p", "h", "r"), Rule.BAD_ADDRESS),
        (UpsertProvider("p", "h:0", "r"), Rule.BAD_ADDRESS),
        (UpsertProvider("p", "h:99999", "r"), Rule.BAD_ADDRESS),
        (UpsertProvider("p", "h h:1", "r"), Rule.BAD_ADDRESS),
        (MoveQuota(AWS, EAST, WEST, 1, "1-1", 1), Rule.QUOTA_NOT_FOUND),
    ],
)
def test_what_is_malformed_is_refused_by_name(command: Command, rule: Rule) -> None:
    assert refused(command, two_shards())[0] is rule


@pytest.mark.rule("coordinator 2/7")
def test_an_empty_quota_deletes_the_row_and_an_equal_one_is_no_write() -> None:
    tables = after(SetQuota(AWS, {EAST: 100, WEST: 0}), start=two_shards())

    assert dict(tables.quotas[AWS].slots_of) == {EAST: 100}
    assert edits(SetQuota(AWS, {EAST: 100}), tables) == ()
    assert apply(tables, SetQuota(AWS, {})).quotas == {}
    assert edits(SetQuota(QuotaKey("gcp", "x"), {}), tables) == ()


@pytest.mark.rule("coordinator 2/7")
def test_a_quota_move_is_booked_once() -> None:
    """A new leader that finds the same hand-over again changes nothing."""
    tables = after(
        SetQuota(AWS, {EAST: 100, WEST: 300}), MoveQuota(AWS, WEST, EAST, 7, "4-9", 1_000), start=two_shards()
    )

    assert dict(tables.quotas[AWS].slots_of) == {EAST: 107, WEST: 293}
    assert edits(MoveQuota(AWS, WEST, EAST, 7, "4-9", 2_000), tables) == ()
    assert refused(MoveQuota(AWS, WEST, EAST, 294, "4-10", 2_000), tables)[0] is Rule.QUOTA_UNDERFLOW


@pytest.mark.rule("coordinator 2/7")
def test_a_quota_move_is_returned_once_and_can_then_be_booked_again() -> None:
    """At most what was booked, and at most what the recipient still has."""
    start = after(SetQuota(AWS, {EAST: 100, WEST: 300}), start=two_shards())
    booked = apply(start, MoveQuota(AWS, WEST, EAST, 7, "4-9", 1_000))
    returned = apply(booked, ReturnQuota(AWS, EAST, WEST, 9, "4-9"))

    assert returned == start
    assert edits(ReturnQuota(AWS, EAST, WEST, 9, "4-9"), returned) == ()
    assert apply(returned, MoveQuota(AWS, WEST, EAST, 7, "4-9", 1_000)) == booked
    lowered = after(SetQuota(AWS, {EAST: 3, WEST: 293}), ReturnQuota(AWS, EAST, WEST, 7, "4-9"), start=booked)
    assert dict(lowered.quotas[AWS].slots_of) == {WEST: 296}
    gone = after(RemoveShard(EAST), ReturnQuota(AWS, EAST, WEST, 7, "4-9"), start=booked)
    assert dict(gone.quotas[AWS].slots_of) == {WEST: 293}
    assert refused(ReturnQuota(AWS, EAST, WEST, -1, "4-9"), booked)[0] is Rule.NEGATIVE_SLOTS


@pytest.mark.rule("coordinator 2/7")
def test_markers_of_quota_moves_go_after_a_day() -> None:
    later = QUOTA_MOVE_RETENTION_NANOS + 2
    tables = after(
        SetQuota(AWS, {EAST: 100, WEST: 300}),
        MoveQuota(AWS, WEST, EAST, 7, "4-9", 1),
        MoveQuota(AWS, WEST, EAST, 7, "4-10", later),
        start=two_shards(),
    )

    assert list(tables.quota_moves) == ["4-10"]


@pytest.mark.rule("coordinator 2/8")
def test_a_provider_is_replaced_or_deleted() -> None:
    tables = after(UpsertProvider("aws", "h:9100", "eu"), UpsertProvider("aws", "h:9200", "eu"))

    assert tables.providers == {"aws": ProviderRow("h:9200", "eu")}
    assert edits(UpsertProvider("aws", "h:9200", "eu"), tables) == ()
    assert apply(tables, UpsertProvider("aws", "", "")).providers == {}
    assert edits(UpsertProvider("gcp", "", ""), tables) == ()


@pytest.mark.rule("coordinator 2/3")
@given(st.lists(COMMANDS, max_size=40))
def test_no_row_ever_points_to_a_shard_that_is_not_there(commands: list[Command]) -> None:
    tables = Tables()
    for command in commands:
        try:
            tables = apply(tables, command)
        except CommandRefused:
            continue
        owners = {row.shard_id for row in tables.clusters.values()} | {row.shard_id for row in tables.domains.values()}
        owners |= {shard_id for row in tables.quotas.values() for shard_id in row.slots_of}
        assert owners <= set(tables.shards)


@pytest.mark.rule("coordinator 2/7")
@given(st.lists(COMMANDS, max_size=40))
def test_only_setting_a_quota_or_removing_a_shard_changes_how_many_slots_there_are(commands: list[Command]) -> None:
    tables = Tables()
    for command in commands:
        before = sum(sum(row.slots_of.values()) for row in tables.quotas.values())
        try:
            tables = apply(tables, command)
        except CommandRefused:
            continue
        after_it = sum(sum(row.slots_of.values()) for row in tables.quotas.values())
        if not isinstance(command, SetQuota | RemoveShard):
            assert after_it == before


@given(st.lists(COMMANDS, max_size=40))
def test_tables_are_made_anew_by_their_rows(commands: list[Command]) -> None:
    tables = Tables()
    for command in commands:
        try:
            tables = apply(tables, command)
        except CommandRefused:
            continue
    assert Tables().with_edits(tables.rows()) == tables
