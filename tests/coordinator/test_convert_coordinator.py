"""Reports, answers and instructions survive the wire in both directions (docs/spec/wire.md §10)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigfleet.coordinator.ephemeral_state import ReportAnswer
from bigfleet.model import labels
from bigfleet.model.ids import ClusterId, Fingerprint, MachineId, ShardId
from bigfleet.model.instructions import (
    Ack,
    AssignDomain,
    CrossShardDrain,
    Instruction,
    InstructionOutcome,
    Payload,
    ReassignSpeculative,
    Selector,
    TransferOwnership,
    UnassignDomain,
)
from bigfleet.model.machine import Machine
from bigfleet.model.ownership import (
    ADOPTED_MAX,
    Base,
    Domain,
    Owned,
    OwnershipRow,
    OwnershipVersion,
    Reservation,
    RowKind,
)
from bigfleet.model.profile import Operator, Requirement
from bigfleet.model.shard_report import CapacityCount, Holding, ShardReport, ShardSummary, Shortfall, SoldOutPool
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.rpc.wire.convert_coordinator import answer_from_wire, answer_to_wire, report_from_wire, report_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2
from tests.engine.proof import in_proportion

names = st.text("abcxyz-01", min_size=1, max_size=8)
shards = names.map(ShardId)
machine_ids = names.map(MachineId)
id_lists = st.lists(machine_ids, max_size=3, unique=True).map(tuple)
counts = st.integers(0, 2**31 - 1)
vectors = st.dictionaries(st.sampled_from(["cpu", "memory", "gpu"]), st.integers(1, 10**15), max_size=3)
versions = st.builds(OwnershipVersion, st.integers(0, 2**62), st.integers(0, 2**40))
domains = st.builds(Domain, names, names)
requirements = st.lists(
    st.builds(
        Requirement,
        st.sampled_from([labels.ZONE, labels.INSTANCE_TYPE, "x"]),
        st.sampled_from([Operator.IN, Operator.NOT_IN]),
        st.lists(names, min_size=1, max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
machines = st.builds(
    Machine, id=machine_ids, state=st.sampled_from([MachineState.IDLE, MachineState.SPECULATIVE]), zone=names
)
selectors = st.builds(
    Selector, count=counts, instance_type=names, zone=names, requirements=requirements, min_unit=vectors
)
payloads: st.SearchStrategy[Payload] = st.one_of(
    st.builds(AssignDomain, domains),
    st.builds(UnassignDomain, domains),
    st.builds(
        ReassignSpeculative,
        from_shard=shards,
        to_shard=shards,
        machine_ids=id_lists,
        selector=st.none() | selectors,
    ),
    st.builds(
        CrossShardDrain,
        to_shard=shards,
        preemptor_priority=st.integers(-(2**31), 2**31 - 1),
        requester_interruption_bucket=st.integers(0, 11),
        selector=selectors,
        machine_ids=id_lists,
    ),
    st.builds(
        TransferOwnership,
        from_shard=shards,
        to_shard=shards,
        machine_ids=id_lists,
        selector=st.none() | selectors,
        machines=st.lists(machines, max_size=2).map(tuple),
        is_note=st.booleans(),
    ),
)
instructions = st.builds(Instruction, instruction_id=names, version=versions, payload=st.none() | payloads)
rows = st.one_of(
    st.builds(OwnershipRow, st.just(RowKind.ADOPTED) | st.just(RowKind.DISOWNED), versions, shards),
    st.builds(OwnershipRow, st.just(RowKind.RELEASED), versions, shards, st.integers(0, 2**62), st.none() | machines),
)
holdings = st.builds(
    Holding,
    owned=st.builds(
        Owned,
        base=st.sampled_from(Base),
        domains=st.frozensets(domains, max_size=3),
        rows=st.dictionaries(machine_ids, rows, max_size=3),
    ),
    reservations=st.lists(
        st.builds(
            Reservation,
            machine_id=machine_ids,
            to_shard=shards,
            instruction_id=names,
            is_ready=st.booleans(),
            expires_unix_nanos=st.integers(0, 2**62),
            instance_type=names,
            zone=names,
        ),
        max_size=2,
    ).map(tuple),
)
capacity = st.lists(
    st.builds(CapacityCount, names, names, st.sampled_from(CapacityType), counts, vectors), max_size=3
).map(tuple)
sold_out = st.lists(st.builds(SoldOutPool, names, names, st.sampled_from(CapacityType), counts), max_size=3).map(tuple)
reports = st.builds(
    ShardReport,
    shard_id=shards,
    epoch=st.integers(0, 2**62),
    cycle=st.integers(0, 2**62),
    timestamp_unix_nanos=st.integers(0, 2**62),
    address=names,
    echoed_term=st.integers(0, 2**62),
    summary=st.builds(
        ShardSummary,
        total_machines=counts,
        free_machines=counts,
        type_counts=st.dictionaries(names, counts, max_size=3),
        zone_counts=st.dictionaries(names, counts, max_size=3),
        provider_address=names,
        idle=capacity,
        speculative=capacity,
    ),
    shortfalls=st.lists(
        st.builds(
            Shortfall,
            fingerprint=names.map(Fingerprint),
            requirements=requirements,
            deficit=vectors,
            min_unit=vectors,
            priority=st.integers(-(2**31), 2**31 - 1),
            age_cycles=counts,
            interruption_bucket=st.integers(0, 11),
            is_topology_constrained=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    acks=st.lists(
        st.builds(
            Ack, names, st.sampled_from(InstructionOutcome), names, id_lists, st.lists(machines, max_size=2).map(tuple)
        ),
        max_size=2,
    ).map(tuple),
    clusters=st.none() | st.frozensets(names.map(ClusterId), min_size=1, max_size=3),
    holding=st.none() | holdings,
    sold_out=sold_out,
)


@settings(max_examples=in_proportion(150))
@given(reports)
def test_a_report_comes_back_as_it_was_sent(report: ShardReport) -> None:
    received = coordinator_pb2.ShardReport.FromString(report_to_wire(report).SerializeToString())

    # With a view the clusters are told too, also when there are none.
    is_told = report.holding is not None and report.clusters is None
    assert report_from_wire(received) == (replace(report, clusters=frozenset()) if is_told else report)


@settings(max_examples=in_proportion(150))
@given(
    st.builds(
        ReportAnswer,
        term=st.integers(0, 2**62),
        acknowledged=st.booleans(),
        instructions=st.lists(instructions, max_size=3).map(tuple),
        want_ownership=st.booleans(),
        confirmed=id_lists,
        sold_out=sold_out,
    )
)
def test_an_answer_comes_back_as_it_was_sent(answer: ReportAnswer) -> None:
    received = coordinator_pb2.ReportAck.FromString(answer_to_wire(answer).SerializeToString())

    assert answer_from_wire(received) == answer


def test_domains_that_are_left_stand_among_the_held_ones() -> None:
    zone_a, zone_b = Domain("zone", "a"), Domain("zone", "b")
    owned = Owned(base=Base.DOMAINS, domains=frozenset({zone_a}), leaving=frozenset({zone_b}))
    report = ShardReport(shard_id=ShardId("s"), epoch=1, cycle=1, holding=Holding(owned=owned))

    holding = report_from_wire(report_to_wire(report)).holding

    assert holding is not None
    assert holding.owned.domains == {zone_a, zone_b}


@pytest.mark.parametrize("kind", RowKind)
def test_a_view_of_more_machines_than_a_shard_adopts_is_taken(kind: RowKind) -> None:
    """Refused, it could never shrink: a shard whose report is refused is not instructed to forget anything."""
    row = OwnershipRow(kind, OwnershipVersion(1, 1), ShardId("other"))
    owned = Owned(base=Base.DOMAINS, rows={MachineId(f"m{number}"): row for number in range(ADOPTED_MAX + 1)})
    report = ShardReport(shard_id=ShardId("s"), epoch=1, cycle=1, clusters=frozenset(), holding=Holding(owned=owned))

    assert report_from_wire(report_to_wire(report)) == report


@pytest.mark.rule("coordinator 6/8")
def test_an_outcome_of_a_later_version_reads_as_a_failure_that_is_tried_again() -> None:
    message = coordinator_pb2.ShardReport(shard_id="s")
    message.instruction_acks.add(instruction_id="7-1", outcome=99)

    (ack,) = report_from_wire(message).acks

    assert ack.outcome is InstructionOutcome.FAILED
