"""Turns the frames of a Session into `shard.proto` and back, for both ends (docs/spec/wire.md §8).

A member that this version does not know reads as None, an unknown enum value as UNSPECIFIED. Text for people is cut to
the bound of §2 on its way out and, from operators, on its way in; a name is never cut, because half a name is another
one. The rows of a roll-up are the business of `bigfleet.rpc.wire.convert_need`. This module must not look at who sent a
frame.
"""

from collections.abc import Iterable
from typing import assert_never

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
    MalformedMessage,
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
from bigfleet.model.ids import text_bytes
from bigfleet.rpc.wire.amounts import RESOURCE_NAMES_MAX, STRING_BYTES_MAX, check_count, check_text
from bigfleet.rpc.wire.convert_machine import resources_to_wire, state_from_wire, state_to_wire
from bigfleet.rpc.wire.convert_need import (
    ReceivedRollUp,
    need_to_wire,
    needs_to_wire,
    requirements_from_wire,
    requirements_to_wire,
    rollup_to_wire,
)
from bigfleet.rpc.wire.gen import shard_pb2, shardread_pb2

__all__ = [
    "ReceivedOperatorFrame",
    "ReceivedRollUp",
    "need_to_wire",
    "needs_to_wire",
    "operator_frame_from_bytes",
    "operator_frame_from_wire",
    "operator_frame_to_wire",
    "shard_frame_from_wire",
    "shard_frame_to_wire",
]

#: What Configure may carry (docs/spec/wire.md §8, docs/spec/provider.md §3).
USER_DATA_BYTES_MAX = 1024 * 1024

#: Of a Hello: names of capabilities, and the length of each.
CAPABILITIES_MAX = 64
CAPABILITY_BYTES_MAX = 64

_AVAILABLE_PREFIX = "available:"
_ELLIPSIS = "…"
_NAME_SHOWN_CHARACTERS_MAX = 64
_CONFIDENCES = {confidence.value: confidence for confidence in Confidence}
_UNMET_REASONS = {reason.value: reason for reason in UnmetReason}
_DRAIN_OUTCOMES = {outcome.value: outcome for outcome in DrainOutcome}
_FORECAST_OUTCOMES = {outcome.value: outcome for outcome in ForecastOutcome}

#: An operator's frame as the shard reads it: a roll-up's rows are not read yet.
ReceivedOperatorFrame = (
    Hello | ReceivedRollUp | BootstrapResponse | ReclaimAck | NodeStatus | DrainResult | DrainForecast
)


# ---- operator to shard ------------------------------------------------------------------------------------------


def operator_frame_to_wire(frame: OperatorFrame) -> shard_pb2.OperatorMessage:
    """Return the message of an operator's frame."""
    match frame:
        case Hello():
            return shard_pb2.OperatorMessage(
                hello=shard_pb2.Hello(
                    cluster_id=frame.cluster_id,
                    protocol_version=frame.protocol_version,
                    capabilities=sorted(frame.capabilities),
                )
            )
        case RollUp():
            return shard_pb2.OperatorMessage(rollup=rollup_to_wire(frame))
        case BootstrapResponse():
            return shard_pb2.OperatorMessage(
                bootstrap_response=shard_pb2.BootstrapBlobResponse(
                    request_id=frame.request_id,
                    user_data=frame.user_data,
                    ttl_seconds=frame.ttl_seconds,
                    error=_cut(frame.error),
                )
            )
        case ReclaimAck():
            return shard_pb2.OperatorMessage(
                reclaim_ack=shard_pb2.ReclaimAck(instruction_id=frame.instruction_id, nodes_started=frame.nodes_started)
            )
        case NodeStatus():
            return shard_pb2.OperatorMessage(
                node_status=shard_pb2.NodeStatus(
                    machine_id=frame.machine_id,
                    node_name=frame.node_name,
                    ready=frame.ready,
                    observed_unix_nanos=frame.observed_unix_nanos,
                    requested=frame.requested,
                    pods=frame.pods,
                )
            )
        case DrainResult():
            return shard_pb2.OperatorMessage(
                drain_result=shard_pb2.DrainResult(
                    instruction_id=frame.instruction_id,
                    machine_id=frame.machine_id,
                    outcome=shard_pb2.DrainResult.Outcome.ValueType(frame.outcome.value),
                    message=_cut(frame.message),
                )
            )
        case DrainForecast():
            return shard_pb2.OperatorMessage(
                drain_forecast=shard_pb2.DrainForecast(
                    request_id=frame.request_id,
                    outcome=shard_pb2.DrainForecast.Outcome.ValueType(frame.outcome.value),
                    machine_id=frame.machine_id,
                    message=_cut(frame.message),
                )
            )
    assert_never(frame)


def operator_frame_from_bytes(
    content: bytes, known_digest: bytes | None, *, parses_rollups: bool = True
) -> ReceivedOperatorFrame | None:
    """Return the frame that some bytes are, None for an unknown member.

    A roll-up that repeats the one with that digest is not parsed, nor any other one without `parses_rollups`, unless
    its bytes have to be parsed for its head. Raises DecodeError for bytes that are no frame, and
    MalformedMessage as `operator_frame_from_wire` does.
    """
    rollup = ReceivedRollUp.repeated(content, known_digest)
    if rollup is None and not parses_rollups:
        rollup = ReceivedRollUp.unread(content)
    return rollup if rollup is not None else operator_frame_from_wire(shard_pb2.OperatorMessage.FromString(content))


def operator_frame_from_wire(message: shard_pb2.OperatorMessage) -> ReceivedOperatorFrame | None:
    """Return the frame, None for an unknown member; a roll-up keeps its message, which is the roll-up's from here on.

    Raises MalformedMessage for a name over 1,024 bytes outside of a roll-up, naming the field.
    """
    match message.WhichOneof("payload"):
        case "hello":
            return _hello(message.hello)
        case "rollup":
            return ReceivedRollUp(message.rollup)
        case "bootstrap_response":
            return _bootstrap_response(message.bootstrap_response)
        case "reclaim_ack":
            ack = message.reclaim_ack
            return ReclaimAck(
                instruction_id=_name("reclaim_ack.instruction_id", ack.instruction_id),
                nodes_started=ack.nodes_started,
            )
        case "node_status":
            return _node_status(message.node_status)
        case "drain_result":
            result = message.drain_result
            return DrainResult(
                instruction_id=_name("drain_result.instruction_id", result.instruction_id),
                machine_id=_name("drain_result.machine_id", result.machine_id),
                outcome=_DRAIN_OUTCOMES.get(result.outcome, DrainOutcome.UNSPECIFIED),
                message=_cut(result.message),
            )
        case "drain_forecast":
            forecast = message.drain_forecast
            return DrainForecast(
                request_id=_name("drain_forecast.request_id", forecast.request_id),
                outcome=_FORECAST_OUTCOMES.get(forecast.outcome, ForecastOutcome.UNSPECIFIED),
                machine_id=_name("drain_forecast.machine_id", forecast.machine_id),
                message=_cut(forecast.message),
            )
    return None


def _hello(hello: shard_pb2.Hello) -> Hello:
    check_count("hello.capabilities", len(hello.capabilities), "names", CAPABILITIES_MAX)
    return Hello(
        cluster_id=_name("hello.cluster_id", hello.cluster_id),
        protocol_version=_name("hello.protocol_version", hello.protocol_version),
        capabilities=frozenset(
            _capability(f"hello.capabilities[{index}]", capability)
            for index, capability in enumerate(hello.capabilities)
        ),
    )


def _capability(place: str, capability: str) -> str:
    size_bytes = text_bytes(capability)
    if size_bytes > CAPABILITY_BYTES_MAX:
        raise MalformedMessage(place, f"has {size_bytes} bytes, at most {CAPABILITY_BYTES_MAX} are allowed")
    return capability


def _node_status(status: shard_pb2.NodeStatus) -> NodeStatus:
    check_count("node_status.requested", len(status.requested), "names", RESOURCE_NAMES_MAX)
    requested = {
        _name(f"node_status.requested[{name[:_NAME_SHOWN_CHARACTERS_MAX]!r}]", name): quantity
        for name, quantity in status.requested.items()
    }
    for name in requested:
        check_text("node_status.requested", name, "a name has")
    return NodeStatus(
        machine_id=_name("node_status.machine_id", status.machine_id),
        node_name=_name("node_status.node_name", status.node_name),
        ready=status.ready,
        observed_unix_nanos=status.observed_unix_nanos,
        requested=requested,
        pods=status.pods,
    )


def _bootstrap_response(response: shard_pb2.BootstrapBlobResponse) -> BootstrapResponse:
    request_id = _name("bootstrap_response.request_id", response.request_id)
    size_bytes = len(response.user_data)
    if size_bytes > USER_DATA_BYTES_MAX and not response.error:
        # The provider would refuse it, and the machine would be blamed for what its operator sent.
        fault = f"user_data has {size_bytes} bytes, at most {USER_DATA_BYTES_MAX} are allowed"
        return BootstrapResponse(request_id=request_id, error=fault)
    return BootstrapResponse(
        request_id=request_id,
        user_data=response.user_data,
        ttl_seconds=response.ttl_seconds,
        error=_cut(response.error),
    )


# ---- shard to operator ------------------------------------------------------------------------------------------


def shard_frame_to_wire(frame: ShardFrame) -> shard_pb2.ShardMessage:
    """Return the message of a shard's frame."""
    match frame:
        case Acknowledgement():
            return shard_pb2.ShardMessage(
                ack=shard_pb2.Acknowledgement(
                    echo=frame.echo,
                    coordinator_term=frame.coordinator_term,
                    shard_epoch=frame.shard_epoch,
                    rollup_timestamp_unix_nanos=frame.rollup_timestamp_unix_nanos,
                    held=frame.held,
                    error=_cut(frame.error),
                    capabilities=sorted(frame.capabilities),
                )
            )
        case BootstrapRequest():
            return shard_pb2.ShardMessage(bootstrap_request=_bootstrap_request_to_wire(frame))
        case ReclaimInstruction():
            return shard_pb2.ShardMessage(
                reclaim_instruction=shard_pb2.ReclaimInstruction(
                    instruction_id=frame.instruction_id,
                    nodes=frame.nodes,
                    grace_period_seconds=frame.grace_seconds,
                    preemptor_priority=frame.preemptor_priority,
                    machine_ids=frame.machine_ids,
                    provider_ids=frame.provider_ids,
                    reason=frame.reason,
                )
            )
        case NodeStateUpdate():
            return shard_pb2.ShardMessage(node_state_update=_node_state_to_wire(frame))
        case AvailableCapacity():
            return shard_pb2.ShardMessage(
                available_capacity=shard_pb2.AvailableCapacityUpdate(
                    supersedes_key=frame.supersedes_key,
                    requirements=requirements_to_wire(frame.requirements),
                    resources=resources_to_wire(frame.resources),
                    available_count=frame.available_count,
                    confidence=shard_pb2.AvailableCapacityUpdate.Confidence.ValueType(frame.confidence.value),
                    cost_per_hour=frame.price_usd_per_hour,
                )
            )
        case NeedStatusUpdate():
            return shard_pb2.ShardMessage(need_status=_need_status_update_to_wire(frame))
        case DrainForecastRequest():
            return shard_pb2.ShardMessage(drain_forecast_request=_forecast_request_to_wire(frame))
    assert_never(frame)


def _bootstrap_request_to_wire(frame: BootstrapRequest) -> shard_pb2.BootstrapRequest:
    return shard_pb2.BootstrapRequest(
        request_id=frame.request_id,
        requirements=requirements_to_wire(frame.requirements),
        cluster_id=frame.cluster_id,
        machine_id=frame.machine_id,
        instance_type=frame.instance_type,
        zone=frame.zone,
        provider_id=frame.provider_id,
        labels=frame.labels,
        taints=_taints_to_wire(frame.taints),
    )


def _node_state_to_wire(frame: NodeStateUpdate) -> shard_pb2.NodeStateUpdate:
    return shard_pb2.NodeStateUpdate(
        supersedes_key=frame.supersedes_key,
        machine_id=frame.machine_id,
        cluster_id=frame.cluster_id,
        state=state_to_wire(frame.state),
        node_name=frame.node_name,
        provider_id=frame.provider_id,
        last_error=_cut(frame.last_error),
        labels=frame.labels,
        resources=resources_to_wire(frame.resources),
        taints=_taints_to_wire(frame.taints),
    )


def _need_status_update_to_wire(frame: NeedStatusUpdate) -> shard_pb2.NeedStatusUpdate:
    return shard_pb2.NeedStatusUpdate(
        supersedes_key=frame.supersedes_key,
        cycle=frame.cycle,
        computed_at_unix_nanos=frame.computed_at_unix_nanos,
        rows=[
            shard_pb2.NeedStatus(
                profile_fingerprint=row.fingerprint,
                group=row.group,
                residual_deficit=resources_to_wire(row.residual),
                unmet_reason=shardread_pb2.UnmetReason.ValueType(row.reason.value),
                age_cycles_unmet=row.age_cycles,
                acquisition_parked=row.parked,
                message=_cut(row.message),
            )
            for row in frame.rows
        ],
        rollup_timestamp_unix_nanos=frame.rollup_timestamp_unix_nanos,
        truncated=frame.truncated,
        coming=[
            shard_pb2.ComingNeed(profile_fingerprint=fingerprint, group=group) for fingerprint, group in frame.coming
        ],
    )


def _forecast_request_to_wire(frame: DrainForecastRequest) -> shard_pb2.DrainForecastRequest:
    return shard_pb2.DrainForecastRequest(
        supersedes_key=frame.supersedes_key,
        request_id=frame.request_id,
        machine_ids=frame.machine_ids,
        comes=[
            shard_pb2.ComingNodes(
                count=nodes.count,
                labels=nodes.labels,
                resources=resources_to_wire(nodes.resources),
                taints=_taints_to_wire(nodes.taints),
            )
            for nodes in frame.comes
        ],
        scheduler=frame.scheduler,
    )


def shard_frame_from_wire(message: shard_pb2.ShardMessage) -> ShardFrame | None:
    """Return the frame, None for an unknown member."""
    match message.WhichOneof("payload"):
        case "ack":
            return _acknowledgement(message.ack)
        case "bootstrap_request":
            return _bootstrap_request(message.bootstrap_request)
        case "reclaim_instruction":
            return _reclaim_instruction(message.reclaim_instruction)
        case "node_state_update":
            return _node_state(message.node_state_update)
        case "available_capacity":
            return _available_capacity(message.available_capacity)
        case "need_status":
            return _need_status_update(message.need_status)
        case "drain_forecast_request":
            return _forecast_request(message.drain_forecast_request)
    return None


def _acknowledgement(ack: shard_pb2.Acknowledgement) -> Acknowledgement:
    return Acknowledgement(
        echo=ack.echo,
        coordinator_term=ack.coordinator_term,
        shard_epoch=ack.shard_epoch,
        rollup_timestamp_unix_nanos=ack.rollup_timestamp_unix_nanos,
        held=ack.held,
        error=ack.error,
        capabilities=frozenset(ack.capabilities),
    )


def _bootstrap_request(request: shard_pb2.BootstrapRequest) -> BootstrapRequest:
    return BootstrapRequest(
        request_id=request.request_id,
        cluster_id=request.cluster_id,
        requirements=requirements_from_wire(request.requirements),
        machine_id=request.machine_id,
        instance_type=request.instance_type,
        zone=request.zone,
        provider_id=request.provider_id,
        labels=dict(request.labels),
        taints=_taints_from_wire(request.taints),
    )


def _reclaim_instruction(instruction: shard_pb2.ReclaimInstruction) -> ReclaimInstruction:
    return ReclaimInstruction(
        instruction_id=instruction.instruction_id,
        nodes=tuple(instruction.nodes),
        machine_ids=tuple(instruction.machine_ids),
        provider_ids=tuple(instruction.provider_ids),
        grace_seconds=instruction.grace_period_seconds,
        preemptor_priority=instruction.preemptor_priority,
        reason=instruction.reason,
    )


def _node_state(update: shard_pb2.NodeStateUpdate) -> NodeStateUpdate:
    return NodeStateUpdate(
        machine_id=update.machine_id,
        cluster_id=update.cluster_id,
        state=state_from_wire(update.state),
        node_name=update.node_name,
        provider_id=update.provider_id,
        last_error=update.last_error,
        labels=dict(update.labels),
        resources=dict(update.resources.resources),
        taints=_taints_from_wire(update.taints),
    )


def _available_capacity(hint: shard_pb2.AvailableCapacityUpdate) -> AvailableCapacity:
    return AvailableCapacity(
        fingerprint=hint.supersedes_key.removeprefix(_AVAILABLE_PREFIX),
        requirements=requirements_from_wire(hint.requirements),
        resources=dict(hint.resources.resources),
        available_count=hint.available_count,
        confidence=_CONFIDENCES.get(hint.confidence, Confidence.UNSPECIFIED),
        price_usd_per_hour=hint.cost_per_hour,
    )


def _need_status_update(update: shard_pb2.NeedStatusUpdate) -> NeedStatusUpdate:
    return NeedStatusUpdate(
        cycle=update.cycle,
        computed_at_unix_nanos=update.computed_at_unix_nanos,
        rows=tuple(
            NeedStatus(
                fingerprint=row.profile_fingerprint,
                group=row.group,
                residual=dict(row.residual_deficit.resources),
                reason=_UNMET_REASONS.get(row.unmet_reason, UnmetReason.UNSPECIFIED),
                age_cycles=row.age_cycles_unmet,
                parked=row.acquisition_parked,
                message=row.message,
            )
            for row in update.rows
        ),
        rollup_timestamp_unix_nanos=update.rollup_timestamp_unix_nanos,
        truncated=update.truncated,
        coming=tuple((need.profile_fingerprint, need.group) for need in update.coming),
    )


def _forecast_request(request: shard_pb2.DrainForecastRequest) -> DrainForecastRequest:
    return DrainForecastRequest(
        request_id=request.request_id,
        machine_ids=tuple(request.machine_ids),
        comes=tuple(
            ComingNodes(
                count=nodes.count,
                labels=dict(nodes.labels),
                resources=dict(nodes.resources.resources),
                taints=_taints_from_wire(nodes.taints),
            )
            for nodes in request.comes
        ),
        scheduler=request.scheduler,
    )


def _taints_to_wire(taints: Iterable[Taint]) -> list[shard_pb2.Taint]:
    return [shard_pb2.Taint(key=taint.key, value=taint.value, effect=taint.effect) for taint in taints]


def _taints_from_wire(messages: Iterable[shard_pb2.Taint]) -> tuple[Taint, ...]:
    return tuple(Taint(message.key, message.value, message.effect) for message in messages)


def _name(place: str, text: str) -> str:
    size_bytes = text_bytes(text)
    if size_bytes > STRING_BYTES_MAX:
        raise MalformedMessage(place, f"has {size_bytes} bytes, at most {STRING_BYTES_MAX} are allowed")
    return text


def _cut(text: str) -> str:
    """Return at most 1,024 bytes of the text, whole characters, with an ellipsis where it was cut.

    Half a surrogate pair, which a file name can bring into an error, becomes a question mark: the frame must leave.
    """
    encoded = text.encode(errors="replace")
    if len(encoded) <= STRING_BYTES_MAX:
        return encoded.decode()
    head = encoded[: STRING_BYTES_MAX - len(_ELLIPSIS.encode())]
    return head.decode(errors="ignore") + _ELLIPSIS
