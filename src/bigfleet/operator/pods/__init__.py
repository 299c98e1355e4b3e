"""Turns pods into CapacityRequests: the mapping, its defaults, and the controller that keeps one request per pod.

The mapping is pure. The controller writes through `bigfleet.operator.kubernetes.api` alone.
"""
