"""Faults of clusters and of people: demand that nothing covers, sessions that end, a second process, a pause."""

from tests.alerts.clusters import Cluster
from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired
from tests.patience import wait_until
from tests.processes import run_bigfleet

SOME = {"cpu": 20}
OF_WEST = ("far", "north", "south")
CRITICAL, SERVICE = 2_000_000, 2_000


def build(fleet: Fleet) -> None:
    """Shards of one coordinator, each with a provider and clusters."""
    replica = fleet.coordinator("replica")
    to_replica = ("--coordinator-addr", replica.address)
    for name in ("east", "west", "twin"):
        provider = fleet.provider(f"{name}-provider", "breakable")
        silent = ("--cluster-silence-alert", "2s")
        fleet.shard(name, "--id", name, "--provider-addr", provider.address, *to_replica, *silent)
    fleet.shard("paused")
    for name in ("greedy", "careless", "clumsy", "silent", "doubled"):
        fleet.cluster(name, "east").report(SOME)
    for name in OF_WEST:
        fleet.cluster(name, "west")


def open_another_session(fleet: Fleet) -> None:
    """Open a session of a cluster that has one, which ends that."""
    former = fleet.clusters["doubled"]
    fleet.cluster("doubled", "east")
    former.close()


def lose_most_sessions(fleet: Fleet) -> None:
    """End the sessions of two clusters of three."""
    for name in OF_WEST[1:]:
        fleet.clusters[name].close()


def open_all_sessions(fleet: Fleet) -> None:
    """Open the sessions of all three, also that which a restart ended."""
    for name in OF_WEST:
        fleet.clusters[name].reopen()


def report_also(fleet: Fleet, name: str, shard: str) -> None:
    """Report demand of a cluster to a second shard, once."""
    stray = Cluster(fleet[shard].address, name)
    stray.report(SOME)
    wait_until(lambda: stray.bound, "never bound")
    stray.close()


def start_second_process(fleet: Fleet) -> None:
    """Start another process with a shard's id on another disk, and have both decide on one machine."""
    flags = ("--id", "twin", "--provider-addr", fleet["twin-provider"].address)
    fleet.shard("newer", *flags, "--coordinator-addr", fleet["replica"].address)
    bound = fleet.cluster("moved", "newer")
    bound.report(SOME)
    wait_until(lambda: bound.bound, "never bound")
    bound.close()
    Cluster(fleet["twin"].address, "moved").report()


def own_the_same(fleet: Fleet) -> None:
    """Start a shard that owns everything of a provider that another shard owns."""
    flags = ("--id", "surplus", "--provider-addr", fleet["east-provider"].address)
    fleet.shard("surplus", *flags, "--coordinator-addr", fleet["replica"].address)


def remove(fleet: Fleet, name: str) -> None:
    """Stop a shard for good."""
    fleet[name].vanish()
    done = run_bigfleet("admin", "remove-shard", name, "--force", "--addr", fleet["replica"].address)
    assert done.returncode == 0, done.stderr


DEMANDING_CLUSTERS = Course(
    build,
    stages=(
        (
            Fault(
                "a cluster asks for what is not on offer",
                {
                    "BigFleetShardShortfallCritical": "east",
                    "BigFleetShardShortfallService": "east",
                    "BigFleetShardShortfallAged": "east",
                },
                lambda fleet: fleet.clusters["greedy"].report(
                    *({"cpu": 1, "priority": priority, "impossible": 1} for priority in (CRITICAL, SERVICE))
                ),
                lambda fleet: fleet.clusters["greedy"].report(SOME),
            ),
            Fault(
                "a cluster reports that it needs nothing any more",
                {"BigFleetShardRollUpHeld": "east"},
                lambda fleet: fleet.clusters["careless"].report(),
                lambda fleet: fleet.clusters["careless"].report(SOME),
            ),
            Fault(
                "a cluster reports what is no quantity",
                {"BigFleetShardRollUpRejected": "east"},
                nothing,
                lambda fleet: fleet.clusters["clumsy"].report(SOME),
                again=lambda fleet: fleet.clusters["clumsy"].report_nonsense(),
            ),
            Fault(
                "the operator of a cluster ends",
                {"BigFleetShardClustersSilent": "east"},
                lambda fleet: fleet.clusters["silent"].close(),
                lambda fleet: fleet.clusters["silent"].open(),
            ),
            Fault(
                "two operators run with one cluster id",
                {"BigFleetShardSessionsReplaced": "east"},
                nothing,
                lambda fleet: fleet.clusters["doubled"].reopen(),
                again=open_another_session,
            ),
            Fault(
                "a cluster reports to two shards",
                {"BigFleetCoordinatorClusterConflict": "replica"},
                lambda fleet: report_also(fleet, "greedy", "west"),
                lambda fleet: fleet["west"].restart(),
            ),
            Fault(
                "most operators of a shard lose their session",
                {"BigFleetShardSessionsLost": "west"},
                lose_most_sessions,
                open_all_sessions,
            ),
            Fault(
                "two processes run with one shard id on two disks",
                {
                    "BigFleetShardFenced": "twin",
                    "BigFleetShardReportsRefused": "twin",
                    "BigFleetProviderFenceRejections": "twin-provider",
                },
                start_second_process,
                lambda fleet: fleet["twin"].vanish(),
            ),
            Fault(
                "two shards own everything of one provider",
                {"BigFleetCoordinatorOwnershipOverlap": "replica"},
                own_the_same,
                lambda fleet: remove(fleet, "surplus"),
            ),
            Fault(
                "a shard is started paused and forgotten",
                {"BigFleetShardPaused": "paused"},
                lambda fleet: fleet["paused"].restart("--actuation-paused"),
                lambda fleet: fleet["paused"].restart(),
            ),
        ),
        (
            Fault(
                "a registered shard is killed",
                {"BigFleetCoordinatorShardsSilent": "replica"},
                lambda fleet: fleet["west"].kill(),
                lambda fleet: fleet["west"].start(),
            ),
        ),
    ),
    also=frozenset(
        {
            Fired("BigFleetShardDown", "paused"),
            Fired("BigFleetShardDown", "west"),
            # `twin` and `surplus` are removed, as their faults are mended.
            Fired("BigFleetShardsFewer", "shard"),
            Fired("BigFleetShardReportsUnanswered", "twin"),
            # The only session of `newer` ends as its cluster goes to `twin`.
            Fired("BigFleetShardSessionsLost", "newer"),
        }
    ),
)
