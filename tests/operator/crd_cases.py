"""Reads tests/cases/crds: objects of our kinds that an API server accepts or refuses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / "cases" / "crds"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionCase:
    """One object: created with its spec, then given its statuses in turn; the last step is what is judged."""

    kind: str
    name: str
    #: None for an object without one.
    spec: dict[str, Any] | None
    statuses: tuple[dict[str, Any], ...]
    #: Texts of the error; empty when the last step is accepted.
    refused: tuple[str, ...]
    #: What the object then has.
    stored: dict[str, Any]


def _read() -> Iterator[DefinitionCase]:
    for path in sorted(FOLDER.glob("*.yaml")):
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        for case in document["cases"]:
            assert case.keys() <= {"name", "spec", "statuses", "refused", "stored"}, case
            yield DefinitionCase(
                kind=document["kind"],
                name=case["name"],
                spec=case.get("spec"),
                statuses=tuple(case.get("statuses", ())),
                refused=tuple(case.get("refused", ())),
                stored=case.get("stored", {}),
            )


CASES = list(_read())
#: For `pytest.mark.parametrize`.
PARAMETERS = [pytest.param(case, id=f"{case.kind}: {case.name}") for case in CASES]


def contains(found: Any, expected: Any) -> bool:
    """Return whether a value has everything that is expected of it; mappings may have more."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(contains(found.get(name), each) for name, each in expected.items())
    return bool(found == expected)
