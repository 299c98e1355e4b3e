"""Certifies `bigfleet provider aws` against a real account of AWS: docs/aws-provider.md.

`guard` decides whether a run may begin, `leftovers` ends what a run launched, `run` does both around the suite.
"""
