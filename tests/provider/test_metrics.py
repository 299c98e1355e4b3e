"""Every series that operators may rely on is there, by name and labels (docs/spec/provider.md §18)."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bigfleet.provider.metrics import PREFIX, ProviderMetrics
from tests.provider.harness import SLOT, fake_core, settle, token

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "provider.md"
#: Declared where certificates and state files are.
IN_OTHER_PLACES = {
    "certificate_expires_timestamp_seconds",
    "certificate_issued_timestamp_seconds",
    "identity_rejected_total",
    "state_file_lost",
}


def named_in_the_specification() -> set[str]:
    section = SPEC.read_text(encoding="utf-8").partition("## 18.")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    words = {word.strip() for row in rows for word in re.split(r"[;,]", re.sub(r"\(.*?\)", "", row))}
    return {word for word in words if re.fullmatch(r"[a-z][a-z_]+", word)} - {"name"} - IN_OTHER_PLACES


def declared() -> dict[str, tuple[str, ...]]:
    metrics = ProviderMetrics(CollectorRegistry())
    found = {}
    for series in vars(metrics).values():
        name = getattr(series, "_name", None)
        if name is not None:
            suffix = "_total" if series._type == "counter" else ""
            found[name.removeprefix(f"{PREFIX}_") + suffix] = series._labelnames
    return found


def test_what_the_specification_names_is_declared_and_nothing_else() -> None:
    assert declared().keys() == named_in_the_specification()
    assert len(declared()) > 30


def test_no_label_could_carry_an_id() -> None:
    allowed = {"method", "code", "scope", "result", "state", "capacity_type", "kind", "outcome", "compensated"}
    allowed |= {"view", "reason", "change", "notice", "by", "version"}
    assert {label for labels in declared().values() for label in labels} <= allowed


@pytest.mark.virtual_time
async def test_ids_never_reach_the_exposition() -> None:
    from prometheus_client import generate_latest

    core, _ = await fake_core(2)
    await core.create(SLOT, token=token(1, shard="shard-of-somebody"))
    await settle()
    await core.configure(SLOT, "cluster-of-somebody", b"blob-of-somebody", {"key-of-somebody": "value-of-somebody"})
    await settle()
    text = generate_latest(core.metrics.registry).decode()
    assert "somebody" not in text
    assert SLOT not in text
    assert f'{PREFIX}_machines{{capacity_type="ON_DEMAND",state="CONFIGURED"}} 1.0' in text
