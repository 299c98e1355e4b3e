"""Keeps records in line with the backend's inventory and its offers."""
