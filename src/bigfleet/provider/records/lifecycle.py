"""Computes the next record: acceptance, completion, failure, recovery, refreshed facts. Pure functions.

docs/spec/provider.md §2, §8, §13, §14. `core`, `operation_runner`, `reconcile` and `recovery` decide when to call
which. This module must not read a clock or store anything.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bigfleet.model.ids import ClusterId, MachineId
from bigfleet.model.machine import NO_HOST, Machine
from bigfleet.model.machine import HostRef as HostRef
from bigfleet.model.states import MachineState
from bigfleet.provider.backend import ExistingHost, Host, Slot
from bigfleet.provider.records.kinds import EDGES, Kind
from bigfleet.provider.records.record import NO_METADATA, ErrorCode, Failure, Operation, Pushed, Record
from bigfleet.provider.storage.codec import intern_map

ERROR_BYTES_MAX = 1024
#: A shorter secret would black out ordinary words of the text.
_SECRET_CHARACTERS_MIN = 4


def new_record(facts: Slot, provider: str, now_unix_nanos: int) -> Record:
    """Return the record of a new machine: a slot SPECULATIVE, a host IDLE, or FAILED if it serves a cluster."""
    record = Record(
        machine=Machine(
            id=MachineId(facts.id),
            state=MachineState.SPECULATIVE,
            instance_type=facts.instance_type,
            zone=facts.zone,
            capacity_type=facts.capacity_type,
        ),
        slot=facts.slot if isinstance(facts, ExistingHost) else facts,
        declared_price_usd_per_hour=facts.price_usd_per_hour,
        declared_probability=facts.interruption_probability,
        state_since_unix_nanos=now_unix_nanos,
    )
    record = with_facts(record, facts)
    if isinstance(facts, ExistingHost):
        host = Host(ref=facts.host_ref, node_name=facts.node_name)
        hosted = _hosted(record, host, provider, MachineState.IDLE, now_unix_nanos)
        return in_service(hosted, facts.in_cluster, now_unix_nanos) if facts.in_cluster else hosted
    return record


def in_service(record: Record, cluster: str, now_unix_nanos: int) -> Record:
    """Return an IDLE record whose host serves a cluster, unknown to it, as FAILED and bound to that cluster.

    So it is bound to no other cluster, and is not deleted: a failed machine that is bound may run pods.
    """
    text = f"the backend shows that the host serves cluster {cluster}, which this state does not know; recover it"
    bound = replace(record, machine=replace(record.machine, cluster=ClusterId(cluster)))
    return failed(bound, ErrorCode.BACKEND, text, now_unix_nanos)


def with_facts(record: Record, facts: Slot) -> Record:
    """Return the record with price, probability, shape and labels as declared now; state and binding stay."""
    machine = replace(
        record.machine,
        resources=_frozen(facts.resources),
        allocatable=_frozen(facts.allocatable),
        labels=_frozen(facts.labels),
    )
    record = replace(
        record,
        machine=machine,
        declared_price_usd_per_hour=facts.price_usd_per_hour,
        declared_probability=facts.interruption_probability,
    )
    if not isinstance(facts, ExistingHost):
        record = replace(record, slot=facts)
    elif facts.fixed != record.slot.fixed:
        record = replace(record, slot=replace(record.slot, fixed=facts.fixed))
    return _served(record)


def _frozen(mapping: Mapping[str, str]) -> Mapping[str, str]:
    return mapping if isinstance(mapping, MappingProxyType) else intern_map(mapping)


def _served(record: Record) -> Record:
    """Return the record showing what pushes make of the declared price and probability."""
    price, probability, pushed = record.declared_price_usd_per_hour, record.declared_probability, record.pushed
    if pushed is not None and pushed.price_usd_per_hour is not None:
        if pushed.price_baseline_usd_per_hour == price:
            price = pushed.price_usd_per_hour
        else:
            pushed = replace(pushed, price_usd_per_hour=None, price_baseline_usd_per_hour=None)
    if pushed is not None and pushed.probability is not None:
        probability = max(probability, pushed.probability)
    machine = replace(record.machine, price_usd_per_hour=price, interruption_probability=probability)
    return replace(record, machine=machine, pushed=None if pushed == Pushed() else pushed)


def with_pushed_price(record: Record, usd_per_hour: float) -> Record:
    """Return the record showing a pushed price until the declared one changes."""
    pushed = replace(
        record.pushed or Pushed(),
        price_usd_per_hour=usd_per_hour,
        price_baseline_usd_per_hour=record.declared_price_usd_per_hour,
    )
    return _served(replace(record, pushed=pushed))


def with_pushed_probability(record: Record, probability: float, *, reclaim_notice: bool) -> Record:
    """Return the record showing the higher of pushed and declared probability until its host is gone."""
    before = record.pushed or Pushed()
    pushed = replace(before, probability=probability, reclaim_notice=before.reclaim_notice or reclaim_notice)
    return _served(replace(record, pushed=pushed))


def _without_host_pushes(record: Record) -> Record:
    if record.pushed is None:
        return record
    return replace(record, pushed=replace(record.pushed, probability=None, reclaim_notice=False))


def _moved(record: Record, machine: Machine, state: MachineState, now_unix_nanos: int) -> Record:
    return replace(record, machine=replace(machine, state=state), state_since_unix_nanos=now_unix_nanos)


def accepted(
    record: Record, operation: Operation, *, cluster: str = "", metadata: Mapping[str, str] = NO_METADATA
) -> Record:
    """Return the record in the transitional state of the operation; Configure brings its binding along."""
    machine = record.machine
    edge = EDGES[operation.kind]
    assert machine.state is edge.source, f"{operation.kind.method} on {machine.state.label}"
    if operation.kind is Kind.CONFIGURE:
        machine = replace(machine, cluster=ClusterId(cluster))
        record = replace(record, metadata=MappingProxyType(dict(metadata)))
    record = replace(record, operation=operation)
    return _moved(record, machine, edge.transitional, operation.accepted_unix_nanos)


def completed(record: Record, result: Host | str | None, provider: str, now_unix_nanos: int) -> Record:
    """Return the record in the target state of its operation, with what the backend's result adds."""
    assert record.operation is not None, "only an operation completes"
    kind = record.operation.kind
    assert record.state is EDGES[kind].transitional, f"{kind.method} completes in {record.state.label}"
    record = replace(record, failures_in_row=0)
    if kind is Kind.CREATE:
        assert isinstance(result, Host), "a Create completes with a host"
        return _hosted(record, result, provider, MachineState.IDLE, now_unix_nanos)
    if kind is Kind.CONFIGURE:
        name = result if isinstance(result, str) else ""
        machine = replace(record.machine, node_name=name or record.host_node_name)
        return _moved(record, machine, MachineState.CONFIGURED, now_unix_nanos)
    if kind is Kind.DRAIN:
        return _unbound(record, MachineState.IDLE, now_unix_nanos)
    return without_host(record, now_unix_nanos)


def _hosted(record: Record, host: Host, provider: str, state: MachineState, now_unix_nanos: int) -> Record:
    machine = record.machine
    price = record.declared_price_usd_per_hour if host.price_usd_per_hour is None else host.price_usd_per_hour
    machine = replace(
        machine,
        host=HostRef(provider, host.ref),
        node_name=host.node_name,
        resources=machine.resources if host.resources is None else _frozen(host.resources),
        allocatable=machine.allocatable if host.allocatable is None else _frozen(host.allocatable),
        labels=machine.labels if host.labels is None else _frozen(host.labels),
    )
    record = replace(record, declared_price_usd_per_hour=price, host_node_name=host.node_name)
    return _served(_moved(record, machine, state, now_unix_nanos))


def _unbound(record: Record, state: MachineState, now_unix_nanos: int) -> Record:
    machine = replace(record.machine, cluster=ClusterId(""), node_name=record.host_node_name)
    return _moved(replace(record, metadata=NO_METADATA), machine, state, now_unix_nanos)


def without_host(record: Record, now_unix_nanos: int) -> Record:
    """Return the record as the slot that it is without its host: SPECULATIVE, the slot's facts, no binding."""
    record = replace(_without_host_pushes(record), host_node_name="", former_cluster="")
    machine = replace(record.machine, host=NO_HOST, last_error="")
    record = _unbound(replace(record, machine=machine, failure=None), MachineState.SPECULATIVE, now_unix_nanos)
    return with_facts(record, record.slot)


def failed(
    record: Record,
    code: ErrorCode,
    text: str,
    now_unix_nanos: int,
    *,
    secrets: tuple[str, ...] = (),
    hold_seconds: float | None = None,
) -> Record:
    """Return the record in FAILED; host, cluster and metadata stay as they were."""
    source = record.state
    if record.operation is not None and source is EDGES[record.operation.kind].transitional:
        source = EDGES[record.operation.kind].source
    machine = replace(record.machine, last_error=error_text(code, text, (*secrets, *record.metadata.values())))
    record = replace(
        record,
        operation=None if record.state is source else record.operation,
        failure=Failure(code=code, source=source, hold_seconds=hold_seconds),
        failures_in_row=record.failures_in_row + 1,
    )
    return _moved(record, machine, MachineState.FAILED, now_unix_nanos)


def error_text(code: ErrorCode, text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return `CODE: text`: at most 1,024 bytes, without control characters, without any of the secrets."""
    for secret in secrets:
        if len(secret) >= _SECRET_CHARACTERS_MIN:
            text = text.replace(secret, "[redacted]")
    printable = "".join(character if character.isprintable() else " " for character in text).strip()
    line = f"{code.value}: {printable or 'no text'}"
    return line.encode("utf-8", "replace")[:ERROR_BYTES_MAX].decode("utf-8", "ignore")


def recovered_with_host(record: Record, host: Host, provider: str, now_unix_nanos: int) -> Record:
    """Return a failed or orphaned record as IDLE with that host; a binding is cleared."""
    machine = replace(record.machine, last_error="", cluster=ClusterId(""))
    cleared = replace(record, machine=machine, metadata=NO_METADATA, operation=None, failure=None)
    return _hosted(cleared, host, provider, MachineState.IDLE, now_unix_nanos)


def recovered_serving(record: Record, host: Host, provider: str, now_unix_nanos: int) -> Record:
    """Return a failed record as CONFIGURED with its binding unchanged."""
    machine = replace(record.machine, last_error="", host=HostRef(provider, host.ref))
    if host.node_name:
        machine = replace(machine, node_name=host.node_name)
    return _moved(replace(record, operation=None, failure=None), machine, MachineState.CONFIGURED, now_unix_nanos)


def recovered_slot(record: Record, now_unix_nanos: int) -> Record:
    """Return a failed record as the slot that it is without a host."""
    return without_host(replace(record, operation=None), now_unix_nanos)


def recovered_to_source(record: Record, now_unix_nanos: int) -> Record:
    """Return a failed record in the state before its operation, which the backend never saw."""
    assert record.failure is not None, "only a failed record has a source"
    source = record.failure.source
    machine = replace(record.machine, last_error="")
    record = replace(record, machine=machine, operation=None, failure=None)
    if source is MachineState.CONFIGURED:
        return _moved(record, machine, source, now_unix_nanos)
    return _unbound(record, source, now_unix_nanos)
