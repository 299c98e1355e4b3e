"""Reads the settings that a replay changes: weights of victims, hold times, the duration of a drain, the engine.

docs/replay.md. A setting with its recorded value is reported, so that an unchanged replay is not mistaken for the
answer. This module does not decide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from bigfleet.cli.flags.values import parse_duration_seconds, parse_positive_duration_seconds
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.engine.decision import Options, Weights
from bigfleet.engine.reference.reclaim import RELEASABLE
from bigfleet.model.states import CapacityType

ENGINES: Final = ("columnar", "reference")
#: How types of capacity are written on a command line.
_TYPES: Final = {kind.name.lower().replace("_", "-"): kind for kind in sorted(RELEASABLE)}
_WEIGHTS: Final = tuple(one.name for one in fields(Weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What is different; nothing where all is as it was recorded."""

    weights: dict[str, float] = field(default_factory=dict)
    #: Seconds by type; 0 never releases.
    hold_seconds: dict[CapacityType, float] = field(default_factory=dict)
    drain_seconds: float | None = None

    def __bool__(self) -> bool:
        return bool(self.weights or self.hold_seconds or self.drain_seconds is not None)

    def applied(self, options: Options) -> Options:
        """Return the options with the changed settings."""
        return replace(
            options,
            weights=replace(options.weights, **self.weights),
            hold_seconds={**options.hold_seconds, **self.hold_seconds},
            drain_seconds=options.drain_seconds if self.drain_seconds is None else self.drain_seconds,
        )

    def text(self) -> str:
        """Return the changed settings as text."""
        names = {kind: name for name, kind in _TYPES.items()}
        parts = [f"weight {name} {value:g}" for name, value in self.weights.items()]
        parts += [
            f"hold {names[kind]} {f'{seconds:g}s' if seconds else 'for ever'}"
            for kind, seconds in self.hold_seconds.items()
        ]
        if self.drain_seconds is not None:
            parts.append(f"drain {self.drain_seconds:g}s")
        return ", ".join(parts)


def read_settings(weights: Sequence[str], holds: Sequence[str], drain: str | None) -> ReplaySettings:
    """Return the settings of the flags. Raises UsageFault naming the flag."""
    return ReplaySettings(
        weights=dict(_weight(text) for text in weights),
        hold_seconds=dict(_hold(text) for text in holds),
        drain_seconds=None if drain is None else parse_positive_duration_seconds(drain, "--drain"),
    )


def _weight(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals or name not in _WEIGHTS:
        raise UsageFault(f"--weight: {text!r} is not a weight; write NAME=NUMBER with one of {', '.join(_WEIGHTS)}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageFault(f"--weight: {name}: {value!r} is not a number of at least 0; write 0, 0.5 or 2")
    return name, number


def _hold(text: str) -> tuple[CapacityType, float]:
    name, equals, value = text.partition("=")
    if not equals or name not in _TYPES:
        raise UsageFault(f"--hold: {text!r} is not a hold; write TYPE=DURATION or TYPE=off with {' or '.join(_TYPES)}")
    if value == "off":
        return _TYPES[name], 0.0
    return _TYPES[name], parse_duration_seconds(value, f"--hold {name}")
