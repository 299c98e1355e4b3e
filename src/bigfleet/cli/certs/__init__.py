"""Implements `bigfleet certs`: makes certificates to try mutual TLS with.

Nothing here serves or checks an identity; that is `bigfleet.rpc.security.identity`.
"""
