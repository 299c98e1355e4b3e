"""Lists the readers of outside input: each target takes any bytes, and rejects them or returns a value.

A refusal is one of the exceptions that the reader documents; anything else that leaves `read` is a defect. Where a
value can be written again, `again` writes it, and reading that gives an equal value.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from bigfleet.cli.engine.cases import CaseFileFault, read_case_file
from bigfleet.cli.engine.fleets import FleetFault, read_fleets
from bigfleet.cli.plan.inputs import read_demand, read_machines
from bigfleet.cli.plan.patches import read_patches
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.coordinator.stores.codec import UnreadableRow, decode_row, encode_row
from bigfleet.coordinator.stores.snapshot import SnapshotFault, read_meta
from bigfleet.coordinator.tables import RowKey, Table
from bigfleet.model.clock import Clock
from bigfleet.model.frames import MalformedMessage
from bigfleet.model.quantity import QuantityError, parse_quantity
from bigfleet.operator.bootstrap.rendering import RenderingFault
from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.decoding import MalformedAnswer, ObjectDecoder, WatchDecoder
from bigfleet.operator.kubernetes.kubeconfig import KubeconfigError, load_endpoint
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, NodeObject, PodObject
from bigfleet.operator.kubernetes.resources import RECLAIM_ANNOTATION
from bigfleet.operator.nodes.drain_annotation import UnreadableAnnotation, read_annotation
from bigfleet.operator.pods.defaults import PenaltyDefaultsFault, read_penalty_defaults
from bigfleet.operator.pods.mapping import map_pod
from bigfleet.partition.answer import answer
from bigfleet.partition.document import WrongInput
from bigfleet.provider.backends.simulated.catalogue import CatalogueFault, parse_catalogue
from bigfleet.provider.backends.simulated.world import WorldFault, parse_world
from bigfleet.provider.inventory.offerings import OfferingsUnreadable, read_offerings
from bigfleet.provider.storage.codec import decode_record
from bigfleet.recording.frames import Damage, WrongFile
from bigfleet.recording.reader import read_recording
from bigfleet.rpc.security.identity import Denied, identity_in
from bigfleet.rpc.wire.convert_coordinator import answer_from_wire, answer_to_wire, report_from_wire, report_to_wire
from bigfleet.rpc.wire.convert_instruction import instruction_from_wire, instruction_to_wire
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.convert_need import ReceivedRollUp
from bigfleet.rpc.wire.convert_session import operator_frame_from_bytes, shard_frame_from_wire, shard_frame_to_wire
from bigfleet.rpc.wire.gen import coordinator_pb2, provider_pb2, shard_pb2
from bigfleet.rpc.wire.list_response import read_listing
from bigfleet.shard.audit.log import read_line
from bigfleet.shard.cluster_policy import PolicyFault, read_policies
from bigfleet.shard.ports import ProviderRefusal
from bigfleet.sim.kernel.virtual_time import LoopClock, run_virtual
from bigfleet.sim.scenarios.scenario_file import ScenarioFault, read_scenario
from tests.rpc.wire.split_parts import composed

_FOLDER: Final = Path(tempfile.mkdtemp(prefix="bigfleet-fuzzing-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader of input from outside."""

    name: str
    read: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    #: Writes a value again; None where nothing does, or for values that are not compared.
    again: Callable[[Any], bytes | None] | None = None
    #: What is doubled to see how its time grows; less for readers in Python, which take a millisecond for 20 bytes.
    doubled_bytes: int = 20_000

    def feed(self, content: bytes) -> Any:
        """Return the value, None for a refusal.

        Raises what the reader does not document, and AssertionError for a value that reads back as another one.
        """
        try:
            value = self.read(content)
        except self.refusals as refusal:
            if not str(refusal).strip():
                raise AssertionError(f"{self.name}: a refusal without a word") from refusal
            return None
        if self.again is not None and value is not None:
            written = self.again(value)
            if written is not None:
                found = self.read(written)
                is_same = found == value or comparable(found) == comparable(value)
                assert is_same, f"{self.name}: reads back as another value"
        return value


def comparable(value: Any) -> Any:
    """Return a value that equals another one's if they say the same.

    A price may be no number, which equals nothing; maps have any order, which differs between two readings.
    """
    if isinstance(value, Mapping):
        return tuple(sorted((repr(key), comparable(each)) for key, each in value.items()))
    if is_dataclass(value):
        return type(value).__name__, tuple(comparable(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple | list):
        return tuple(map(comparable, value))
    return repr(value)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """Return a reader of bytes from one of files."""
    path = _FOLDER / name

    def read_content(content: bytes) -> Any:
        path.write_bytes(content)
        return read(path)

    return read_content


def _listed(read: Callable[[Path], Iterable[Any]]) -> Callable[[Path], list[Any]]:
    return lambda path: list(read(path))


# ---- messages ----------------------------------------------------------------------------------------------------


def _operator_frame(content: bytes) -> Any:
    frame = operator_frame_from_bytes(content, None)
    if isinstance(frame, ReceivedRollUp):
        return (frame.cluster_id, frame.timestamp_unix_nanos, frame.needs(), frame.overheads())
    return frame


def _message(kind: Any, convert: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return lambda content: convert(kind.FromString(content))


def _machine(message: provider_pb2.Machine) -> Any:
    return machine_from_wire(message)


def _list_answer(content: bytes) -> Any:
    """Read each record as a whole, and compare with it what is read in parts."""

    async def read() -> list[str]:
        listing = await read_listing(content, LoopClock())
        assert listing.parts is not None
        split = await listing.parts.read(range(len(listing.records)))
        for number, place in enumerate(split.places):
            assert repr(composed(split, number)) == repr(listing.records[place]), "parts say another thing"
        return [repr(record) for record in listing.records]

    return run_virtual(read)


def _machine_again(value: Any) -> bytes:
    return bytes(machine_to_wire(*value).SerializeToString())


def _shard_frame_again(frame: Any) -> bytes:
    return bytes(shard_frame_to_wire(frame).SerializeToString())


# ---- Kubernetes --------------------------------------------------------------------------------------------------


def _pod(content: bytes) -> Any:
    pod = ObjectDecoder.of(PodObject).object(content)
    return map_pod(pod)


def _page(content: bytes) -> Any:
    return ObjectDecoder.of(CapacityRequestObject).page(content)


def _event(content: bytes) -> Any:
    return WatchDecoder.of(NodeObject).event("watch nodes", content)


def _annotation(content: bytes) -> Any:
    node = msgspec.convert({"metadata": {"name": "n", "annotations": {RECLAIM_ANNOTATION: _text(content)}}}, NodeObject)
    return read_annotation(node)


def _annotation_again(found: Any) -> bytes:
    return str(found.text()).encode("utf-8", "surrogateescape")


def _template(content: bytes) -> Any:
    """Compile only: a rendering has its limits from the process that it runs in."""
    from bigfleet.operator.bootstrap.rendering import _compiled

    return _compiled(content.decode("utf-8"), "template") is not None


# ---- state and files ---------------------------------------------------------------------------------------------


def _record(content: bytes) -> Any:
    """Read the two columns of a row, which a NUL separates here."""
    text, _nul, operation = content.partition(b"\x00")
    return decode_record("m/1", 1, 1, text, operation or None, None)


def _row(content: bytes) -> Any:
    """Read a row of the table that the first byte names by its number."""
    table = list(Table)[content[0] % len(Table)] if content else Table.SHARDS
    key = RowKey(table, ("a", "b") if table in (Table.DOMAINS, Table.QUOTAS) else ("a",))
    return table, decode_row(key, content[1:])


def _row_again(value: Any) -> bytes:
    table, row = value
    return bytes([list(Table).index(table)]) + encode_row(row)


def _clock() -> Clock:
    return LoopClock()


TARGETS: Final = (
    Target(name="quantity", read=lambda c: parse_quantity(_text(c)), refusals=(QuantityError,)),
    Target(
        name="identity",
        read=lambda c: identity_in(_text(c).split("\n")),
        refusals=(Denied,),
        again=lambda identity: identity.uri.encode(),
    ),
    Target(name="operator-frame", read=_operator_frame, refusals=(MalformedMessage, DecodeError)),
    Target(
        name="shard-frame",
        read=_message(shard_pb2.ShardMessage, shard_frame_from_wire),
        refusals=(MalformedMessage, DecodeError),
        again=_shard_frame_again,
    ),
    Target(
        name="machine",
        read=_message(provider_pb2.Machine, _machine),
        refusals=(MalformedMessage, DecodeError),
        again=_machine_again,
    ),
    Target(name="list-answer", read=_list_answer, refusals=(ProviderRefusal,)),
    Target(
        name="shard-report",
        read=_message(coordinator_pb2.ShardReport, report_from_wire),
        refusals=(MalformedMessage, DecodeError),
        again=lambda report: bytes(report_to_wire(report).SerializeToString()),
    ),
    Target(
        name="report-answer",
        read=_message(coordinator_pb2.ReportAck, answer_from_wire),
        refusals=(MalformedMessage, DecodeError),
        again=lambda found: bytes(answer_to_wire(found).SerializeToString()),
    ),
    Target(
        name="instruction",
        read=_message(coordinator_pb2.CoordinatorInstruction, instruction_from_wire),
        refusals=(MalformedMessage, DecodeError),
        again=lambda found: bytes(instruction_to_wire(found).SerializeToString()),
    ),
    Target(name="pod", read=_pod, refusals=(MalformedAnswer,)),
    Target(name="capacity-request-page", read=_page, refusals=(MalformedAnswer,)),
    Target(name="node-event", read=_event, refusals=(MalformedAnswer, ApiError)),
    Target(name="drain-annotation", read=_annotation, refusals=(UnreadableAnnotation,)),
    Target(name="bootstrap-template", read=_template, refusals=(RenderingFault, UnicodeDecodeError)),
    Target(
        name="kubeconfig",
        read=_file("kubeconfig", lambda path: load_endpoint(clock=_clock(), environment={}, kubeconfig=path)),
        refusals=(KubeconfigError,),
    ),
    Target(
        name="penalty-defaults", read=_file("defaults.yaml", read_penalty_defaults), refusals=(PenaltyDefaultsFault,)
    ),
    Target(name="cluster-policy", read=_file("policy.yaml", read_policies), refusals=(PolicyFault,)),
    Target(name="fleet-csv", read=_file("fleet.csv", read_machines), refusals=(UsageFault,)),
    Target(name="fleet-json", read=_file("fleet.json", read_machines), refusals=(UsageFault,)),
    Target(name="demand-yaml", read=_file("demand.yaml", read_demand), refusals=(UsageFault,)),
    Target(name="demand-json", read=_file("demand.json", read_demand), refusals=(UsageFault,)),
    Target(name="patches", read=_file("patches.yaml", read_patches), refusals=(UsageFault,)),
    Target(name="scenario", read=_file("scenario.yaml", read_scenario), refusals=(ScenarioFault,), doubled_bytes=4_000),
    Target(name="engine-cases", read=_file("cases.yaml", read_case_file), refusals=(CaseFileFault,)),
    Target(name="engine-fleets", read=_file("fleets.jsonl", _listed(read_fleets)), refusals=(FleetFault,)),
    Target(name="simulated-cloud", read=lambda c: parse_world(c, "cloud.yaml"), refusals=(WorldFault,)),
    Target(
        name="simulated-cloud-json", read=lambda c: parse_world(c, "cloud.json", is_json=True), refusals=(WorldFault,)
    ),
    Target(
        name="catalogue",
        read=lambda c: dict(parse_catalogue(c.decode("utf-8", "replace").splitlines(keepends=True), "types.csv")),
        refusals=(CatalogueFault,),
    ),
    Target(
        name="offerings",
        read=_file("offerings.json", lambda path: read_offerings(path, "p")),
        refusals=(OfferingsUnreadable,),
    ),
    Target(name="hail", read=answer, refusals=(WrongInput,)),
    Target(name="audit-line", read=read_line, refusals=()),
    Target(name="recording", read=_file("cycles.rec", _listed(read_recording)), refusals=(Damage, WrongFile, OSError)),
    # What is stored is checked by its checksum or its database before; these readers come after that.
    Target(name="provider-record", read=_record, refusals=(msgspec.MsgspecError, ValueError, RecursionError)),
    Target(name="coordinator-row", read=_row, refusals=(UnreadableRow,), again=_row_again),
    Target(name="coordinator-snapshot", read=lambda c: read_meta(c, "meta.json"), refusals=(SnapshotFault,)),
)
BY_NAME: Final = {target.name: target for target in TARGETS}
