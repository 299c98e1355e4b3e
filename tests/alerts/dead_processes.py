"""Faults of processes: killed, killed again and again, gone with their target, all gone."""

from collections.abc import Mapping
from functools import partial

from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet
from tests.alerts.prometheus_server import Fired
from tests.patience import wait_until

LOOPING = ("looping-shard", "looping-provider", "looping-replica")


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


def restart_all_looping(fleet: Fleet) -> None:
    """Kill each and start it again, and return once each was scraped."""
    started = "process_start_time_seconds"
    before = fleet.server.values(started)
    for name in LOOPING:
        fleet[name].restart()
    wait_until(partial(_are_newer, fleet, started, before), "a process that was started again was not scraped")


def _are_newer(fleet: Fleet, started: str, before: Mapping[str, float]) -> bool:
    after = fleet.server.values(started)
    return all(after.get(name, 0) > before[name] for name in LOOPING)


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
            Fault(
                "a shard, a provider and a replica are killed as often as they are started",
                {
                    "BigFleetShardRestarts": "looping-shard",
                    "BigFleetProviderRestarts": "looping-provider",
                    "BigFleetCoordinatorRestarts": "looping-replica",
                },
                nothing,
                nothing,
                again=restart_all_looping,
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
