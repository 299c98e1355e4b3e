"""Implements `bigfleet conformance`: certifies a capacity provider over gRPC (docs/spec/provider.md §23).

This package must not decide whether a behaviour holds; that is `bigfleet.conformance`.
"""
