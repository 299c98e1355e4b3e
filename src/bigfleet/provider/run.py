"""Runs the whole main program of a provider; an author of a provider calls it.

docs/spec/provider.md §16; docs/writing-a-provider.md. Nothing else in this package may import it.
"""

from bigfleet.cli.provider.serve import run

__all__ = ["run"]
