"""How many series one scrape of a real shard has: each of them is stored and paid for, in every second that it runs."""

from pathlib import Path

import pytest

from tests.e2e.fault_world import LiveOperator, LiveShard, live_provider, live_shard, until

pytestmark = pytest.mark.slow

MACHINES = 43
SERIES_MAX = 620


def calls(shard: LiveShard, method: str, code: str) -> list[str]:
    labels = f'code="{code}",method="{method}"'
    return [line for line in shard.series() if line.startswith("bigfleet_shard_provider_rpc_seconds_count{" + labels)]


def test_a_small_shard_exports_few_series_also_after_its_provider_was_away(tmp_path: Path) -> None:
    """A machine is created, bound and drained, and then the provider does not answer."""
    with live_provider(tmp_path, MACHINES) as provider, live_shard(tmp_path / "s", provider.address) as shard:
        start = shard.series()
        operator = LiveOperator(shard.address, "c1")
        operator.report("7")
        until(lambda: list(shard.bound("c1").values()), lambda found: "MACHINE_STATE_CONFIGURED" in found, "none bound")
        operator.report("")
        until(lambda: calls(shard, "Drain", "OK"), bool, "nothing was drained")
        provider.stop()
        until(lambda: calls(shard, "List", "UNAVAILABLE"), bool, "no call failed")
        end = shard.series()
        operator.close()

    print(f"series: {len(start)} at the start, {len(end)} in the end")
    assert len(start) < len(end) < SERIES_MAX
    assert not [line for line in end if "_created" in line.split()[0]]
    assert not [line for line in end if "Unspecified" in line]
