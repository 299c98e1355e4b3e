"""Stores a provider's records durably and publishes the committed view."""
