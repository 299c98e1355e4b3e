"""The workload of a recorded shard computes what it says, at a size that takes a moment; it asserts itself."""

import pytest

from bench.workloads.recording import recording


@pytest.mark.slow
@pytest.mark.parametrize("is_incremental", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_recorded_churn_is_read_back_and_decided_alike(is_incremental: bool) -> None:
    measured = recording(20_000, 10, is_incremental=is_incremental, cycles=4).run()

    readings = {reading.what: reading.value for reading in measured.readings}
    assert readings["a record"] > 0
    assert readings["on the loop, of a cycle"] < readings["in all, of a cycle"]
