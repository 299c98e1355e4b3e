"""Checks the flags of a conformance run against each other (docs/spec/provider.md §23).

This module must not reach a provider.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bigfleet.cli.flags.values import parse_address
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.conformance.areas.scale import PAGE
from bigfleet.conformance.catalogue import BY_ID
from bigfleet.conformance.profiles import ConformanceProfile
from bigfleet.conformance.runner import Plan
from bigfleet.files.bounded import CONFIGURATION_BYTES_MAX, read_bounded

if TYPE_CHECKING:
    from bigfleet.rpc.security.tls import TlsFiles

ALL: Final = "all"
DEFAULT_PROFILES: Final = "core,cloud"
ADDRESS: Final = "{addr}"
STATE: Final = "{state}"
SEEDS: Final = "{seeds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceSettings:
    """A run, ready to go."""

    plan: Plan
    #: `HOST:PORT` of a running provider.
    target: str | None
    #: Argument vectors with the placeholders still in them.
    launch: tuple[str, ...] | None
    launch_fault: tuple[str, ...] | None
    out: Path | None
    tls: "TlsFiles | None"


def parse_profiles(text: str) -> frozenset[ConformanceProfile]:
    """Return the profiles of a comma-separated list, or of `all`. Raises UsageFault."""
    if text == ALL:
        return frozenset(ConformanceProfile)
    profiles = set()
    for name in _names(text, "--profile"):
        try:
            profiles.add(ConformanceProfile(name))
        except ValueError:
            known = ", ".join(profile.value for profile in ConformanceProfile)
            raise UsageFault(f"--profile: {name!r} is unknown; choose among {known}, or {ALL}") from None
    return frozenset(profiles)


def parse_only(text: str) -> frozenset[str]:
    """Return the ids of a comma-separated list. Raises UsageFault for one that does not exist."""
    ids = frozenset(name.upper() for name in _names(text, "--only"))
    unknown = sorted(ids - set(BY_ID))
    if unknown:
        raise UsageFault(f"--only: no behaviour {', '.join(unknown)}; ids are like LIFE-1, see docs/conformance.md")
    return ids


def profiles_asked(profile: str | None, only: frozenset[str] | None) -> frozenset[ConformanceProfile]:
    """Return the profiles of a run: those named, else those of the ids, else the default.

    Raises UsageFault for an id whose profile was not asked for.
    """
    if profile is None and only is not None:
        return frozenset(BY_ID[id].profile for id in only)
    profiles = parse_profiles(DEFAULT_PROFILES if profile is None else profile)
    strangers = sorted(id for id in only or () if BY_ID[id].profile not in profiles)
    if strangers:
        needed = ", ".join(sorted({BY_ID[id].profile.value for id in strangers}))
        raise UsageFault(f"--only: {', '.join(strangers)} belongs to profile {needed}; add it to --profile")
    return profiles


def parse_target(text: str | None) -> str | None:
    """Return `HOST:PORT`. Raises UsageFault."""
    if text is not None:
        host, port = parse_address(text, "--target")
        if not text.rpartition(":")[0] or not host or port == 0:
            raise UsageFault(f"--target: {text!r} cannot be dialled; write HOST:PORT with a port above 0")
    return text


def read_blob(path: Path | None) -> bytes:
    """Return the bootstrap data that a file has, the suite's own without a file. Raises UsageFault."""
    if path is None:
        return Plan(profiles=frozenset()).blob
    try:
        return read_bounded(path, CONFIGURATION_BYTES_MAX)
    except OSError as error:
        raise UsageFault(f"--blob {path}: {error.strerror}; name a file of bootstrap data") from error


def checked_scale_count(count: int) -> int:
    """Return how many machines the scale profile asks for. Raises UsageFault for a fleet of one page."""
    if count <= PAGE:
        raise UsageFault(f"--scale-count: {count} machines prove nothing about pages of {PAGE}; ask for more")
    return count


def parse_command(text: str | None, flag: str) -> tuple[str, ...] | None:
    """Return the argument vector of a command line, split as a shell would, but run without one. Raises UsageFault."""
    if text is None:
        return None
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageFault(f"{flag}: {error}; quote it as for a shell") from error
    if not arguments:
        raise UsageFault(f"{flag}: is empty; give a command that serves on {ADDRESS}")
    for placeholder, why in ((ADDRESS, "where to serve"), (STATE, "where to keep its state")):
        if not any(placeholder in argument for argument in arguments):
            raise UsageFault(f"{flag}: has no {placeholder}; the command needs it: {why}")
    return arguments


def _names(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageFault(f"{flag}: {text!r} has an empty name; write them separated by commas")
    return names
