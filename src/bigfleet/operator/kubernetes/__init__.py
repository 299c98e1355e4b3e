"""Talks to the API server of one cluster: resources, typed objects, the client, reflectors, leases, events.

The flows of the operator and the pod controller use the Protocol in `api` only; `http` implements it over HTTP.
"""
