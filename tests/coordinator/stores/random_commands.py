"""Commands for tests: a few shards, domains and quotas, drawn at random, most of them refused by some rule."""

from hypothesis import strategies as st

from bigfleet.coordinator.commands import (
    AddShard,
    BindCluster,
    BindClusters,
    Command,
    DropDomain,
    MoveQuota,
    ReleaseDomain,
    RemoveShard,
    ReturnQuota,
    SetDomainOwner,
    SetQuota,
    UpdateShard,
    UpsertProvider,
)
from bigfleet.coordinator.tables import QuotaKey
from bigfleet.model.ids import ClusterId, ShardId
from bigfleet.model.ownership import Domain

EAST, WEST, NORTH = ShardId("east-0"), ShardId("west-0"), ShardId("north-0")
ZONE = "topology.kubernetes.io/zone"
ZONE_A, ZONE_B = Domain(ZONE, "a"), Domain(ZONE, "b")
AWS = QuotaKey("aws", "eu-west-1")


SHARDS = st.sampled_from([EAST, WEST, NORTH])
DOMAINS = st.sampled_from([ZONE_A, ZONE_B, Domain("rack", "r1")])
COMMANDS: st.SearchStrategy[Command] = st.one_of(
    st.builds(AddShard, SHARDS, st.just("h:1"), st.integers(1, 3), st.just(1)),
    st.builds(UpdateShard, SHARDS, st.sampled_from(["h:1", "h:2"]), st.integers(1, 3)),
    st.builds(RemoveShard, SHARDS),
    st.builds(BindCluster, st.sampled_from([ClusterId("c1"), ClusterId("c2")]), SHARDS, st.just(1)),
    st.builds(BindClusters, st.just((ClusterId("c2"), ClusterId("c1"), ClusterId("c3"))), SHARDS, st.just(1)),
    st.builds(SetDomainOwner, DOMAINS, SHARDS, st.frozensets(SHARDS)),
    st.builds(ReleaseDomain, DOMAINS),
    st.builds(DropDomain, DOMAINS),
    st.builds(SetQuota, st.just(AWS), st.dictionaries(SHARDS, st.integers(0, 9))),
    st.builds(MoveQuota, st.just(AWS), SHARDS, SHARDS, st.integers(0, 5), st.sampled_from("abc"), st.just(1)),
    st.builds(ReturnQuota, st.just(AWS), SHARDS, SHARDS, st.integers(0, 5), st.sampled_from("abc")),
    st.builds(UpsertProvider, st.sampled_from(["aws", "gcp"]), st.sampled_from(["", "h:1"]), st.just("eu")),
)
