"""Asks the planner for the target compositions of clusters and hands them to a decision."""
