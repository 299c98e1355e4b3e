"""Names that are HTML, XML, markup of terminals or formulas stay text in pages, pictures, reports and tables."""

from io import StringIO
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest
from rich.table import Table

from bigfleet.cli.conformance.reports import junit_of
from bigfleet.cli.partition.picture import GroupPicture, HostBar, print_picture, svg_of
from bigfleet.cli.runtime.console import TerminalConsole
from bigfleet.conformance.catalogue import BEHAVIOURS
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, Plan, Result
from bigfleet.sim.kernel.journal import JournalEntry
from bigfleet.sim.world.run import WorldResult
from bigfleet.sim.world.timeline import timeline

NAMES = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]><evil/>",
    "a[/b]",
    "[link=http://evil.example]x[/link]",
    ":bomb:",
    '=HYPERLINK("http://evil.example")',
)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_shows_a_name_as_it_is(name: str) -> None:
    console = TerminalConsole(file=StringIO(), width=200)
    table = Table("id", title=name)
    table.add_row(name)
    console.print(name, table)

    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count(name) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_of_hosts_shows_a_name_as_text(name: str) -> None:
    """On the terminal and as SVG."""
    host = HostBar(name=name, state="", blocks=(), memory_free_mib=1, disk_free_mib=1, fits=("1",))
    picture = [GroupPicture(title=name, sizes=("1/1",), hosts=(host,))]
    console = TerminalConsole(file=StringIO(), width=200)
    print_picture(console, picture)

    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count(name) == 2
    texts = [element.text for element in ElementTree.fromstring(svg_of(picture)).iter() if element.text]
    assert texts.count(name) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_report_for_ci_shows_a_reason_as_text(name: str) -> None:
    result = Result(behaviour=BEHAVIOURS[0], outcome=BehaviourOutcome.FAILED, reason=name, calls=(name,))
    report = ConformanceReport(plan=Plan(profiles=frozenset({ConformanceProfile.CORE})), targets={}, results=(result,))
    root = ElementTree.fromstring(junit_of(report).tostring())

    (failure,) = root.iter("failure")
    assert failure.attrib["message"] == name
    assert list(failure) == []


def test_a_timeline_shows_faults_and_violations_as_text() -> None:
    """The page has no script, also if a trace was made by somebody else."""
    entries = [JournalEntry(number, "fault", name, text) for number, name in enumerate(NAMES) for text in ("x", "over")]
    violation = SimpleNamespace(invariant="S1", text=NAMES[0])
    result = SimpleNamespace(
        plan=SimpleNamespace(seed=1),
        violations=(violation,),
        trace_hash=NAMES[1],
        samples=(),
        simulated_seconds=1.0,
        journal=SimpleNamespace(entries=entries),
    )
    page = timeline(cast(WorldResult, result))

    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
