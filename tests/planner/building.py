"""Builds small planning problems for tests, and Hypothesis strategies for them."""

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from bigfleet.planner import MachineClass, PlannerShape, PlannerSpread, Problem, SchedulerOrder, mask_of

DIMENSIONS = ("cpu", "memory", "pods")
ZONES = ("a", "b", "c")
DOLLAR = 1_000_000_000


def kind(
    key: str,
    cpu: int,
    memory: int,
    dollars: float,
    *,
    pods: int = 110,
    zone: str = "a",
    gpu: int | None = None,
    held: int = 0,
    stock: int | None = None,
    probability: int = 0,
) -> MachineClass:
    """Return a class; cpu in milli, memory in MiB."""
    supply = (cpu, memory, pods) if gpu is None else (cpu, memory, pods, gpu)
    cost = round(dollars * DOLLAR)
    return MachineClass(
        key=key,
        supply=supply,
        cost=cost,
        held=held,
        held_cost=cost,
        stock=stock,
        probability=probability,
        domains=(("zone", zone),),
    )


def shape(
    cpu: int,
    memory: int,
    count: int,
    classes: Sequence[MachineClass] | int,
    *,
    on: Sequence[int] | None = None,
    row: int = 0,
    gpu: int | None = None,
    rank: int = 0,
    priority: int = 0,
    limit: int = 0,
    penalty: float = 0.0,
    is_pinned: bool = False,
    gang: str = "",
    spread: PlannerSpread | None = None,
) -> PlannerShape:
    """Return a shape that matches all classes, or those at the positions `on`."""
    number = classes if isinstance(classes, int) else len(classes)
    return PlannerShape(
        row=row,
        request=(cpu, memory, 1) if gpu is None else (cpu, memory, 1, gpu),
        count=count,
        matches=mask_of(range(number) if on is None else on),
        rank=rank,
        priority=priority,
        max_per_machine=limit,
        penalty=round(penalty * DOLLAR),
        is_pinned=is_pinned,
        gang=gang,
        same_key="zone" if gang else "",
        spread=spread,
    )


def problem(
    classes: Sequence[MachineClass],
    shapes: Sequence[PlannerShape],
    *,
    order: SchedulerOrder = SchedulerOrder.LEAST_ALLOCATED,
    dimensions: tuple[str, ...] = DIMENSIONS,
    may_exchange: bool = False,
) -> Problem:
    """Return a problem."""
    return Problem(
        dimensions=dimensions,
        classes=tuple(classes),
        shapes=tuple(shapes),
        order=order,
        may_exchange=may_exchange,
    )


CLOUD = tuple(
    kind(f"{family}{size}-{zone}", 1000 * size, ratio * 1024 * size, price * size, zone=zone)
    for family, ratio, price in (("c", 2, 0.038), ("m", 4, 0.043), ("r", 8, 0.057))
    for size in (2, 4, 8, 16)
    for zone in ZONES
)


def services(seed: int, pods: int) -> list[PlannerShape]:
    """Return Deployments of mixed ratios, some of them pinned to a zone."""
    rng = Random(seed)
    shapes = []
    for row in range(12):
        zone = rng.randrange(3) if rng.random() < 0.2 else None
        on = None if zone is None else [c for c in range(len(CLOUD)) if c % 3 == zone]
        cpu = rng.choice((100, 250, 500, 1000, 2000))
        shapes.append(shape(cpu, cpu * rng.randint(1, 8), pods // 12, CLOUD, on=on, row=row, priority=rng.randrange(3)))
    return shapes


@st.composite
def small_problems(draw: st.DrawFn, most_pods: int = 24) -> Problem:
    """Draw a problem with a few classes and shapes in which every feature occurs."""
    number = draw(st.integers(1, 5))
    classes = []
    for n in range(number):
        size, ratio = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((2, 4, 8)))
        classes.append(
            kind(
                f"k{n}",
                1000 * size,
                1024 * size * ratio,
                draw(st.integers(0, 40)) * size / 100,
                pods=draw(st.sampled_from((3, 110))),
                zone=draw(st.sampled_from(ZONES)),
                held=draw(st.sampled_from((0, 0, 1, 3))),
                stock=draw(st.sampled_from((None, None, 2))),
                probability=draw(st.sampled_from((0, 0, 500_000))),
            )
        )
    shapes = []
    for row in range(draw(st.integers(1, 4))):
        feature = draw(st.sampled_from(("", "", "limit", "gang", "spread", "zone", "pinned")))
        on = draw(st.lists(st.integers(0, number - 1), unique=True)) if feature == "zone" else None
        shapes.append(
            shape(
                draw(st.sampled_from((100, 250, 500, 1000, 3000, 9000))),
                draw(st.sampled_from((128, 512, 1024, 4096, 16384))),
                draw(st.integers(1, max(1, most_pods // 4))),
                number,
                on=on,
                row=row,
                rank=draw(st.integers(0, 2)),
                priority=draw(st.integers(0, 2)),
                limit=draw(st.integers(1, 2)) if feature == "limit" else 0,
                penalty=draw(st.sampled_from((0.0, 4.0, 1000.0))),
                is_pinned=feature == "pinned",
                gang=f"g{row}" if feature == "gang" else "",
                spread=PlannerSpread("zone") if feature == "spread" else None,
            )
        )
    order = draw(st.sampled_from(list(SchedulerOrder)))
    return problem(classes, shapes, order=order, may_exchange=draw(st.booleans()))
