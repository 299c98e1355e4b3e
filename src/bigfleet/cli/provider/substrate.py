"""Defines what a provider's command passes to the process that serves it: backend, readiness, metrics.

docs/spec/provider.md §16, §19. The command builds it after the state file is locked, and it is closed after the core
has stopped. This module does not serve anything.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.provider.backend import Backend, ConfigureWaits, Ready, Slot


def _nothing() -> None:
    return None


def _no_facts() -> Mapping[str, object]:
    return {}


def _no_fault() -> str:
    return ""


def _no_metrics(_registry: CollectorRegistry) -> None:
    return None


def _no_slots(_slots: Iterable[Slot]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Substrate:
    """A backend ready to be served."""

    backend: Backend
    readiness: Ready | ConfigureWaits
    #: Its own fleet has `ProviderProcessSettings.seed_count` machines; for others the kit offers that many slots.
    seeds_itself: bool = False
    #: Hears which slots --offerings offers, at the start and whenever that changes.
    take_offers: Callable[[Iterable[Slot]], None] = _no_slots
    #: Called once, after the core stopped.
    close: Callable[[], None] = _nothing
    #: Called on the loop for each SIGHUP; raises nothing: what cannot be read is logged and the former stays.
    reload: Callable[[], None] = _nothing
    #: What `admin status` shows beside the kit's own facts: name to a number or text.
    status: Callable[[], Mapping[str, object]] = _no_facts
    #: Why the backend can do nothing now although the provider serves, "" for nothing; `/readyz` says it.
    fault: Callable[[], str] = _no_fault
    #: Adds series of its own to the provider's registry, once.
    export: Callable[[CollectorRegistry], None] = _no_metrics


#: Opens the substrate of a process. Raises UsageFault for a wrong file or flag, StartRefused for a state of its own.
OpenSubstrate = Callable[[ProviderProcessSettings], Substrate]
