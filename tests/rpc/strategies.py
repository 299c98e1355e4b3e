"""Hypothesis strategies for what crosses the wire: machines, needs and frames as flows may hold them."""

from collections.abc import Mapping

from hypothesis import strategies as st

from bigfleet.model.frames import (
    Acknowledgement,
    AvailableCapacity,
    BootstrapRequest,
    BootstrapResponse,
    ComingNodes,
    Confidence,
    DrainForecast,
    DrainForecastRequest,
    DrainOutcome,
    DrainResult,
    ForecastOutcome,
    Hello,
    NeedStatus,
    NeedStatusUpdate,
    NodeStateUpdate,
    NodeStatus,
    OperatorFrame,
    ReclaimAck,
    ReclaimInstruction,
    RollUp,
    ShardFrame,
    Taint,
    UnmetReason,
)
from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import HostRef, Machine
from bigfleet.model.need import Need, amounts_of
from bigfleet.model.penalty import ORDINALS
from bigfleet.model.profile import Operator, Profile, Requirement, SpreadMode, TopologySpread
from bigfleet.model.quantity import MILLI_MAX, Family
from bigfleet.model.shapes import (
    COUNT_MAX,
    LIMIT_MAX,
    DemandShape,
    Overhead,
    canonical_overheads,
    canonical_shapes,
    total_of,
)
from bigfleet.model.states import CapacityType, MachineState

#: Anything that UTF-8 can hold, NUL and non-characters included.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=12)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), min_size=1, max_size=12)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT_MAPS = st.dictionaries(TEXTS, TEXTS, max_size=4)
MONEY = st.floats(allow_nan=False)

HOSTS = st.builds(HostRef, TEXTS, TEXTS)
MACHINES = st.builds(
    Machine,
    id=TEXTS.map(MachineId),
    state=st.sampled_from(MachineState),
    host=HOSTS,
    cluster=TEXTS.map(ClusterId),
    instance_type=TEXTS,
    zone=TEXTS,
    capacity_type=st.sampled_from(CapacityType),
    resources=TEXT_MAPS,
    allocatable=TEXT_MAPS,
    labels=TEXT_MAPS,
    price_usd_per_hour=MONEY,
    interruption_probability=MONEY,
    last_error=TEXTS,
    node_name=TEXTS,
)

_OPERATORS_OPTIONAL_VALUES = (Operator.EXISTS, Operator.DOES_NOT_EXIST, Operator.SAME)
REQUIREMENTS = st.one_of(
    st.builds(
        Requirement,
        key=NAMES,
        operator=st.sampled_from((Operator.IN, Operator.NOT_IN)),
        values=st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(
        Requirement,
        key=NAMES,
        operator=st.sampled_from(_OPERATORS_OPTIONAL_VALUES),
        values=st.lists(TEXTS, max_size=3).map(tuple),
    ),
)
REQUIREMENT_LISTS = st.lists(REQUIREMENTS, max_size=4).map(tuple)
SPREADS = st.builds(TopologySpread, topology_key=TEXTS, skew_max=INT32, mode=st.sampled_from(SpreadMode))
PROFILES = st.builds(
    Profile,
    requirements=REQUIREMENT_LISTS,
    spreads=st.lists(SPREADS, max_size=2).map(tuple),
    priority=INT32,
    interruption_bucket=st.sampled_from(ORDINALS),
    reclamation_bucket=st.sampled_from(ORDINALS),
)
_RESOURCES = ("cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "")
VECTORS: st.SearchStrategy[Mapping[str, int]] = st.dictionaries(
    st.sampled_from(_RESOURCES), st.integers(1, MILLI_MAX), max_size=4
)
FAMILIES = st.dictionaries(st.sampled_from(_RESOURCES), st.sampled_from(Family), max_size=4)

SHAPES = st.builds(
    DemandShape,
    st.dictionaries(st.sampled_from(_RESOURCES), st.integers(1, 2**40), max_size=3),
    st.integers(1, 5) | st.just(COUNT_MAX // 4),
    st.sampled_from([0, 0, 1, 2, LIMIT_MAX]),
)


@st.composite
def needs(draw: st.DrawFn, cluster: str) -> Need:
    """Draw a row that its shard accepts; a group only where a Same requirement stands."""
    profile = draw(PROFILES)
    shapes = canonical_shapes(draw(st.lists(SHAPES, max_size=3)))
    amounts = amounts_of(shapes, aggregate=total_of(shapes) or draw(VECTORS), min_unit=draw(VECTORS))
    if shapes and not total_of(shapes):
        amounts = amounts._replace(aggregate={})
    return Need(
        cluster=ClusterId(cluster),
        profile=profile,
        aggregate=amounts.aggregate,
        min_unit=amounts.min_unit,
        group=draw(TEXTS) if profile.same_key is not None else "",
        families=draw(FAMILIES),
        shapes=shapes,
        waiting=canonical_shapes(draw(st.lists(SHAPES, max_size=2))),
    )


OVERHEADS = st.lists(
    st.builds(Overhead, st.lists(REQUIREMENTS.filter(lambda r: r.operator is not Operator.SAME), max_size=2), VECTORS),
    max_size=2,
).map(canonical_overheads)


@st.composite
def rollups(draw: st.DrawFn) -> RollUp:
    """Draw a roll-up with a few rows."""
    cluster = draw(TEXTS)
    rows = draw(st.lists(needs(cluster), max_size=4))
    return RollUp(cluster_id=cluster, timestamp_unix_nanos=draw(INT64), needs=tuple(rows), overheads=draw(OVERHEADS))


TAINTS = st.lists(st.builds(Taint, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple)
TEXT_SETS = st.frozensets(TEXTS, max_size=3)
TEXT_TUPLES = st.lists(TEXTS, max_size=3).map(tuple)

PLAIN_OPERATOR_FRAMES: st.SearchStrategy[OperatorFrame] = st.one_of(
    st.builds(Hello, cluster_id=TEXTS, protocol_version=TEXTS, capabilities=TEXT_SETS),
    st.builds(BootstrapResponse, request_id=TEXTS, user_data=st.binary(max_size=20), ttl_seconds=INT64, error=TEXTS),
    st.builds(ReclaimAck, instruction_id=TEXTS, nodes_started=INT32),
    st.builds(
        NodeStatus,
        machine_id=TEXTS,
        node_name=TEXTS,
        ready=st.booleans(),
        observed_unix_nanos=INT64,
        requested=TEXT_MAPS,
        pods=INT32,
    ),
    st.builds(
        DrainResult, instruction_id=TEXTS, machine_id=TEXTS, outcome=st.sampled_from(DrainOutcome), message=TEXTS
    ),
    st.builds(
        DrainForecast, request_id=TEXTS, outcome=st.sampled_from(ForecastOutcome), machine_id=TEXTS, message=TEXTS
    ),
)
SHARD_FRAMES: st.SearchStrategy[ShardFrame] = st.one_of(
    st.builds(
        Acknowledgement,
        echo=TEXTS,
        coordinator_term=INT64,
        shard_epoch=INT64,
        rollup_timestamp_unix_nanos=INT64,
        held=st.booleans(),
        error=TEXTS,
        capabilities=TEXT_SETS,
    ),
    st.builds(
        BootstrapRequest,
        request_id=TEXTS,
        cluster_id=TEXTS,
        requirements=REQUIREMENT_LISTS,
        machine_id=TEXTS,
        instance_type=TEXTS,
        zone=TEXTS,
        provider_id=TEXTS,
        labels=TEXT_MAPS,
        taints=TAINTS,
    ),
    st.builds(
        ReclaimInstruction,
        instruction_id=TEXTS,
        nodes=TEXT_TUPLES,
        machine_ids=TEXT_TUPLES,
        provider_ids=TEXT_TUPLES,
        grace_seconds=INT64,
        preemptor_priority=INT32,
        reason=TEXTS,
    ),
    st.builds(
        NodeStateUpdate,
        machine_id=TEXTS,
        cluster_id=TEXTS,
        state=st.sampled_from(MachineState),
        node_name=TEXTS,
        provider_id=TEXTS,
        last_error=TEXTS,
        labels=TEXT_MAPS,
        resources=TEXT_MAPS,
        taints=TAINTS,
    ),
    st.builds(
        AvailableCapacity,
        fingerprint=TEXTS,
        requirements=REQUIREMENT_LISTS,
        resources=TEXT_MAPS,
        available_count=INT32,
        confidence=st.sampled_from(Confidence),
        price_usd_per_hour=MONEY,
    ),
    st.builds(
        DrainForecastRequest,
        request_id=TEXTS,
        machine_ids=TEXT_TUPLES,
        comes=st.lists(
            st.builds(ComingNodes, count=INT32, labels=TEXT_MAPS, resources=TEXT_MAPS, taints=TAINTS), max_size=3
        ).map(tuple),
        scheduler=TEXTS,
    ),
    st.builds(
        NeedStatusUpdate,
        cycle=INT64,
        computed_at_unix_nanos=INT64,
        rows=st.lists(
            st.builds(
                NeedStatus,
                fingerprint=TEXTS,
                group=TEXTS,
                residual=TEXT_MAPS,
                reason=st.sampled_from(UnmetReason),
                age_cycles=INT32,
                parked=st.booleans(),
                message=TEXTS,
            ),
            max_size=3,
        ).map(tuple),
        rollup_timestamp_unix_nanos=INT64,
        truncated=st.booleans(),
        coming=st.lists(st.tuples(TEXTS, TEXTS), max_size=3).map(tuple),
    ),
)
