"""Authenticates and authorizes peers: TLS, certificates, and the calls that each identity may make."""
