"""The wire from outside: a client in a process of its own against a real provider and a real shard."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.processes import free_port, serving

CLIENT = Path(__file__).parent / "wire_client.py"


#: What the client sees at each step (docs/spec/wire.md).
FACTS: dict[str, dict[str, Any]] = {
    "create": {"state": "MACHINE_STATE_CREATING"},
    "create stale": {"code": "FAILED_PRECONDITION"},
    "create repeated": {"same": True, "host": True},
    "configure": {"state": "MACHINE_STATE_CONFIGURING"},
    "get": {"cluster": "wire", "metadata": {"a/b": "c"}},
    "drain": {"state": "MACHINE_STATE_DRAINING"},
    "drained": {"cluster": "", "metadata": {}},
    "delete": {"state": "MACHINE_STATE_DELETING"},
    "get unknown": {"code": "NOT_FOUND"},
    "session without hello": {"code": "INVALID_ARGUMENT"},
    "inspect": {"first": "header"},
    "machines": {"bound": ["wire"]},
    "explain": {"about": True, "shown": True, "actions": ["Bootstrap"]},
    "explain unknown": {"code": "NOT_FOUND"},
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What the client printed, by step."""
    place = tmp_path_factory.mktemp("wire")
    provider, shard = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    provider_flags = ("--addr", provider, "--state", str(place / "provider.db"), "--metrics-addr", "off")
    shard_flags = ("--listen", shard, "--provider-addr", provider, "--data-dir", str(place), "--metrics-addr", "off")
    simulated = ("provider", "simulated", *provider_flags, "--calm", "--time-scale", "0.001")
    with (
        serving(provider, place / "provider.log", *simulated),
        serving(shard, place / "shard.log", "shard", *shard_flags, "--cycle-interval", "1s"),
    ):
        client = subprocess.run(
            [sys.executable, str(CLIENT), provider, shard],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_SECONDS,
            check=False,
        )
        assert client.returncode == 0, client.stdout + client.stderr
        yield {line["step"]: line for line in map(json.loads, client.stdout.splitlines())}


def test_each_call_answers_as_the_wire_says(said: dict[str, dict[str, Any]]) -> None:
    """One test: each worker that ran a part of it would start the processes once more."""
    assert {step: {name: said[step][name] for name in facts} for step, facts in FACTS.items()} == FACTS


def test_a_session_acks_in_order_and_shows_the_machine_on_its_way(said: dict[str, dict[str, Any]]) -> None:
    """Hello, resync and roll-up are acked, and the machine is shown Configuring and Configured."""
    assert {"hello", "resync", "rollup"} == set(said["session"]["echoes"])
    assert said["session"]["echoes"][0] == "hello"
    assert {"MACHINE_STATE_CONFIGURING", "MACHINE_STATE_CONFIGURED"} <= set(said["session"]["states"])


def test_a_bound_machine_is_explained_by_the_names_of_the_records(said: dict[str, dict[str, Any]]) -> None:
    """It counts for its row and is kept (docs/spec/aggregates.md §8)."""
    assert said["explain"]["kinds"] == ["candidate_considered", "credited", "machine_kept"]


def test_a_row_without_capabilities_is_read_back_as_reported(said: dict[str, dict[str, Any]]) -> None:
    """InspectNeeds shows the row with its own quantities."""
    assert [need["aggregateResources"] for need in said["inspect"]["needs"]] == [{"cpu": "1"}]
