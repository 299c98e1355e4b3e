"""Implements `bigfleet certs`: creates certificates to try mutual TLS.

Nothing here serves or checks an identity; that is `bigfleet.rpc.security.identity`.
"""
