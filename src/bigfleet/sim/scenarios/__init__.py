"""Closed-loop scenarios: demand that follows from the pods, pods that follow from the machines, as data.

docs/spec/simulation.md. `scenario` reads the files, `world` puts the real shard, provider kit and operator flow
together on virtual time, `measures` says what came of it, `scenarios` is what others call.
"""
