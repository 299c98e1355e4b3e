"""`python -m bench.memory`: what a shard's machines take of memory, step by step, in a process of its own.

Machines enter as a provider tells them, one message after the other, and are read as the shard reads them; what one
large answer takes while it is on the wire is not part of it. The fleet and the rows are those of W8
(docs/spec/benchmarks.md). Figures are resident MiB.
"""

import argparse
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from bench.engine_fleets import cluster_rows, fleet_machines, in_list_order, options_of
from bench.harness import resident_mib
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.engine.columnar.engine import ColumnarEngine, warm_up
from bigfleet.model.metadata import encode_metadata
from bigfleet.rpc.wire.convert_machine import machine_from_wire, machine_to_wire
from bigfleet.rpc.wire.gen import provider_pb2
from bigfleet.shard.inventory.ingest import Ingest
from bigfleet.shard.inventory.inventory import Inventory
from bigfleet.shard.metrics import ShardMetrics
from bigfleet.shard.ports import ListedMachine
from bigfleet.shard.sessions.registry import Sessions

_MIB = 2**20
_SIZE_BYTES = 4
_CLUSTERS = 100


def write_fleet(path: Path, machines: int) -> None:
    """Write the messages of the fleet, each behind its size."""
    with path.open("wb") as file:
        for machine in fleet_machines(machines, _CLUSTERS):
            metadata = encode_metadata(machine) if machine.cluster else {}
            content = machine_to_wire(machine, metadata).SerializeToString()
            file.write(len(content).to_bytes(_SIZE_BYTES, "big") + content)


def records(path: Path) -> Iterator[tuple[ListedMachine, bytes]]:
    """Yield the records of a file that `write_fleet` wrote, each with its digest."""
    with path.open("rb") as file:
        while size := file.read(_SIZE_BYTES):
            content = file.read(int.from_bytes(size, "big"))
            message = provider_pb2.Machine.FromString(content)
            yield ListedMachine(*machine_from_wire(message)), xxhash.xxh3_128_digest(content)


def measure(machines: int) -> list[tuple[str, float]]:
    """Return (step, resident MiB) for a fleet of that size, steps in order."""
    warm_up()
    steps = [("interpreter, libraries, kernels", resident_mib())]

    def end(step: str) -> None:
        gc.collect()
        steps.append((step, resident_mib()))

    inventory, clock = Inventory(), SystemClock()
    ingest = Ingest(
        inventory=inventory,
        sessions=Sessions(epoch=1, outbox_frames_max=16),
        metrics=ShardMetrics(CollectorRegistry(), inventory),
        clock=clock,
    )
    with TemporaryDirectory() as place:
        path = Path(place) / "fleet"
        # Elsewhere, so that making the fleet leaves nothing behind here.
        subprocess.run(
            [sys.executable, "-m", "bench.memory", "--write", str(path), "--machines", str(machines)], check=True
        )
        moment = ingest.moment()
        for record, digest in records(path):
            ingest.observe(record, moment)
            inventory.note(record.machine.id, digest)
    assert len(inventory) == machines
    end("machines in the inventory")
    views = [inventory.snapshot()]
    end("first view in columns")
    for machine in list(inventory)[:1000]:
        inventory.observe(replace(machine, price_usd_per_hour=2.0), now_seconds=0.0)
    views.append(inventory.snapshot())
    end("second view, the first one held")
    demand = in_list_order([row for c in range(_CLUSTERS) for row in cluster_rows(c, machines * 8 // 10 // _CLUSTERS)])
    end(f"{len(demand):,} rows of demand")
    engine = ColumnarEngine()
    decision = engine.decide(views[1], demand, options_of(demand))
    end("one decision, held")
    assert len(decision.rows)
    return steps


def main() -> None:
    """Read the command line and measure, or write a fleet for whoever measures."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--machines", type=int, default=500_000)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_fleet(options.write, options.machines)
        return
    table = Table(title=f"resident memory, {options.machines:,} machines")
    table.add_column("after")
    table.add_column("MiB", justify="right")
    table.add_column("bytes a machine", justify="right")
    former = 0.0
    for step, mib in measure(options.machines):
        table.add_row(step, f"{mib:.0f}", f"{(mib - former) * _MIB / options.machines:.0f}" if former else "")
        former = mib
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
