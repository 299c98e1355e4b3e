"""Judges the quality of decisions independently of the engine: cost, placement and calm on families of fleets.

Nothing here that judges imports `bigfleet.engine` or `bigfleet.planner`; candidates under test may.
"""
