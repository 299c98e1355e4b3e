"""A `bigfleet shard` with a planted defect: no roll-up ever waits, and no operator is sent a limit."""

from bigfleet.cli.main import main
from bigfleet.shard.sessions.rollup_allowance import ReadingTurns, RollUpAllowances


def _never(*_arguments: object) -> float:
    return 0.0


if __name__ == "__main__":
    for limit, method in ((RollUpAllowances, "wait_seconds"), (ReadingTurns, "expected_seconds")):
        setattr(limit, method, _never)
    main()
