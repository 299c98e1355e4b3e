"""Prints replayed cycles: a line per cycle, its differences below it, and a verdict at the end.

This module does not decide or compare.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from bigfleet.cli.get.columns import NOTHING, TableColumn
from bigfleet.cli.get.output import TableWriter
from bigfleet.cli.get.records import time_text
from bigfleet.cli.replay.records import Record
from bigfleet.cli.replay.replaying import Replayed, ReplayVerdict, differing_actions
from bigfleet.engine.explain.sentences import dollars_text
from bigfleet.recording.values import RecordingHead

#: Cycles that are laid out together, so that a long replay is seen to go on.
BLOCK_MAX: Final = 20
#: Cycles that a verdict names.
NAMED_MAX: Final = 10
#: Of a digest, in a table; JSON has all of it.
DIGEST_CHARACTERS: Final = 12
#: Actions of each side that are named where a cycle differs.
DIFFERING_MAX: Final = 20
_STYLES: Final = {
    ReplayVerdict.SAME.value: "green",
    ReplayVerdict.DIFFERENT.value: "bold red",
    ReplayVerdict.FAILS.value: "yellow",
}
_WORDS: Final = {
    ReplayVerdict.SAME.value: "same",
    ReplayVerdict.DIFFERENT.value: "DIFFERENT",
    ReplayVerdict.FAILS.value: "fails again",
}


def head_text(head: RecordingHead) -> str:
    """Return who recorded what comes."""
    checked = f", every {head.verify_every_cycles:,}th decision checked" if head.verify_every_cycles else ""
    started = time_text(head.started_unix_nanos)
    return f"{head.shard_id}, epoch {head.epoch}, bigfleet {head.bigfleet}{checked}; started {started}"


def new_table(console: Console, *, is_changed: bool) -> TableWriter:
    """Return the writer of the cycles' table."""
    columns = [*_COLUMNS, *_CHANGED] if is_changed else [*_COLUMNS]
    return TableWriter(console, columns, now_seconds=0.0)


def show_line(console: Console, text: str, style: str = "") -> None:
    """Print one line as it is."""
    # As text: ids may hold what rich would take for markup.
    console.print(Text(text, style=style), soft_wrap=True)


def verdict_text(verdicts: Sequence[tuple[int, ReplayVerdict]], *, missed: int) -> str:
    """Return one sentence about all cycles."""
    count = len(verdicts)
    differing = [cycle for cycle, verdict in verdicts if verdict is ReplayVerdict.DIFFERENT]
    text = f"{count:,} {'cycle' if count == 1 else 'cycles'}"
    if missed:
        text += f" ({missed:,} more were not recorded: the disk took them too slowly or not at all)"
    if not differing:
        return f"{text}: {'decided' if count == 1 else 'every one decided'} as it was recorded."
    named = ", ".join(map(str, differing[:NAMED_MAX]))
    rest = f" and {len(differing) - NAMED_MAX:,} more" if len(differing) > NAMED_MAX else ""
    some = "it is" if count == 1 else f"{len(differing):,} {'is' if len(differing) == 1 else 'are'}"
    return f"{text}: {some} DIFFERENT ({named}{rest}); --cycle {differing[0]} shows the decision."


def changed_text(changes: Sequence[tuple[int, int]]) -> str:
    """Return one sentence about what changed settings change in all: of each cycle the actions added and dropped."""
    other = sum(change != (0, 0) for change in changes)
    if not other:
        return "The change would have changed no action of any cycle."
    added, dropped = map(sum, zip(*changes, strict=True))
    return (
        f"The change would have changed {other:,} {'cycle' if other == 1 else 'cycles'}, each decided on what was "
        f"recorded: {added:,} actions only with it, {dropped:,} only without it."
    )


def verdict_line(replayed: Replayed, digest: str) -> str:
    """Return one sentence about one cycle."""
    cycle = replayed.recorded.cycle
    if replayed.verdict is ReplayVerdict.FAILS:
        return f"Cycle {cycle}: the engine failed then and fails now ({replayed.error})."
    if replayed.verdict is ReplayVerdict.DIFFERENT:
        return f"Cycle {cycle}: DIFFERENT: {replayed.difference}."
    return f"Cycle {cycle}: same decision (digest {digest})."


def show_differing(console: Console, replayed: Replayed) -> None:
    """Print the actions that were recorded and are not decided now, and the other way round."""
    only_recorded, only_now = differing_actions(replayed)
    for title, texts in (("Only recorded", only_recorded), ("Only now", only_now)):
        if texts:
            show_line(console, f"{title}: {len(texts):,} {'action' if len(texts) == 1 else 'actions'}")
        for text in texts[:DIFFERING_MAX]:
            show_line(console, f"  {text}")
        if len(texts) > DIFFERING_MAX:
            show_line(console, f"  and {len(texts) - DIFFERING_MAX:,} more; --output json names them")


def _field(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: NOTHING if record[name] is None else str(record[name])


def _number(name: str) -> Callable[[Record, float], str]:
    return lambda record, _now: NOTHING if record[name] is None else f"{record[name]:,}"


def _count(kind: str) -> Callable[[Record, float], str]:
    def cell(record: Record, _now: float) -> str:
        return NOTHING if record["actions"] is None else f"{record['actions'][kind]:,}"

    return cell


def _digest(record: Record, _now: float) -> str:
    return NOTHING if record["digest"] is None else str(record["digest"][:DIGEST_CHARACTERS])


def _what_if(describe: Callable[[Record], str]) -> Callable[[Record, float], str]:
    return lambda record, _now: describe(record["what_if"]) if "what_if" in record else NOTHING


def _dollars(value: float | str) -> str:
    return str(value) if isinstance(value, str) else dollars_text(value)


_COLUMNS: Final[Sequence[TableColumn]] = (
    TableColumn(head="CYCLE", cell=_number("cycle"), right=True),
    TableColumn(head="TIME", cell=_field("time"), rank=3),
    TableColumn(head="ROWS", cell=_number("rows"), right=True, rank=1),
    TableColumn(head="MACHINES", cell=_number("machines"), right=True, rank=1),
    TableColumn(head="BIND", cell=_count("bootstrap"), right=True),
    TableColumn(head="MAKE", cell=_count("provision"), right=True),
    TableColumn(head="RECLAIM", cell=_count("reclaim"), right=True),
    TableColumn(head="PREEMPT", cell=_count("preempt"), right=True),
    TableColumn(head="RELEASE", cell=_count("delete"), right=True),
    TableColumn(head="SHORT", cell=_number("short"), right=True),
    TableColumn(head="DIGEST", cell=_digest, rank=4),
    TableColumn(
        head="DECISION",
        cell=lambda record, _now: _WORDS[record["verdict"]],
        style=lambda record: _STYLES[record["verdict"]],
    ),
)
_CHANGED: Final[Sequence[TableColumn]] = (
    TableColumn(head="ONLY CHANGED", cell=_what_if(lambda what_if: f"{what_if['actions_added']:,}"), right=True),
    TableColumn(head="ONLY RECORDED", cell=_what_if(lambda what_if: f"{what_if['actions_dropped']:,}"), right=True),
    TableColumn(head="SHORT CHANGED", cell=_what_if(lambda what_if: f"{what_if['short']:,}"), right=True, rank=2),
    TableColumn(head="$/H", cell=_what_if(lambda what_if: _dollars(what_if["cost_after_usd_per_hour"])), right=True),
    TableColumn(
        head="$/H CHANGED",
        cell=_what_if(lambda what_if: _dollars(what_if["changed_cost_after_usd_per_hour"])),
        right=True,
    ),
)
