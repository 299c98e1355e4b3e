"""Serves the provider protocol over a backend: the six calls, administration, options."""
