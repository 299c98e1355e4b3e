"""Faults of machines: what a provider and its backend do wrong, and a shard that does not keep up."""

from contextlib import suppress

import grpc

from tests.alerts.faults import Course, Fault, nothing
from tests.alerts.programs import Fleet, Program
from tests.alerts.prometheus_server import Fired
from tests.alerts.provider_calls import bind_one, create_all

FEW, ALL = {"cpu": 20}, {"cpu": 160}
#: A machine of the provider whose records are falsified.
FALSIFIED = "fake-0"


def build(fleet: Fleet) -> None:
    """Pairs of a provider and a shard, and single providers: one for each fault that would hide another."""
    for name, flags in {
        "refusing": (),
        "hanging": ("--stuck-configuring", "1s"),
        "frozen": ("--list-timeout", "60s"),
        "shrinking": (),
        "unjoined": ("--join-deadline", "1s"),
    }.items():
        provider = fleet.provider(f"{name}-provider", "breakable")
        fleet.shard(f"{name}-shard", "--id", name, "--provider-addr", provider.address, *flags)
    for name in ("failing", "away", "unread", "lossy", "odd"):
        fleet.provider(f"{name}-provider", "breakable")
    fleet.provider("late-provider", "fault", "--seed-count", "24")
    live = fleet.live_provider("live", 24)
    slow = ("--execute-concurrency", "1", "--execute-waiting-max", "0")
    fleet.shard("crowded-shard", "--id", "crowded", "--provider-addr", live.address, *slow)
    for name in ("refusing", "hanging"):
        fleet.cluster(name, f"{name}-shard")
    fleet.cluster("unjoined", "unjoined-shard", joins=False).report(FEW)
    fleet.cluster("crowded", "crowded-shard", answers=False)


def demand(fleet: Fleet, name: str, **faults: object) -> None:
    """Break a provider, and ask for machines."""
    fleet[f"{name}-provider"].suffer(**faults)
    fleet.clusters[name].report(ALL)


def mend_and_restart(provider: Program, process: Program) -> None:
    """Mend a provider, and restart the process that remembers what it did."""
    provider.suffer()
    process.restart()


def fail_all(fleet: Fleet) -> None:
    """Have machines of a provider fail as they are bound."""
    fleet["failing-provider"].suffer(configure_fails=True)
    create_all(fleet["failing-provider"].address)


def cut_off(fleet: Fleet) -> None:
    """Have no call of a backend answered; once the breaker is open, Creates are refused."""
    fleet["away-provider"].suffer(create_is_away=True)
    with suppress(grpc.RpcError):
        create_all(fleet["away-provider"].address)


def shrink(fleet: Fleet) -> None:
    """Restart a provider that has lost its state and most of its machines."""
    provider = fleet["shrinking-provider"]
    provider.suffer(missing=20)
    provider.start_anew()


def grow(fleet: Fleet) -> None:
    """Restart it with all machines."""
    fleet["shrinking-provider"].suffer()
    fleet["shrinking-provider"].start_anew()


def falsify(fleet: Fleet) -> None:
    """Have a provider list a machine with a negative price."""
    fleet.providers["live"].faults.garbage[FALSIFIED] = {"price_usd_per_hour": -1.0}


OF_SHARDS = (
    Fault(
        "the provider refuses every Configure",
        {"BigFleetShardActionsFail": "refusing-shard", "BigFleetShardMachinesHeld": "refusing-shard"},
        lambda fleet: demand(fleet, "refusing", refuses=True),
        lambda fleet: mend_and_restart(fleet["refusing-provider"], fleet["refusing-shard"]),
    ),
    Fault(
        "Configures of the backend never end",
        {"BigFleetShardMachinesStuck": "hanging-shard"},
        lambda fleet: demand(fleet, "hanging", configure_hangs=True),
        lambda fleet: mend_and_restart(fleet["hanging-provider"], fleet["hanging-provider"]),
    ),
    Fault(
        "the provider hangs and the List never ends",
        {"BigFleetShardCycleStalled": "frozen-shard"},
        lambda fleet: fleet["frozen-provider"].freeze(),
        lambda fleet: fleet["frozen-provider"].thaw(),
    ),
    Fault(
        "the provider lost its state and lists few machines",
        {"BigFleetShardRemovalBrake": "shrinking-shard"},
        shrink,
        grow,
    ),
    Fault(
        "an operator does not answer, and the only worker waits for it",
        {"BigFleetShardActionsDropped": "crowded-shard"},
        lambda fleet: fleet.clusters["crowded"].report(ALL),
        # Less would be held by the shard: a tenth of the demand before.
        lambda fleet: fleet.clusters["crowded"].report(FEW),
    ),
    Fault(
        "the provider lists a negative price",
        {"BigFleetShardRecordsRejected": "crowded-shard"},
        falsify,
        lambda fleet: fleet.providers["live"].faults.garbage.clear(),
    ),
    Fault(
        "nodes of Configured machines do not become ready",
        {"BigFleetShardMachinesUnjoined": "unjoined-shard"},
        nothing,
        lambda fleet: fleet.clusters["unjoined"].join(),
    ),
)
OF_PROVIDERS = (
    Fault(
        "every Configure of the backend fails",
        {"BigFleetProviderMachinesFailed": "failing-provider", "BigFleetProviderOperationsFail": "failing-provider"},
        fail_all,
        lambda fleet: fleet["failing-provider"].start_anew(),
        again=lambda fleet: bind_one(fleet["failing-provider"].address, "c1"),
    ),
    Fault(
        "the backend does not answer Creates",
        {"BigFleetProviderBackendAway": "away-provider"},
        cut_off,
        lambda fleet: fleet["away-provider"].suffer(),
    ),
    Fault(
        "the inventory of the backend cannot be read",
        {"BigFleetProviderInventoryStale": "unread-provider"},
        lambda fleet: fleet["unread-provider"].suffer(inventory_fails=True),
        lambda fleet: fleet["unread-provider"].suffer(),
    ),
    Fault(
        "the backend reports that most machines are gone",
        {"BigFleetProviderLossesHeld": "lossy-provider"},
        lambda fleet: fleet["lossy-provider"].suffer(missing=20),
        lambda fleet: fleet["lossy-provider"].suffer(),
    ),
    Fault(
        "the backend reports prices that are no numbers",
        {"BigFleetProviderFactsRejected": "odd-provider"},
        lambda fleet: fleet["odd-provider"].suffer(price_is_nan=True),
        lambda fleet: fleet["odd-provider"].suffer(),
    ),
    Fault(
        "hosts join after the Configure has timed out",
        {"BigFleetProviderLateEffects": "late-provider"},
        lambda fleet: create_all(fleet["late-provider"].address),
        nothing,
        again=lambda fleet: bind_one(fleet["late-provider"].address, "fault-slow-ok"),
    ),
)

BROKEN_MACHINES = Course(
    build,
    stages=((*OF_SHARDS, *OF_PROVIDERS),),
    also=frozenset(
        {
            Fired("BigFleetProviderDown", "frozen-provider"),
            # Nodes of `fault-slow-ok` never become ready, and slots of a fault provider are there that fail.
            Fired("BigFleetProviderOperationsFail", "late-provider"),
            Fired("BigFleetProviderMachinesFailed", "late-provider"),
            Fired("BigFleetProviderOperationsFail", "hanging-provider"),
        }
    ),
)
