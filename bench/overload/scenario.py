"""Scenarios of overload as data: who is there, who floods the shard, for how long, and what must hold."""

from dataclasses import dataclass, replace
from typing import Final

MEBIBYTE: Final = 1024 * 1024
#: A cluster may send one roll-up of the largest size in this time (docs/spec/shard.md §4.4); the greedy send ten.
ALLOWED_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What clients do to the shard at the same time. Zero of a kind leaves it out."""

    #: Sessions of clusters that the shard does not know, each with a roll-up of so many rows.
    sessions: int = 0
    session_rows: int = 1
    sessions_per_second: int = 250
    #: Clusters with roll-ups of so many rows, each changed; before and after the flood they keep to the allowed rate.
    greedy: int = 0
    greedy_rows: int = 20_000
    greedy_times: float = 10.0
    #: Streams that read nothing of what they are sent.
    silent_readers: int = 0
    #: Connections on which one byte a second is written.
    slow_writers: int = 0
    #: Sessions that are opened and cut, in all and at the same time.
    reconnects: int = 0
    reconnects_at_once: int = 50
    #: Frames that are no message, in all and at the same time.
    frames: int = 0
    frame_bytes: int = 20_000_000
    frames_at_once: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run: quiet, flood, after. Durations in seconds."""

    name: str
    machines: int
    honest: int
    #: How often every honest cluster wants a machine more, in each phase.
    steps: int
    quiet_seconds: float
    flood_seconds: float
    after_seconds: float
    flood: Flood
    memory_bytes: int = 1024 * MEBIBYTE
    #: Bounds of docs/spec/benchmarks.md.
    cycle_ratio_max: float = 3.0
    back_seconds_max: float = 60.0

    @property
    def wanted_at_the_end(self) -> int:
        """How many machines each honest cluster has been given when all is decided."""
        return 1 + 3 * self.steps


FLOOD: Final = Scenario(
    name="flood",
    machines=2_000,
    honest=50,
    steps=3,
    quiet_seconds=60.0,
    flood_seconds=90.0,
    after_seconds=60.0,
    flood=Flood(
        sessions=5_000,
        greedy=2,
        silent_readers=200,
        slow_writers=200,
        reconnects=5_000,
    ),
)
FRAMES: Final = Scenario(
    name="frames",
    machines=2_000,
    honest=50,
    steps=3,
    quiet_seconds=30.0,
    flood_seconds=60.0,
    after_seconds=30.0,
    flood=Flood(frames=1_000, reconnects=10_000),
)
SCENARIOS: Final = (FLOOD, FRAMES)


def quick(scenario: Scenario) -> Scenario:
    """Return the scenario with a fiftieth of the clients, in a tenth of the time."""
    flood = scenario.flood
    fewer = replace(
        flood,
        sessions=flood.sessions // 50,
        greedy=min(flood.greedy, 1),
        silent_readers=flood.silent_readers // 20,
        slow_writers=flood.slow_writers // 20,
        reconnects=flood.reconnects // 50,
        reconnects_at_once=10,
        frames=flood.frames // 50,
        frames_at_once=2,
    )
    return replace(
        scenario,
        machines=200,
        honest=10,
        steps=1,
        quiet_seconds=8.0,
        flood_seconds=12.0,
        after_seconds=8.0,
        flood=fewer,
    )
