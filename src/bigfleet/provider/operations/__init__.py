"""Drives accepted operations on the backend, with retries, recovery and restart."""
