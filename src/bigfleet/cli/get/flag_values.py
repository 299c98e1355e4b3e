"""Checks the values of the flags of `bigfleet get` and `bigfleet explain`, and converts them for the shard.

Each mistake is a UsageFault that names the flag and the values allowed. This module does not call a shard.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from bigfleet.cli.flags.values import address_text, parse_address, parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.engine.decision import ActionKind
from bigfleet.model.ids import identifier_fault
from bigfleet.model.states import CapacityType, MachineState
from bigfleet.shard.outcomes import REDRIVE_LABEL, ActionOutcome

OUTPUTS: Final = ("table", "json", "yaml")
FLAGS: Final = ("pending", "held", "stuck", "unjoined", "reserved")
#: What an action may end as; the last three stand for no end of a worker's.
OUTCOMES: Final = (*(outcome.value for outcome in ActionOutcome), "suppressed", "dryrun", "running")
INTERVAL_SECONDS: Final = 2.0


def dialled(text: str, flag: str) -> str:
    """Return HOST:PORT of an address; `:PORT` is this machine. Raises UsageFault naming the flag."""
    host, port = parse_address(text, flag)
    if not port:
        raise UsageFault(f"{flag}: {text!r} has port 0, which cannot be called; name the port of the server")
    host = "127.0.0.1" if text.startswith(":") else host
    return address_text(host, port)


def output_form(text: str) -> str:
    """Return table, json or yaml. Raises UsageFault for anything else."""
    # As kubectl reads `-o=json`.
    form = text.removeprefix("=")
    if form not in OUTPUTS:
        raise UsageFault(f"--output: {form!r} is unknown; choose one of {', '.join(OUTPUTS)}")
    return form


def watch_seconds(*, watch: bool, interval: str | None) -> float | None:
    """Return the time between two looks, None when there is one look only. Raises UsageFault for a contradiction."""
    if interval is not None and not watch:
        raise UsageFault("--interval needs --watch; add --watch")
    if not watch:
        return None
    return INTERVAL_SECONDS if interval is None else parse_positive_duration_seconds(interval, "--interval")


def cluster_id(text: str) -> str:
    """Return a cluster id, "" for any cluster. Raises UsageFault for one that no cluster can have."""
    return _identifier(text, "--cluster")


def shard_id(text: str) -> str:
    """Return a shard id, "" for any shard. Raises UsageFault for one that no shard can have."""
    return _identifier(text, "--shard")


def _identifier(text: str, flag: str) -> str:
    fault = identifier_fault(text) if text else None
    if fault is not None:
        raise UsageFault(f"{flag} {fault}")
    return text


def machine_states(texts: Iterable[str]) -> list[MachineState]:
    """Return states by their names, in any case. Raises UsageFault for an unknown one."""
    known = {state.label: state for state in MachineState if state}
    return [known[name] for name in _chosen(texts, list(known), "--state")]


def capacity_types(texts: Iterable[str]) -> list[CapacityType]:
    """Return capacity types by their names, such as OnDemand, on-demand or ON_DEMAND. Raises UsageFault."""
    known = {kind.label: kind for kind in CapacityType if kind}
    return [known[name] for name in _chosen(texts, list(known), "--capacity-type")]


def machine_flags(texts: Iterable[str]) -> list[str]:
    """Return flags of machines. Raises UsageFault for an unknown one."""
    return _chosen(texts, FLAGS, "--flag")


def action_kinds(texts: Iterable[str]) -> list[str]:
    """Return kinds of actions by their names, in any case. Raises UsageFault for an unknown one."""
    return _chosen(texts, [*(kind.label for kind in ActionKind), REDRIVE_LABEL], "--kind")


def outcomes(texts: Iterable[str]) -> list[str]:
    """Return outcomes as the shard labels them, which has "" for running. Raises UsageFault for an unknown one."""
    return ["" if name == "running" else name for name in _chosen(texts, OUTCOMES, "--outcome")]


def _chosen(texts: Iterable[str], known: Sequence[str], flag: str) -> list[str]:
    """Return the known names that are meant: flags may be repeated and may hold lists with commas."""
    by_spelling = {_spelling(name): name for name in known}
    chosen = []
    for text in (part.strip() for given in texts for part in given.split(",")):
        name = by_spelling.get(_spelling(text))
        if name is None:
            raise UsageFault(f"{flag}: {text!r} is unknown; choose from {', '.join(known)}")
        chosen.append(name)
    return chosen


def _spelling(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
