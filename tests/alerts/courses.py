"""Lists the fleets that are broken to see the alerts fire, and the alerts that are shown over written series alone."""

from collections.abc import Mapping

from tests.alerts.broken_machines import BROKEN_MACHINES
from tests.alerts.broken_operators import BROKEN_OPERATORS
from tests.alerts.certificates import CERTIFICATES
from tests.alerts.dead_processes import DEAD_PROCESSES
from tests.alerts.demanding_clusters import DEMANDING_CLUSTERS
from tests.alerts.faults import Course
from tests.alerts.full_disks import FULL_DISKS
from tests.alerts.lost_etcd import LOST_ETCD

COURSES: Mapping[str, Course] = {
    "dead processes": DEAD_PROCESSES,
    "full disks": FULL_DISKS,
    "broken machines": BROKEN_MACHINES,
    "demanding clusters": DEMANDING_CLUSTERS,
    "certificates": CERTIFICATES,
    "broken operators": BROKEN_OPERATORS,
    "lost etcd": LOST_ETCD,
}

_A_DEFECT = "only a defect of BigFleet makes it happen, and a planted one would be in another program than is shipped"
#: Alerts without a fault in any course, and why: `promtool test rules` shows them (tests/deploy/every_alert.yaml).
WRITTEN_SERIES_ONLY: Mapping[str, str] = {
    "BigFleetShardCycleFailures": _A_DEFECT,
    "BigFleetShardEngineDivergence": _A_DEFECT,
    "BigFleetOperatorRecountMismatch": _A_DEFECT,
    "BigFleetShardOperatorsUnresponsive": "a stream must take nothing for a minute, three times; buffers of a loopback"
    " connection take more frames than a small fleet sends",
    "BigFleetShardMachinesSetAside": "a provider of the kit shows a machine whose Configure failed as Failed; only"
    " one that is not made with the kit shows it as Idle",
    "BigFleetShardBindingsLost": "the reproduction restores a backup of a provider under demand, which no course has",
    "BigFleetOperatorNodesUnmatched": "the operator counts machines that have had no Node for five minutes, a constant",
    "BigFleetShardPreemptionsInVain": "a row is held for ten minutes first, a constant",
    "BigFleetShardExchangeSavings": "an exchange begins when prices have been there for 15 minutes, a constant",
    "BigFleetCoordinatorMachinesUnowned": "the recipient must die between a donor's release and its own adoption, which"
    " takes one report",
}
