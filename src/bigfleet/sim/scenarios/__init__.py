"""Runs closed-loop scenarios: demand follows from the pods, pods follow from the machines.

docs/spec/simulation.md. `scenario_file` reads the files, `world` runs the real shard, provider kit and operator flow on
virtual time, `measures` computes the results, and callers use `runner`.
"""
