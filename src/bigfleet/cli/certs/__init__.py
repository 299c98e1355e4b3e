"""Implements `bigfleet certs`: creates certificates to try mutual TLS.

This package does not serve or check an identity; that is `bigfleet.rpc.security.identity`.
"""
