"""The choice: on small clusters, the host or pair that trying every one of them finds, with the same counts."""

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bigfleet.partition.cluster import read_cluster, read_instance
from bigfleet.partition.document import decode
from bigfleet.partition.hosts import PartitionedHost
from bigfleet.partition.instance import Instance
from bigfleet.partition.policy import Policy
from bigfleet.partition.search import SearchOutcome, choose_host, choose_pair
from tests.engine.proof import in_proportion
from tests.partition.counting import Tried, try_hosts, try_pairs
from tests.partition.messages import Dice, Object, dice, dumped, instance, messages

USUAL = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    max_examples=in_proportion(200),
)


def candidates_of(message: Object) -> list[PartitionedHost]:
    """Return the candidates of the first group that has two."""
    cluster = read_cluster(decode(dumped(message).encode()))
    for group in cluster.groups:
        hosts = [host for host in cluster.hosts if host.group is group and host.is_candidate]
        if len(hosts) > 1:
            return hosts
    assume(False)
    raise AssertionError("not reached")


def wanted(die: Dice) -> Instance:
    """Return an instance to place, with one exclusion tag that others may have."""
    read = read_instance("new", decode(dumped(instance(die, is_wanted=True)).encode()))
    return read.with_exclusion_tags([tag for tag in read.tags if tag.startswith("service")])


def assert_same(outcome: SearchOutcome, tried: Tried) -> None:
    """Compare what was chosen and what was counted."""
    best = None if outcome.choice is None else (outcome.choice.key, outcome.choice.hosts)
    assert best == tried.best
    assert outcome.successes == tried.successes
    assert dict(outcome.refusals) == dict(tried.refusals)


def check(
    choose: Callable[..., SearchOutcome],
    try_all: Callable[..., Tried],
    hosts: Sequence[PartitionedHost],
    one: Instance,
    force: bool,
) -> bool:
    """Compare, and say whether anything was placed."""
    policy: Policy = hosts[0].group.policy
    outcome = choose(hosts, one, policy, force=force)
    assert_same(outcome, try_all(hosts, one, force=force))
    return outcome.choice is not None


@USUAL
@given(messages(), dice(), st.booleans())
def test_the_chosen_host_minimises_the_key_among_all(message: Object, die: Dice, force: bool) -> None:
    check(choose_host, try_hosts, candidates_of(message), wanted(die), force)


@USUAL
@given(messages(), dice(), st.booleans())
def test_the_chosen_pair_minimises_the_key_among_all_ordered_pairs(message: Object, die: Dice, force: bool) -> None:
    one = wanted(die)
    mirrored = Instance(
        name="new",
        memory_mib=one.memory_mib,
        vcpus=one.vcpus,
        disk_mib=one.disk_mib,
        disks_mib=one.disks_mib,
        spindles=one.spindles,
        spindle_use=one.spindle_use,
        template="drbd",
        state=one.state,
        is_forthcoming=one.is_forthcoming,
    )

    check(choose_pair, try_pairs, candidates_of(message), mirrored, force)
