"""Frames cross a session whole; a roll-up is read late, refused at its first fault, and known by its digest."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings

from bigfleet.model.frames import (
    Acknowledgement,
    AvailableCapacity,
    BootstrapResponse,
    Confidence,
    DrainOutcome,
    DrainResult,
    Hello,
    MalformedMessage,
    NodeStateUpdate,
    NodeStatus,
    OperatorFrame,
    ReclaimAck,
    RollUp,
    ShardFrame,
)
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import Family
from bigfleet.model.states import MachineState
from bigfleet.rpc.wire import amounts as wire_amounts
from bigfleet.rpc.wire import convert_need
from bigfleet.rpc.wire.convert_session import (
    USER_DATA_BYTES_MAX,
    ReceivedRollUp,
    need_to_wire,
    operator_frame_from_wire,
    operator_frame_to_wire,
    shard_frame_from_wire,
    shard_frame_to_wire,
)
from bigfleet.rpc.wire.gen import capacity_pb2, shard_pb2
from bigfleet.shard.sessions.registry import RollUpOffer
from tests.engine.proof import in_proportion
from tests.rpc.strategies import PLAIN_OPERATOR_FRAMES, SHARD_FRAMES, rollups

WireRequirement = capacity_pb2.NodeSelectorRequirement
IN = WireRequirement.OPERATOR_IN
EXISTS = WireRequirement.OPERATOR_EXISTS
SAME = WireRequirement.OPERATOR_SAME


def received(frame: OperatorFrame) -> object:
    """Return the frame as the shard reads it off the wire."""
    content = operator_frame_to_wire(frame).SerializeToString()
    return operator_frame_from_wire(shard_pb2.OperatorMessage.FromString(content))


def offered(message: capacity_pb2.ClusterCapacityNeeds) -> RollUpOffer:
    """Return the roll-up as the shard receives it."""
    frame = operator_frame_from_wire(shard_pb2.OperatorMessage(rollup=message))
    assert isinstance(frame, ReceivedRollUp)
    return frame


def wire_need(
    *requirements: WireRequirement,
    aggregate: Mapping[str, str] | None = None,
    min_unit: Mapping[str, str] | None = None,
    group: str = "",
) -> capacity_pb2.CapacityNeed:
    return capacity_pb2.CapacityNeed(
        requirements=requirements, aggregate_resources=aggregate or {"cpu": "4"}, min_unit=min_unit, group=group
    )


def rollup(*needs: capacity_pb2.CapacityNeed, at: int = 7) -> capacity_pb2.ClusterCapacityNeeds:
    return capacity_pb2.ClusterCapacityNeeds(cluster_id="blue", timestamp_unix_nanos=at, needs=needs)


def fault(message: capacity_pb2.ClusterCapacityNeeds) -> MalformedMessage:
    """Return the fault for which the roll-up is refused."""
    with pytest.raises(MalformedMessage) as caught:
        offered(message).needs()
    return caught.value


class TestFrames:
    """Hello, acks, results and the shard's frames."""

    @settings(max_examples=in_proportion(100), deadline=None)
    @given(PLAIN_OPERATOR_FRAMES)
    def test_operator_frames_round_trip(self, frame: OperatorFrame) -> None:
        """What an operator sends is what its shard reads."""
        assert frame == received(frame)

    @settings(max_examples=in_proportion(100), deadline=None)
    @given(SHARD_FRAMES)
    def test_shard_frames_round_trip(self, frame: ShardFrame) -> None:
        """What a shard sends is what the operator reads."""
        content = shard_frame_to_wire(frame).SerializeToString()

        assert frame == shard_frame_from_wire(shard_pb2.ShardMessage.FromString(content))

    def test_unknown_members_read_as_none(self) -> None:
        """A frame of a newer peer, or one with no payload, is nothing that this version can name."""
        newer = b"\xfa\x3e\x02\x08\x01"  # field 1007, a message

        assert operator_frame_from_wire(shard_pb2.OperatorMessage.FromString(newer)) is None
        assert operator_frame_from_wire(shard_pb2.OperatorMessage()) is None
        assert shard_frame_from_wire(shard_pb2.ShardMessage.FromString(newer)) is None
        assert shard_frame_from_wire(shard_pb2.ShardMessage()) is None

    def test_unknown_enum_values_read_as_unspecified(self) -> None:
        """Outcomes, states, operators and confidences of a newer peer never break a frame."""
        result = shard_pb2.DrainResult(outcome=shard_pb2.DrainResult.Outcome.ValueType(99))
        update = shard_pb2.NodeStateUpdate()
        update.MergeFromString(b"\x20\x63")  # state = 99
        hint = shard_pb2.AvailableCapacityUpdate(
            requirements=[WireRequirement(key="k", operator=WireRequirement.Operator.ValueType(99))],
            confidence=shard_pb2.AvailableCapacityUpdate.Confidence.ValueType(99),
        )
        drain = operator_frame_from_wire(shard_pb2.OperatorMessage(drain_result=result))
        node = shard_frame_from_wire(shard_pb2.ShardMessage(node_state_update=update))
        available = shard_frame_from_wire(shard_pb2.ShardMessage(available_capacity=hint))

        assert isinstance(drain, DrainResult)
        assert drain.outcome is DrainOutcome.UNSPECIFIED
        assert isinstance(node, NodeStateUpdate)
        assert node.state is MachineState.UNSPECIFIED
        assert isinstance(available, AvailableCapacity)
        assert available.confidence is Confidence.UNSPECIFIED
        assert (Requirement("k", Operator.UNSPECIFIED),) == available.requirements

    def test_coalescing_frames_carry_their_key(self) -> None:
        """The key under which a newer frame replaces a queued one is on the wire."""
        node = NodeStateUpdate(machine_id="m-1", cluster_id="blue", state=MachineState.CONFIGURED)
        hint = AvailableCapacity(
            fingerprint="p=1|",
            requirements=(),
            resources={},
            available_count=0,
            confidence=Confidence.NONE,
            price_usd_per_hour=0.0,
        )

        assert shard_frame_to_wire(node).node_state_update.supersedes_key == "node:m-1"
        assert shard_frame_to_wire(hint).available_capacity.supersedes_key == "available:p=1|"

    @pytest.mark.parametrize(
        ("frame", "place"),
        [
            (Hello(cluster_id="x" * 1025), "hello.cluster_id"),
            (Hello(cluster_id="a", protocol_version="ü" * 513), "hello.protocol_version"),
            (Hello(cluster_id="a", capabilities=frozenset({"", "x" * 1025})), "hello.capabilities[1]"),
            (BootstrapResponse(request_id="x" * 1025), "bootstrap_response.request_id"),
            (ReclaimAck(instruction_id="x" * 1025, nodes_started=1), "reclaim_ack.instruction_id"),
            (
                NodeStatus(machine_id="x" * 1025, node_name="", ready=True, observed_unix_nanos=1),
                "node_status.machine_id",
            ),
            (
                NodeStatus(machine_id="m", node_name="x" * 1025, ready=True, observed_unix_nanos=1),
                "node_status.node_name",
            ),
            (
                DrainResult(instruction_id="x" * 1025, machine_id="m", outcome=DrainOutcome.DRAINED),
                "drain_result.instruction_id",
            ),
            (
                DrainResult(instruction_id="i", machine_id="x" * 1025, outcome=DrainOutcome.DRAINED),
                "drain_result.machine_id",
            ),
        ],
    )
    def test_overlong_names_are_refused_with_their_field(self, frame: OperatorFrame, place: str) -> None:
        """A name over 1,024 bytes names its field; half a name would be another one."""
        with pytest.raises(MalformedMessage) as caught:
            received(frame)

        assert place == caught.value.place

    def test_names_of_the_largest_size_pass(self) -> None:
        """1,024 bytes are allowed, counted in UTF-8."""
        frame = ReclaimAck(instruction_id="ü" * 512, nodes_started=1)

        assert frame == received(frame)

    def test_text_for_people_is_cut_and_still_says_so(self) -> None:
        """A long cause leaves with whole characters and an ellipsis, within 1,024 bytes; neither side fails on it."""
        cause = "ü" * 2000
        texts = [
            operator_frame_to_wire(BootstrapResponse(request_id="r", error=cause)).bootstrap_response.error,
            shard_frame_to_wire(Acknowledgement(echo="rollup_rejected", error=cause)).ack.error,
            shard_frame_to_wire(
                NodeStateUpdate(machine_id="m", cluster_id="c", state=MachineState.FAILED, last_error=cause)
            ).node_state_update.last_error,
        ]

        assert texts == ["ü" * 510 + "…"] * 3
        assert len(texts[0].encode()) == 1023

    def test_a_foreign_operators_long_text_is_cut_on_receipt(self) -> None:
        """An operator that does not cut its own text is understood all the same."""
        message = shard_pb2.OperatorMessage(drain_result=shard_pb2.DrainResult(message="x" * 5000))
        frame = operator_frame_from_wire(message)

        assert isinstance(frame, DrainResult)
        assert frame.message == "x" * 1021 + "…"

    def test_text_that_is_not_unicode_leaves_with_a_question_mark(self) -> None:
        """Half a surrogate pair, as file names bring into errors, does not hold a frame back."""
        frame = DrainResult(instruction_id="i", machine_id="m", outcome=DrainOutcome.FAILED, message="no \udcff file")

        assert operator_frame_to_wire(frame).drain_result.message == "no ? file"

    def test_a_blob_over_the_bound_reads_as_the_operators_error(self) -> None:
        """The provider would refuse it and the machine would be blamed; so the row hears it."""
        largest = BootstrapResponse(request_id="r", user_data=bytes(USER_DATA_BYTES_MAX))
        larger = received(BootstrapResponse(request_id="r", user_data=bytes(USER_DATA_BYTES_MAX + 1)))

        assert largest == received(largest)
        assert isinstance(larger, BootstrapResponse)
        assert (larger.request_id, larger.user_data) == ("r", b"")
        assert larger.error == "user_data has 1048577 bytes, at most 1048576 are allowed"


class TestRollUp:
    """Demand on its way from an operator to its shard."""

    @settings(max_examples=in_proportion(150), deadline=None)
    @given(rollups())
    def test_rows_round_trip(self, sent: RollUp) -> None:
        """Requirements, spreads, priority, buckets, vectors and groups come back equal, in order."""
        offer = received(sent)

        assert isinstance(offer, ReceivedRollUp)
        assert (sent.cluster_id, sent.timestamp_unix_nanos) == (offer.cluster_id, offer.timestamp_unix_nanos)
        assert sent.needs == offer.needs()

    def test_an_empty_roll_up_is_a_statement(self) -> None:
        """No rows are no rows, not a fault."""
        assert offered(rollup()).needs() == ()

    def test_each_field_of_a_row_arrives(self) -> None:
        """One row with everything in it, spelled out."""
        row = capacity_pb2.CapacityNeed(
            requirements=[
                WireRequirement(key="zone", operator=SAME),
                WireRequirement(key="arch", operator=IN, values=["b", "a", "b"]),
            ],
            aggregate_resources={"cpu": "2500m", "memory": "1.5Gi", "gpu": "0"},
            priority=-5,
            spread=[capacity_pb2.TopologySpread(topology_key="rack", max_skew=2, when_unsatisfiable=1)],  # type: ignore[arg-type]
            interruption_penalty_bucket=27,  # type: ignore[arg-type]
            reclamation_penalty_bucket=2,  # type: ignore[arg-type]
            min_unit={"cpu": "500m", "gpu": "0"},
            group="gang-1",
        )
        (need,) = offered(rollup(row)).needs()

        assert need == Need(
            cluster=ClusterId("blue"),
            profile=Profile(
                requirements=(Requirement("arch", Operator.IN, ("a", "b")), Requirement("zone", Operator.SAME)),
                spreads=(TopologySpread("rack", 2, SpreadMode.DO_NOT_SCHEDULE),),
                priority=-5,
                interruption_bucket=27,
                reclamation_bucket=2,
            ),
            aggregate={"cpu": 2500, "memory": 1536 * 1024 * 1024 * 1000},
            min_unit={"cpu": 500},
            group="gang-1",
        )
        assert need.families["memory"] is Family.BINARY
        assert need.families["cpu"] is Family.DECIMAL

    def test_quantities_are_written_back_in_the_rows_own_way(self) -> None:
        """A row that said 1536Mi of something unknown says so again; dimensions without a family are guessed."""
        row = wire_need(aggregate={"example.com/ram": "1536Mi", "cpu": "1e3", "memory": "2Gi"})
        (need,) = offered(rollup(row)).needs()

        assert dict(need_to_wire(need).aggregate_resources) == {
            "cpu": "1e3",
            "example.com/ram": "1536Mi",
            "memory": "2Gi",
        }

    def test_where_both_maps_name_a_dimension_the_sum_decides_how_it_prints(self) -> None:
        """The aggregate's spelling wins over that of the min unit, whose own dimensions keep theirs."""
        row = wire_need(aggregate={"ram": "4Ki"}, min_unit={"ram": "4096", "disk": "1Ki"})
        (need,) = offered(rollup(row)).needs()

        assert need.families == {"ram": Family.BINARY, "disk": Family.BINARY}

    def test_an_unknown_spread_mode_reads_as_unspecified(self) -> None:
        """Ingest does not name spreads: a mode of a newer operator is no fault."""
        spread = capacity_pb2.TopologySpread(
            topology_key="zone",
            max_skew=1,
            when_unsatisfiable=capacity_pb2.TopologySpread.WhenUnsatisfiable.ValueType(9),
        )
        (need,) = offered(rollup(capacity_pb2.CapacityNeed(spread=[spread]))).needs()

        assert (TopologySpread("zone", 1, SpreadMode.UNSPECIFIED),) == need.profile.spreads

    def test_unknown_fields_are_ignored(self) -> None:
        """A field of a newer operator changes no row."""
        row = wire_need()
        newer = capacity_pb2.CapacityNeed.FromString(row.SerializeToString() + b"\xfa\x3e\x02\x08\x01")

        assert offered(rollup(row)).needs() == offered(rollup(newer)).needs()


class TestDigest:
    """How a shard knows a roll-up that it has already read."""

    @pytest.mark.rule("shard 4/2")
    def test_it_ignores_the_timestamp_alone(self) -> None:
        """Equal demand at another time has an equal digest; any other difference shows."""
        demand = [wire_need(WireRequirement(key="zone", operator=SAME), group="g"), wire_need(min_unit={"cpu": "1"})]
        base = offered(rollup(*demand, at=1))
        other_cluster = rollup(*demand, at=1)
        other_cluster.cluster_id = "green"

        assert base.digest == offered(rollup(*demand, at=2**62)).digest
        assert base.digest != offered(rollup(*reversed(demand), at=1)).digest
        assert base.digest != offered(rollup(demand[0], at=1)).digest
        assert base.digest != offered(other_cluster).digest

    @pytest.mark.rule("shard 4/2")
    def test_it_ignores_the_order_of_maps(self) -> None:
        """A map has no order, whatever the sender's library makes of it."""
        names = [f"r{number}" for number in range(20)]
        forth = rollup(wire_need(aggregate=dict.fromkeys(names, "1")))
        back = rollup(wire_need(aggregate=dict.fromkeys(reversed(names), "1")))

        assert offered(forth).digest == offered(back).digest

    def test_reading_it_changes_nothing(self) -> None:
        """The timestamp, the rows and the digest are the same before and after."""
        offer = offered(rollup(wire_need(), at=9))
        before = offer.needs()

        assert len(offer.digest) == 16
        assert offer.timestamp_unix_nanos == 9
        assert (before, offer.digest) == (offer.needs(), offered(rollup(wire_need(), at=9)).digest)

    def test_a_malformed_roll_up_has_one_too(self) -> None:
        """Rows are judged only when they are read: taking a roll-up off the wire never fails."""
        offer = offered(rollup(wire_need(aggregate={"cpu": "lots"})))

        assert len(offer.digest) == 16
        with pytest.raises(MalformedMessage):
            offer.needs()


def unknown_operator(number: int) -> WireRequirement:
    return WireRequirement(key="k", operator=WireRequirement.Operator.ValueType(number))


def bucket(**ordinals: int) -> capacity_pb2.CapacityNeed:
    return capacity_pb2.CapacityNeed(**ordinals)  # type: ignore[arg-type]


EXIST = WireRequirement(key="k", operator=EXISTS)


class TestRefusals:
    """What refuses the whole roll-up, with the place of the first fault (docs/spec/wire.md §7)."""

    @pytest.mark.parametrize(
        ("need", "place", "text"),
        [
            (wire_need(unknown_operator(0)), "requirements[0].operator", "is 0, known operators are In (1), NotIn (2)"),
            (wire_need(EXIST, EXIST, unknown_operator(6)), "requirements[2].operator", "is 6, known operators are"),
            (wire_need(WireRequirement(operator=EXISTS)), "requirements[0].key", "is empty"),
            (
                wire_need(WireRequirement(key="k", operator=IN)),
                "requirements[0].values",
                "is empty, the operator In needs at least one value",
            ),
            (
                wire_need(EXIST, WireRequirement(key="k", operator=WireRequirement.OPERATOR_NOT_IN)),
                "requirements[1].values",
                "is empty, the operator NotIn needs at least one value",
            ),
            (
                wire_need(aggregate={"cpu": "1", "memory": "4GB"}),
                "aggregate_resources['memory']",
                "'4GB' is no quantity",
            ),
            (wire_need(aggregate={"cpu": "-1m"}), "aggregate_resources['cpu']", "'-1m' is negative"),
            (wire_need(min_unit={"cpu": ""}), "min_unit['cpu']", "'' is no quantity"),
            (wire_need(min_unit={"cpu": "-4"}), "min_unit['cpu']", "'-4' is negative"),
            (bucket(interruption_penalty_bucket=28), "interruption_penalty_bucket", "is 28, penalty buckets are 0 to"),
            (bucket(reclamation_penalty_bucket=-1), "reclamation_penalty_bucket", "is -1, penalty buckets are 0 to 27"),
            (wire_need(EXIST, group="g"), "group", "none of the row's requirements has the operator Same"),
        ],
    )
    def test_the_first_fault_is_named_with_row_and_field(
        self, need: capacity_pb2.CapacityNeed, place: str, text: str
    ) -> None:
        """The rows before it are good, and one bad row refuses all."""
        found = fault(rollup(*[wire_need(EXIST)] * 17, need, wire_need(unknown_operator(9))))

        assert found.place == f"needs[17].{place}"
        assert text in found.fault

    @pytest.mark.parametrize("operator", [1, 2, 3, 4, 5])
    def test_each_known_operator_passes(self, operator: int) -> None:
        """Values are demanded of In and NotIn only, and allowed everywhere."""
        requirement = WireRequirement(key="k", operator=WireRequirement.Operator.ValueType(operator), values=["v"])
        (need,) = offered(rollup(wire_need(requirement))).needs()

        assert (Requirement("k", Operator(operator), ("v",)),) == need.profile.requirements

    def test_a_group_passes_with_any_same_requirement(self) -> None:
        """Whichever position the Same requirement has."""
        (need,) = offered(rollup(wire_need(EXIST, WireRequirement(key="z", operator=SAME), group="g"))).needs()

        assert need.group == "g"


Build = Callable[[int], capacity_pb2.ClusterCapacityNeeds]


class TestBounds:
    """The bounds of docs/spec/wire.md §2: the largest passes, one more is refused."""

    @pytest.mark.parametrize(
        ("largest", "place", "build"),
        [
            (
                convert_need.REQUIREMENTS_MAX,
                "needs[0].requirements",
                lambda n: rollup(wire_need(*[WireRequirement(key=f"k{i}", operator=EXISTS) for i in range(n)])),
            ),
            (
                convert_need.VALUES_MAX,
                "needs[0].requirements[0].values",
                # Counted as sent: dropping duplicates first would be work without a bound.
                lambda n: rollup(wire_need(WireRequirement(key="k", operator=IN, values=["v"] * n))),
            ),
            (
                wire_amounts.RESOURCE_NAMES_MAX,
                "needs[0].aggregate_resources",
                lambda n: rollup(wire_need(aggregate={f"r{i}": "0" for i in range(n)})),
            ),
            (
                wire_amounts.RESOURCE_NAMES_MAX,
                "needs[0].min_unit",
                lambda n: rollup(wire_need(min_unit={f"r{i}": "1" for i in range(n)})),
            ),
            (
                1024,
                "needs[0].requirements[0].key",
                lambda n: rollup(wire_need(WireRequirement(key="k" * n, operator=EXISTS))),
            ),
            (
                1024,
                "needs[0].requirements[0].values[1]",
                lambda n: rollup(wire_need(WireRequirement(key="k", operator=IN, values=["v", "v" * n]))),
            ),
            (
                1024,
                f"needs[0].aggregate_resources['{'r' * 64}…']",
                lambda n: rollup(wire_need(aggregate={"r" * n: "1"})),
            ),
            (
                1024,
                "needs[0].spread[0].topology_key",
                lambda n: rollup(capacity_pb2.CapacityNeed(spread=[capacity_pb2.TopologySpread(topology_key="k" * n)])),
            ),
            (
                1024,
                "needs[0].group",
                lambda n: rollup(wire_need(WireRequirement(key="z", operator=SAME), group="g" * n)),
            ),
            (1024, "cluster_id", lambda n: capacity_pb2.ClusterCapacityNeeds(cluster_id="c" * n)),
        ],
    )
    def test_the_largest_passes_and_one_more_is_refused(self, largest: int, place: str, build: Build) -> None:
        """The fault says how many there are and how many are allowed."""
        offered(build(largest)).needs()
        found = fault(build(largest + 1))

        assert found.place == place
        assert str(largest + 1) in found.fault
        assert str(largest) in found.fault

    def test_twenty_thousand_rows_pass_and_one_more_is_refused(self) -> None:
        """The bound on rows is checked before any row is read."""
        row = capacity_pb2.CapacityNeed(priority=1)
        message = rollup(*[row] * convert_need.NEEDS_MAX)

        assert len(offered(message).needs()) == 20_000

        message.needs.add(priority=1)
        found = fault(message)

        assert (found.place, found.fault) == ("needs", "has 20001 rows, at most 20000 are allowed")

    def test_a_string_is_measured_in_bytes(self) -> None:
        """1,024 bytes of two each are 512 characters."""
        assert offered(rollup(wire_need(WireRequirement(key="ü" * 512, operator=EXISTS)))).needs()

        found = fault(rollup(wire_need(WireRequirement(key="ü" * 513, operator=EXISTS))))

        assert found.fault == "has 1026 bytes, at most 1024 are allowed"
