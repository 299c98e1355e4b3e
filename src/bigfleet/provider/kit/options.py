"""Defines the options of a provider that do not belong to its backend (docs/spec/provider.md §19).

Every option must have an effect.
"""

from dataclasses import dataclass, field

from bigfleet.provider.inventory.offers import Offers


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """How a core behaves, apart from its backend."""

    #: HostRef.provider; None is the backend's own name.
    provider: str | None = None
    #: T of all four kinds; None is the backend's limit of each.
    transition_timeout_seconds: float | None = None
    reconcile_interval_seconds: float = 60.0
    #: Hold before the automatic way out of FAILED; 0 switches it off.
    failed_hold_seconds: float = 600.0
    #: Slots beside those of the inventory, or in their place.
    offers: Offers | None = None
    #: 32 bytes that seal bootstrap blobs in the store; None keeps blobs in memory alone.
    intent_key: bytes | None = field(default=None, repr=False)
    #: Run commits and plain backend functions on the loop's own thread, as the simulation must.
    is_inline: bool = False
