"""What several files of this folder are handed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigfleet.model.machine import Machine
from tests.shard.ownership.handover_shard import HandoverShard


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., HandoverShard]]:
    """Makes a shard with an ownership file over some machines; its disk is the test's own."""
    made: list[HandoverShard] = []

    def build(*machines: Machine, **more: Any) -> HandoverShard:
        made.append(HandoverShard(tmp_path, *machines, **more))
        return made[-1]

    yield build
    for shard in made:
        shard.close()
