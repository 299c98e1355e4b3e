"""Lists the fleets that are broken to see the alerts fire, and the alerts that no fault of a process can fire."""

from collections.abc import Mapping

from tests.alerts.broken_machines import BROKEN_MACHINES
from tests.alerts.certificates import CERTIFICATES
from tests.alerts.dead_processes import DEAD_PROCESSES
from tests.alerts.demanding_clusters import DEMANDING_CLUSTERS
from tests.alerts.faults import Course
from tests.alerts.full_disks import FULL_DISKS

COURSES: Mapping[str, Course] = {
    "dead processes": DEAD_PROCESSES,
    "full disks": FULL_DISKS,
    "broken machines": BROKEN_MACHINES,
    "demanding clusters": DEMANDING_CLUSTERS,
    "certificates": CERTIFICATES,
}
