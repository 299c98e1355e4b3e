"""What conditions say, and what they read in a shard's sentence."""

import pytest

from bigfleet.engine.decision import Impossibility
from bigfleet.model.frames import NeedStatus, UnmetReason
from bigfleet.model.ids import ClusterId
from bigfleet.model.need import Need
from bigfleet.model.profile import Profile
from bigfleet.model.shapes import DemandShape
from bigfleet.operator.conditions import wording
from bigfleet.operator.demand.too_large import largest_named
from bigfleet.shard.inventory.machine_shapes import Ask
from bigfleet.shard.status.need_status import Unmet, statuses


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, ""),
        (59, ""),
        (60, " for 1 min"),
        (200, " for 2 min"),
        (3599, " for 30 min"),
        (3600, " for 1 h"),
        (7 * 3600, " for 4 h"),
        (86_399, " for 12 h"),
        (3 * 86_400, " for 3 d"),
    ],
)
def test_ages_are_said_in_coarse_steps(seconds: float, text: str) -> None:
    """A message that changed by the minute would be written again for every request of its row."""
    assert wording.age_text(seconds) == text


def test_what_a_shard_calls_too_large_is_read_from_its_own_sentence() -> None:
    """The sentence is made by the shard's code: when its words change, this fails."""
    shapes = (DemandShape({"cpu": 1_000_000}, 1), DemandShape({"cpu": 1000, "gpu": 9000}, 2))
    need = Need(ClusterId("c"), Profile(), {"cpu": 1_002_000, "gpu": 18_000}, shapes=shapes)
    row = Unmet(
        need=need,
        ask=Ask.of(need),
        residual={"cpu": 1_002_000},
        reason=UnmetReason.REQUEST_TOO_LARGE,
        parked=False,
        key=need.key,
        decided_key=need.key,
        impossible=(
            Impossibility(shape=0, dimension="cpu", wanted=1_000_000, largest=96_500),
            Impossibility(shape=1, dimension="gpu", wanted=9000, largest=0),
        ),
    )

    (status,) = statuses([row], {"c"}, {}, {need.key: 1})["c"]

    assert largest_named(status.message) == (("cpu", 96_500), ("gpu", 0))


def test_long_texts_are_cut() -> None:
    status = NeedStatus(
        fingerprint="f", group="", residual={"cpu": "1"}, reason=UnmetReason.STOCKOUT, message="x" * 5000
    )

    verdict = wording.unmet(status, requests=1, age_seconds=0)

    assert len(verdict.shortfall.message) == 1000
    assert verdict.shortfall.message.startswith("1 request has this need; short of cpu 1: xx")
    assert len(wording.rejected("y" * 5000).message) == len(wording.invalid("r", "z" * 5000).message) == 1000
