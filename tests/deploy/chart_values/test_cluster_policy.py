"""Renders `clusterPolicy` of the chart bigfleet, and reads the file with the reader of `bigfleet shard`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bigfleet.exchange.values import ExchangeMode
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.shard import cluster_policy
from bigfleet.shard.cluster_policy import ClusterPolicies, read_policies
from tests.deploy.charts import CHARTS, NAMESPACE, by_name, command_of, needs_helm, pod_templates, rendered, run_program
from tests.deploy.command_lines import parsed_flags

pytestmark = pytest.mark.slow

SHARDS = [{"id": "a", "providerAddr": "p:1"}, {"id": "b", "providerAddr": "q:1"}]
BASE = {"image": {"repository": "r", "tag": "t"}, "shards": SHARDS}
CONFIG_MAP = ("ConfigMap", NAMESPACE, "bigfleet-cluster-policy")


def with_policy(folder: Path, policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Each under a name of its own: what was rendered of a file is remembered.
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({**BASE, "clusterPolicy": policy}))
    return rendered("bigfleet", ("--values", str(path)))


def policy_text(objects: list[dict[str, Any]]) -> str:
    ((_name, text),) = by_name(objects)[CONFIG_MAP]["data"].items()
    return str(text)


def as_read(folder: Path, objects: list[dict[str, Any]]) -> ClusterPolicies:
    path = folder / "policy.yaml"
    path.write_text(policy_text(objects), encoding="utf-8")
    return read_policies(path)


@needs_helm
def test_each_shard_reads_the_policy_from_a_config_map(tmp_path: Path) -> None:
    """The whole folder is mounted: the kubelet does not update a file that is mounted by subPath."""
    objects = with_policy(tmp_path, {"clusters": {"eu-1": {"machines_max": 5}}})
    pods = dict(pod_templates(objects))

    assert pods.keys() == {"bigfleet-shard-a", "bigfleet-shard-b"}
    for pod in pods.values():
        (container,) = pod["containers"]
        (volume,) = [each for each in pod["volumes"] if each.get("configMap") == {"name": CONFIG_MAP[2]}]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
        path = parsed_flags(command_of(pod))["cluster_policy"]
        assert mount == {"name": volume["name"], "mountPath": str(path.parent), "readOnly": True}
        assert by_name(objects)[CONFIG_MAP]["data"].keys() == {path.name}


@needs_helm
def test_without_a_policy_there_is_neither_file_nor_flag(tmp_path: Path) -> None:
    objects = with_policy(tmp_path, {})

    assert CONFIG_MAP not in by_name(objects)
    assert all("cluster-policy" not in json.dumps(each) for each in objects)


@needs_helm
def test_a_changed_policy_does_not_restart_a_shard(tmp_path: Path) -> None:
    one, other = (with_policy(tmp_path, {"clusters": {"eu-1": {"machines_max": number}}}) for number in (5, 6))

    assert policy_text(one) != policy_text(other)
    assert dict(pod_templates(one)) == dict(pod_templates(other))


@needs_helm
def test_every_value_that_the_schema_accepts_is_one_that_the_shard_reads(tmp_path: Path) -> None:
    schema = json.loads((CHARTS / "bigfleet" / "values.schema.json").read_text(encoding="utf-8"))
    settings = schema["definitions"]["clusterPolicy"]["properties"]
    values: dict[str, list[Any]] = {
        "scheduler": settings["scheduler"]["enum"],
        "exchange": settings["exchange"]["enum"],
        "penalty_max": settings["penalty_max"]["enum"],
        "spot_pool_max": ["0%", "50%", "100%"],
        "priority_max": [-(2**31), 0, 1_000_000, 2**31 - 1, "7", "unlimited"],
        "machines_max": [0, 1_000_000, 2**31 - 1, "7", "unlimited"],
        "rows_max": [0, 200, 2**31 - 1, "7", "unlimited"],
        "dollars_per_hour_max": [0, 0.25, 12.5, 1_000_000, 999_999_999_999, "12.5", "unlimited"],
    }
    entries = {
        f"{name.replace('_', '-')}-{number}": {name: value}
        for name, listed in values.items()
        for number, value in enumerate(listed)
    }
    read = as_read(tmp_path, with_policy(tmp_path, {"clusters": entries})).by_cluster

    assert values.keys() == settings.keys() == set(cluster_policy._SETTINGS)
    assert read.keys() == entries.keys()
    assert {read[name].penalty_max for name in read if name.startswith("penalty-max-")} == {
        *cluster_policy._BUCKETS.values(),
        float("inf"),
    }
    assert {read[f"scheduler-{number}"].scheduler for number in range(2)} == set(SchedulerOrder)
    assert read["priority-max-0"].priority_max == -(2**31)
    assert read["machines-max-1"].machines_max == 1_000_000
    assert read["dollars-per-hour-max-4"].dollars_per_hour_max == 999_999_999_999


@needs_helm
def test_on_and_off_without_quotes_are_modes_of_exchange(tmp_path: Path) -> None:
    """Helm reads them as booleans."""
    path = tmp_path / "values.yaml"
    path.write_text(
        "image: {repository: r, tag: t}\nshards: [{id: a, providerAddr: 'p:1'}]\n"
        "clusterPolicy: {clusters: {a: {exchange: on}, b: {exchange: off}, c: {exchange: propose}, 7: {}}}\n"
    )
    read = as_read(tmp_path, rendered("bigfleet", ("--values", str(path)))).by_cluster

    assert [read[name].exchange for name in ("a", "b", "c", "7")] == [
        ExchangeMode.ON,
        ExchangeMode.OFF,
        ExchangeMode.PROPOSE,
        None,
    ]


@needs_helm
def test_a_longer_pattern_is_before_a_shorter_one(tmp_path: Path) -> None:
    """Helm forgets the order of keys; by the alphabet `*` would be first, and hide all others."""
    patterns = {"*": 1, "*-b": 2, "batch-*": 3, "batch-eu-*": 4, "**********": 5, "a-*": 6, "batch-eu-1": 7}
    entries = {name: {"machines_max": number} for name, number in patterns.items()}
    policies = as_read(tmp_path, with_policy(tmp_path, {"clusters": entries}))

    assert list(policies.by_pattern) == ["batch-eu-*", "batch-*", "*-b", "a-*", "*", "**********"]
    assert [policies.limits(name).machines_max for name in ("batch-eu-1", "batch-eu-2", "batch-1", "x")] == [7, 4, 3, 1]


@needs_helm
@pytest.mark.parametrize("policy", [{"clusters": {}}, {"clusters": {"plain": {}}}])
def test_a_policy_without_settings_is_read(tmp_path: Path, policy: Mapping[str, Any]) -> None:
    """So that later settings need no restart: the flag is there."""
    objects = with_policy(tmp_path, policy)

    assert as_read(tmp_path, objects).by_cluster.keys() == policy["clusters"].keys()
    assert all("--cluster-policy" in " ".join(command_of(pod)) for _name, pod in pod_templates(objects))


@needs_helm
@pytest.mark.parametrize("is_set", [True, False])
def test_the_notes_say_how_each_shard_reads_a_changed_policy(tmp_path: Path, is_set: bool) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps({**BASE, "clusterPolicy": {"clusters": {}} if is_set else {}}))
    words = ("--namespace", NAMESPACE, "--dry-run=client", "--values", str(path))
    done = run_program("helm", "install", "fleet", str(CHARTS / "bigfleet"), *words)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]

    for shard in SHARDS:
        exec_command = f"kubectl -n {NAMESPACE} exec bigfleet-shard-{shard['id']}-0 -- "
        assert (f"{exec_command}python3 -c 'import os; os.kill(1, 1)'" in notes) is is_set
