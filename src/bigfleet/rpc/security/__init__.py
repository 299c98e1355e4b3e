"""Authenticates peers: TLS, certificates, and which identity may call what."""
