"""Implements the provider whose backend is a program of the user's, run once for each call (`bigfleet provider exec`).

docs/spec/exec-provider.md.
"""
