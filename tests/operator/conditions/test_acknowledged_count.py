"""How many requests count as acknowledged while their gang moves between domains."""

from collections.abc import Iterable

from bigfleet.model import frames
from bigfleet.model.frames import Acknowledgement
from bigfleet.model.ids import ClusterId
from bigfleet.operator.conditions.verdicts import RequestVerdicts
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import PodKey
from bigfleet.operator.kubernetes.objects import CapacityRequestObject
from tests.operator.demand.objects import HandClock, HandView, request

ZONE = "topology.kubernetes.io/zone"
CO_LOCATION = {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "gang"}}}


class Domains:
    """Where the pods of every gang run."""

    def __init__(self) -> None:
        self.values: tuple[str, ...] = ()

    def domains(self, topology_key: str, pods: Iterable[PodKey]) -> tuple[str, ...]:
        return self.values


def test_a_gang_that_moves_is_counted_once() -> None:
    """Its requests are reported again with each move, and acknowledged again."""
    clock, domains = HandClock(), Domains()
    objects: HandView[CapacityRequestObject] = HandView()
    demand = DemandView(cluster=ClusterId("c"), requests=objects, clock=clock, domains=domains)
    verdicts = RequestVerdicts(demand=demand, clock=clock, changed=lambda key, urgency: None)
    demand.add_listener(verdicts)
    objects.listeners.append(demand)
    verdicts.session_opened(frozenset({frames.CAPABILITY_NEED_STATUS}))
    stored = [objects.put(request(name, pod_uid=f"pod-{name}", coLocation=CO_LOCATION)) for name in ("a", "b")]

    counts = []
    for values in ((), ("z1",), ("z1", "z2"), ("z2",)):
        domains.values = values
        roll_up = demand.roll_up()
        assert roll_up is not None
        stamp_nanos = roll_up.timestamp_unix_nanos
        verdicts.acknowledged(Acknowledgement(echo=frames.ECHO_ROLLUP, rollup_timestamp_unix_nanos=stamp_nanos))
        counts.append(verdicts.acknowledged_count)
    objects.remove(stored[0])

    assert counts == [2, 2, 2, 2]
    assert verdicts.acknowledged_count == 1
