"""Manages the sessions of cluster operators and the demand that they report."""
