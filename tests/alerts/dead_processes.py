"""Faults of processes: killed, killed again and again, gone with their target, all gone."""

from collections.abc import Callable

from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired

LOOPING = {
    "looping-shard": "BigFleetShardRestarts",
    "looping-provider": "BigFleetProviderRestarts",
    "looping-replica": "BigFleetCoordinatorRestarts",
}


def build(fleet: Fleet) -> None:
    """A shard with a provider and a coordinator, and processes for themselves."""
    provider = fleet.provider("provider", "simulated", "--calm", "--seed-count", "4")
    replica = fleet.coordinator("replica")
    fleet.shard("shard", "--provider-addr", provider.address, "--coordinator-addr", replica.address)
    late = fleet.provider("late-provider", "simulated", "--calm", "--seed-count", "4")
    fleet.shard("late-shard", "--id", "late", "--provider-addr", late.address)
    fleet.shard("killed-shard")
    fleet.shard("vanished-shard")
    fleet.shard("looping-shard")
    fleet.provider("looping-provider", "simulated", "--calm", "--seed-count", "4")
    fleet.coordinator("looping-replica")


def restart_once_scraped(name: str) -> Callable[[Fleet], None]:
    """Return what kills a process and starts it again as soon as its last start was scraped."""
    killed_seconds = 0.0

    def again(fleet: Fleet) -> None:
        nonlocal killed_seconds
        started_seconds = fleet.server.values("process_start_time_seconds").get(name, 0.0)
        if started_seconds > killed_seconds:
            killed_seconds = started_seconds
            fleet[name].restart()

    return again


def kill_all(fleet: Fleet) -> None:
    """Kill every process."""
    for each in fleet.programs.values():
        each.kill()


def start_all(fleet: Fleet) -> None:
    """Start every process."""
    for each in fleet.programs.values():
        each.start()


def restart_without_provider(fleet: Fleet) -> None:
    """Start a shard anew whose provider does not answer."""
    fleet["late-provider"].kill()
    fleet["late-shard"].restart()


DEAD_PROCESSES = Course(
    build,
    stages=(
        (
            Fault(
                "a shard is killed",
                {"BigFleetShardDown": "killed-shard"},
                lambda fleet: fleet["killed-shard"].kill(),
                lambda fleet: fleet["killed-shard"].start(),
            ),
            Fault(
                "a shard is killed, and service discovery drops its target",
                {"BigFleetShardsFewer": "shard"},
                lambda fleet: fleet["vanished-shard"].vanish(),
                lambda fleet: fleet["vanished-shard"].come_back(),
            ),
            Fault(
                "the provider is killed",
                {"BigFleetProviderDown": "provider", "BigFleetShardInventoryUnread": "shard"},
                lambda fleet: fleet["provider"].kill(),
                lambda fleet: fleet["provider"].start(),
            ),
            Fault(
                "the only replica of the coordinator is killed",
                {"BigFleetCoordinatorDown": "replica", "BigFleetShardReportsUnanswered": "shard"},
                lambda fleet: fleet["replica"].kill(),
                lambda fleet: fleet["replica"].start(),
            ),
            Fault(
                "a shard starts while its provider is down",
                {"BigFleetShardNotReady": "late-shard"},
                restart_without_provider,
                lambda fleet: fleet["late-provider"].start(),
            ),
            *(
                Fault(
                    f"{name} is killed as often as it starts",
                    {alert: name},
                    nothing,
                    nothing,
                    restart_once_scraped(name),
                )
                for name, alert in LOOPING.items()
            ),
        ),
        (
            Fault(
                "every process is killed",
                {"BigFleetShardAbsent": "", "BigFleetProviderAbsent": "", "BigFleetCoordinatorAbsent": ""},
                kill_all,
                start_all,
            ),
        ),
    ),
    # What starts again is down for as long as a start takes.
    also=frozenset(
        {
            *(Fired("BigFleetShardDown", name) for name in ("shard", "late-shard", "vanished-shard", "looping-shard")),
            *(Fired("BigFleetProviderDown", name) for name in ("late-provider", "looping-provider")),
            Fired("BigFleetCoordinatorDown", "looping-replica"),
            Fired("BigFleetShardInventoryUnread", "late-shard"),
        }
    ),
)
