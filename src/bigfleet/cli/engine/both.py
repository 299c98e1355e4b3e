"""Runs all engines on the same input and shows where they first differ.

Decisions are compared in every field and, on request, the records that a reporter receives (docs/spec/aggregates.md
§8). The default engine is what the others are compared with. This module does not say which of two answers is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

from bigfleet.cli.engine.registry import DEFAULT_ENGINE, ENGINES, NamedEngine, engine_named
from bigfleet.cli.engine.runner import CaseFault, Question, fault_of
from bigfleet.engine.decision import Decision, Options
from bigfleet.engine.explain.records import RecordLog
from bigfleet.engine.snapshot import Snapshot
from bigfleet.model.need import Need

ALL_ENGINES: Final = " and ".join(ENGINES)


class EnginesDiffer(Exception):
    """Two engines gave different answers; the message names the field and both values."""


class EveryEngine:
    """Decides with every engine and returns the decision on which they agree."""

    def __init__(self, *, with_records: bool) -> None:
        """Compare decisions and, when asked, records: one per machine that a row looks at, up to a log's bound."""
        self._engines: Mapping[str, NamedEngine] = {name: engine_named(name) for name in ENGINES}
        self._with_records = with_records

    def decide(self, snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Decision:
        """Decide one cycle. Raises EnginesDiffer, and whatever the default engine raises."""
        decision = self._engines[DEFAULT_ENGINE](snapshot, demand, options)
        expected = RecordLog()
        if self._with_records:
            reported = self._engines[DEFAULT_ENGINE](snapshot, demand, options, expected)
            _expect_same(decision, reported, "decision with a reporter", DEFAULT_ENGINE)
        for name, engine in self._engines.items():
            if name == DEFAULT_ENGINE:
                continue
            log = RecordLog()
            try:
                _expect_same(decision, engine(snapshot, demand, options), "decision", name)
                if self._with_records:
                    _expect_same(decision, engine(snapshot, demand, options, log), "decision with a reporter", name)
            except EnginesDiffer:
                raise
            except Exception as error:
                raise EnginesDiffer(f"{DEFAULT_ENGINE} decides, {name} fails ({error!r})") from error
            _expect_same(expected.records, log.records, "records", name)
        return decision

    def faults(self, question: Question) -> list[CaseFault]:
        """Return what is wrong with the answers to a case: of each engine, and where they differ."""
        differing = ""

        def noting_differences(snapshot: Snapshot, demand: Sequence[Need], options: Options) -> Decision:
            nonlocal differing
            try:
                return self.decide(snapshot, demand, options)
            except EnginesDiffer as fault:
                differing = str(fault)
                raise

        if not fault_of(question, noting_differences):
            return []
        engines_by_text: dict[str, list[str]] = {}
        for name, engine in self._engines.items():
            text = fault_of(question, engine)
            if text:
                engines_by_text.setdefault(text, []).append(name)
        found = [CaseFault(engine=" and ".join(names), text=text) for text, names in engines_by_text.items()]
        if differing:
            found.append(CaseFault(engine=ALL_ENGINES, text=f"the engines differ: {differing}"))
        return found


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


def _expect_same(expected: object, actual: object, what: str, engine: str) -> None:
    difference = first_difference(expected, actual)
    if difference is not None:
        place, left, right = difference
        raise EnginesDiffer(f"{what}{place}: {DEFAULT_ENGINE} {left!r}, {engine} {right!r}")


def first_difference(expected: object, actual: object) -> tuple[str, object, object] | None:
    """Return where two values first differ, such as `.rows[2].held['cpu']`, and the two parts there.

    Looks into dataclasses by the fields that count for equality, into mappings by key and into sequences by place; a
    part that is missing reads `nothing`. None when the two are equal.
    """
    if expected == actual:
        return None
    for place, left, right in _parts(expected, actual):
        deeper = first_difference(left, right)
        if deeper is not None:
            return (place + deeper[0], deeper[1], deeper[2])
    return ("", expected, actual)


def _parts(expected: Any, actual: Any) -> list[tuple[str, Any, Any]]:
    """Return the parts of two values by which they differ; none for values without parts."""
    if is_dataclass(expected) and type(expected) is type(actual):
        names = [field.name for field in fields(expected) if field.compare]
        return [(f".{name}", getattr(expected, name), getattr(actual, name)) for name in names]
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        keys = dict.fromkeys([*expected, *actual])
        return [(f"[{key!r}]", expected.get(key, _NOTHING), actual.get(key, _NOTHING)) for key in keys]
    if isinstance(expected, str) or isinstance(actual, str):
        return []
    if isinstance(expected, Sequence) and isinstance(actual, Sequence):
        places = range(max(len(expected), len(actual)))
        return [(f"[{place}]", _at(expected, place), _at(actual, place)) for place in places]
    return []


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else _NOTHING
