"""Shards of the chart bigfleet that share a provider: each machine has one owner, and an upgrade changes no owner."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import CHARTS, NAMESPACE, command_of, needs_helm, pod_templates, refusal, rendered, run_program
from tests.deploy.command_lines import parsed_flags

pytestmark = pytest.mark.slow

COORDINATED = {"coordinator": {"enabled": True}}
ELSEWHERE = "--coordinator-addr=coordinator.example.com:7790"


def words_of(folder: Path, providers: str, more: Mapping[str, Any]) -> Sequence[str]:
    """Return the words that set one shard for each letter, which names its provider."""
    shards = [{"id": f"s{number}", "providerAddr": f"{name}:9100"} for number, name in enumerate(providers)]
    path = folder / "values.json"
    path.write_text(json.dumps({"image": {"repository": "r", "tag": "t"}, "shards": shards, **more}))
    return ("--values", str(path))


def ownerships(words: Sequence[str]) -> list[str]:
    pods = sorted(pod_templates(rendered("bigfleet", words)), key=lambda each: each[0])
    return [parsed_flags(command_of(pod))["ownership"] for name, pod in pods if name.startswith("bigfleet-shard-")]


def notes(words: Sequence[str]) -> str:
    done = run_program(
        "helm", "install", "fleet", str(CHARTS / "bigfleet"), "--namespace", NAMESPACE, "--dry-run=client", *words
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@needs_helm
@pytest.mark.parametrize(
    ("providers", "expected"),
    [
        ("p", ["all"]),
        ("pq", ["all", "all"]),
        ("pp", ["assigned", "assigned"]),
        ("pqp", ["assigned", "all", "assigned"]),
    ],
)
def test_a_new_shard_owns_all_of_its_provider_unless_another_shard_has_it_too(
    tmp_path: Path, providers: str, expected: list[str]
) -> None:
    """The only shard of a provider would wait for domains that no other shard could claim."""
    assert ownerships(words_of(tmp_path, providers, COORDINATED)) == expected


@needs_helm
def test_shards_of_one_provider_are_refused_without_a_coordinator(tmp_path: Path) -> None:
    said = refusal("bigfleet", words_of(tmp_path, "pqp", {}))

    assert "shards: s0, s2 have one providerAddr, p:9100, and each would claim all of its machines" in said
    assert "set coordinator.enabled=true, or give each a provider of its own" in said


@needs_helm
def test_the_coordinator_may_be_one_of_another_release(tmp_path: Path) -> None:
    assert ownerships(words_of(tmp_path, "pp", {"shard": {"extraArgs": [ELSEWHERE]}})) == ["assigned", "assigned"]


@needs_helm
@pytest.mark.parametrize("mode", ["all", "assigned"])
def test_a_mode_that_a_user_chose_is_not_changed(tmp_path: Path, mode: str) -> None:
    words = words_of(tmp_path, "pp", {**COORDINATED, "shard": {"extraArgs": [f"--ownership={mode}"]}})
    pods = [pod for name, pod in pod_templates(rendered("bigfleet", words)) if name.startswith("bigfleet-shard-")]

    assert ownerships(words) == [mode, mode]
    assert [sum("--ownership" in word for word in command_of(pod)) for pod in pods] == [1, 1]


@needs_helm
@pytest.mark.parametrize("is_tls", [True, False])
def test_the_notes_say_how_domains_are_assigned_to_shards_of_one_provider(tmp_path: Path, is_tls: bool) -> None:
    found = notes(words_of(tmp_path, "pqp", {**COORDINATED, "tls": {"enabled": is_tls}}))
    (line,) = [line.strip() for line in found.splitlines() if "assign-domain" in line]
    pod, _, command = line.removeprefix(f"kubectl -n {NAMESPACE} exec ").partition(" -- bigfleet ")
    flags = parsed_flags(command.split())

    assert "Shards s0, s2 share the provider p:9100." in found
    assert "q:9100." in found
    assert "share the provider q:9100" not in found
    assert pod == "bigfleet-coordinator-0"
    assert flags["addr"] == f"{pod}.bigfleet-coordinator.{NAMESPACE}.svc:7790"
    assert (flags["tls_cert"] is not None) is is_tls


@needs_helm
@pytest.mark.parametrize("providers", ["p", "pq"])
def test_the_notes_say_nothing_of_domains_when_no_provider_is_shared(tmp_path: Path, providers: str) -> None:
    found = notes(words_of(tmp_path, providers, COORDINATED))

    assert "assign-domain" not in found
    assert not any(one == other == "" for one, other in pairwise(found.strip().splitlines()))
