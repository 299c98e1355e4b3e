"""How many examples the proofs of the engines run, and the counts that the terminal prints of them.

One knob: BIGFLEET_HYPOTHESIS_EXAMPLES is the number of fleets on which the two engines are compared; every other proof
runs in proportion. Without it the run is a quick look; CI sets it. Nothing here generates or compares anything.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

RecordProperty = Callable[[str, object], None]

#: Fleets of the comparison of engines in CI; the numbers of the other proofs are those that go with it.
EQUALITY_EXAMPLES_USUAL = 2_000
EQUALITY_EXAMPLES_QUICK = 100
EQUALITY_EXAMPLES = int(os.environ.get("BIGFLEET_HYPOTHESIS_EXAMPLES", EQUALITY_EXAMPLES_QUICK))
#: Below this share of the usual number a run is a quick look, and rare features need not turn up in it.
ALL_FEATURES_SHARE = 0.25


def examples(usual: int) -> settings:
    """Return the settings of a proof that usually runs so many examples."""
    return settings(
        max_examples=max(1, usual * EQUALITY_EXAMPLES // EQUALITY_EXAMPLES_USUAL),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def in_proportion(usual: int, *, least: int = 25) -> int:
    """Return how many examples a property outside the engines runs where it usually runs so many."""
    return max(least, usual * EQUALITY_EXAMPLES // EQUALITY_EXAMPLES_USUAL)


class Proof:
    """Counts the examples of one property, and what they had in them."""

    def __init__(self) -> None:
        self.ran = 0
        self.held = 0
        #: Feature → examples that had it.
        self.features: Counter[str] = Counter()

    @contextmanager
    def example(self) -> Iterator[None]:
        """Count one example; it held unless the block raises."""
        self.ran += 1
        yield
        self.held += 1

    @contextmanager
    def told(self, record_property: RecordProperty, kind: str) -> Iterator[None]:
        """Leave the counts for the terminal under a kind of tests/conftest.py, also when the block raises."""
        try:
            yield
        finally:
            record_property(kind, (self.ran, self.held))

    def assert_features(self, names: frozenset[str]) -> None:
        """Check that every feature was met, unless the run was too short to expect it."""
        if EQUALITY_EXAMPLES >= EQUALITY_EXAMPLES_USUAL * ALL_FEATURES_SHARE:
            assert sorted(names - self.features.keys()) == [], "the fleets lack what they are meant to have"
