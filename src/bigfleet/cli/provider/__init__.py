"""Implements `bigfleet provider`: serves, administers and scaffolds capacity providers."""
