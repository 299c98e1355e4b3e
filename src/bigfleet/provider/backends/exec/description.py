"""Reads a program's description of itself: its verbs, which of them may be repeated, and its rate limits.

docs/spec/exec-provider.md §1. A verb that is not named is never run. Unknown keys and values are rejected, so that a
typing mistake does not become a default.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from bigfleet.files.durations import duration_seconds
from bigfleet.model.ids import identifier_fault
from bigfleet.provider.backend import KindLimits, Limits, Reset
from bigfleet.provider.programs.runner import LOOK_SECONDS_MAX, ProgramRunner, decoded
from bigfleet.provider.records.kinds import TIMEOUT_SECONDS, Kind

API: Final = 1
DESCRIBE: Final = "describe"
DESCRIBE_SECONDS_MAX: Final = 10.0
CONCURRENCY_DEFAULT: Final = 16
#: More processes at a time than a host can be asked to run.
CONCURRENCY_MAX: Final = 1000
_TIMEOUT_SECONDS_MAX: Final = 86_400.0
_ANSWER_BYTES_MAX: Final = 1 << 20
INVENTORY: Final = "inventory"
READY: Final = "ready"
_KINDS: Final = MappingProxyType({kind.value: kind for kind in Kind})
_RESETS: Final = tuple(reset.value for reset in Reset)
_REQUIRED: Final = (Kind.CREATE.value, Kind.CONFIGURE.value, Kind.DRAIN.value)
_VERBS: Final = (DESCRIBE, INVENTORY, *_KINDS, "adopt", READY, "compensate", "feed")


class DescriptionFault(Exception):
    """The program's description cannot be used; the text names the key."""


class _VerbLimits(msgspec.Struct, forbid_unknown_fields=True):
    concurrency: int | None = None
    timeout: str | None = None
    #: Processes begun in a second.
    rate: float | None = None


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    api: int
    provider: str
    verbs: list[str]
    #: Checked by hand, for a text that names the values.
    reset: str = ""
    resumable: list[str] = []
    limits: dict[str, _VerbLimits] = {}


class _Api(msgspec.Struct):
    """What every version of a description has: another version may have other keys."""

    api: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a program says about itself, checked."""

    provider: str
    verbs: frozenset[str]
    limits: Limits
    #: Of one reading of the inventory.
    inventory_seconds_max: float


async def describe(runner: ProgramRunner, *, needs_inventory: bool, concurrency: int) -> Description:
    """Run `describe` and return its answer, checked. Raises DescriptionFault.

    `needs_inventory` is False if the slots come from elsewhere; `concurrency` is that of kinds without one.
    """
    try:
        result = await runner.run(DESCRIBE, {}, seconds=DESCRIBE_SECONDS_MAX, output_bytes_max=_ANSWER_BYTES_MAX)
        if result.exit_code != 0:
            raise DescriptionFault(
                f"describe ended with exit code {result.exit_code}: {result.error_line or 'no text'}"
            )
        api = decoded(DESCRIBE, result.output, _Api).api
        if api != API:
            raise DescriptionFault(f"describe: api is {api}, this version runs programs of api {API}")
        said: _Description = decoded(DESCRIBE, result.output, _Description)
    except DescriptionFault:
        raise
    except Exception as error:  # a program that cannot be run, or answers anything else
        raise DescriptionFault(str(error)) from error
    return _checked(said, needs_inventory=needs_inventory, concurrency=concurrency)


def _checked(said: _Description, *, needs_inventory: bool, concurrency: int) -> Description:
    fault = identifier_fault(said.provider)
    if fault is not None:
        raise DescriptionFault(f"describe: provider {fault}")
    verbs = frozenset(said.verbs)
    for verb in said.verbs:
        if verb not in _VERBS:
            raise DescriptionFault(f"describe: verbs: {verb!r} is unknown; choose from {', '.join(_VERBS)}")
    for verb in _REQUIRED:
        if verb not in verbs:
            raise DescriptionFault(f"describe: verbs: {verb} is missing; every program has it")
    if needs_inventory and INVENTORY not in verbs:
        raise DescriptionFault("describe: verbs: inventory is missing; name it, or give the slots by --offerings")
    if said.reset not in _RESETS:
        text = f"{said.reset!r} is unknown" if said.reset else "is missing"
        raise DescriptionFault(f"describe: reset: {text}; say what a drain does to the host: {', '.join(_RESETS)}")
    return Description(
        provider=said.provider,
        verbs=verbs,
        limits=Limits(
            kinds=_kinds(said, verbs, concurrency),
            resumable=_resumable(said, verbs),
            reset=Reset(said.reset),
        ),
        inventory_seconds_max=_inventory_seconds(said),
    )


def _resumable(said: _Description, verbs: frozenset[str]) -> frozenset[Kind]:
    for verb in said.resumable:
        if verb not in _KINDS:
            raise DescriptionFault(f"describe: resumable: {verb!r} is none of {', '.join(_KINDS)}")
        if verb not in verbs:
            raise DescriptionFault(f"describe: resumable: {verb} is not among the verbs")
    return frozenset(_KINDS[verb] for verb in said.resumable)


def _kinds(said: _Description, verbs: frozenset[str], concurrency: int) -> Mapping[Kind, KindLimits]:
    for verb in said.limits:
        if verb not in verbs or (verb not in _KINDS and verb != INVENTORY):
            raise DescriptionFault(
                f"describe: limits: {verb!r} has none; choose from {', '.join((*_KINDS, INVENTORY))}"
            )
    kinds = {}
    for verb, kind in _KINDS.items():
        limits = said.limits.get(verb, _VerbLimits())
        if limits.concurrency is not None and not 1 <= limits.concurrency <= CONCURRENCY_MAX:
            text = f"{limits.concurrency} is not from 1 to {CONCURRENCY_MAX}"
            raise DescriptionFault(f"describe: limits.{verb}.concurrency: {text}")
        if limits.rate is not None and limits.rate <= 0:
            raise DescriptionFault(f"describe: limits.{verb}.rate: {limits.rate:g} is not above 0")
        kinds[kind] = KindLimits(
            timeout_seconds=_seconds(verb, limits, TIMEOUT_SECONDS[kind]),
            concurrency_max=limits.concurrency or concurrency,
            rate_per_second=limits.rate,
            burst=1 if limits.rate is None else max(1, math.floor(limits.rate)),
        )
    return MappingProxyType(kinds)


def _inventory_seconds(said: _Description) -> float:
    limits = said.limits.get(INVENTORY, _VerbLimits())
    for key in ("concurrency", "rate"):
        if getattr(limits, key) is not None:
            raise DescriptionFault(f"describe: limits.inventory.{key}: inventory has a timeout only")
    return _seconds(INVENTORY, limits, LOOK_SECONDS_MAX)


def _seconds(verb: str, limits: _VerbLimits, default_seconds: float) -> float:
    if limits.timeout is None:
        return default_seconds
    seconds = duration_seconds(limits.timeout)
    if seconds is None or not 0 < seconds <= _TIMEOUT_SECONDS_MAX:
        text = f"{limits.timeout!r} is not a duration above 0 and up to a day; write 90s, 10m or 1m30s"
        raise DescriptionFault(f"describe: limits.{verb}.timeout: {text}")
    return seconds
