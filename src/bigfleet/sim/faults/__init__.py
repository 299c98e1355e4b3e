"""Injects faults into the fault world and undoes them."""
