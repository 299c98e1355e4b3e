"""Runs closed-loop scenarios: demand follows from the pods, pods follow from the machines.

docs/spec/simulation.md. `scenario` reads the files, `world` puts the real shard, provider kit and operator flow
together on virtual time, `measures` says what came of it, `scenarios` is what others call.
"""
