"""Reconciles records with the backend's inventory and its offers."""
