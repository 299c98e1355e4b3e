"""Runs closed-loop scenarios: demand follows from the pods, pods follow from the machines.

docs/spec/simulation.md. `scenario_file` reads the files, `world` puts the real shard, provider kit and
operator flow together on virtual time, `measures` says what came of it, `runner` is what others call.
"""
