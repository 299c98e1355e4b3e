"""Calls a shard for the data of a command, and words the reason if there is nothing to show.

docs/spec/shard.md §12. Records are yielded as they arrive; only the sums of `get clusters` are stored, one per cluster.
An empty answer has one of three causes: the shard has decided nothing yet, does not know the cluster, or has nothing
that matches. This module does not print.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import grpc

from bigfleet.cli.get.columns import plain
from bigfleet.cli.get.exchange_records import exchange_records
from bigfleet.cli.get.records import Record, action_record, machine_record, need_record, session_record
from bigfleet.cli.runtime.failures import CommandFault, RunFault, UsageFault
from bigfleet.model import vector
from bigfleet.model.states import MachineState
from bigfleet.model.vector import Vector
from bigfleet.rpc.clients.shardread import ReadRefused, ShardReader, ShardReadFault, UnreachableShard
from bigfleet.rpc.security.tls import TlsFiles
from bigfleet.rpc.wire.convert_machine import state_from_wire, state_to_wire
from bigfleet.rpc.wire.gen import shardread_pb2

Source = Callable[[ShardReader], Iterator[Record]]

#: States in which a machine is a cluster's, or was and is lost.
_OF_CLUSTERS = (MachineState.CONFIGURING, MachineState.CONFIGURED, MachineState.DRAINING, MachineState.FAILED)


@contextmanager
def connected(address: str, tls: TlsFiles | None) -> Iterator[ShardReader]:
    """Yield a reader that is connected, in plain text without `tls`. Raises what `shard_read_faults` raises."""
    with ShardReader(address, tls=tls) as reader, shard_read_faults(address):
        reader.connect()
        yield reader


@contextmanager
def shard_read_faults(address: str) -> Iterator[None]:
    """Turn what goes wrong with a shard into one line: RunFault, or UsageFault for a question that no shard answers."""
    try:
        yield
    except ShardReadFault as fault:
        raise fault_of(fault, address) from fault


def fault_of(fault: ShardReadFault, address: str) -> CommandFault:
    """Return the error line: address, cause, what to check."""
    if isinstance(fault, UnreachableShard):
        return RunFault(
            f"cannot reach a shard at {address}: {fault}; check that the shard runs and that --addr or "
            "BIGFLEET_SHARD_ADDR names the address of its --listen"
        )
    if not isinstance(fault, ReadRefused):
        return RunFault(f"the shard at {address}: {fault}")
    text = _in_commands(plain(fault))
    match fault.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return UsageFault(f"the shard at {address} rejects the request: {text}")
        case grpc.StatusCode.NOT_FOUND:
            return RunFault(f"the shard at {address}: {text}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return RunFault(
                f"{address} is not a shard, or has another version: it serves no ShardRead; check --addr, whose port "
                "is that of the shard's --listen and not that of its metrics"
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return RunFault(f"the shard at {address} rejects this identity: {text}; it must be readonly or admin")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RunFault(f"the shard at {address} is busy: {text}; try again in a moment")
        case _:
            return RunFault(f"the shard at {address} answered {fault.code.name}: {text}")


def _in_commands(text: str) -> str:
    """Return a shard's words with commands for the calls that they send a reader to."""
    for call, command in (
        ("InspectNeeds lists", "bigfleet get needs lists"),
        ("ListMachines lists", "bigfleet get machines lists"),
    ):
        text = text.replace(call, command)
    return text


def machines(request: shardread_pb2.ListMachinesRequest) -> Source:
    """Return the source of machines, ids ascending."""

    def read(reader: ShardReader) -> Iterator[Record]:
        records = (machine_record(view) for view in reader.machines(request).entries)
        return _known(reader, request.cluster_id, records)

    return read


def needs(cluster: str, limit: int) -> Source:
    """Return the source of rows of demand, the most urgent first."""
    return lambda reader: _known(reader, cluster, map(need_record, _rows(reader, cluster, limit)))


def shortfalls(cluster: str, limit: int) -> Source:
    """Return the source of the rows that nothing covers, the most urgent first.

    A row whose missing part is being freed for it, by machines that drain, is none (docs/spec/shard.md §11.1).
    """

    def read(reader: ShardReader) -> Iterator[Record]:
        short = (view for view in _rows(reader, cluster) if not view.satisfied and view.age_cycles_unmet)
        return _known(reader, cluster, map(need_record, islice(short, limit or None)))

    return read


def actions(request: shardread_pb2.ListActionsRequest) -> Source:
    """Return the source of actions, newest first."""

    return lambda reader: _known(reader, request.cluster_id, map(action_record, reader.actions(request)))


def sessions(cluster: str) -> Source:
    """Return the source of the operators that are connected or missed, cluster ids ascending."""

    def read(reader: ShardReader) -> Iterator[Record]:
        is_empty = True
        for view in reader.sessions(shardread_pb2.ListSessionsRequest(cluster_id=cluster)):
            is_empty = False
            yield session_record(view)
        if is_empty and cluster:
            raise RunFault(
                f"the shard at {reader.address} has no session of cluster {cluster!r} and expects none: the "
                "cluster has neither demand nor machines; bigfleet get sessions lists those that it knows"
            )

    return read


def exchanges(cluster: str) -> Source:
    """Return the source of exchanges, begun and proposed: a record for each, and one for a cluster without any."""

    def read(reader: ShardReader) -> Iterator[Record]:
        views = reader.exchanges(shardread_pb2.ListExchangesRequest(cluster_id=cluster))
        return _known(reader, cluster, (record for view in views for record in exchange_records(view)))

    return read


def clusters(cluster: str) -> Source:
    """Return the source of the clusters that report demand or hold machines, ids ascending."""

    def read(reader: ShardReader) -> Iterator[Record]:
        sums: dict[str, _Cluster] = {}
        for view in _rows(reader, cluster):
            sums.setdefault(view.cluster_id, _Cluster()).add_row(view)
        request = shardread_pb2.ListMachinesRequest(
            cluster_id=cluster, states=[state_to_wire(state) for state in _OF_CLUSTERS]
        )
        for machine in reader.machines(request).entries:
            if machine.machine.cluster:
                sums.setdefault(machine.machine.cluster, _Cluster()).add_machine(machine)
        return _known(reader, cluster, (sums[name].record(name) for name in sorted(sums)))

    return read


def _rows(reader: ShardReader, cluster: str, limit: int = 0) -> Iterator[shardread_pb2.NeedView]:
    return reader.needs(shardread_pb2.InspectNeedsRequest(cluster_id=cluster, limit=limit)).entries


def _known(reader: ShardReader, cluster: str, records: Iterator[Record]) -> Iterator[Record]:
    """Yield the records; when there is none, raise RunFault if that says something about the shard or the cluster."""
    is_empty = True
    for record in records:
        is_empty = False
        yield record
    if not is_empty:
        return
    demand = reader.needs(shardread_pb2.InspectNeedsRequest(cluster_id=cluster, limit=1))
    if not demand.cycle:
        raise RunFault(
            f"the shard at {reader.address} is not ready yet: it has finished no cycle; it waits for the provider's "
            "list of machines, or loads its engine, and its log says which"
        )
    if cluster and not demand.total:
        held = reader.machines(shardread_pb2.ListMachinesRequest(cluster_id=cluster, page_size=1))
        if not held.total:
            raise RunFault(
                f"the shard at {reader.address} knows no cluster {cluster!r}: it reported no demand and holds no "
                "machine; bigfleet get clusters lists those that it knows"
            )


@dataclass(slots=True)
class _Cluster:
    """What is added up for one cluster."""

    rows: int = 0
    rows_short: int = 0
    #: Of the most urgent row that is short.
    short_priority: int | None = None
    unmet_cycles_max: int = 0
    wanted: Vector = field(default_factory=dict)
    missing: Vector = field(default_factory=dict)
    machines: dict[MachineState, int] = field(default_factory=lambda: dict.fromkeys(_OF_CLUSTERS, 0))
    stuck: int = 0
    unjoined: int = 0
    cost_usd_per_hour: float = 0.0

    def add_row(self, view: shardread_pb2.NeedView) -> None:
        self.rows += 1
        self.wanted = vector.add(self.wanted, vector.parse_vector(view.need.aggregate_resources))
        if not view.satisfied:
            self.rows_short += 1
            self.missing = vector.add(self.missing, vector.parse_vector(view.residual_deficit.resources))
            self.unmet_cycles_max = max(self.unmet_cycles_max, view.age_cycles_unmet)
            urgent = view.need.priority if self.short_priority is None else self.short_priority
            self.short_priority = max(urgent, view.need.priority)

    def add_machine(self, view: shardread_pb2.MachineView) -> None:
        state = state_from_wire(view.machine.state)
        # A state that was not asked for: the machine moved on while its page was made.
        self.machines[state] = self.machines.get(state, 0) + 1
        self.stuck += view.stuck
        self.unjoined += view.unjoined
        self.cost_usd_per_hour += view.machine.price_per_hour

    def record(self, name: str) -> Record:
        return {
            "cluster": name,
            "rows": self.rows,
            "rowsShort": self.rows_short,
            "shortPriority": self.short_priority,
            "unmetCycles": self.unmet_cycles_max,
            "wanted": vector.format_vector(self.wanted),
            "missing": vector.format_vector(self.missing),
            "machines": {state.label.lower(): self.machines[state] for state in _OF_CLUSTERS},
            "stuck": self.stuck,
            "unjoined": self.unjoined,
            "costUsdPerHour": round(self.cost_usd_per_hour, 6),
        }
