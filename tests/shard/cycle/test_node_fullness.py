"""How full a node is: by its scarcest resource, DaemonSets apart."""

import pytest

from bigfleet.model.vector import Vector
from bigfleet.shard.cycle.node_fullness import fullness

SUPPLY = {"cpu": 4000, "memory": 8000}
DAEMONS = {"cpu": 400, "memory": 100}


@pytest.mark.parametrize(
    ("requested", "overhead", "quarters"),
    [
        ({}, {}, 0),
        ({"cpu": 400, "memory": 100}, DAEMONS, 0),
        ({"cpu": 401, "memory": 100}, DAEMONS, 1),
        ({"cpu": 1000}, {}, 1),
        ({"cpu": 1001}, {}, 2),
        ({"cpu": 1000, "memory": 7000}, {}, 4),
        ({"cpu": 9000}, {}, 4),
        # What the machine does not have is all used: a status may be older than the machine's record.
        ({"gpu": 1000}, {}, 4),
        ({"cpu": 500}, {"cpu": 5000}, 0),
    ],
)
def test_fullness_is_in_quarters_of_the_resource_that_is_used_most(
    requested: Vector, overhead: Vector, quarters: int
) -> None:
    assert fullness(requested, SUPPLY, overhead) == quarters
