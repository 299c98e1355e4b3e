"""Lists the facts about API servers that the simulated one and a real one are both tested against.

Each is a coroutine of a `FactWorld`.
"""

from tests.api_facts import applying, deletions, objects, reading, rights
from tests.api_facts.world import Fact

FACTS: list[Fact] = [*objects.FACTS, *applying.FACTS, *deletions.FACTS, *reading.FACTS, *rights.FACTS]
