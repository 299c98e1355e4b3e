"""Certifies a capacity provider from outside (docs/spec/provider.md §23).

Start reading at `catalogue`, which names every behaviour, and `runner`, which runs them. The suite does not know how a
provider is implemented: it imports `bigfleet.model` only. The exception is `in_process`, which runs the suite against
the kit.
"""
