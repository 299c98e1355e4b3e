"""Converts pods to CapacityRequests: the mapping, its defaults, and the controller that maintains one request per pod.

The mapping is pure. The controller writes through `bigfleet.operator.kubernetes.api` only.
"""
