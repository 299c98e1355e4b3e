"""Reads the penalties that pods of a PriorityClass get if their annotations name none.

docs/spec/operator.md §11. The file is read completely or not at all; a fault names file, line, place and remedy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from bigfleet.files.yaml_loading import NestingError, compose_yaml
from bigfleet.model.quantity import QuantityError, format_quantity, parse_quantity, quantity_family

FILE_BYTES_MAX: Final = 1024 * 1024
_INTERRUPTION: Final = "interruptionPenalty"
_RECLAMATION: Final = "reclamationPenalty"
_FIELDS: Final = (_INTERRUPTION, _RECLAMATION)
_CLASS_REMEDY: Final = "write the name of a PriorityClass"
_FIELD_REMEDY: Final = f"write {' or '.join(_FIELDS)}"


class PenaltyDefaultsFault(ValueError):
    """The file cannot be used; the message names the file, the line and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPenalties:
    """Penalties of one PriorityClass in dollars, canonical quantities; None is unset."""

    interruption_penalty: str | None = None
    reclamation_penalty: str | None = None


_UNSET = ClassPenalties()


@dataclass(frozen=True, slots=True)
class PenaltyDefaults:
    """Penalties by the name of the PriorityClass, and the bound of those that pods state themselves."""

    by_class: Mapping[str, ClassPenalties] = field(default_factory=dict)
    #: What an annotation may state at most, a canonical quantity; None is any amount.
    annotated_max: str | None = None

    def of(self, priority_class: str) -> ClassPenalties:
        """Return the penalties of a class; all unset when the file does not name it."""
        return self.by_class.get(priority_class, _UNSET)

    def bounded(self, penalty: str) -> str:
        """Return the penalty of an annotation, at most the bound. Both are quantities."""
        bound = self.annotated_max
        return penalty if bound is None or parse_quantity(penalty) <= parse_quantity(bound) else bound

    def unknown_classes(self, existing: Iterable[str]) -> list[str]:
        """Return the classes of the file that a cluster does not have, sorted."""
        return sorted(set(self.by_class).difference(existing))


def penalty_text(text: str) -> str:
    """Return a penalty in dollars as canonical quantity. Raises QuantityError for other text and for a negative one."""
    milli = parse_quantity(text)
    if milli < 0:
        raise QuantityError(f"{text!r} is negative: a penalty is 0 or more dollars")
    return format_quantity(milli, quantity_family(text))


def read_penalty_defaults(path: Path) -> PenaltyDefaults:
    """Return the defaults of a file; an empty mapping has none. Raises PenaltyDefaultsFault for its first fault."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or error
        raise PenaltyDefaultsFault(f"{path}: cannot be read: {reason}; check the path and its permissions") from error
    if len(content) > FILE_BYTES_MAX:
        raise PenaltyDefaultsFault(f"{path}: has more than {FILE_BYTES_MAX} bytes; name only classes that exist")
    try:
        root = compose_yaml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PenaltyDefaultsFault(f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        fault = error.problem or error.context
        raise PenaltyDefaultsFault(f"{path}:{line}: is not YAML: {fault}; correct this line") from error
    except (yaml.YAMLError, NestingError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise PenaltyDefaultsFault(f"{path}: is not YAML: {text}; write a mapping of PriorityClasses") from error
    if root is None:
        raise PenaltyDefaultsFault(f"{path}: is empty; write `{{}}` for no defaults, or leave the flag out")
    return _DefaultsReader(path).defaults(root)


class _DefaultsReader:
    """Turns the nodes of one file into defaults; the nodes know their lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def defaults(self, root: yaml.Node) -> PenaltyDefaults:
        """Return the defaults of the file. Raises PenaltyDefaultsFault for its first fault."""
        by_class: dict[str, ClassPenalties] = {}
        for name, key, value in self._entries(root, "the file", _CLASS_REMEDY):
            if not name:
                raise self._fault(key, "the file", f"an empty name cannot be a key here; {_CLASS_REMEDY}")
            penalties: dict[str, str] = {}
            for each, field_key, scalar in self._entries(value, name, _FIELD_REMEDY):
                if each not in _FIELDS:
                    raise self._fault(field_key, name, f"{each!r} is unknown; {_FIELD_REMEDY}")
                penalties[each] = self._penalty(scalar, f"{name}.{each}")
            by_class[name] = ClassPenalties(
                interruption_penalty=penalties.get(_INTERRUPTION), reclamation_penalty=penalties.get(_RECLAMATION)
            )
        return PenaltyDefaults(by_class)

    def _penalty(self, node: yaml.Node, place: str) -> str:
        remedy = "write dollars, such as 0.5, 20 or 1k"
        if not isinstance(node, yaml.ScalarNode):
            raise self._fault(node, place, f"is not a quantity; {remedy}")
        try:
            return penalty_text(node.value)
        except QuantityError as error:
            raise self._fault(node, place, f"{error}; {remedy}") from error

    def _entries(self, node: yaml.Node, place: str, remedy: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yield name, key and value of a mapping; a key is a text and appears once."""
        if not isinstance(node, yaml.MappingNode):
            raise self._fault(node, place, f"is not a mapping; {remedy}")
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._fault(key, place, f"a key is not text; {remedy}")
            if key.value in lines:
                raise self._fault(key, place, f"{key.value!r} is already in line {lines[key.value]}; remove one")
            lines[key.value] = key.start_mark.line + 1
            yield key.value, key, value

    def _fault(self, node: yaml.Node, place: str, text: str) -> PenaltyDefaultsFault:
        return PenaltyDefaultsFault(f"{self._path}:{node.start_mark.line + 1}: {place}: {text}")
