"""What W18 measures, in small: real provider, shard and operator processes; nothing is reported that did not arrive."""

import pytest

from bench.harness import Measured
from bench.workloads import recovery


def figures_of(measured: Measured) -> dict[str, float]:
    """Return the figures by what they say, all above zero but for a difference of two starts."""
    found = {reading.what: reading.value for reading in measured.readings}
    assert all(value > 0 for what, value in found.items() if not what.startswith(("the first List", "the same for")))
    return found


@pytest.mark.long
def test_first_list_and_restart_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may have to be compiled first."""
    monkeypatch.setattr(recovery, "STARTS", 1)
    monkeypatch.setattr(recovery, "STOOD_SECONDS", 0.0)
    first_list = figures_of(recovery.measure_first_list(1_000))
    restart = figures_of(recovery.measure_restart(1_000))

    assert first_list["memory, peak"] >= first_list["memory at rest, few machines"] / 2
    assert restart["the same, longest"] >= restart["start to the end of the first cycle"]
