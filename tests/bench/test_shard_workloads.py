"""The workloads of W7 and W10 compute what they say, at a size that takes a moment; each counts and asserts itself."""

import pytest

from bench.harness import Benchmark, Repeated
from bench.workloads.shard import ListedFrom, delta, full_list, ingest, removals


@pytest.mark.parametrize(
    "benchmark",
    [
        full_list(2_000),
        full_list(2_000, ListedFrom.BYTES),
        full_list(2_000, ListedFrom.RECORDS),
        delta(2_000, 50),
        removals(2_000, 50, is_incremental=True),
        removals(2_000, 50, is_incremental=False),
        ingest(4, 0),
        ingest(4, 2),
        ingest(4, 2, is_alone=True),
    ],
    ids=lambda benchmark: f"{benchmark.name}, {benchmark.size}",
)
def test_a_workload_does_the_same_every_time(benchmark: Benchmark) -> None:
    prepared = benchmark.prepare()
    repeated = prepared if isinstance(prepared, Repeated) else Repeated(lambda: None, prepared)

    def once() -> object:
        repeated.before()
        return repeated.work()

    assert len({repr(once()) for _ in range(3)}) == 1
