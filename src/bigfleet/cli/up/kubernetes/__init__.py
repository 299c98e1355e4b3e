"""Runs `bigfleet up --kubernetes N`: real control planes, operators and pod controllers on simulated machines."""
