"""The metric: the design's own table, and closed forms that equal counting."""

import doctest

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigfleet.partition import metric
from bigfleet.partition.cluster import read_cluster
from bigfleet.partition.document import decode
from bigfleet.partition.metric import (
    HostLimits,
    Room,
    Size,
    UnlimitedSize,
    allocation_vector,
    is_over_ratio,
    vcpus_allowed,
)
from tests.engine.proof import in_proportion
from tests.partition.counting import counted_vector
from tests.partition.messages import Object, dumped, messages

USUAL = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=in_proportion(150))


def test_the_design_documents_own_table_is_reproduced() -> None:
    result = doctest.testmod(metric)

    assert (result.attempted, result.failed) == (8, 0)


@USUAL
@given(messages())
def test_the_closed_form_equals_counting_on_every_host(message: Object) -> None:
    for host in read_cluster(decode(dumped(message).encode())).hosts:
        assert host.allocation_vector() == counted_vector(host, host.room)


@given(st.integers(0, 10_000), st.sampled_from((0.0, 0.5, 1, 3, 7.3, 48, 1e6, -2)), st.floats(-0.5, 40))
def test_the_largest_number_of_cpus_is_the_last_that_the_ratio_allows(vcpus: int, cpus: float, ratio: float) -> None:
    most = vcpus_allowed(cpus, ratio)

    assert is_over_ratio(vcpus, cpus, ratio) == (most is not None and vcpus > most)


def test_memory_and_disk_must_stay_above_zero_and_spindles_may_reach_it() -> None:
    room = Room.of(memory_mib=100, disk_mib=100, spindles=2)

    assert allocation_vector((Size.of(memory_mib=50),), room) == (1,)
    assert allocation_vector((Size.of(disk_mib=50),), room) == (1,)
    assert allocation_vector((Size.of(memory_mib=1, spindles=1),), room) == (2,)


def test_what_is_planned_limits_as_much_as_what_is_there() -> None:
    room = Room.of(memory_mib=1_000, disk_mib=1_000)._replace(planned_memory_mib=100)

    assert allocation_vector((Size.of(memory_mib=30),), room) == (3,)


def test_a_kept_reserve_is_left_alone_and_a_broken_one_is_not_asked_for() -> None:
    room = Room.of(memory_mib=1_000, disk_mib=1_000)._replace(reserve_mib=500)

    assert allocation_vector((Size.of(memory_mib=100),), room) == (4,)
    assert allocation_vector((Size.of(memory_mib=100),), room._replace(is_reserve_broken=True)) == (9,)


def test_a_host_that_is_over_a_limit_takes_nothing() -> None:
    room = Room.of(memory_mib=1_000, disk_mib=1_000, vcpus_used=5)
    limits = HostLimits(is_exclusive=True, vcpus_max=4, spindle_use_max=0)

    assert allocation_vector((Size.of(memory_mib=1),), room, limits) == (0,)


def test_a_size_that_nothing_limits_has_no_count() -> None:
    with pytest.raises(UnlimitedSize) as caught:
        allocation_vector((Size.of(memory_mib=1), Size.of(vcpus=1)), Room.of(memory_mib=9, disk_mib=9))

    assert caught.value.position == 1
