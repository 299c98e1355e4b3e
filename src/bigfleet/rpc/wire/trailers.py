"""Names the trailing metadata of CapacityProvider (docs/spec/wire.md §4)."""

from typing import Final

#: Of an UNAVAILABLE that the provider itself answered a mutating call with: nothing happened.
NOT_READY_TRAILER: Final = ("bigfleet-not-ready", "1")
