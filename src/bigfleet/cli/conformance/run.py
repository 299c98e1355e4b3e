"""Runs one conformance run from its settings to its exit code.

This module must not decide anything but the exit code (docs/spec/provider.md §23).
"""

import random

from rich.console import Console

from bigfleet.cli.conformance.launching import CommandSites
from bigfleet.cli.conformance.reports import prepare, write_reports
from bigfleet.cli.conformance.settings import ConformanceSettings
from bigfleet.cli.conformance.view import RunView, print_summary
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.system import SystemClock, SystemIds
from bigfleet.conformance.catalogue import behaviours_of
from bigfleet.conformance.ports import SiteFault
from bigfleet.conformance.runner import Runner, Verdict


async def run_conformance(settings: ConformanceSettings, console: Console) -> int:
    """Run, print, write the reports, and return 0 for CERTIFIED, else 1.

    Raises UsageFault for a provider that cannot be set up; what others had shown before is printed and written first.
    """
    if settings.out is not None:
        prepare(settings.out)
    plan = settings.plan
    total = len(behaviours_of(plan.profiles) if plan.only is None else plan.only)
    clock = SystemClock()
    try:
        with RunView(console, total) as view:
            report = await Runner(
                plan,
                CommandSites(settings, clock),
                clock=clock,
                ids=SystemIds(),
                make_rng=random.Random,
                listener=view,
            ).run()
    except SiteFault as fault:
        raise UsageFault(str(fault)) from fault
    print_summary(report, console)
    if settings.out is not None:
        write_reports(report, settings.out)
    if report.faults:
        raise UsageFault("; ".join(report.faults.values()))
    return 0 if report.verdict is Verdict.CERTIFIED else 1
