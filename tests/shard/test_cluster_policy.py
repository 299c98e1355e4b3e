"""The cluster policy: what a cluster gets of the file, what is refused, and what stays in force."""

import asyncio
import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.cli.runtime.service_notifier import ServiceNotifier
from bigfleet.cli.runtime.system import SystemClock
from bigfleet.cli.shard import process as shard_process
from bigfleet.cli.shard.command import ShardFlags
from bigfleet.planner.problem import SchedulerOrder
from bigfleet.shard.cluster_policy import (
    PATTERNS_MAX,
    ClusterPolicies,
    ClusterPolicy,
    PolicyFault,
    PolicyFile,
    read_policies,
)
from tests.patience import wait_until
from tests.shard.world import World

LEAST, MOST = SchedulerOrder.LEAST_ALLOCATED, SchedulerOrder.MOST_ALLOCATED

FILE = """
clusters:
  batch-7: {scheduler: least-allocated}
  "batch-*":
    scheduler: most-allocated
  "*-eu-*": {scheduler: least-allocated}
  "*-eu-9": {scheduler: most-allocated}
  plain: {}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.rule("shard 1.1/1")
@pytest.mark.parametrize(
    ("cluster", "order"),
    [
        ("batch-7", LEAST),
        ("batch-8", MOST),
        ("batch-", MOST),
        ("batch-eu-1", MOST),
        ("web-eu-9", LEAST),
        ("xbatch-8", LEAST),
        ("plain", LEAST),
        ("other", LEAST),
    ],
)
def test_a_clusters_own_entry_goes_before_patterns_and_those_in_the_order_of_the_file(
    tmp_path: Path, cluster: str, order: SchedulerOrder
) -> None:
    assert read_policies(written(tmp_path / "p.yaml", FILE)).plan_settings(cluster).order is order


def test_an_own_entry_without_the_setting_leaves_it_to_the_patterns() -> None:
    policies = ClusterPolicies(
        by_cluster={"a": ClusterPolicy()}, by_pattern={"*": ClusterPolicy(), "a*": ClusterPolicy(scheduler=MOST)}
    )

    assert (policies.plan_settings("a").order, policies.plan_settings("b").order) == (MOST, LEAST)


def test_the_limit_of_spot_pools_is_a_share() -> None:
    policies = ClusterPolicies(
        by_cluster={"a": ClusterPolicy(scheduler=MOST)},
        by_pattern={"a*": ClusterPolicy(spot_pool_max=0), "b": ClusterPolicy(spot_pool_max=70)},
    )

    limits = [policies.plan_settings(name).spot_pool_percent_max for name in ("a", "b", "c")]
    assert limits == [0, 70, 50]


def test_a_file_that_names_no_cluster_treats_all_alike(tmp_path: Path) -> None:
    assert read_policies(written(tmp_path / "p.yaml", "clusters: {}\n")) == ClusterPolicies()


WRONG = {
    "no YAML": ("clusters:\n  a: {scheduler: [\n", ":3: is not YAML"),
    "an empty file": ("", ": has no `clusters:`; write `clusters: {}` for no policy"),
    "only comments": ("# clusters:\n", ": has no `clusters:`; write `clusters: {}` for no policy"),
    "only the start of a document": ("---\n", ": has no `clusters:`; write `clusters: {}` for no policy"),
    "an empty mapping": ("{}\n", ": has no `clusters:`; write `clusters: {}` for no policy"),
    "no mapping": ("- a\n", ":1: the file: is no mapping; write `clusters:`"),
    "an unknown section": ("cluster: {}\n", ":1: the file: 'cluster' cannot be a key here; write `clusters:`"),
    "clusters as a list": ("clusters:\n  - a\n", ":2: clusters: is no mapping"),
    "no cluster id": ("clusters:\n  a b: {}\n", ":2: clusters: 'a b' cannot be a key here; write a cluster id"),
    "an unknown setting": (
        "clusters:\n  a:\n    schedular: x\n",
        ":3: clusters.a: 'schedular' cannot be a key here; write `scheduler:` or `spot_pool_max:`",
    ),
    "an unknown value": (
        "clusters:\n  a:\n    scheduler: packed\n",
        ":3: clusters.a.scheduler: 'packed' is unknown; write least-allocated or most-allocated",
    ),
    "no text": ("clusters:\n  a:\n    scheduler: [x]\n", ":3: clusters.a.scheduler: is no text; write"),
    "no share": (
        "clusters:\n  a:\n    spot_pool_max: 0.5\n",
        ":3: clusters.a.spot_pool_max: '0.5' is unknown; write a share from 0% to 100%, as 50%",
    ),
    "too large a share": ("clusters: {a: {spot_pool_max: 101%}}\n", ":1: clusters.a.spot_pool_max: '101%' is unknown"),
    "no settings": ("clusters:\n  a:\n", ":2: clusters.a: is no mapping"),
    "a cluster twice": ("clusters:\n  a: {}\n  b: {}\n  a: {}\n", ":4: clusters: 'a' is already in line 2; remove"),
    "many patterns": (
        "clusters:\n" + "".join(f"  'a{n}*': {{}}\n" for n in range(PATTERNS_MAX + 1)),
        f":2: clusters: has {PATTERNS_MAX + 1} patterns; write at most {PATTERNS_MAX}",
    ),
    "characters that YAML has not": ("clusters: \x00\n", ": is not YAML: "),
}


@pytest.mark.rule("shard 1.1/1")
@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_a_fault_names_file_line_and_remedy_and_ends_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path / "p.yaml", text)
    with pytest.raises(UsageFault) as fault:
        ShardFlags(provider_addr=":1", cluster_policy=path).process()

    assert str(fault.value).startswith(f"--cluster-policy {path}{said}")
    assert "\n" not in str(fault.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyFault, match=r"none\.yaml: cannot be read: No such file or directory; check the path"):
        read_policies(tmp_path / "none.yaml")
    (tmp_path / "p.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyFault, match="is not UTF-8 at byte 0"):
        read_policies(tmp_path / "p.yaml")


@given(st.binary(max_size=60) | st.text(" -:{}[]*&abclustersheduler\n", max_size=60).map(str.encode))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with contextlib.suppress(PolicyFault):
        read_policies(path).plan_settings("a")


@pytest.mark.rule("shard 1.1/1")
async def test_a_hang_up_reads_it_again_and_a_fault_keeps_the_last_good_one(tmp_path: Path) -> None:
    path = written(tmp_path / "p.yaml", "clusters: {a: {scheduler: most-allocated}}")
    world = World()

    async def hang_up(text: str, result: str, count: int) -> SchedulerOrder:
        written(path, text)
        os.kill(os.getpid(), signal.SIGHUP)
        reads = partial(world.metric, "cluster_policy_reads_total", result=result)
        await asyncio.to_thread(wait_until, lambda: reads() >= count, f"{count} reads that are {result}")
        return world.shard.policies.plan_settings("a").order

    following = shard_process._files_maintained(PolicyFile(path), None, SystemClock(), world.shard, ServiceNotifier(""))
    async with following:
        assert world.shard.policies.plan_settings("a").order is MOST
        assert await hang_up("clusters: {a: {scheduler: x}}", "refused", 1) is MOST
        assert await hang_up("clusters: {a: {scheduler: least-allocated}}", "ok", 1) is LEAST
        assert await hang_up("clusters: {a: {scheduler: most-allocated}}", "ok", 2) is MOST
        # The policies in force would all be lifted.
        assert await hang_up("", "refused", 2) is MOST
        path.unlink()
        assert await hang_up("clusters: {}", "ok", 3) is LEAST
