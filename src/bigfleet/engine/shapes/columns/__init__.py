"""Decides over pods on columns: machines, demand, hosting order and credit, without an object for each."""
