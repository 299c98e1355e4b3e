"""The allocator: what is taken comes back whole, and what it offers can really be placed."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.partition.allocator import Allocator, NoSuchInstance, NothingToTry
from bigfleet.partition.cluster import GanetiCluster, read_cluster, read_instance
from bigfleet.partition.document import decode
from bigfleet.partition.hosts import PartitionedHost, Role, as_primary
from bigfleet.partition.instance import Instance
from bigfleet.partition.policy import PolicyRefusal
from tests.engine.proof import in_proportion
from tests.partition.messages import Dice, Object, dice, dumped, host, instance, messages, policy

USUAL = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=in_proportion(150))


def cluster_of(message: Object) -> GanetiCluster:
    """Return the cluster of a message."""
    return read_cluster(decode(dumped(message).encode()))


def simple_cluster(*states: str) -> GanetiCluster:
    """Return empty hosts, one for each state: `up`, `offline` or `drained`."""
    die = Dice(bytes(1_000))
    nodes = Object()
    for number, state in enumerate(states):
        body = Object((key, value) for key, value in host(die, group="u0", is_exclusive=True) if key != state)
        nodes.append((f"n{number}", Object([*body, *([(state, True)] if state != "up" else [])])))
    group = Object(
        [("name", "g0"), ("alloc_policy", "preferred"), ("networks", []), ("tags", []), ("ipolicy", policy(die))]
    )
    return cluster_of(
        Object(
            [
                ("cluster_tags", []),
                ("enabled_hypervisors", ["xen-pvm"]),
                ("nodegroups", Object([("u0", group)])),
                ("nodes", nodes),
                ("instances", Object()),
            ]
        )
    )


def an_instance(name: str, die: Dice | None = None, **changes: object) -> Instance:
    """Return a quarter of a host, or what the dice say."""
    body = dict(instance(die or Dice(bytes(30)), is_wanted=True))
    return read_instance(name, decode(dumped(Object({**body, **changes}.items())).encode()))


def state_of(host: PartitionedHost) -> object:
    """Return everything about a host that a placement changes."""
    reserves = {index: mib for index, mib in host.reserves_mib.items() if mib}
    return host.room, reserves, +host.exclusion_tags, list(host.instances), host.allocation_vector()


@USUAL
@given(messages(), st.lists(dice(), max_size=6), st.randoms())
def test_what_is_released_in_any_order_leaves_the_hosts_as_they_were(
    message: Object, several: list[Dice], random: Random
) -> None:
    cluster = cluster_of(message)
    allocator = Allocator(cluster)
    before = [state_of(host) for host in cluster.hosts]
    taken = []
    for number, die in enumerate(several):
        one = an_instance(f"new{number}", die)
        for group in cluster.groups:
            try:
                outcome = allocator.choose(group, one, hosts=2 if one.template == "drbd" else 1)
            except NothingToTry:
                continue
            if outcome.choice is not None:
                allocator.take(one, outcome.choice)
                taken.append(one.name)
                break
    random.shuffle(taken)
    for name in taken:
        allocator.release(name)

    assert [state_of(host) for host in cluster.hosts] == before


@USUAL
@given(messages(), dice())
def test_an_offer_is_as_often_as_the_instance_can_really_be_placed(message: Object, die: Dice) -> None:
    cluster = cluster_of(message)
    allocator = Allocator(cluster)
    one = an_instance("new", die)
    for there in {each.name: each for each in cluster.hosts}.values():
        offered = allocator.how_often(there.name, one)
        placed = 0
        while there.is_candidate and placed <= offered:
            room = there.group.policy.refusal(one, is_exclusive=there.is_exclusive) or as_primary(there, one)
            if isinstance(room, PolicyRefusal):
                break
            there.take_primary(one, room)
            placed += 1

        assert placed == offered


def test_an_exclusive_tag_lets_one_instance_on_a_host() -> None:
    cluster = simple_cluster("up")
    allocator = Allocator(cluster)
    one = an_instance("new").with_exclusion_tags(["service:a"])

    assert allocator.how_often("n0", one) == 1
    assert allocator.how_often("n0", an_instance("new")) > 1


@pytest.mark.parametrize("state", ["offline", "drained"])
def test_a_host_that_takes_nothing_offers_nothing(state: str) -> None:
    allocator = Allocator(simple_cluster("up", state))

    assert sum(allocator.vector("n0")) > 0
    assert sum(allocator.vector("n1")) == 0
    assert allocator.how_often("n1", an_instance("new")) == 0


def test_candidates_are_those_of_the_list_and_the_last_of_equals_is_chosen() -> None:
    cluster = simple_cluster("up", "up", "up")
    allocator = Allocator(cluster)
    (group,) = cluster.groups
    every = allocator.choose(group, an_instance("new"))
    listed = allocator.choose(group, an_instance("new"), among={"n0", "n1", "nobody"})

    assert [outcome.choice.hosts[0].name for outcome in (every, listed) if outcome.choice] == ["n2", "n1"]
    assert (every.successes, listed.successes) == (3, 2)
    with pytest.raises(NothingToTry, match="No online nodes"):
        allocator.choose(group, an_instance("new"), among=())


def test_what_stands_on_a_host_can_be_asked_and_released_once() -> None:
    cluster = simple_cluster("up", "up")
    allocator = Allocator(cluster)
    one = an_instance("new", disk_template="drbd")
    outcome = allocator.choose(cluster.groups[0], one, hosts=2)
    assert outcome.choice is not None
    allocator.take(one, outcome.choice)

    assert allocator.standing_on("n1") == [(one, Role.PRIMARY)]
    assert allocator.standing_on("n0") == [(one, Role.SECONDARY)]
    assert [host.name for host in allocator.release("new")] == ["n1", "n0"]
    assert allocator.standing_on("n1") == []
    with pytest.raises(NoSuchInstance):
        allocator.release("new")


@pytest.mark.parametrize("template", ["plain", "drbd"])
def test_a_new_allocator_with_everything_restored_is_as_the_old_one(template: str) -> None:
    old, new = (Allocator(simple_cluster("up", "up", "up")) for _ in range(2))
    names = [f"new{number}" for number in range(4)]
    for name in names:
        one = an_instance(name, disk_template=template)
        outcome = old.choose(old.cluster.groups[0], one, hosts=2 if template == "drbd" else 1)
        assert outcome.choice is not None
        old.take(one, outcome.choice)
        new.restore(one, *(host.name for host in outcome.choice.hosts))

    rooms = [[host.room for host in each.cluster.hosts] for each in (old, new)]
    assert rooms[0] == rooms[1]
    assert [new.release(name)[0].name for name in names] == [old.release(name)[0].name for name in names]
    assert [host.room for host in new.cluster.hosts] == [host.room for host in old.cluster.hosts]


def test_what_is_restored_may_overfill_a_host_which_then_offers_nothing() -> None:
    allocator = Allocator(simple_cluster("up"))
    for number in range(5):
        allocator.restore(an_instance(f"new{number}"), "n0")

    assert set(allocator.vector("n0")) == {0}
    with pytest.raises(KeyError):
        allocator.restore(an_instance("other"), "n0", "nowhere")
    assert len(allocator.standing_on("n0")) == 5
