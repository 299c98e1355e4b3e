"""Providers that misbehave in front of a real shard process: nothing is lost, nothing is bound twice (shard.md §15)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bigfleet.provider.records.kinds import Kind
from tests.commands import run_here
from tests.e2e.fault_world import LiveOperator, LiveProvider, LiveShard, live_provider, live_shard, until

CONFIGURED = "MACHINE_STATE_CONFIGURED"


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LiveProvider]:
    """A provider with four slots."""
    with live_provider(tmp_path) as serving:
        yield serving


@pytest.fixture
def shard(tmp_path: Path, provider: LiveProvider) -> Iterator[LiveShard]:
    """A shard that waits a second for a call, and believes deltas."""
    flags = ("--execute-timeout", "1s", "--list-timeout", "2s", "--incremental-reconcile")
    with live_shard(tmp_path / "shard", provider.address, *flags) as running:
        yield running


@pytest.fixture
def operator(shard: LiveShard) -> Iterator[LiveOperator]:
    """An operator of cluster c1."""
    connected = LiveOperator(shard.address, "c1")
    yield connected
    connected.close()


def until_bound(shard: LiveShard, count: int) -> dict[str, str]:
    """Return the cluster's machines once that many are Configured and none is on its way."""
    return until(
        lambda: shard.bound("c1"),
        lambda bound: list(bound.values()) == [CONFIGURED] * count,
        f"{count} machines were never Configured",
    )


def bindings(provider: LiveProvider) -> list[str]:
    """Return the machine of every Configure that reached the backend."""
    return [machine_id for kind, machine_id, _op in provider.backend.calls if kind is Kind.CONFIGURE]


def assert_log_is_whole(shard: LiveShard) -> None:
    """The audit log verifies."""
    said = run_here("audit", "verify", str(shard.audit_log))
    assert (said.returncode, said.stdout.startswith("OK: ")) == (0, True), said.stdout + said.stderr


@pytest.mark.rule("shard 15/5")
@pytest.mark.slow
def test_a_provider_that_goes_and_comes_back(provider: LiveProvider, shard: LiveShard, operator: LiveOperator) -> None:
    """While it is away nothing is removed and demand stands; afterwards it is served, and bindings are as they were."""
    operator.report("7")
    before = until_bound(shard, 1)
    provider.stop()
    operator.report("14")
    until(lambda: shard.said("reconcile.failed"), lambda said: len(said) > 2, "the provider was never missed")
    assert (len(shard.machines()), shard.bound("c1")) == (4, before)

    provider.start()
    after = until_bound(shard, 2)
    assert before.items() <= after.items()
    assert sorted(bindings(provider)) == sorted(after)
    assert_log_is_whole(shard)


@pytest.mark.rule("shard 15/8")
@pytest.mark.slow
def test_a_provider_that_answers_late(provider: LiveProvider, shard: LiveShard, operator: LiveOperator) -> None:
    """A call without an answer in time may have been applied: it is looked up, and not made again."""
    provider.faults.late_seconds = {"create": 3.0, "configure": 3.0}
    operator.report("7")
    (bound,) = until_bound(shard, 1)

    assert bindings(provider) == [bound]
    assert shard.outcomes() == [("Provision", "unknown_outcome"), ("Bootstrap", "unknown_outcome")]
    assert [record["outcome"] for record in shard.audited()] == ["unknown_outcome"] * 2
    assert_log_is_whole(shard)


@pytest.mark.slow
def test_a_provider_that_errs_after_the_effect(
    provider: LiveProvider, shard: LiveShard, operator: LiveOperator
) -> None:
    """The error is not believed to mean that nothing happened: the machine is asked for at once."""
    provider.faults.fails_after = {"create", "configure", "drain"}
    operator.report("7")
    (bound,) = until_bound(shard, 1)
    assert bindings(provider) == [bound]
    assert shard.outcomes() == [("Provision", "provider_error"), ("Bootstrap", "configure_error")]

    operator.report("")
    until(lambda: shard.bound("c1"), lambda left: not left, "the machine was never given back")
    assert shard.outcomes()[2:] == [("Reclaim", "provider_error")]
    assert provider.backend.clusters == {}
    assert_log_is_whole(shard)


@pytest.mark.rule("shard 5.2/3")
@pytest.mark.slow
def test_a_provider_that_loses_its_cursors(provider: LiveProvider, shard: LiveShard, operator: LiveOperator) -> None:
    """It answers a cursor in full, and that is taken as the whole: nothing is removed, and new demand is served."""
    operator.report("7")
    before = until_bound(shard, 1)
    assert any(provider.faults.cursors)
    provider.faults.forgets_cursors = True
    operator.report("14")
    after = until_bound(shard, 2)
    asked = len(provider.faults.cursors)
    until(lambda: len(provider.faults.cursors), lambda count: count > asked + 3, "the shard stopped reading")

    assert (len(shard.machines()), before.items() <= after.items()) == (4, True)
    assert sorted(bindings(provider)) == sorted(after)
    assert shard.said("inventory.machines_removed") == []


@pytest.mark.rule("shard 15/7")
def test_a_provider_that_returns_garbage(provider: LiveProvider, shard: LiveShard, operator: LiveOperator) -> None:
    """A broken record is refused alone and the last good one stays; an answer that is none is no inventory."""
    operator.report("7")
    before = until_bound(shard, 1)
    others = sorted(set(shard.machines()) - set(before))
    provider.faults.garbage = {
        next(iter(before)): {"price_usd_per_hour": -1.0},
        others[-1]: {"interruption_probability": 7.0},
    }
    provider.faults.forgets_cursors = True
    until(
        lambda: [
            shard.metric(f'machines_rejected_total{{reason="{reason}"}}')
            for reason in ("price", "interruption_probability")
        ],
        all,
        "the broken records were never refused",
    )
    operator.report("14")
    after = until_bound(shard, 2)
    assert (len(shard.machines()), before.items() <= after.items()) == (4, True)
    assert [view.machine.price_per_hour >= 0 for view in shard.machines().values()] == [True] * 4

    provider.faults.answers_noise = True
    until(lambda: shard.said("reconcile.failed"), bool, "noise was taken for a list")
    assert shard.bound("c1") == after
    provider.faults.answers_noise, provider.faults.garbage = False, {}
    operator.report("21")
    until_bound(shard, 3)
    assert shard.metric("cycle_failures_total") == 0
