"""Formats an explanation for a terminal: its subject, the sentences that led to the decision, and the decision.

The sentences are the shard's own (docs/spec/shard.md §12). This module does not add a reason.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigfleet.cli.get.columns import ACTIONS, NOTHING, age_text, amounts, plain, requirements_text, shortened
from bigfleet.cli.get.output import TableWriter, print_trimmed
from bigfleet.cli.get.records import Record, unix_seconds

#: Actions that a page shows; `-o json` has all that the shard sent.
ACTIONS_MAX: Final = 20
#: Machines that are named of those about which the same is to be said.
ALIKE_MAX: Final = 3
#: Of a fingerprint, which spells out all that a row asks for.
STAMP_CHARACTERS_MAX: Final = 80
#: Events of which there is one per machine that a row looked at.
_OF_CANDIDATES: Final = ("candidate_rejected", "candidate_considered")


def show_need(console: Console, explained: Record) -> None:
    """Print why a row got what it got."""
    need = explained["need"]
    state = "met" if need["satisfied"] else f"short: {plain(need['reason'])}" + (", parked" if need["parked"] else "")
    facts = [
        ("need", f"{need['need']} of {plain(need['cluster'])}"),
        ("group", plain(need["group"])),
        ("priority", f"{need['priority']} ({need['class']})"),
        ("asks for", requirements_text(need["requirements"])),
        ("wanted", amounts(need["wanted"])),
        ("missing", amounts(need["missing"])),
        ("state", state),
        ("machines", f"{need['machines']} held, {need['bootstraps']} newly bound, {need['provisions']} newly made"),
        ("domain", plain(need["domain"])),
        ("reported", _ago(need["firstReported"])),
        ("unmet for", f"{need['unmetCycles']} cycles" if need["unmetCycles"] else NOTHING),
        ("cycle", _cycle(explained)),
    ]
    _show_facts(console, facts)
    _show_events(console, explained["events"], truncated=explained["truncated"])


def show_machine(console: Console, explained: Record) -> None:
    """Print why a machine serves its cluster, and which action was decided."""
    machine = explained["machine"]
    flags = [name for name in ("joined", "unjoined", "stuck", "held") if machine[name]]
    price = NOTHING if machine["priceUsdPerHour"] is None else f"${machine['priceUsdPerHour']:.4g}/h"
    facts = [
        ("machine", plain(machine["id"])),
        ("state", f"{machine['state']} for {_for(machine['stateSince'])}"),
        ("cluster", plain(machine["cluster"])),
        ("type", f"{plain(machine['instanceType'])} in {plain(machine['zone'])}, {machine['capacityType']}, {price}"),
        ("offers", amounts(machine["allocatable"])),
        ("serves", _served(machine)),
        ("flags", ", ".join(flags) or NOTHING),
        ("under way", plain(machine["pendingAction"])),
        ("error", plain(machine["lastError"])),
        ("cycle", _cycle(explained)),
    ]
    _show_facts(console, facts)
    _show_events(console, explained["events"], truncated=False)
    if explained["actions"]:
        console.print()
        console.print(Text("What was done with it, newest first", style="bold"))
        TableWriter(console, ACTIONS, now_seconds=time.time()).write(explained["actions"][:ACTIONS_MAX])
        rest = len(explained["actions"]) - ACTIONS_MAX
        if rest > 0:
            console.print(Text(f"{rest:,} older ones: -o json shows them", style="dim"))


def _show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in facts:
        grid.add_row(name, Text(text))
    print_trimmed(console, grid)


def _show_events(console: Console, events: Sequence[Record], *, truncated: bool) -> None:
    console.print()
    console.print(Text("Why", style="bold"))
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, justify="right", style="dim")
    grid.add_column(overflow="fold")
    for place, line in enumerate(_lines(events), start=1):
        grid.add_row(f"{place}.", Text(line))
    print_trimmed(console, grid if events else Text("the cycle came past it without a word"))
    if truncated:
        console.print(Text("There is more: the shard sends the first thousand, those about itself first.", style="dim"))


def _lines(events: Iterable[Record]) -> list[str]:
    """Return a sentence per event; of machines that were looked at or passed over alike, a few and how many more."""
    alike: Counter[tuple[str, str, str]] = Counter()
    #: Where in the list the rest of a kind is counted.
    rests: dict[tuple[str, str, str], int] = {}
    lines: list[str] = []
    for event in events:
        stage, reason = event["attributes"].get("stage", ""), event["attributes"].get("reason", "")
        kind = (event["kind"], stage, reason)
        alike[kind] += 1
        if event["kind"] not in _OF_CANDIDATES or alike[kind] <= ALIKE_MAX:
            lines.append(plain(event["text"]))
        elif kind not in rests:
            rests[kind] = len(lines)
            lines.append("")
    for (kind_name, stage, reason), place in rests.items():
        count = alike[(kind_name, stage, reason)] - ALIKE_MAX
        why = f" for the same reason ({plain(reason)})" if reason else ""
        done = "passed over" if reason else "looked at"
        more = "1 more machine was" if count == 1 else f"{count:,} more machines were"
        lines[place] = f"{more} {done} as {plain(stage)} candidates{why}; -o json names them."
    return lines


def _served(machine: Record) -> str:
    if machine["needFingerprint"] is None:
        return NOTHING
    group = f", group {plain(machine['group'])}" if machine["group"] else ""
    return (
        f"priority {machine['priority']}{group}, {shortened(plain(machine['needFingerprint']), STAMP_CHARACTERS_MAX)}"
    )


def _for(moment: str | None) -> str:
    return NOTHING if moment is None else age_text(time.time() - unix_seconds(moment))


def _ago(moment: str | None) -> str:
    return NOTHING if moment is None else f"{_for(moment)} ago"


def _cycle(explained: Record) -> str:
    return f"{explained['cycle']}, {_ago(explained['computedAt'])}"
