"""Reproduces known weaknesses of decisions one by one, each on the smallest fleet that shows it.

Every finding has the figure that was measured and the figure that a good decision has. Those that only show over time,
or in a shard's own rules, use the engine's world or the shard's rule directly, and exist for the engine alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.box import SIMPLE
from rich.table import Table

from bench.quality.bound import lower_bound
from bench.quality.candidates import CANDIDATES, Candidate
from bench.quality.catalogue import Data
from bench.quality.instances import FAMILIES, build, with_impossible_pod
from bench.quality.judges import Verdict, judge, packed
from bench.quality.reports.handmade import GIB, instance, offer, row
from bench.quality.reports.tables import WIDTH, console
from bench.quality.values import (
    CPU,
    MEMORY,
    MILLI,
    Instance,
    PackingRow,
    PackingShape,
    Scheduler,
    Settled,
    Start,
)
from bigfleet.demo.trace import GPU_MILLI

LEAST: Final = Scheduler.LEAST_ALLOCATED


@dataclass(frozen=True, slots=True)
class Finding:
    """One weakness: what happens, what was measured, and what a good decision does."""

    what: str
    measured: str
    good: str


def _before_and_after(candidate: Candidate, of: Instance) -> tuple[Settled, Settled]:
    """Return what is held after the last step but one, and after the last."""
    before = candidate.settle(replace(of, steps=of.steps[:-1]), Start.STEPS, LEAST)
    return before, candidate.settle(of, Start.STEPS, LEAST)


def _lost_machines(before: Settled, after: Settled) -> set[str]:
    return {h.machine_id for h in before.holdings} - {h.machine_id for h in after.holdings}


def _settled(candidate: Candidate, of: Instance) -> tuple[Settled, Verdict]:
    settled = candidate.settle(of, Start.STEPS, LEAST)
    return settled, judge(of, settled, scheduler=LEAST)


# ---- one small fleet each ----------------------------------------------------------------------------------------


def impossible_pod(candidate: Candidate, _data: Data) -> Finding:
    """One pod of 1,000 cpu joins a row of 200 running pods."""
    calm, typo = row("web", [(0.5, 1, 200)]), row("web", [(0.5, 1, 200), (1000, 1, 1)])
    fleet = instance([offer("m8", 8, 32, 0.4)], {"c": [calm]}, {"c": [typo]})
    before, after = _before_and_after(candidate, fleet)
    lost = len(_lost_machines(before, after))
    pods = judge(fleet, after, scheduler=LEAST).lost_to_neighbour
    measured = f"{lost} of {len(before.holdings)} machines reclaimed, {pods} pods lose their place"
    return Finding("one impossible pod joins a row of 200 pods", measured, "0 machines, 0 pods")


def opposite_shapes(candidate: Candidate, _data: Data) -> Finding:
    """One pod of 60 cpu and one of 400 GiB in one row."""
    offers = [offer("compute", 64, 128, 2.7), offer("memory", 16, 512, 2.0)]
    settled, verdict = _settled(candidate, instance(offers, {"c": [row("both", [(60, 4, 1), (1, 400, 1)])]}))
    measured = f"{len(settled.holdings)} machines bound, {verdict.short_hostable} of 2 pods starve"
    return Finding("two pods of opposite shapes in one row", measured, "2 machines, 0 pods starve")


def ten_rows(candidate: Candidate, _data: Data) -> Finding:
    """Ten rows of one pod of 500m in one cluster."""
    rows = [row(f"r{n}", [(0.5, 0.5, 1)], priority=n) for n in range(10)]
    settled, verdict = _settled(candidate, instance([offer("m8", 8, 32, 0.4)], {"c": rows}))
    measured = f"{len(settled.holdings)} machines, ${verdict.cost_usd_per_hour:.2f}/h"
    return Finding("ten rows of 500m in one cluster", measured, "1 machine, $0.40/h")


def many_small(candidate: Candidate, _data: Data) -> Finding:
    """64 pods of 1 cpu: machines of 1 cpu at $0.05, or one of 64 at $1.60."""
    offers = [offer("m1", 1, 4, 0.05), offer("m64", 64, 256, 1.6)]
    settled, verdict = _settled(candidate, instance(offers, {"c": [row("r", [(1, 1, 64)])]}))
    measured = f"{len(settled.holdings)} machines, ${verdict.cost_usd_per_hour:.2f}/h"
    return Finding("64 cpu: 1 cpu at $0.05 or 64 cpu at $1.60", measured, "1 machine, $1.60/h")


def dear_idle(candidate: Candidate, _data: Data) -> Finding:
    """2 cpu: an idle on-demand machine at $55/h, an offer at $0.20/h."""
    offers = [offer("dear", 192, 2048, 55.0, stock=1, is_existing=True), offer("cheap", 4, 16, 0.2)]
    _, verdict = _settled(candidate, instance(offers, {"c": [row("r", [(2, 4, 1)])]}))
    return Finding(
        "2 cpu: an idle machine at $55/h, an offer at $0.20/h", f"${verdict.cost_usd_per_hour:.2f}/h", "$0.20/h"
    )


def idle_gpu(candidate: Candidate, _data: Data) -> Finding:
    """Two idle bare-metal machines, one with GPUs and the lower id; a cpu row comes before a GPU row."""
    metal = {"capacity_type": "BareMetal", "stock": 1, "is_existing": True}
    gpu = offer("a-gpu", 64, 256, 0.0, **metal)
    gpu = replace(gpu, allocatable={**gpu.allocatable, GPU_MILLI: 8 * MILLI * MILLI})
    wants = PackingRow(
        id="gpu", shapes=(PackingShape({CPU: 8 * MILLI, MEMORY: 8 * GIB, GPU_MILLI: 8 * MILLI * MILLI}, 1),)
    )
    rows = [row("cpu", [(8, 8, 7)], priority=10), wants]
    _, verdict = _settled(candidate, instance([gpu, offer("b-cpu", 64, 256, 0.0, **metal)], {"c": rows}))
    measured = f"{verdict.short} of 1 GPU pods starve"
    return Finding("bare metal: the id decides who gets the GPUs", measured, "0 pods starve")


def no_exchange(candidate: Candidate, _data: Data) -> Finding:
    """A row shrinks from one pod of 60 cpu to one of 500m."""
    offers = [offer("m1", 1, 4, 0.05), offer("m64", 64, 256, 2.0)]
    fleet = instance(offers, {"c": [row("r", [(60, 60, 1)])]}, {"c": [row("r", [(0.5, 1, 1)])]})
    kept = judge(fleet, candidate.settle(fleet, Start.STEPS, LEAST), scheduler=LEAST).cost_usd_per_hour
    fresh = judge(fleet, candidate.settle(fleet, Start.NOTHING, LEAST), scheduler=LEAST).cost_usd_per_hour
    return Finding(
        "a row shrinks from 60 cpu to 500m", f"${kept:.2f}/h kept, ${fresh:.2f}/h fresh", "kept as fresh, once it pays"
    )


def other_cluster(candidate: Candidate, _data: Data) -> Finding:
    """A new row of 2 cpu; its own cluster has a machine with 62 free cpu, another cluster runs 60 cpu."""
    metal = {"capacity_type": "BareMetal", "stock": 1, "is_existing": True}
    offers = [offer("m64", 64, 256, 0.0, **metal), offer("n60", 60, 256, 0.0, **metal)]
    keeps, runs = row("b", [(2, 2, 1)], "m64", priority=200), row("z", [(60, 60, 1)], "n60", priority=10)
    comes = row("a", [(2, 2, 1)], priority=100)
    fleet = instance(offers, {"c": [keeps], "d": [runs]}, {"c": [keeps, comes], "d": [runs]})
    before, after = _before_and_after(candidate, fleet)
    lost = [h for h in before.holdings if h.cluster == "d" and h not in after.holdings]
    return Finding(
        "2 cpu lack, 62 are free on a machine of the cluster",
        f"{60 * len(lost)} cpu of another cluster preempted",
        "0 cpu preempted",
    )


def large_victim(candidate: Candidate, _data: Data) -> Finding:
    """1 cpu lacks; victims of 192 and of 2 cpu at equal priority."""
    return _victims(
        candidate,
        "1 cpu lacks: victims of 192 and 2 cpu, equal priority",
        {"a-large": (192, 100, 1), "b-small": (2, 100, 1)},
        good="b-small preempted",
    )


def dear_victim(candidate: Candidate, _data: Data) -> Finding:
    """A victim of $8.4 million at priority 100 and one of $0 at 120."""
    return _victims(
        candidate,
        "victims: $8.4 M at priority 100, $0 at priority 120",
        {"a-dear": (2, 100, 26), "b-free": (2, 120, 1)},
        good="b-free preempted",
    )


def _victims(candidate: Candidate, what: str, victims: dict[str, tuple[int, int, int]], good: str) -> Finding:
    metal = {"capacity_type": "BareMetal", "stock": 1, "is_existing": True}
    offers = [offer(name, cpu, 4 * cpu, 0.0, **metal) for name, (cpu, _, _) in victims.items()]
    serve = {
        f"of-{name}": [row("r", [(cpu, cpu, 1)], name, priority=priority, reclamation_bucket=bucket)]
        for name, (cpu, priority, bucket) in victims.items()
    }
    fleet = instance(offers, {**serve, "c": []}, {**serve, "c": [row("new", [(1, 1, 1)], priority=1000)]})
    before, after = _before_and_after(candidate, fleet)
    moved = {h.machine_id for h in after.holdings if h.cluster == "c"}
    taken = [fleet.offers[h.offer].instance_type for h in before.holdings if h.machine_id in moved]
    return Finding(what, f"{', '.join(taken) or 'nothing'} preempted", good)


# ---- the families ------------------------------------------------------------------------------------------------


def all_families(candidate: Candidate, data: Data) -> Finding:
    """Each family at its small size, seed 0."""
    over_packer, over_bound = [], []
    for family in FAMILIES:
        of = build(family, "small", 0, data)
        completed = judge(of, candidate.settle(of, Start.NOTHING, LEAST), scheduler=LEAST).completed_usd_per_hour
        packer = judge(of, packed(of), scheduler=LEAST).completed_usd_per_hour
        bound = lower_bound(of)
        if packer > 0 and bound > 0 and family != "F5":
            over_packer.append(completed / packer)
            over_bound.append(completed / bound)
    return Finding(
        f"completed cost ÷ packer; ÷ LP bound ({len(over_packer)} families)",
        f"{_median_worst(over_packer)}; {_median_worst(over_bound)}",
        "0.95 / 1.02; 1.10 / 1.20",
    )


def _median_worst(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2f} / {ordered[-1]:.2f}" if ordered else "–"


def impossible_pod_in_services(candidate: Candidate, data: Data) -> Finding:
    """One impossible pod joins the largest row of F1, medium."""
    of = build("F1", "medium", 0, data)
    of = with_impossible_pod(replace(of, steps=(of.steps[-1], of.steps[-1])))
    before, after = _before_and_after(candidate, of)
    lost = len(_lost_machines(before, after))
    pods = judge(of, after, scheduler=LEAST).lost_to_neighbour
    measured = f"{lost} of {len(before.holdings)} machines, {pods} pods of the row"
    return Finding("the same in the largest row of 1,000 service pods", measured, "0 machines, 0 pods")


def service_costs(candidate: Candidate, data: Data) -> Finding:
    """Services on demand: cost at rest, the packer's, and the bound."""
    parts, unplaced = [], []
    for size, seed in (("small", 0), ("small", 1), ("medium", 0), ("medium", 1)):
        of = build("F1", size, seed, data)
        verdict = judge(of, candidate.settle(of, Start.NOTHING, LEAST), scheduler=LEAST)
        packer = judge(of, packed(of), scheduler=LEAST).cost_usd_per_hour
        parts.append(f"{verdict.cost_usd_per_hour:.2f}/{packer:.2f}/{lower_bound(of):.2f}")
        unplaced.append(f"{verdict.lost_mean:.0f} of {of.pods}")
    measured = f"{', '.join(parts)}; {', '.join(unplaced)}"
    return Finding("services: $/h ours/packer/bound; pods lost although covered", measured, "1.10 × bound; 0")


def trace_on_its_nodes(candidate: Candidate, data: Data) -> Finding:
    """1,500 pods of the GPU trace on its nodes."""
    of = build("F3", "medium", 0, data)
    settled, verdict = _settled(candidate, replace(of, steps=of.steps[-1:]))
    covered = sum(report.is_satisfied for report in settled.rows)
    measured = f"{verdict.unplaced} pods not placeable, {verdict.lost_mean + verdict.lost_unprotected:.0f} lost in "
    measured += f"the scheduler's order, {covered} of {len(settled.rows)} rows covered"
    return Finding("GPU trace on its own nodes, 1,500 pods", measured, "0 pods")


# ---- over time, and in the shard ---------------------------------------------------------------------------------


def sold_out(_candidate: Candidate, _data: Data) -> Finding:
    """Every creation of the cheapest type fails, 12 slots of it; another type is free; cycles of 30 s."""
    from bench.quality.engine_candidate import EngineWorld

    offers = [offer("sold-out", 8, 32, 0.3, stock=12), offer("there", 8, 32, 0.4)]
    demand = instance(offers, {"c": [row("r", [(2, 4, 1)])]})
    world = EngineWorld(demand, [demand.clusters], has_all_slots=True)
    wasted = cycles = 0
    while not world.serving("there") and cycles < 200:
        counts = world.cycle(demand.clusters, refuses={"sold-out"})
        cycles += 1
        wasted += sum(n for kind, n in counts.items() if kind.name == "PROVISION")
    # The last creation was of the other type, and one cycle bound it.
    return Finding(
        "a sold-out type, 12 slots", f"{wasted - 1} creations wasted in {cycles - 2} cycles", "≤ 4 creations, 2 cycles"
    )


def swinging_demand(_candidate: Candidate, _data: Data) -> Finding:
    """Demand swings between 160 and 80 pods: every second cycle of 30 s, for 60 cycles."""
    from bench.quality.engine_candidate import EngineWorld

    offers = [offer("m8", 8, 32, 0.4)]
    high, low = (
        instance(offers, {"c": [row("r", [(0.5, 1, 160)])]}),
        instance(offers, {"c": [row("r", [(0.5, 1, 80)])]}),
    )
    world = EngineWorld(high, [high.clusters])
    reclaims = bootstraps = 0
    for cycle in range(60):
        for kind, number in world.cycle((low if cycle // 2 % 2 else high).clusters).items():
            reclaims += number if kind.name == "RECLAIM" else 0
            bootstraps += number if kind.name == "BOOTSTRAP" else 0
    return Finding(
        "160 and 80 pods in turn, every minute for 30 min",
        f"{reclaims} reclaims, {bootstraps} bootstraps",
        "0 reclaims in 10 min",
    )


def empty_rollup(_candidate: Candidate, _data: Data) -> Finding:
    """A roll-up of 0 rows after one of 9 rows: the shard's rule is asked."""
    from bigfleet.model.ids import ClusterId
    from bigfleet.model.need import Need
    from bigfleet.model.profile import Profile
    from bigfleet.shard.safety_limits import DemandQuarantine

    rows = [Need(ClusterId("c"), Profile(priority=n), {"cpu": 40_000}, {"cpu": 1_000}) for n in range(9)]
    _, known = DemandQuarantine().admit(rows, lambda: {"cpu": 16_000})
    verdict, _ = known.admit([], lambda: {"cpu": 16_000})
    measured = "accepted at once" if verdict.is_accepted else "held"
    return Finding("a roll-up of 0 rows after one of 9 rows", measured, "held")


FINDINGS: Final[tuple[Callable[[Candidate, Data], Finding], ...]] = (
    *(impossible_pod, opposite_shapes, ten_rows, many_small, dear_idle, idle_gpu, no_exchange),
    *(all_families, impossible_pod_in_services, service_costs, trace_on_its_nodes),
    *(other_cluster, large_victim, dear_victim),
)
#: Those that no other candidate has.
ENGINE_FINDINGS: Final = (sold_out, swinging_demand, empty_rollup)


def findings(data: Data, candidate: str) -> list[Finding]:
    """Return every finding of a candidate, measured now, in a fixed order."""
    made = CANDIDATES[candidate]()
    return [find(made, data) for find in (*FINDINGS, *(ENGINE_FINDINGS if candidate == "engine" else ()))]


def print_findings(data: Data, candidate: str) -> None:
    """Measure and print the findings."""
    table = Table(title=f"findings: {candidate}", box=SIMPLE, width=WIDTH)
    for column in ("finding", "measured", "good"):
        table.add_column(column, overflow="fold")
    for finding in findings(data, candidate):
        table.add_row(finding.what, finding.measured, finding.good)
    console().print(table)
