"""What is measured of a coordinator in whole processes: that it counts what it says."""

from bench.processes.coordinators import keep_all
from bench.workloads.catalogue import MEASUREMENTS
from bench.workloads.coordinator import report_of
from bigfleet.rpc.wire.convert_coordinator import report_to_wire


def test_what_a_leader_keeps_is_counted_for_each_shard() -> None:
    contents = [report_to_wire(report_of(shard, giving_every=1)).SerializeToString() for shard in range(10)]

    counted = keep_all(contents)

    assert counted["shards"] == 10
    # More than what came over the wire, and not by an order of magnitude.
    assert len(contents[0]) < counted["kept"] * 1024 < 20 * len(contents[0])
    assert counted["most"] >= counted["kept"]


def test_the_measurements_of_the_coordinator_are_run_with_the_others() -> None:
    names = [measurement.name for measurement in MEASUREMENTS]

    assert {"W14 reports over gRPC, sqlite", "W14 memory of a shard's summary"} <= set(names)
