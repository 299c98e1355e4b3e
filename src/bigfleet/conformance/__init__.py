"""Certifies a capacity provider from outside (docs/spec/provider.md §23).

Start reading at `catalogue`, which names every behaviour, and `runner`, which runs them. Nothing here may know how a
provider is made: of ours it imports `bigfleet.model` alone, `in_process` apart, which puts the kit before the suite.
"""
