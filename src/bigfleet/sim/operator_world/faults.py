"""Injects faults into API servers, their clients, and the processes of BigFleet in a cluster; some act as people.

One function each; they draw from the same stream as `bigfleet.sim.faults.catalogue`. `KubernetesSite.heal` undoes their
effects. A fault never touches the state of the code under test.
"""

from collections.abc import Callable, Iterable
from functools import partial

from bigfleet.operator.kubernetes.api import ApiError
from bigfleet.operator.kubernetes.resources import UPCOMING_NODES
from bigfleet.sim.faults.parts import Fault, cut, for_a_while
from bigfleet.sim.kubernetes.faults import ApiCall
from bigfleet.sim.operator_world.replicas import ControllerReplica
from bigfleet.sim.operator_world.site import KubernetesSite
from bigfleet.sim.operator_world.world import OperatorWorld
from bigfleet.sim.world.world import World

_LASTS_SECONDS_MAX = 150.0
_WRITES = frozenset({"create", "update", "patch", "delete"})
_REFUSALS = (
    (409, "Conflict", "the object has been modified"),
    (429, "TooManyRequests", "the server has received too many requests"),
    (500, "InternalError", "etcdserver: request timed out"),
    (503, "ServiceUnavailable", "the server is currently unable to handle the request"),
)


def _site(world: World, name: str) -> KubernetesSite:
    """Return a cluster, and note that a fault has come to it."""
    assert isinstance(world, OperatorWorld), "these are faults of the operator world"
    site = world.rng.choice(world.sites)
    world.observations.note("fault", name, str(site.name))
    return site


async def _disturb(world: World, site: KubernetesSite, name: str, *, seconds_max: float = _LASTS_SECONDS_MAX) -> None:
    """Wait for a while in which the cluster counts as disturbed."""
    site.disturbances.add(name)
    await for_a_while(world, seconds_max)
    site.disturbances.discard(name)


async def api_down(world: World) -> None:
    """An API server refuses connections."""
    site = _site(world, "api-down")
    site.server.go_down()
    await _disturb(world, site, "api-down")
    site.server.come_up()


async def api_hangs(world: World) -> None:
    """An API server takes connections and answers nothing."""
    site = _site(world, "api-hangs")
    site.server.faults.is_hanging = True
    await _disturb(world, site, "api-hangs")
    site.server.faults.is_hanging = False


async def api_slow(world: World) -> None:
    """Each request takes seconds."""
    site = _site(world, "api-slow")
    site.server.faults.latency_seconds = world.rng.uniform(0.1, 3.0)
    await _disturb(world, site, "api-slow")
    site.server.faults.latency_seconds = 0.0


async def watches_dropped(world: World) -> None:
    """An API server ends every watch."""
    _site(world, "watches-dropped").server.drop_watches()


async def watches_expired(world: World) -> None:
    """An API server forgets what has changed and ends every watch: none can resume."""
    site = _site(world, "watches-expired")
    site.server.store.compact()
    site.server.drop_watches()


async def writes_refused(world: World) -> None:
    """Some writes are refused."""
    site, rng = _site(world, "writes-refused"), world.rng
    share = rng.uniform(0.1, 0.7)

    def refuse(call: ApiCall) -> ApiError | None:
        if call.verb not in _WRITES or rng.random() >= share:
            return None
        return ApiError(*rng.choice(_REFUSALS))

    site.server.faults.refuse = refuse
    await _disturb(world, site, "writes-refused")
    site.server.faults.refuse = lambda _call: None


async def answers_lost(world: World) -> None:
    """Some requests take effect, and their answers are lost."""
    site, rng = _site(world, "answers-lost"), world.rng
    share = rng.uniform(0.1, 0.7)
    site.server.faults.lose_answer = lambda call: call.verb in _WRITES and rng.random() < share
    await _disturb(world, site, "answers-lost")
    site.server.faults.lose_answer = lambda _call: False


def _replica(world: World, replicas: Iterable[ControllerReplica]) -> ControllerReplica:
    """Return a process, rather the one that leads."""
    among = list(replicas)
    leaders = [each for each in among if each.is_leader]
    return world.rng.choice(leaders if leaders and world.rng.random() < 0.8 else among)


Choice = Callable[[KubernetesSite], list[ControllerReplica]]


async def process_killed(world: World, name: str, of: Choice) -> None:
    """A process dies between two awaits, and is back after a while."""
    replica = _replica(world, of(_site(world, name)))
    process = replica.process
    if not process.is_alive:
        return
    process.dies_at_step = process.steps + world.rng.randrange(1, 400)
    replica.back_seconds = world.clock.monotonic_seconds() + world.rng.uniform(0.5, 40.0)
    await world.clock.sleep(world.rng.uniform(2.0, 20.0))
    process.kill()


async def process_paused(world: World, name: str, of: Choice) -> None:
    """A process stands still, for longer than its Lease or not, and goes on knowing nothing of it."""
    site = _site(world, name)
    replica = _replica(world, of(site))
    process = replica.process
    process.pause()
    await _disturb(world, site, name, seconds_max=60.0)
    replica.resumed_seconds = world.clock.monotonic_seconds()
    process.resume()


async def process_cut_off(world: World, name: str, of: Choice) -> None:
    """A process does not reach the API server any more, but its shard."""
    site = _site(world, name)
    api = _replica(world, of(site)).api
    if api is None:
        return
    api.disconnect()
    await _disturb(world, site, name)
    api.reconnect()


async def session_cut(world: World) -> None:
    """Nothing passes between the shard and the operators of a cluster."""
    site = _site(world, "session-cut")
    names = [each.name for each in site.operators]
    shard = site.shard.name
    links = [world.network.link(*way) for name in names for way in ((shard, name), (name, shard))]
    await cut(world, links, _LASTS_SECONDS_MAX)


async def nodes_not_ready(world: World) -> None:
    """Some Nodes are not Ready for a while."""
    site = _site(world, "nodes-not-ready")
    names = [node["metadata"]["name"] for node in site.components.nodes() if world.rng.random() < 0.3]
    site.components.unready.update(names)
    await _disturb(world, site, "nodes-not-ready")
    site.components.unready.difference_update(names)


async def person_cordons(world: World) -> None:
    """A person cordons a Node, and uncordons it later."""
    site = _site(world, "person-cordons")
    names = [node["metadata"]["name"] for node in site.components.nodes()]
    if not names:
        return
    name = world.rng.choice(names)
    site.components.cordon(name, is_cordoned=True)
    await _disturb(world, site, "person-cordons")
    site.components.cordon(name, is_cordoned=False)


async def person_meddles(world: World) -> None:
    """A person deletes a CapacityRequest or an UpcomingNode."""
    site, rng = _site(world, "person-meddles"), world.rng
    if rng.random() < 0.5:
        site.components.delete_request(rng.randrange(1000))
        return
    shown = site.server.read_all(UPCOMING_NODES)
    if shown:
        site.server.caller = ""
        site.server.remove(UPCOMING_NODES, rng.choice(shown).metadata.name)


def _operators(site: KubernetesSite) -> list[ControllerReplica]:
    return [*site.operators]


def _pod_controllers(site: KubernetesSite) -> list[ControllerReplica]:
    return [*site.pod_controllers]


FAULTS: dict[str, Fault] = {
    "api-down": api_down,
    "api-hangs": api_hangs,
    "api-slow": api_slow,
    "watches-dropped": watches_dropped,
    "watches-expired": watches_expired,
    "writes-refused": writes_refused,
    "answers-lost": answers_lost,
    "operator-killed": partial(process_killed, name="operator-killed", of=_operators),
    "operator-paused": partial(process_paused, name="operator-paused", of=_operators),
    "operator-cut-off": partial(process_cut_off, name="operator-cut-off", of=_operators),
    "pod-controller-killed": partial(process_killed, name="pod-controller-killed", of=_pod_controllers),
    "pod-controller-paused": partial(process_paused, name="pod-controller-paused", of=_pod_controllers),
    "pod-controller-cut-off": partial(process_cut_off, name="pod-controller-cut-off", of=_pod_controllers),
    "session-cut": session_cut,
    "nodes-not-ready": nodes_not_ready,
    "person-cordons": person_cordons,
    "person-meddles": person_meddles,
}
