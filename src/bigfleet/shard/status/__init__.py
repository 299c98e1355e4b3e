"""Publishes what a cycle decided: statuses of needs, capacity hints, views, reports."""
