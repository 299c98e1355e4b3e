"""Defines the columns of every table of `bigfleet get`, and which of them are dropped first on a narrow terminal.

A column's rank says how soon it is dropped; rank 0 never is. Cells have no control characters, because error texts come
from providers. This module does not call a shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bigfleet.cli.get.records import Record, unix_seconds
from bigfleet.cli.up.amounts import amount_text
from bigfleet.model.vector import parse_vector

#: What a cell shows when there is nothing to say.
NOTHING: Final = "-"
#: Of the 16 digits of a need's id; `bigfleet explain need` takes any beginning that is one row's alone.
NEED_DIGITS: Final = 8
#: Requirements may list a thousand values.
ASKED_CHARACTERS_MAX: Final = 60
_BYTES: Final = ("memory", "ephemeral-storage", "storage")
_STATE_STYLES: Final[Mapping[str, str]] = {
    "Configured": "green",
    "Idle": "",
    "Speculative": "dim",
    "Failed": "bold red",
    "Draining": "yellow",
    "Deleting": "yellow",
    "Creating": "cyan",
    "Configuring": "cyan",
}
_SESSION_STYLES: Final[Mapping[str, str]] = {"connected": "green", "away": "yellow", "silent": "bold red"}
#: Outcomes that need no attention.
_CALM_OUTCOMES: Final = frozenset({"success", "noop", "stale", "transition_raced_to_idle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One column of a table."""

    head: str
    #: (record, Unix seconds now) → text.
    cell: Callable[[Record, float], str]
    #: Makes room before columns of a lower rank; 0 stays.
    rank: int = 0
    right: bool = False
    style: Callable[[Record], str] = lambda _record: ""
    #: Cut to what is left of the line on a terminal; at most the last column is.
    flexible: bool = False


def plain(value: object) -> str:
    """Return a value as one line without control characters; null and empty as `-`."""
    text = "" if value is None else " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text) or NOTHING


def age_text(seconds: float) -> str:
    """Return an age as kubectl writes it: `42s`, `3m12s`, `2h10m`, `5d3h`; a clock that differs makes none negative."""
    whole = max(0, int(seconds))
    for size, unit, rest, rest_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            left = whole % size // rest
            return f"{whole // size}{unit}{left}{rest_unit}" if left else f"{whole // size}{unit}"
    return f"{whole}s"


def amounts(quantities: Mapping[str, str]) -> str:
    """Return quantities in few characters: `cpu 12.5, memory 96.0GiB, gpu 4`."""
    parts = []
    for name, milli in sorted(parse_vector(quantities).items()):
        is_bytes = name in _BYTES or name.startswith("hugepages-")
        parts.append(f"{name.rpartition('/')[2]} {amount_text(milli, 'memory' if is_bytes else 'cpu')}")
    return ", ".join(parts) or NOTHING


def _field(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: plain(record[name])


def _age(name: str) -> Callable[[Record, float], str]:
    return lambda record, now: NOTHING if record[name] is None else age_text(now - unix_seconds(record[name]))


def _amounts(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: amounts(record[name])


def _dollars(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: NOTHING if record[name] is None else f"{record[name]:.4g}"


def _state_style(record: Record) -> str:
    return _STATE_STYLES.get(record["state"], "")


def _flags(record: Record, _now: float) -> str:
    """Return what is unusual about a machine, the action under way included."""
    notes = [name for name in ("stuck", "unjoined", "held") if record[name]]
    if record["reservedForShard"]:
        notes.append(f"reserved:{plain(record['reservedForShard'])}")
    if record["reclaimDelayedReason"]:
        notes.append(f"reclaim-delayed:{plain(record['reclaimDelayedReason'].partition(':')[0])}")
    if record["pendingAction"]:
        notes.append(record["pendingAction"].lower())
    return ",".join(notes) or NOTHING


def _alarm(name: str, style: str = "bold red") -> Callable[[Record], str]:
    return lambda record: style if record[name] else ""


def _flags_style(record: Record) -> str:
    return "bold red" if record["stuck"] or record["unjoined"] or record["held"] else "cyan"


def _supply(record: Record, _now: float) -> str:
    """Return idle, configured and speculative machines that match, `+` where counting stopped."""
    supply: Mapping[str, Any] | None = record["matchingSupply"]
    if supply is None:
        return NOTHING
    counts = "/".join(str(supply[name]) for name in ("idle", "configured", "speculative"))
    return f"{counts}+" if supply["capped"] else counts


def requirements_text(requirements: Sequence[Mapping[str, Any]]) -> str:
    """Return what a row asks of its machines, the keys without their domain: `zone in a|b, arch=arm64, rack same`."""
    return ", ".join(_requirement(requirement) for requirement in requirements) or "any machine"


def _requirement(requirement: Mapping[str, Any]) -> str:
    key, values = plain(requirement["key"]).rpartition("/")[2], [plain(value) for value in requirement["values"]]
    match requirement["operator"]:
        case "In":
            return f"{key}={values[0]}" if len(values) == 1 else f"{key} in {'|'.join(values)}"
        case "NotIn":
            return f"{key}!={values[0]}" if len(values) == 1 else f"{key} not in {'|'.join(values)}"
        case "Exists":
            return key
        case "DoesNotExist":
            return f"no {key}"
        case operator:
            return f"{key} {operator.lower()}" + (f" of {'|'.join(values)}" if values else "")


def _asks(record: Record, _now: float) -> str:
    return shortened(requirements_text(record["requirements"]), ASKED_CHARACTERS_MAX)


def _need(record: Record, _now: float) -> str:
    return str(record["need"])[:NEED_DIGITS]


def shortened(text: str, characters_max: int) -> str:
    """Return a text, cut with an ellipsis if it is longer."""
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def _reason(record: Record, _now: float) -> str:
    if record["satisfied"]:
        return "met"
    return plain(record["reason"]) + (", parked" if record["parked"] else "")


def _reason_style(record: Record) -> str:
    return "green" if record["satisfied"] else "bold red" if record["class"] in ("critical", "service") else "yellow"


def _held(record: Record, _now: float) -> str:
    """Return the machines that a row holds, and those of them that are new in this cycle."""
    new = record["bootstraps"] + record["provisions"]
    return f"{record['machines']} ({new} new)" if new else str(record["machines"])


def _unmet(record: Record, _now: float) -> str:
    return str(record["unmetCycles"]) if record["unmetCycles"] else NOTHING


def _outcome(record: Record, _now: float) -> str:
    return plain(record["outcome"] or "running")


def _outcome_style(record: Record) -> str:
    outcome = record["outcome"]
    return "cyan" if outcome is None else "green" if outcome in _CALM_OUTCOMES else "bold red"


def _took(record: Record, now: float) -> str:
    ended = now if record["finished"] is None else unix_seconds(record["finished"])
    return NOTHING if record["decided"] is None else age_text(ended - unix_seconds(record["decided"]))


def _list(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: plain(",".join(record[name]))


def _rollup(record: Record, now: float) -> str:
    """Return the age of the last roll-up, and whether it is held."""
    age = _age("lastRollup")(record, now)
    return f"{age} held" if record["rollupHeld"] else age


def _session_style(record: Record) -> str:
    return _SESSION_STYLES.get(record["state"], "")


def _count(state: str) -> Callable[[Record, float], str]:
    return lambda record, _now: str(record["machines"][state])


def _cluster_flags(record: Record, _now: float) -> str:
    return ",".join(f"{record[name]} {name}" for name in ("stuck", "unjoined") if record[name]) or NOTHING


def _exchanged(name: str) -> Callable[[Record, float], str]:
    def cell(record: Record, _now: float) -> str:
        parts = [
            f"{each['machines']} × {plain(each['instanceType'])} {each['capacityType']}" for each in record[name] or ()
        ]
        return " + ".join(parts) or NOTHING

    return cell


def _goes(record: Record, now: float) -> str:
    """Return what goes, and of an exchange between clusters where it goes and what goes there."""
    text = _exchanged("goes")(record, now)
    if not record["taker"]:
        return text
    there = _exchanged("takerGoes")(record, now)
    return f"{text} to {plain(record['taker'])}" + ("" if there == NOTHING else f", {there} there")


def _break_even(record: Record, _now: float) -> str:
    return NOTHING if record["breakEvenSeconds"] is None else age_text(record["breakEvenSeconds"])


def _exchange_state(record: Record, _now: float) -> str:
    if record["exchangeId"]:
        end = record["end"]
        return plain(end or record["phase"]) if end in (None, "done") else f"abandoned: {plain(end)}"
    if record["blocked"]:
        return f"blocked: {plain(record['blocked'])}"
    return NOTHING if record["kind"] is None else plain(record["waitsFor"] or "ready")


def _excluded(record: Record, _now: float) -> str:
    return ", ".join(f"{plain(reason)} {count}" for reason, count in record["excluded"].items()) or NOTHING


MACHINES: Final[Sequence[TableColumn]] = (
    TableColumn(head="MACHINE", cell=_field("id")),
    TableColumn(head="STATE", cell=_field("state"), style=_state_style),
    TableColumn(head="AGE", cell=_age("stateSince"), right=True),
    TableColumn(head="CLUSTER", cell=_field("cluster"), rank=1),
    TableColumn(head="TYPE", cell=_field("instanceType"), rank=4),
    TableColumn(head="ZONE", cell=_field("zone"), rank=5),
    TableColumn(head="CAPACITY", cell=_field("capacityType"), rank=6),
    TableColumn(head="$/H", cell=_dollars("priceUsdPerHour"), rank=7, right=True),
    TableColumn(head="PRIORITY", cell=_field("priority"), rank=3, right=True),
    TableColumn(head="FLAGS", cell=_flags, rank=2, style=_flags_style),
    TableColumn(head="ERROR", cell=_field("lastError"), rank=1, style=_alarm("lastError", "red"), flexible=True),
)
NEEDS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="PRIORITY", cell=_field("priority"), right=True),
    TableColumn(head="NEED", cell=_need),
    TableColumn(head="GROUP", cell=_field("group"), rank=4),
    TableColumn(head="AGE", cell=_age("firstReported"), rank=3, right=True),
    TableColumn(head="HELD", cell=_held, rank=5),
    TableColumn(head="UNMET", cell=_unmet, rank=3, right=True, style=_alarm("unmetCycles")),
    TableColumn(head="REASON", cell=_reason, style=_reason_style),
    TableColumn(head="DOMAIN", cell=_field("domain"), rank=6),
    TableColumn(head="ASKS FOR", cell=_asks, rank=7),
    TableColumn(head="WANTED", cell=_amounts("wanted"), rank=2),
    TableColumn(head="MISSING", cell=_amounts("missing"), style=_alarm("missing", "red"), flexible=True),
)
SHORTFALLS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="PRIORITY", cell=_field("priority"), right=True),
    TableColumn(head="CLASS", cell=_field("class"), rank=3, style=_reason_style),
    TableColumn(head="NEED", cell=_need),
    TableColumn(head="GROUP", cell=_field("group"), rank=4),
    TableColumn(head="CYCLES", cell=_unmet, right=True),
    TableColumn(head="REASON", cell=_reason, style=_reason_style),
    TableColumn(head="IDLE/CONF/SPEC", cell=_supply, rank=3, right=True),
    TableColumn(head="VICTIMS", cell=_field("victims"), rank=5, right=True),
    TableColumn(head="ASKS FOR", cell=_asks, rank=6),
    TableColumn(head="MISSING", cell=_amounts("missing"), style=lambda _record: "red", flexible=True),
)
CLUSTERS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="ROWS", cell=_field("rows"), rank=3, right=True),
    TableColumn(head="SHORT", cell=_field("rowsShort"), right=True, style=_alarm("rowsShort")),
    TableColumn(head="URGENCY", cell=_field("shortPriority"), rank=1, right=True, style=_alarm("rowsShort")),
    TableColumn(head="CYCLES", cell=_unmet, rank=2, right=True),
    TableColumn(head="READY", cell=_count("configured"), right=True),
    TableColumn(head="COMING", cell=_count("configuring"), right=True),
    TableColumn(head="DRAINING", cell=_count("draining"), rank=2, right=True),
    TableColumn(head="FAILED", cell=_count("failed"), right=True),
    TableColumn(head="FLAGS", cell=_cluster_flags, rank=1, style=lambda _record: "bold red"),
    TableColumn(head="$/H", cell=_dollars("costUsdPerHour"), rank=4, right=True),
    TableColumn(head="WANTED", cell=_amounts("wanted"), rank=5),
    TableColumn(head="MISSING", cell=_amounts("missing"), rank=1, style=_alarm("missing", "red"), flexible=True),
)
ACTIONS: Final[Sequence[TableColumn]] = (
    TableColumn(head="AGE", cell=_age("decided"), right=True),
    TableColumn(head="KIND", cell=_field("kind")),
    TableColumn(head="MACHINE", cell=_field("machine")),
    TableColumn(head="CLUSTER", cell=_field("cluster"), rank=1),
    TableColumn(head="OUTCOME", cell=_outcome, style=_outcome_style),
    TableColumn(head="TOOK", cell=_took, rank=2, right=True),
    TableColumn(head="REASON", cell=_field("reason"), rank=4),
    TableColumn(head="CYCLE", cell=_field("decidedCycle"), rank=5, right=True),
    TableColumn(head="MESSAGE", cell=_field("message"), rank=3, flexible=True),
)
SESSIONS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="STATE", cell=_field("state"), style=_session_style),
    TableColumn(head="SINCE", cell=_age("since"), right=True),
    TableColumn(head="ROLL-UP", cell=_rollup, right=True, style=_alarm("rollupHeld")),
    TableColumn(head="ROWS", cell=_field("rows"), rank=2, right=True),
    TableColumn(head="OUTBOX", cell=_field("outboxFrames"), rank=1, right=True),
    TableColumn(head="DROPPED", cell=_field("outboxDropped"), rank=1, right=True, style=_alarm("outboxDropped")),
    TableColumn(head="CAPABILITIES", cell=_list("capabilities"), rank=3, flexible=True),
)
EXCHANGES: Final[Sequence[TableColumn]] = (
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="STATE", cell=_exchange_state, style=lambda record: "" if record["waitsFor"] else "green"),
    TableColumn(head="SAVES $/H", cell=_dollars("savingUsdPerHour"), right=True),
    TableColumn(head="REALISED $/H", cell=_dollars("realisedUsdPerHour"), rank=3, right=True),
    TableColumn(head="PAYS AFTER", cell=_break_even, rank=2, right=True),
    TableColumn(head="GAIN $", cell=_dollars("gainUsd"), rank=4, right=True),
    TableColumn(head="REQUIRED $", cell=_dollars("requiredUsd"), rank=4, right=True),
    TableColumn(head="GO", cell=_goes),
    TableColumn(head="COME", cell=_exchanged("comes")),
    TableColumn(head="EXCLUDED", cell=_excluded, rank=3, flexible=True),
)
SESSION_TOTALS: Final[Sequence[TableColumn]] = (
    TableColumn(head="FIGURE", cell=_field("name")),
    TableColumn(head="WHICH", cell=_field("event")),
    TableColumn(head="CLUSTER", cell=_field("cluster")),
    TableColumn(head="COUNT", cell=_field("count"), right=True),
    TableColumn(head="MEANING", cell=_field("meaning"), rank=1, flexible=True),
)
