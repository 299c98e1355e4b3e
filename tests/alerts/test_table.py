"""Every alert is shown by a fault of real processes, or is in a list that says why it cannot be."""

from collections import Counter

from tests.alerts.courses import COURSES, WRITTEN_SERIES_ONLY
from tests.alerts.test_failure_table import ALERTS

FAULTS = [fault for course in COURSES.values() for fault in course.faults]


def test_every_alert_has_a_fault_or_a_reason() -> None:
    shown = {alert for fault in FAULTS for alert in fault.fires}

    assert shown | WRITTEN_SERIES_ONLY.keys() == set(ALERTS)
    assert shown & WRITTEN_SERIES_ONLY.keys() == set()
    assert all(len(reason) > 20 for reason in WRITTEN_SERIES_ONLY.values())


def test_a_fault_is_described_once() -> None:
    assert [what for what, count in Counter(fault.what for fault in FAULTS).items() if count > 1] == []
