"""A cluster of requests and pods whose time, nodes and verdicts tests move."""

from bigfleet.model.frames import RollUp
from bigfleet.model.ids import ClusterId
from bigfleet.operator.demand.demand import DemandView
from bigfleet.operator.demand.entries import ObjectKey
from bigfleet.operator.demand.waiting import PodWait, UnschedulablePods
from bigfleet.operator.kubernetes.objects import CapacityRequestObject, PodObject
from tests.operator.demand.objects import HandClock, HandView, need_status, request


class Nodes:
    """Says that a node that became Ready at one moment could have taken any pod."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self.ready_seconds: float | None = None
        #: The same of a node that does not suit the pod, though its machine does.
        self.vain_seconds: float | None = None
        self.is_machine_coming = False
        #: How long a search takes.
        self.search_seconds = 0.0
        #: The pods for which the nodes were searched.
        self.searched: list[str] = []

    def could_have_run(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        self._search(pod)
        return self.ready_seconds is not None and after_seconds <= self.ready_seconds <= before_seconds

    def came_in_vain(self, pod: PodObject, *, after_seconds: float, before_seconds: float) -> bool:
        return self.vain_seconds is not None and after_seconds <= self.vain_seconds <= before_seconds

    def is_coming(self, pod: PodObject) -> bool:
        self._search(pod)
        return self.is_machine_coming

    def _search(self, pod: PodObject) -> None:
        self.searched.append(pod.metadata.name)
        self._clock.seconds += self.search_seconds


class Heard:
    def __init__(self) -> None:
        self.keys: list[ObjectKey] = []

    def waiting_changed(self, key: ObjectKey) -> None:
        self.keys.append(key)


class Cluster:
    """Requests and pods of a cluster, each pod with its request."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.requests: HandView[CapacityRequestObject] = HandView()
        self.pods: HandView[PodObject] = HandView()
        self.nodes = Nodes(self.clock)
        self.heard = Heard()
        self.demand = DemandView(cluster=ClusterId("c"), requests=self.requests, clock=self.clock)
        self.requests.listeners.append(self.demand)
        self.waiting = UnschedulablePods(pods=self.pods, requests=self.demand, nodes=self.nodes, clock=self.clock)
        self.waiting.add_listener(self.heard)
        self.pods.listeners.append(self.waiting)

    def add(self, stored: PodObject) -> PodObject:
        name, uid = stored.metadata.name, stored.metadata.uid
        self.requests.put(request(f"cr-{name}", pod_uid=uid))
        return self.pods.put(stored)

    def pass_time(self, seconds: float, *, met: bool = True) -> None:
        """Let time pass, with a roll-up and a verdict every 10 s."""
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            self.clock.seconds += 10
            self.report(met=met)

    def report(self, *, met: bool = True) -> None:
        roll_up = self.roll_up()
        rows = [] if met else [(need.fingerprint, need.group) for need in roll_up.needs]
        self.waiting.need_status(need_status(*rows, stamp=roll_up.timestamp_unix_nanos))

    def roll_up(self) -> RollUp:
        found = self.demand.roll_up(self.waiting.waiting_requests, self.waiting.given_up_requests)
        assert found is not None
        return found

    def requested(self) -> int:
        """Return how many pods the demand has."""
        return sum(shape.count for need in self.roll_up().needs for shape in need.shapes)

    def asked(self) -> list[str]:
        return sorted(name for _namespace, name in self.waiting.waiting_requests())

    def wait_of(self, uid: str) -> PodWait | None:
        known = self.waiting.get(("ns", uid))
        return known.wait if known is not None else None
