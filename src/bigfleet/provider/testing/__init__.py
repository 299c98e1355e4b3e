"""Offers test tools for authors of providers: fakes, virtual time, seeded ids, the suite, a state machine.

docs/spec/provider.md §16. A core that it makes encodes records like a served one. Only `four_edges` needs Hypothesis.
Only tests of a provider may import this package.
"""

import random  # noqa: TID251 - every generator made here is seeded by the caller
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from bigfleet.conformance.in_process import certify as certify_in_process
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import BehaviourOutcome, ConformanceReport, Plan, Verdict
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready
from bigfleet.provider.backends.fake import FakeBackend
from bigfleet.provider.backends.fault import FaultBackend, FaultReadiness
from bigfleet.provider.kit.core import CapacityCore
from bigfleet.provider.testing.cores import SEEDS_END, SeededIds, make_core, settled, started_core
from bigfleet.sim.kernel.virtual_time import Deadlock, LoopClock, VirtualTimeLoop, run_virtual

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

__all__ = [
    "FakeBackend",
    "FaultBackend",
    "FaultReadiness",
    "Deadlock",
    "LoopClock",
    "VirtualTimeLoop",
    "run_virtual",
    "SeededIds",
    "make_core",
    "started_core",
    "settled",
    "BehaviourOutcome",
    "Plan",
    "ConformanceProfile",
    "ConformanceReport",
    "Verdict",
    "certify",
    "Provider",
    "four_edges",
]

#: A backend and who says when its nodes are Ready.
Provider = tuple[Backend, Ready | ConfigureWaits]

PROFILES: Final = frozenset({ConformanceProfile.CORE, ConformanceProfile.CLOUD, ConformanceProfile.DELTA})


async def certify(
    core: CapacityCore, *, profiles: Iterable[ConformanceProfile] = PROFILES, seed: int = 1
) -> ConformanceReport:
    """Run the conformance suite before a started core. Raises SiteFault for too few slots.

    Profiles of lanes that start a provider themselves (`durable`, `fault`) have no result here.
    """
    plan = Plan(profiles=frozenset(profiles), seed=seed)
    # Ids of its own, so that the suite and the core never make the same one.
    ids = SeededIds(SEEDS_END - 1)
    return await certify_in_process(core, clock=LoopClock(), ids=ids, make_rng=random.Random, plan=plan)


def four_edges(make_provider: "Callable[[], Provider]") -> "type[RuleBasedStateMachine]":
    """Return a Hypothesis state machine that drives a backend under the kit along the four edges.

    `make_provider` is called once for each example and returns a new substrate's backend. Use it as
    `TestMyCloud = four_edges(make_provider).TestCase`. Raises ImportError when Hypothesis is not installed.
    """
    try:
        from bigfleet.provider.testing.state_machine import FourEdges
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        raise ImportError(
            "four_edges needs Hypothesis, which is not installed; "
            "run make setup in a checkout, or pip install 'hypothesis>=6.170'"
        ) from error
    return type("FourEdges", (FourEdges,), {"make_provider": staticmethod(make_provider)})
