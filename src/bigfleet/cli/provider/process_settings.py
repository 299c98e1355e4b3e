"""Defines the settings of a provider process, as its flags give them (docs/spec/provider.md §19).

This module does not open anything.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigfleet.rpc.security.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderProcessSettings:
    """One provider process: where it listens, which state file it has, how it admits callers."""

    address: tuple[str, int]
    metrics_address: tuple[str, int] | None
    #: None keeps the state in memory, which only fakes may.
    state_path: Path | None
    is_power_safe: bool
    #: HostRef.provider and the prefix of ids.
    provider: str
    reflect: bool
    #: None is plain text.
    tls: "TlsFiles | None" = None
    #: Whether an admin may change machines with any token (docs/spec/provider.md §17).
    certify: bool = False
    #: That many slots in place of the backend's own fleet; None is its own.
    seed_count: int | None = None
    #: Slots beside those of the inventory; read again on SIGHUP.
    offerings_path: Path | None = None
